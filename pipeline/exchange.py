"""From one process's features to the global batch that the objective sees."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeline.collectives import gather, rank
from pipeline.models.heterogeneous import Features
from pipeline.objectives.objective import GlobalBatch, Objective


@dataclass(frozen=True)
class Split:
    """How many labelled and unlabelled rows each process holds; known from the plan."""

    labelled: Sequence[int]
    unlabelled: Sequence[int]

    @property
    def rows(self) -> list[int]:
        """Rows of each process."""
        return [a + b for a, b in zip(self.labelled, self.unlabelled, strict=True)]


def globalise(
    features: Features, targets: Tensor, shares: Split, objective: Objective
) -> GlobalBatch:
    """Gather what the terms need of all processes' rows, and nothing else; never logits.

    Args:
        features: of this process's rows, the labelled ones first.
        targets: labels of its labelled rows.
        shares: the rows of every process.
        objective: says what is needed.

    Returns:
        The global batch, differentiable back to every process's features.
    """
    own = shares.labelled[rank()]
    hidden = features.hidden[:own]
    return GlobalBatch(
        logits=None if features.logits is None else features.logits[:own],
        targets=targets,
        hidden=gather(hidden, shares.labelled) if objective.needs("share_hidden") else hidden,
        all_targets=gather(targets, shares.labelled),
        labelled=_own(shares.labelled),
        projections=[gather(z, shares.rows) for z in features.projections],
        weights=[gather(h, shares.rows) for h in features.weights],
        rows=_own(shares.rows),
    )


def _own(sizes: Sequence[int]) -> slice:
    """This process's rows in the order of `gather`."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return slice(ends[rank()], ends[rank() + 1])
