"""A term of the objective as a module for any training loop.

Its value is the loss over the rows of all processes, the same on each. Its gradient, after
DistributedDataParallel's mean over processes, is that of one process with all rows.
"""

import copy
import math
import zlib
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from heron.config.sections import check
from heron.distributed import collectives
from heron.losses.inputs import LossError, RowCounts, Views, as_views, expect_width, same_rows
from heron.models.heterogeneous import Encoded, FeaturePart, Features, ModelSpec
from heron.objectives.batch import GlobalBatch
from heron.objectives.exchange import ShardSizes, exchange
from heron.objectives.term import Memory, Term

HALF = torch.float16, torch.bfloat16  # losses are computed in float32 at least


def options_of(kind: type[Term], arguments: Mapping[str, object]) -> dict[str, object]:
    """Returns those of an `__init__`'s `locals()` that are options of a term."""
    return {name: arguments[name] for name in kind.model_fields if name in arguments}


class Loss(nn.Module):
    """Base class of all losses.

    Attributes:
        term: the term of the objective, with its options.
        gather: whether the rows of all processes are compared, or this process's alone.
        parts: the modules that the term learns beside the network, by name.
        memory: the state that the term keeps between steps, equal on all processes.
        width: the width of projections that the parts expect, if they expect one.
    """

    def __init__(
        self,
        kind: type[Term],
        options: Mapping[str, object],
        gather: bool = True,
        spec: ModelSpec | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Builds a term and its modules.

        Args:
            kind: the class of the term.
            options: the term's options by name.
            gather: compare the rows of all processes.
            spec: the model that the term's modules are built for; None: it has none.
            memory: the term's memory, if it has one.

        Raises:
            ConfigError: an option is unknown or out of range.
        """
        super().__init__()
        self.term = check(kind, dict(options), type(self).__name__)
        self.gather = gather
        builders = self.term.parts(spec) if spec else {}
        self.parts = nn.ModuleDict({name: build() for name, build in builders.items()})
        if spec and (classifier := self.term.classifier(spec)) is not None:
            self.parts["classifier"] = classifier
        self.memory = memory
        self.width = spec.config.projection_width if spec else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`; its errors become a LossError that names the loss, and the rank."""
        try:
            return super().__call__(*args, **kwargs)
        except (ValueError, LossError) as fault:
            rank = f"rank {collectives.rank()}: " if collectives.world_size() > 1 else ""
            raise LossError(f"{rank}{type(self).__name__}: {fault}") from None

    def extra_repr(self) -> str:
        """Returns the options, for `repr`."""
        hidden = {"weight", "ramp_epochs"}
        options = [f"{k}={v!r}" for k, v in self.term if k not in hidden]
        return ", ".join([*options, f"gather={self.gather}"])

    def evaluate(
        self,
        features: Mapping[str, Views],
        targets: Tensor | None = None,
        *,
        sizes: RowCounts = None,
        indices: Tensor | None = None,
        rng_keys: Tensor | None = None,
        epoch: float = 0.0,
    ) -> Tensor:
        """Returns the loss over the rows of all processes; every process must call it.

        Args:
            features: features of this process's rows, by the names in the term's `needs`.
            targets: their labels as columns, [rows, labels]; None where the term needs none.
            sizes: numbers of rows of every process; None exchanges them.
            indices: the rows' numbers in the data set, where the term's memory needs them.
            rng_keys: keys of the rows' random numbers, where the term draws some.
            epoch: the current epoch, which may be fractional.

        Raises:
            LossError: the rows cannot be compared, or processes differ in more than their rows.
        """
        if not isinstance(epoch, Real) or not 0 <= epoch < math.inf:
            raise LossError(f"epoch is {epoch!r}; expected a finite number, 0.0 at the start")
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
        zeros = torch.zeros(len(first), dtype=torch.int64, device=first.device)
        rng_keys = zeros if rng_keys is None else rng_keys
        with torch.autocast(first.device.type, enabled=False):
            views |= {"paths": [targets]} | self._features_of_parts(views, targets, rng_keys)
        world = collectives.world_size() if self.gather else 1
        sizes = [len(first)] if world == 1 else _sizes(views, targets, sizes)
        batch = exchange(
            views,
            self.term.requires(),
            ShardSizes(sizes, [0] * len(sizes)),
            targets,
            inputs=views.get("inputs", []),
            indices=zeros if indices is None else indices,
            rng_keys=rng_keys,
            epoch=epoch,
            wire_dtypes=half,
        )
        with torch.autocast(first.device.type, enabled=False):
            share = self.share(batch)
        if world == 1:
            return share
        # The value is exactly the sum. Only the share has a gradient, world times its own, so that
        # the mean over processes is the gradient of the sum.
        total = collectives.sum_over_processes(share.detach())
        return total + world * (share - share.detach())

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns this process's share of the loss; the shares' sum is the loss."""
        # A memory is updated in training alone.
        memory = self.memory if self.training else copy.deepcopy(self.memory)
        loss = self.term.loss(batch, memory)
        assert loss is not None
        return loss

    def nodes(self, features: Features) -> list[Tensor]:
        """Returns the features of graphs' nodes, a tensor per view; only `Infograph` has some."""
        return []

    def _features_of_parts(self, features: Features, targets: Tensor, rng_keys: Tensor) -> Features:
        """Returns the features that the term's parts compute from the given ones."""
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

    def _refuse(self, features: Features, targets: Tensor) -> None:
        """Refuses tensors whose rows, widths or types do not agree."""
        named = {f"{name}[{v}]": x for name, views in features.items() for v, x in enumerate(views)}
        same_rows({**named, "labels": targets})
        for name in ("projections", "keys"):
            if len(widths := {x.shape[1] for x in features.get(name, [])}) > 1:
                raise LossError(
                    f"views of the {name} have {sorted(widths)} numbers; expected one width"
                )
        if self.width is not None and "projections" in features:
            expect_width({"projections": features["projections"][0]}, self.width)
        own_types = {x.dtype for x in self.parameters() if x.is_floating_point()}
        types = {torch.float32 if x.dtype in HALF else x.dtype for x in named.values()}
        if own_types and own_types != types:
            raise LossError(
                f"features are {_names(types)} and its own parameters {_names(own_types)}; "
                "expected the same: loss.double(), loss.float(), or features of its type"
            )


def _names(types: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))


def _sizes(features: Features, targets: Tensor, sizes: RowCounts) -> list[int]:
    """Returns the number of rows of every process.

    Processes whose tensors differ in more than their rows would wait for each other for ever, so
    each sends a checksum of all shapes and types beside its number of rows.

    Raises:
        LossError: processes differ (raised on every process), or `sizes` are wrong.
    """
    rows, rank = len(targets), collectives.rank()
    if sizes is not None:
        if len(sizes) != collectives.world_size() or sizes[rank] != rows:
            raise LossError(
                f"sizes are {list(sizes)}, and process {rank} of {collectives.world_size()} has "
                f"{rows} rows; expected the rows of every process, in order of rank"
            )
        return list(sizes)
    description = "; ".join(
        f"{name} "
        + ", ".join(
            f"{str(x.dtype)[6:]} [{', '.join(['batch', *map(str, x.shape[1:])])}]" for x in tensors
        )
        for name, tensors in {**features, "labels": [targets]}.items()
        if name != "paths"  # these are the labels
    )
    checksum = zlib.crc32(description.encode())
    own = torch.tensor([rows, checksum], device=targets.device)
    of_processes = collectives.gather_stacked(own).tolist()
    if any(other != checksum for _, other in of_processes):
        descriptions = enumerate(collectives.gather_objects(description))
        lines = [f"rank {n} {line}" for n, line in descriptions]
        raise LossError(f"processes differ: {' | '.join(lines)}; expected the same of each")
    return [count for count, _ in of_processes]
