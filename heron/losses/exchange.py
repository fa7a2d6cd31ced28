"""The exchange of features between processes: the global batch of a step."""

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from heron.distributed.collectives import (
    gather,
    gather_all,
    gather_objects,
    gather_stacked,
    rank,
    with_local_gradient,
    with_summed_gradient,
    world_size,
)
from heron.losses.batch import FeatureMap, GlobalBatch
from heron.losses.inputs import LossError, RowCounts
from heron.losses.pairs import OwnRows
from heron.losses.terms import Needs
from heron.models.heterogeneous import Features


@dataclass(frozen=True)
class ShardSizes:
    """The number of labelled and unlabelled rows of each process, which the plan determines."""

    labelled: Sequence[int]
    unlabelled: Sequence[int]

    @property
    def rows(self) -> list[int]:
        """Rows of each process."""
        return [a + b for a, b in zip(self.labelled, self.unlabelled, strict=True)]

    def offsets(self) -> list[int]:
        """Returns where this process's share of each non-empty stream's global batch begins."""
        streams = [stream for stream in (self.labelled, self.unlabelled) if sum(stream)]
        return [sum(stream[: rank()]) for stream in streams]


@lru_cache(maxsize=4)  # the host would wait for a copy in each step
def _labelled_indices(rows: Sequence[int], labelled: Sequence[int], device: torch.device) -> Tensor:
    """Returns the indices of the labelled rows among all rows, in the order of `gather`."""
    spans = zip(itertools.accumulate(rows, initial=0), labelled, strict=False)
    return torch.cat([torch.arange(x, x + count, device=device) for x, count in spans])


def sizes_of_processes(
    features: Features, targets: Tensor, sizes: RowCounts, label_weights: Tensor | None = None
) -> list[int]:
    """Returns the number of rows of every process.

    Processes whose tensors differ in more than their rows would wait for each other for ever, so
    each sends a checksum of all shapes and types beside its number of rows.

    Raises:
        LossError: processes differ (raised on every process), or `sizes` are wrong.
    """
    rows, own_rank = len(targets), rank()
    if sizes is not None:
        if len(sizes) != world_size() or sizes[own_rank] != rows:
            raise LossError(
                f"sizes must be the rows of every process, in order of rank, got {list(sizes)}, "
                f"but process {own_rank} of {world_size()} has {rows} rows"
            )
        return list(sizes)
    weighed = {} if label_weights is None else {"label_weights": [label_weights]}
    description = "; ".join(
        f"{name} "
        + ", ".join(
            f"{str(x.dtype)[6:]} [{', '.join(['batch', *map(str, x.shape[1:])])}]" for x in tensors
        )
        for name, tensors in {**features, **weighed, "labels": [targets]}.items()
        if name != "paths"  # these are the labels
    )
    checksum = zlib.crc32(description.encode())
    own = torch.tensor([rows, checksum], device=targets.device)
    of_processes = gather_stacked(own).tolist()
    if any(other != checksum for _, other in of_processes):
        descriptions = enumerate(gather_objects(description))
        lines = [f"rank {n} {line}" for n, line in descriptions]
        raise LossError(f"all processes must have the same: {' | '.join(lines)}")
    return [count for count, _ in of_processes]


def own_row_sets(sizes: ShardSizes) -> tuple[OwnRows, OwnRows] | None:
    """Returns this process's rows and labelled rows among all; None on a single process."""
    if len(sizes.rows) == 1:
        return None

    def own_rows(counts: list[int]) -> OwnRows:
        return OwnRows(_local_slice(counts), lambda x: gather_all([x], [counts])[0])

    return own_rows(sizes.rows), own_rows(list(sizes.labelled))


def exchange(
    features: Features,
    needs: Needs,
    sizes: ShardSizes,
    targets: Tensor,
    *,
    inputs: Sequence[Tensor],
    indices: Tensor,
    rng_keys: Tensor,
    epoch: float,
    present: Tensor | None = None,
    wire_dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    labels_known: bool = False,
    label_weights: Tensor | None = None,
) -> GlobalBatch:
    """Gathers features of all rows, and of the labelled ones, in one collective.

    Where a feature is gathered for all rows, its labelled rows are selected from those. Tensors are
    of this process's rows, labelled ones first: `targets` of the labelled rows alone, `inputs` one
    a view, `present` None if every row has all views. `wire_dtypes` are dtypes by feature in which
    they are sent, and to which they are rounded on one process, too; other features keep theirs.
    `labels_known` tells that no label of any process is unknown. `label_weights` are of the
    labelled rows, as `targets`; None if all labels of all processes count 1.
    """
    rows, labelled = sizes.rows, list(sizes.labelled)
    local_labelled = labelled[_exchange_rank(rows)]
    labelled_indices = _labelled_indices(tuple(rows), tuple(labelled), targets.device)
    all_rows = dict.fromkeys((*needs.gathered, *needs.vectors))
    only_labelled = dict.fromkeys(
        name for name in (*needs.labelled, *needs.labelled_vectors) if name not in all_rows
    )
    to_gather = [(name, x, rows) for name in all_rows for x in features[name]]
    to_gather += [
        (name, x[:local_labelled], labelled) for name in only_labelled for x in features[name]
    ]
    extra = [(targets, labelled)]
    extra += [] if present is None else [(present, rows)]
    extra += [] if label_weights is None else [(label_weights, labelled)]
    gathered, (targets, *others) = _gather(to_gather, extra, wire_dtypes)
    label_weights = None if label_weights is None else others.pop()
    present = None if present is None else others.pop()

    def select(scope: str, of_labelled: bool, sum_grads: bool) -> FeatureMap:
        selected = FeatureMap(scope, {name: [] for name in getattr(needs, scope)})
        for feature in gathered:
            if (name := feature.name) in selected:
                unchanged = len(rows) == 1 and name not in wire_dtypes
                x = feature.local if unchanged else feature.differentiable(sum_grads)
                take_labelled = of_labelled and name in all_rows
                selected[name].append(x.index_select(0, labelled_indices) if take_labelled else x)
        return selected

    return GlobalBatch(
        own=FeatureMap("own", features),
        gathered=select("gathered", of_labelled=False, sum_grads=True),
        gathered_labelled=select("labelled", of_labelled=True, sum_grads=True),
        vectors=select("vectors", of_labelled=False, sum_grads=False),
        labelled_vectors=select("labelled_vectors", of_labelled=True, sum_grads=False),
        targets=targets,
        rows=_local_slice(rows),
        labelled=_local_slice(labelled),
        labelled_indices=labelled_indices,
        inputs=inputs,
        indices=indices,
        rng_keys=rng_keys,
        epoch=epoch,
        gather_labelled=partial(gather, sizes=sizes.labelled),
        present=present,
        own_row_sets=own_row_sets(sizes),
        labels_known=labels_known,
        num_rows=sum(rows),
        label_weights=label_weights,
    )


class _Gathered(NamedTuple):
    """One tensor of a feature: this process's rows, all processes' rows, and how many each has."""

    name: str
    local: Tensor
    full: Tensor
    sizes: list[int]

    def differentiable(self, sum_grads: bool) -> Tensor:
        """Returns `full`, differentiable back to `local`: see `collectives`."""
        if not self.local.requires_grad:
            return self.full
        if sum_grads and len(self.sizes) > 1:
            return with_summed_gradient(self.local, self.full, self.sizes)
        return with_local_gradient(self.local, self.full, _local_slice(self.sizes))


def _gather(
    features: Sequence[tuple[str, Tensor, list[int]]],
    extra: Sequence[tuple[Tensor, list[int]]],
    wire_dtypes: Mapping[str, torch.dtype],
) -> tuple[list[_Gathered], list[Tensor]]:
    """Gathers named features and extra tensors, each with every process's number of rows."""
    to_send = [
        (x.detach().to(wire_dtypes.get(name, x.dtype)), sizes) for name, x, sizes in features
    ]
    tensors, sizes_by_tensor = zip(*to_send, *extra, strict=True)
    full = gather_all(tensors, sizes_by_tensor)
    gathered = [
        _Gathered(name, x, y.to(x.dtype), sizes)
        for (name, x, sizes), y in zip(features, full, strict=False)
    ]
    return gathered, full[len(features) :]


def _local_slice(sizes: Sequence[int]) -> slice:
    """Returns where this process's rows lie in the order of `gather`."""
    ends, index = list(itertools.accumulate(sizes, initial=0)), _exchange_rank(sizes)
    return slice(ends[index], ends[index + 1])


def _exchange_rank(sizes: Sequence[int]) -> int:
    """Returns this process's rank among those that exchange; 0 where it exchanges with none."""
    return rank() if len(sizes) > 1 else 0
