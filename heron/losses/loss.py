"""A term of the objective as a module for any training loop.

Its value is the loss of the rows of all processes, the same on each. Its gradient, after the mean
over processes that DistributedDataParallel takes, is that of one process with all rows.
"""

import copy
import math
import zlib
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from heron.losses.inputs import LossError, RowCounts, Views, as_views, expect_width, same_rows
from heron.pipeline.config.sections import check
from heron.pipeline.config.terms import Term
from heron.pipeline.distributed import collectives
from heron.pipeline.distributed.exchange import ShardSizes, exchange
from heron.pipeline.models.heterogeneous import Encoded, FeaturePart, Features, ModelSpec
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.memory import Memory

HALF = torch.float16, torch.bfloat16  # losses are computed in float32 at least


def options_of(kind: type[Term], given: Mapping[str, object]) -> dict[str, object]:
    """Returns what is an option of a term among arguments: an `__init__` gives its `locals()`."""
    return {name: given[name] for name in kind.model_fields if name in given}


class Loss(nn.Module):
    """Base of all losses.

    Attributes:
        term: the term with its options.
        gather: whether rows of all processes are compared, or this process's alone.
        parts: what the term learns beside the network, by name.
        memory: what the term remembers between steps; all processes hold the same.
        width: of projections, where the parts ask for one.
    """

    def __init__(
        self,
        kind: type[Term],
        options: Mapping[str, object],
        gather: bool = True,
        spec: ModelSpec | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Makes the term of some options, and the parts of the model that it brings.

        Raises:
            ConfigError: an option is not what it should be.
        """
        super().__init__()
        self.term = check(kind, dict(options), type(self).__name__)
        self.gather = gather
        built = self.term.parts(spec) if spec else {}
        self.parts = nn.ModuleDict({name: build() for name, build in built.items()})
        if spec and (classifier := self.term.classifier(spec)) is not None:
            self.parts["classifier"] = classifier
        self.memory = memory
        self.width = spec.config.projection_width if spec else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`; what it refuses is an error that names this process and the loss."""
        try:
            return super().__call__(*args, **kwargs)
        except (ValueError, LossError) as fault:
            here = f"rank {collectives.rank()}: " if collectives.world_size() > 1 else ""
            raise LossError(f"{here}{type(self).__name__}: {fault}") from None

    def extra_repr(self) -> str:
        """Returns the options."""
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
        """Returns the loss of the rows of all processes; every process must call it.

        Args:
            features: of this process's rows, by the names that the term knows them by.
            targets: their labels as columns, [rows, labels]; None where the term looks at none.
            sizes: rows of every process; None exchanges them.
            indices: row numbers in the data set, where the term's memory asks for them.
            rng_keys: of the rows' random numbers, likewise.
            epoch: now; a fraction of it counts.

        Raises:
            LossError: the rows cannot be compared, or processes differ in more than their number.
        """
        if not isinstance(epoch, Real) or not 0 <= epoch < math.inf:
            raise LossError(f"epoch is {epoch!r}; expected a finite number, 0.0 at the start")
        known = {name: as_views(x, name) for name, x in features.items()}
        first = next(iter(known.values()))[0]
        targets = first.new_zeros(len(first), 0) if targets is None else targets
        self._refuse(known, targets)
        half = {name: xs[0].dtype for name, xs in known.items() if xs[0].dtype in HALF}
        known = {n: [x.float() if x.dtype in HALF else x for x in xs] for n, xs in known.items()}
        first = next(iter(known.values()))[0]
        if targets.is_floating_point() or targets.dtype == torch.bool:
            targets = targets.double() if first.dtype == torch.float64 else targets.float()
        nothing = torch.zeros(len(first), dtype=torch.int64, device=first.device)
        rng_keys = nothing if rng_keys is None else rng_keys
        with torch.autocast(first.device.type, enabled=False):
            known |= {"paths": [targets]} | self._added(known, targets, rng_keys)
        world = collectives.world_size() if self.gather else 1
        sizes = [len(first)] if world == 1 else _sizes(known, targets, sizes)
        batch = exchange(
            known,
            self.term.requires(),
            ShardSizes(sizes, [0] * len(sizes)),
            targets,
            inputs=known.get("inputs", []),
            indices=nothing if indices is None else indices,
            rng_keys=rng_keys,
            epoch=epoch,
            types=half,
        )
        with torch.autocast(first.device.type, enabled=False):
            share = self.share(batch)
        if world == 1:
            return share
        # The value is the sum's to the last bit, and only the share has a gradient: that of the
        # mean over processes is then the sum's.
        total = collectives.sum_over_processes(share.detach())
        return total + world * (share - share.detach())

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns this process's share of the loss; the shares' sum is the loss."""
        # A memory moves on in training alone.
        memory = self.memory if self.training else copy.deepcopy(self.memory)
        loss = self.term.loss(batch, memory)
        assert loss is not None
        return loss

    def nodes(self, known: Features) -> list[Tensor]:
        """Returns the nodes of a view of graphs, which but one loss is given."""
        return []

    def _added(self, known: Features, targets: Tensor, rng_keys: Tensor) -> Features:
        """Returns the features that the term's parts make of what there is."""
        rows = len(targets)
        hidden = known.get("hidden", [])
        encoded = Encoded(
            inputs=known.get("inputs", []),
            rng_keys=rng_keys,
            view_keys=[],
            sizes=[rows],
            hidden=hidden,
            classified=hidden[0] if hidden else targets,
            projections=known.get("projections", []),
            logits=None,
            classifier=None,
            targets=targets,
            nodes=self.nodes(known),
        )
        added: Features = {}
        for part in self.parts.values():
            if isinstance(part, FeaturePart):
                added |= part.add_features(encoded)
        return added

    def _refuse(self, known: Features, targets: Tensor) -> None:
        """Refuses tensors that cannot stand in one batch."""
        named = {f"{name}[{v}]": x for name, views in known.items() for v, x in enumerate(views)}
        same_rows({**named, "labels": targets})
        for name in ("projections", "keys"):
            if len(widths := {x.shape[1] for x in known.get(name, [])}) > 1:
                raise LossError(
                    f"views of the {name} have {sorted(widths)} numbers; expected one width"
                )
        if self.width is not None and "projections" in known:
            expect_width({"projections": known["projections"][0]}, self.width)
        kinds = {x.dtype for x in self.parameters() if x.is_floating_point()}
        given = {torch.float32 if x.dtype in HALF else x.dtype for x in named.values()}
        if kinds and kinds != given:
            raise LossError(
                f"features are {_types(given)} and its own parameters {_types(kinds)}; expected "
                "the same: loss.double(), loss.float(), or features of its type"
            )


def _types(kinds: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def _sizes(known: Features, targets: Tensor, sizes: RowCounts) -> list[int]:
    """Returns the rows of every process.

    Processes that differ in anything but their rows would wait for each other for ever, so each
    tells, beside its rows, a checksum of all shapes and types.

    Raises:
        LossError: on every process, where they differ.
    """
    rows, rank = len(targets), collectives.rank()
    if sizes is not None:
        if len(sizes) != collectives.world_size() or sizes[rank] != rows:
            raise LossError(
                f"sizes are {list(sizes)}, and process {rank} of {collectives.world_size()} has "
                f"{rows} rows; expected the rows of every process, in order of rank"
            )
        return list(sizes)
    told = "; ".join(
        f"{name} "
        + ", ".join(
            f"{str(x.dtype)[6:]} [{', '.join(['batch', *map(str, x.shape[1:])])}]" for x in tensors
        )
        for name, tensors in {**known, "labels": [targets]}.items()
        if name != "paths"  # which are the labels
    )
    checksum = zlib.crc32(told.encode())
    device = targets.device
    found = collectives.stack(torch.tensor([rows, checksum], device=device)).tolist()
    if any(other != checksum for _, other in found):
        lines = [f"rank {n} {line}" for n, line in enumerate(collectives.gather_objects(told))]
        raise LossError(f"processes differ: {' | '.join(lines)}; expected the same of each")
    return [count for count, _ in found]
