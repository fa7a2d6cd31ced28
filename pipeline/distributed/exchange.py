"""What the processes of a step exchange of its rows."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, TypedDict

import torch
from torch import Tensor

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.terms import Needs
from heron.pipeline.distributed.collectives import (
    gather,
    gather_all,
    gather_objects,
    of_own,
    rank,
    ring,
    sum_over_processes,
    summed,
)
from heron.pipeline.models.heterogeneous import Features
from heron.pipeline.objectives.batch import ByName, GlobalBatch
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

    def offsets(self, sizes: Sequence[int]) -> list[int]:
        """Returns where this process's part of each stream's global batch begins.

        Args:
            sizes: the process's rows of each stream that there is: see `Batch`.
        """
        streams = [stream for stream in (self.labelled, self.unlabelled) if sum(stream)]
        assert len(streams) == len(sizes)
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
    needs = objective.needs
    known = dict(features)
    if "inputs" in needs.features:  # a copy of pictures, whose memory is channels-last
        known["inputs"] = [x.flatten(1) for x in inputs]
    if "paths" in needs.features:
        known["paths"] = [batch.paths]
    if not needs.features <= known.keys():
        _refuse(objective, known)
    targets = batch.targets
    if any(x.dtype == torch.float64 for tensors in features.values() for x in tensors):
        targets = targets.double()  # or losses of logits and labels would be rounded to float32
    labelled_at = sizes.labelled_at.to(batch.targets.device)
    of_rows = [] if batch.present is None else [batch.present]
    vectors = {*needs.vectors, *needs.labelled_vectors} if half else ()
    types = dict.fromkeys(vectors, torch.bfloat16)
    scopes, (targets, *present) = exchange(
        known, needs, sizes, labelled_at, targets, of_rows, types, by_ring
    )
    return GlobalBatch(
        own=ByName("own", known),
        **scopes,
        targets=targets,
        rows=_own(sizes.rows),
        labelled=_own(sizes.labelled),
        labelled_at=labelled_at,
        inputs=inputs,
        indices=batch.indices,
        rng_keys=batch.rng_keys,
        epoch=epoch,
        gather_labelled=partial(gather, sizes=sizes.labelled),
        present=present[0] if present else None,
        shared=shared(sizes, by_ring),
    )


class Scopes(TypedDict):
    """The fields of `GlobalBatch` that hold features of all rows."""

    gathered: ByName
    gathered_labelled: ByName
    vectors: ByName
    labelled_vectors: ByName


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
    labelled_at: Tensor,
    targets: Tensor,
    of_rows: Sequence[Tensor] = (),
    types: Mapping[str, torch.dtype] = MappingProxyType({}),
    by_ring: bool = False,
) -> tuple[Scopes, list[Tensor]]:
    """Gathers features of all rows, and of the labelled ones, in one collective.

    Labelled rows of a feature that is gathered of all rows are taken from these.

    Args:
        known: features of this process's rows, the labelled ones first.
        needs: what is wanted of them.
        sizes: the rows of every process.
        labelled_at: where the labelled rows lie among all rows.
        targets: labels of this process's labelled rows.
        of_rows: further tensors of this process's rows, without gradient.
        types: in which features travel, by name, and to which they are rounded on any number of
            processes, one too; of others, their own.
        by_ring: whether `vectors` and `labelled_vectors` stay those of own rows.

    Returns:
        The fields of `GlobalBatch` that hold features, and `targets` and `of_rows` of all rows.
    """
    rows, labelled_sizes = sizes.rows, list(sizes.labelled)
    count = labelled_sizes[_place(rows)]
    by_ring = by_ring and len(rows) > 1
    vectors, labelled_vectors = ((), ()) if by_ring else (needs.vectors, needs.labelled_vectors)
    all_rows = dict.fromkeys((*needs.gathered, *vectors))
    wanted = [(n, False) for n in all_rows]
    few = dict.fromkeys((*needs.labelled, *labelled_vectors))
    wanted += [(n, True) for n in few if n not in all_rows]

    own: list[Tensor] = []
    of: list[tuple[str, bool]] = []
    for name, labelled in wanted:
        own += [x[:count] if labelled else x for x in known[name]]
        of += [(name, labelled)] * len(known[name])
    travel = [x.detach().to(types.get(name, x.dtype)) for x, (name, _) in zip(own, of, strict=True)]
    others = [targets, *of_rows]
    each = [labelled_sizes if labelled else rows for _, labelled in of]
    found = gather_all([*travel, *others], [*each, labelled_sizes, *[rows] * len(of_rows)])
    whole = [y.to(x.dtype) for x, y in zip(own, found, strict=False)]

    def joined(x: Tensor, y: Tensor, of_rows: list[int], summing: bool) -> Tensor:
        if not x.requires_grad:
            return y
        if summing and len(rows) > 1:
            return summed(x, y, of_rows)
        return of_own(x, y, _own(of_rows))

    def scope(name: str, asked: Sequence[str], labelled: bool, summing: bool) -> ByName:
        made: dict[str, list[Tensor]] = {feature: [] for feature in asked}
        for x, y, (feature, few) in zip(own, whole, of, strict=True):
            if feature in made and (labelled or not few):
                if len(rows) == 1 and feature not in types:
                    y = x
                else:
                    y = joined(x, y, labelled_sizes if few else rows, summing)
                made[feature].append(y.index_select(0, labelled_at) if labelled > few else y)
        return ByName(name, made)

    scopes: Scopes = {
        "gathered": scope("gathered", needs.gathered, False, True),
        "gathered_labelled": scope("labelled", needs.labelled, True, True),
        "vectors": scope("vectors", vectors, False, False),
        "labelled_vectors": scope("labelled_vectors", labelled_vectors, True, False),
    }
    if by_ring:
        here = _rounded(known, needs.vectors, types)
        few_here = _rounded(known, needs.labelled_vectors, types, count)
        scopes["vectors"] = ByName("vectors", here)
        scopes["labelled_vectors"] = ByName("labelled_vectors", few_here)
    return scopes, found[len(own) :]


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


def nonfinite(features: Features) -> list[str]:
    """Says which features of which process are not finite; every process calls it."""
    lines = []
    for name, tensors in features.items():
        for view, x in enumerate(tensors):
            of_view = f" of view {view + 1}" if len(tensors) > 1 else ""
            if bad := int((~x.isfinite()).flatten(1).any(1).sum()):
                lines.append(
                    f"rank {rank()}: {name}{of_view} of {bad} of {len(x)} rows are not finite"
                )
    return [line for found in gather_objects(lines) for line in found]


def _own(sizes: Sequence[int]) -> slice:
    """This process's rows in the order of `gather`."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return slice(ends[_place(sizes)], ends[_place(sizes) + 1])


def _place(sizes: Sequence[int]) -> int:
    """This process's number among those that exchange; one may do without the others."""
    return rank() if len(sizes) > 1 else 0
