"""What the processes of a step exchange of its rows."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NoReturn

import torch
from torch import Tensor

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.batches import Batch
from heron.pipeline.distributed.collectives import gather, gather_objects, rank
from heron.pipeline.models.heterogeneous import Features
from heron.pipeline.objectives.batch import ByName, GlobalBatch
from heron.pipeline.objectives.objective import Objective

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


def globalise(
    features: Features,
    batch: Batch,
    inputs: Sequence[Tensor],
    sizes: ShardSizes,
    objective: Objective,
    epoch: float = 0.0,
) -> GlobalBatch:
    """Gathers what the terms need of all processes' rows, and nothing else.

    Args:
        features: of this process's rows, the labelled ones first.
        batch: the rows, with the labels of the labelled ones.
        inputs: what the features were made of, a tensor a view.
        sizes: the rows of every process.
        objective: its terms say what they need.
        epoch: now; a fraction of it counts.

    Returns:
        The global batch, differentiable back to every process's features.

    Raises:
        ConfigError: a term needs what neither the model nor the batch has.
    """
    count, needs = sizes.labelled[rank()], objective.needs
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
    return GlobalBatch(
        own=ByName("own", known),
        gathered=ByName(
            "gathered",
            {name: [gather(x, sizes.rows) for x in known[name]] for name in needs.gathered},
        ),
        gathered_labelled=ByName(
            "labelled",
            {
                name: [gather(x[:count], sizes.labelled) for x in known[name]]
                for name in needs.labelled
            },
        ),
        targets=gather(targets, sizes.labelled),
        rows=_own(sizes.rows),
        labelled=_own(sizes.labelled),
        labelled_at=sizes.labelled_at.to(batch.targets.device),
        inputs=inputs,
        indices=batch.indices,
        rng_keys=batch.rng_keys,
        epoch=epoch,
        gather_labelled=partial(gather, sizes=sizes.labelled),
        present=None if batch.present is None else gather(batch.present.byte(), sizes.rows) > 0,
    )


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
    return slice(ends[rank()], ends[rank() + 1])
