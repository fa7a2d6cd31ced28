"""What the processes of a step exchange of its rows."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.terms import Needs
from heron.pipeline.distributed.collectives import (
    gather,
    gather_all,
    of_own,
    rank,
    ring,
    sum_over_processes,
    summed,
)
from heron.pipeline.models.heterogeneous import Features
from heron.pipeline.objectives.batch import FeatureMap, GlobalBatch
from heron.pipeline.objectives.objective import Objective
from heron.pipeline.objectives.present import OwnRows, Ring

if TYPE_CHECKING:  # losses in anybody's own loop read no data
    from heron.pipeline.data.batches import Batch

RING_FROM = 1 / 8  # of a process's memory
ALWAYS = "hidden", "inputs", "logits", "paths", "projections"  # what a term may ask for


@dataclass(frozen=True)
class ShardSizes:
    """How many labelled and unlabelled rows each process has; known from the plan."""

    labelled: Sequence[int]
    unlabelled: Sequence[int]

    @property
    def rows(self) -> list[int]:
        """Rows of each process."""
        return [a + b for a, b in zip(self.labelled, self.unlabelled, strict=True)]

    def offsets(self) -> list[int]:
        """Returns where this process's part begins in the global batch of each stream there is."""
        streams = [stream for stream in (self.labelled, self.unlabelled) if sum(stream)]
        return [sum(stream[: rank()]) for stream in streams]

    @cached_property
    def labelled_at(self) -> Tensor:
        """Where the labelled rows lie among all rows, in the order of `gather`."""
        starts = itertools.accumulate(self.rows, initial=0)
        own = zip(starts, self.labelled, strict=False)
        return torch.cat([torch.arange(start, start + count) for start, count in own])


def gather_batch(
    features: Features,
    batch: "Batch",
    inputs: Sequence[Tensor],
    sizes: ShardSizes,
    objective: Objective,
    epoch: float = 0.0,
    half: bool = False,
    by_ring: bool = False,
) -> GlobalBatch:
    """Gathers what the terms need of all processes' rows, and nothing else, in one collective.

    Args:
        features: of this process's rows, the labelled ones first.
        batch: the rows, with the labels of the labelled ones.
        inputs: what the features were made of, a tensor a view.
        sizes: the rows of every process.
        objective: its terms say what they need.
        epoch: now; a fraction of it counts.
        half: round vectors to bfloat16, in which they travel; on one process, too. Round a ring go
            what terms make of them, in float32.
        by_ring: leave out the vectors that come round a ring.

    Returns:
        The global batch, differentiable back to every process's features.

    Raises:
        ConfigError: a term needs what neither the model nor the batch has.
    """
    needs, known = objective.needs, dict(features)
    asked = needs.features
    if "inputs" in asked:  # a copy of pictures, whose memory is channels-last
        known["inputs"] = [x.flatten(1) for x in inputs]
    if "paths" in asked:
        known["paths"] = [batch.paths]
    if not asked <= known.keys():
        _refuse(objective, known)
    targets = batch.targets
    if any(x.dtype == torch.float64 for tensors in features.values() for x in tensors):
        targets = targets.double()  # or losses of logits and labels would be rounded to float32
    vectors = {*needs.vectors, *needs.labelled_vectors} if half else ()
    return exchange(
        known,
        needs,
        sizes,
        targets,
        inputs=inputs,
        indices=batch.indices,
        rng_keys=batch.rng_keys,
        epoch=epoch,
        present=batch.present,
        types=dict.fromkeys(vectors, torch.bfloat16),
        by_ring=by_ring,
    )


def shared(sizes: ShardSizes, by_ring: bool = False) -> tuple[OwnRows, OwnRows] | None:
    """The own rows, and the own labelled ones, where other processes have some too."""
    if len(sizes.rows) == 1:
        return None

    def own(of: list[int]) -> OwnRows:
        ends = itertools.accumulate(of, initial=0)
        shares = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        around = Ring(shares, ring) if by_ring else None
        return OwnRows(_own(of), lambda x: gather_all([x], [of])[0], around)

    return own(sizes.rows), own(list(sizes.labelled))


def exchange(
    known: Features,
    needs: Needs,
    sizes: ShardSizes,
    targets: Tensor,
    *,
    inputs: Sequence[Tensor],
    indices: Tensor,
    rng_keys: Tensor,
    epoch: float,
    present: Tensor | None = None,
    types: Mapping[str, torch.dtype] = MappingProxyType({}),
    by_ring: bool = False,
) -> GlobalBatch:
    """Gathers features of all rows, and of the labelled ones, in one collective.

    Labelled rows of a feature that is gathered of all rows are taken from these. Features, targets,
    inputs, indices, rng_keys and present are of this process's rows, the labelled ones first.

    Args:
        known: all features that there are.
        needs: what is wanted of them.
        sizes: the rows of every process.
        targets: labels of the labelled rows.
        inputs: a tensor a view.
        indices: numbers of the rows in the data set.
        rng_keys: of the rows' random numbers.
        epoch: now; a fraction of it counts.
        present: which views each row has; None: all of them.
        types: in which features travel, by name, and to which they are rounded on any number of
            processes, one too; of others, their own.
        by_ring: whether `vectors` and `labelled_vectors` stay those of own rows.
    """
    rows, labelled = sizes.rows, list(sizes.labelled)
    count = labelled[_place(rows)]
    labelled_at = sizes.labelled_at.to(targets.device)
    by_ring = by_ring and len(rows) > 1
    vectors, labelled_vectors = ((), ()) if by_ring else (needs.vectors, needs.labelled_vectors)
    all_rows = dict.fromkeys((*needs.gathered, *vectors))
    few = dict.fromkeys(n for n in (*needs.labelled, *labelled_vectors) if n not in all_rows)
    own = [(name, x, rows) for name in all_rows for x in known[name]]
    own += [(name, x[:count], labelled) for name in few for x in known[name]]
    others = [(targets, labelled)] + ([] if present is None else [(present, rows)])
    travelled, (targets, *of_rows) = _gather(own, others, types)

    def scope(names: Sequence[str], of_labelled: bool, summing: bool) -> dict[str, list[Tensor]]:
        made: dict[str, list[Tensor]] = {name: [] for name in names}
        for one in travelled:
            if one.name in made:
                x = one.own if len(rows) == 1 and one.name not in types else one.joined(summing)
                chosen = of_labelled and one.name in all_rows
                made[one.name].append(x.index_select(0, labelled_at) if chosen else x)
        return made

    gathered = scope(needs.gathered, False, True)
    gathered_labelled = scope(needs.labelled, True, True)
    compared, labelled_compared = scope(vectors, False, False), scope(labelled_vectors, True, False)
    if by_ring:
        compared = _rounded(known, needs.vectors, types)
        labelled_compared = _rounded(known, needs.labelled_vectors, types, count)
    own_rows, own_labelled, of_others = _own(rows), _own(labelled), shared(sizes, by_ring)
    return GlobalBatch(
        own=FeatureMap("own", known),
        gathered=FeatureMap("gathered", gathered),
        gathered_labelled=FeatureMap("labelled", gathered_labelled),
        vectors=FeatureMap("vectors", compared),
        labelled_vectors=FeatureMap("labelled_vectors", labelled_compared),
        targets=targets,
        rows=own_rows,
        labelled=own_labelled,
        labelled_at=labelled_at,
        inputs=inputs,
        indices=indices,
        rng_keys=rng_keys,
        epoch=epoch,
        gather_labelled=partial(gather, sizes=sizes.labelled),
        present=of_rows[0] if of_rows else None,
        shared=of_others,
    )


class _Travelled(NamedTuple):
    """A tensor of a feature: of own rows, and of those of all processes, so many of each."""

    name: str
    own: Tensor
    whole: Tensor
    sizes: list[int]

    def joined(self, summing: bool) -> Tensor:
        """Returns the whole, differentiable: see `collectives`."""
        if not self.own.requires_grad:
            return self.whole
        if summing and len(self.sizes) > 1:
            return summed(self.own, self.whole, self.sizes)
        return of_own(self.own, self.whole, _own(self.sizes))


def _gather(
    own: Sequence[tuple[str, Tensor, list[int]]],
    others: Sequence[tuple[Tensor, list[int]]],
    types: Mapping[str, torch.dtype],
) -> tuple[list[_Travelled], list[Tensor]]:
    """Gathers features by name, and other tensors, each with every process's number of rows."""
    travel = [(x.detach().to(types.get(name, x.dtype)), sizes) for name, x, sizes in own]
    tensors, each = zip(*travel, *others, strict=True)
    found = gather_all(tensors, each)
    whole = zip(own, found, strict=False)
    return [_Travelled(n, x, y.to(x.dtype), sizes) for (n, x, sizes), y in whole], found[len(own) :]


def _rounded(
    known: Features,
    names: Sequence[str],
    types: Mapping[str, torch.dtype],
    count: int | None = None,
) -> dict[str, list[Tensor]]:
    """The first rows of own features, rounded to the types in which they would travel."""
    made: dict[str, list[Tensor]] = {}
    for name in names:
        of_views = [x[:count] for x in known[name]]
        rounded = [x.detach().to(types.get(name, x.dtype)).to(x.dtype) for x in of_views]
        made[name] = [
            of_own(x, y, slice(0, len(x))) if x.requires_grad else y
            for x, y in zip(of_views, rounded, strict=True)
        ]
    return made


def uses_ring(
    asked: str, features: Features, objective: Objective, sizes: ShardSizes, memory: int
) -> bool:
    """Whether vectors come round a ring in a run's steps; every process calls it.

    Args:
        asked: `distributed.exchange`. `auto`: a ring where every term has one, and on some process
            all rows' vectors take more than `RING_FROM` of the memory: as they come, as unit
            vectors, and laid end to end.
        features: of this process's rows.
        objective: its terms say what is compared.
        sizes: the rows of every process.
        memory: of this process, in bytes.
    """
    if len(sizes.rows) == 1 or asked != "auto" or not objective.rings:
        return asked == "ring" and len(sizes.rows) > 1
    needs, held = objective.needs, 0
    for names, rows in ((needs.vectors, sizes.rows), (needs.labelled_vectors, sizes.labelled)):
        of_row = [x.shape[1:].numel() * x.itemsize for name in names for x in features[name]]
        held += sum(rows) * sum(of_row)
    device = next(iter(features.values()))[0].device
    over = torch.tensor([float(3 * held > RING_FROM * memory)], device=device)
    return float(sum_over_processes(over)) > 0


def _refuse(objective: Objective, known: Features) -> NoReturn:
    """Names the term that needs what there is not."""
    for name, term in objective.terms.items():
        if missing := sorted(term.requires().features - known.keys()):
            raise ConfigError(
                f"objective.{name} needs {', '.join(missing)}, which no part of the model makes; "
                f"expected some of {', '.join(sorted({*known, *ALWAYS}))}, or a part that makes it"
            )
    raise AssertionError("every need is a term's")


def _own(sizes: Sequence[int]) -> slice:
    """This process's rows in the order of `gather`."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return slice(ends[_place(sizes)], ends[_place(sizes) + 1])


def _place(sizes: Sequence[int]) -> int:
    """This process's number among those that exchange; one may do without the others."""
    return rank() if len(sizes) > 1 else 0
