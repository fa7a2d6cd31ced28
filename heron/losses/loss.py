"""The base class of every loss: an `nn.Module` for any training loop, and a term of a run.

Its value is the loss over the rows of all processes, the same on each. Its gradient, after
DistributedDataParallel's mean over processes, is that of one process with all rows.
"""

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from heron.base.sections import check
from heron.distributed import collectives
from heron.distributed.derivatives import OPERATIONS, one_operation
from heron.losses.batch import GlobalBatch
from heron.losses.exchange import ShardSizes, exchange, sizes_of_processes
from heron.losses.inputs import (
    LossError,
    RowCounts,
    Views,
    as_label_weights,
    as_views,
    expect_width,
    same_rows,
)
from heron.losses.run import Memory, RunSpec, TermSetting
from heron.losses.terms import Needs, section_of
from heron.models.heterogeneous import Encoded, FeaturePart, Features, ModelSpec
from heron.models.options import ModelConfig

HALF = torch.float16, torch.bfloat16  # losses are computed in float32 at least

if TYPE_CHECKING:  # for whom a call of a loss has the types of its `forward`
    P = ParamSpec("P")
    R = TypeVar("R", covariant=True)

    class _HasForward(Protocol[P, R]):
        def forward(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    class _CallsForward:
        def __get__(self, loss: _HasForward[P, R], kind: Any = None) -> Callable[P, R]:
            return loss.forward


class Loss(nn.Module, ABC):
    """Base class of all losses.

    A subclass says what it reads in `needs`, takes its options as keyword arguments, and returns
    from `share` this process's share of the loss. An experiment names it by its dotted path,
    `objective: {my_lab.losses.Mine: {weight: 1, tau: 0.2}}`; a loop calls it. Bases with a
    `forward` for usual inputs are in `heron.losses.families`.

    Options are checked against their annotations, such as `tau: Temperature`.

    Attributes:
        needs: the features that the loss reads, and for which labels and views it is defined.
        missing_views: whether it is defined where rows lack views (`GlobalBatch.present`).
        unknown_labels: whether it is defined where single labels of a row are unknown (NaN).
        weighs_labels: whether it counts labels by `GlobalBatch.label_weights`.
        remembers_rows: whether its memory is indexed by the rows' numbers.
        repels_all: whether all other samples are negatives, at exp(cos / tau).
        truncated: the features that `Matryoshka` cuts, which are as wide as a projection; (): the
            loss uses `mean_over_widths` itself, as it must if it updates a memory; None: it has no
            meaning on a part of a projection.
        gather: whether the rows of all processes are compared, or this process's alone.
        options: its options, by name.
        parts: the modules that the loss learns, by name; in a run they are parts of the model.
        memory: the state that the loss keeps between steps, equal on all processes.
        widths: the widths of `Matryoshka`; (): projections are compared whole.
    """

    needs: Needs = Needs()
    missing_views: ClassVar[bool] = False
    unknown_labels: ClassVar[bool] = False
    weighs_labels: ClassVar[bool] = False
    remembers_rows: ClassVar[bool] = False
    repels_all: ClassVar[bool] = False
    truncated: ClassVar[tuple[str, ...] | None] = ("projections",)
    memory: Any
    widths: tuple[int, ...] = ()
    width: int | None = None  # of the projections that `parts` expect

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets the class's own `__init__` check its options."""
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _with_checked_options(cls, cls.__init__)  # type: ignore[method-assign]

    def __new__(cls, *args: Any, **kwargs: Any) -> "Loss":
        """Makes a loss, new or a copy, that `one_operation` finds."""
        loss = super().__new__(cls)
        OPERATIONS[id(loss)] = loss
        return loss

    def __init__(self, *, gather: bool = True) -> None:
        """Sets `gather`: compare the rows of all processes."""
        super().__init__()
        self.gather = gather
        self.options: dict[str, Any] = {}
        self.parts = nn.ModuleDict()
        self.memory: Memory | None = None

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`; its errors become a LossError that names the loss, and the rank.

        In code under `torch.compile` the loss is one operation of its graph.
        """
        if torch.compiler.is_compiling():
            return one_operation(self, args, kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except (ValueError, LossError) as fault:
            rank = f"rank {collectives.rank()}: " if collectives.world_size() > 1 else ""
            raise LossError(f"{rank}{type(self).__name__}: {fault}") from None

    if TYPE_CHECKING:
        __call__ = _CallsForward()
    else:
        __call__ = _call

    def extra_repr(self) -> str:
        """Returns the options, for `repr`."""
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return ", ".join([*options, f"gather={self.gather}"])

    # What a subclass defines.

    @abstractmethod
    def share(self, batch: GlobalBatch) -> Tensor | None:
        """Returns this process's share of the loss, a scalar; the loss is the sum of the shares.

        A loss that only adds modules or a memory to a run returns None.

        Args:
            batch: the features of the global batch, and which rows are this process's own.

        Raises:
            ValueError: the loss is not defined for the batch; the message says why.
        """

    def refuse(self, name: str, setting: TermSetting) -> None:
        """Raises ConfigError if the loss, `name` in the YAML, does not fit a run's setting."""

    def build_parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns functions, by name, that build the modules that this loss learns.

        A module with a method `add_features(encoded) -> {name: [tensor of each view]}` adds these
        features to the model's outputs (see `models.heterogeneous.Encoded`). A module that two
        terms request by the same name is built once, by the first term.
        """
        return {}

    def build_classifier(self, spec: ModelSpec) -> nn.Module | None:
        """Returns a module that replaces the linear classifier, or None."""
        return None

    def build_memory(self, run: RunSpec) -> Memory | None:
        """Returns the loss's state between the steps of a run, or None."""
        return None

    # What a run and a loop call.

    @property
    def truncated_features(self) -> set[str]:
        """The features that `Matryoshka` cuts; empty where the loss compares all of them whole."""
        return {*(self.truncated or ())} & self.needs.features if self.widths else set()

    def nested_share(self, batch: GlobalBatch) -> Any:
        """Returns what `share` does, or under `Matryoshka` its mean over the widths."""
        if not (names := self.truncated_features):
            return self.share(batch)
        shares: list[Any] = [self.share(batch.prefix(names, width)) for width in self.widths]
        return None if shares[0] is None else sum(shares) / len(shares)

    def mean_over_widths(self, loss: Callable[[slice], Tensor]) -> Tensor:
        """Returns the mean over the widths of `loss`, a function of the columns to compare."""
        return torch.stack([loss(slice(width)) for width in self.widths or (None,)]).mean()

    def set_widths(self, widths: Sequence[int]) -> None:
        """Compares the first `widths` numbers of projections: see `Matryoshka`."""
        self.widths = tuple(widths)

    def build_own_parts(self, spec: ModelSpec, width: int | None = None) -> None:
        """Builds the loss's modules for a loop; `width` is that of the projections they expect."""
        self.parts.update({name: build() for name, build in self.build_parts(spec).items()})
        if (classifier := self.build_classifier(spec)) is not None:
            self.parts["classifier"] = classifier
        self.width = width

    def loop_share(self, batch: GlobalBatch) -> Tensor:
        """Returns the share in a loop of one's own, where no trainer updates a memory."""
        share: Tensor = self.nested_share(batch)
        return share

    def evaluate(
        self,
        features: Mapping[str, Views],
        targets: Tensor | None = None,
        *,
        sizes: RowCounts = None,
        indices: Tensor | None = None,
        rng_keys: Tensor | None = None,
        epoch: float = 0.0,
        label_weights: Tensor | None = None,
    ) -> Tensor:
        """Returns the loss over the rows of all processes; every process must call it.

        Args:
            features: features of this process's rows, by the names in `needs`.
            targets: their labels as columns, [rows, labels]; None where the loss needs none.
            sizes: numbers of rows of every process; None exchanges them.
            indices: the rows' numbers in the data set, where its memory needs them.
            rng_keys: keys of the rows' random numbers, where it draws some.
            epoch: the current epoch, which may be fractional.
            label_weights: how much each label counts, 0 to 1, [rows, labels]; None: all count 1.

        Raises:
            LossError: the rows cannot be compared, or processes differ in more than their rows.
        """
        if not isinstance(epoch, Real) or not 0 <= epoch < math.inf:
            raise LossError(f"epoch must be a finite number, 0.0 at the start, got {epoch!r}")
        views = {name: as_views(x, name) for name, x in features.items()}
        first = next(iter(views.values()))[0]
        targets = first.new_zeros(len(first), 0) if targets is None else targets
        self._refuse(views, targets)
        # A feature travels in half precision if all its views have that one type.
        dtypes = {name: {x.dtype for x in xs} for name, xs in views.items()}
        half = {name: x.pop() for name, x in dtypes.items() if len(x) == 1 and x <= {*HALF}}
        views = {n: [x.float() if x.dtype in HALF else x for x in xs] for n, xs in views.items()}
        first = next(iter(views.values()))[0]
        if targets.is_floating_point() or targets.dtype == torch.bool:
            targets = targets.double() if first.dtype == torch.float64 else targets.float()
        label_weights = self._checked_weights(label_weights, targets)
        zeros = _zeros(len(first), first.device)
        rng_keys = zeros if rng_keys is None else rng_keys
        with torch.autocast(first.device.type, enabled=False):
            views |= {"paths": [targets]} | self._features_of_parts(views, targets, rng_keys)
        needs = self.needs
        exchanged = {*needs.gathered, *needs.labelled, *needs.vectors, *needs.labelled_vectors}
        if missing := sorted(exchanged - views.keys()):
            raise LossError(
                f"no module makes its {', '.join(missing)}; pass the widths of its inputs when you "
                f"build it: see help({type(self).__name__})"
            )
        world = collectives.world_size() if self.gather else 1
        sizes = (
            [len(first)] if world == 1 else sizes_of_processes(views, targets, sizes, label_weights)
        )
        batch = exchange(
            views,
            needs,
            ShardSizes(sizes, [0] * len(sizes)),
            targets,
            inputs=views.get("inputs", []),
            indices=zeros if indices is None else indices,
            rng_keys=rng_keys,
            epoch=epoch,
            wire_dtypes=half,
            labels_known=not targets.is_floating_point(),
            label_weights=label_weights,
        )
        memory = self.memory
        if not self.training:  # a memory is updated in training alone
            self.memory = copy.deepcopy(memory)
        try:
            with torch.autocast(first.device.type, enabled=False):
                share = self.loop_share(batch)
        finally:
            self.memory = memory
        if world == 1:
            return share
        # The value is exactly the sum. Only the share has a gradient, world times its own, so that
        # the mean over processes is the gradient of the sum.
        total = collectives.sum_over_processes(share.detach())
        return total + world * (share - share.detach())

    def nodes(self, features: Features) -> list[Tensor]:
        """Returns the features of graphs' nodes, a tensor per view; only `Infograph` has some."""
        return []

    def _features_of_parts(self, features: Features, targets: Tensor, rng_keys: Tensor) -> Features:
        """Returns the features that the parts compute from the given ones."""
        rows = len(targets)
        hidden = features.get("hidden", [])
        encoded = Encoded(
            inputs=features.get("inputs", []),
            rng_keys=rng_keys,
            view_keys=[],
            sizes=[rows],
            hidden=hidden,
            classified=hidden[0] if hidden else targets,
            projections=features.get("projections", []),
            logits=None,
            classifier=None,
            targets=targets,
            nodes=self.nodes(features),
        )
        added: Features = {}
        for part in self.parts.values():
            if isinstance(part, FeaturePart):
                added |= part.add_features(encoded)
        return added

    def _checked_weights(self, weights: Tensor | None, targets: Tensor) -> Tensor | None:
        """Returns weights in the shape and type of the targets; refuses those of other losses."""
        if weights is not None and not self.weighs_labels:
            raise LossError("it cannot weigh labels; pass label_weights=None")
        return None if weights is None else as_label_weights(weights, targets)

    def _refuse(self, features: Features, targets: Tensor) -> None:
        """Refuses tensors whose rows, widths or types do not agree."""
        named = {f"{name}[{v}]": x for name, views in features.items() for v, x in enumerate(views)}
        same_rows({**named, "labels": targets})
        for name in ("projections", "keys"):
            if len(widths := {x.shape[1] for x in features.get(name, [])}) > 1:
                raise LossError(f"views of the {name} must have one width, got {sorted(widths)}")
        if "projections" in features:
            z = features["projections"][0]
            least = max(z.shape[1], *self.widths, 0)  # of `Matryoshka`
            expect_width("projections", z, self.width or least)
        own_types = {x.dtype for x in self.parameters() if x.is_floating_point()}
        types = {torch.float32 if x.dtype in HALF else x.dtype for x in named.values()}
        if own_types and own_types != types:
            raise LossError(
                f"features are {_names(types)}, but its own parameters are {_names(own_types)}; "
                "use loss.double(), loss.float(), or features of its type"
            )


@lru_cache(maxsize=8)  # made once, not in every step
def _zeros(rows: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(rows, dtype=torch.int64, device=device)


def _names(types: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))


def _with_checked_options(cls: type[Loss], init: Callable[..., None]) -> Callable[..., None]:
    """Returns an `__init__` that checks its options, and keeps them in `options`."""
    signature = inspect.signature(init)

    @wraps(init)
    def checked(self: Loss, *args: Any, **kwargs: Any) -> None:
        section = section_of(cls)
        names = [name for name in section.model_fields if name in signature.parameters]
        given = {name: kwargs.pop(name) for name in names if name in kwargs}
        valid = check(section, given, cls.__name__)
        options = {name: getattr(valid, name) for name in names}
        try:
            init(self, *args, **kwargs, **options)
        except ValueError as fault:
            raise LossError(f"{cls.__name__}: {fault}") from None
        self.options = options

    return checked


def projection_spec(dim: int, input_dims: Sequence[int] = ()) -> ModelSpec:
    """Returns the model that parts are built for in a loop; ConfigError if `dim` is no width."""
    config = check(ModelConfig, {"projection_width": dim}, "dim")
    return ModelSpec(config, [[width] for width in input_dims], 0, [], 0)
