"""What a term remembers from step to step."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from heron.pipeline.config.terms import Term
from heron.pipeline.models.heterogeneous import Heterogeneous


@dataclass(frozen=True)
class RunSpec:
    """What a memory is made for.

    Attributes:
        model: in its initial state, unwrapped.
        rows: numbers of all labelled rows, in any order.
        labels: how many there are.
        read_targets: gives the labels that training sees of the rows, 0/1, [labelled, labels].
        terms: all terms of the objective by name.
    """

    model: Heterogeneous
    rows: Int[Tensor, " labelled"]
    labels: int
    read_targets: Callable[[], Float[Tensor, "labelled labels"]]
    terms: Mapping[str, Term]


@dataclass(frozen=True)
class StepEnd:
    """The step that is done.

    Attributes:
        number: from 0.
        per_epoch: steps of an epoch.
        gathered_parameters: while it is open, every process can read all weights of the model;
            every process must open it.
        from_first: a small value of the first process, on every process; all must call it.
    """

    number: int
    per_epoch: int
    gathered_parameters: Callable[[], AbstractContextManager[None]]
    from_first: Callable[[Any], Any]


class Memory(nn.Module):
    """Buffers that every process holds the same; a checkpoint keeps them under the term's name."""

    def update(self, step: StepEnd) -> list[str]:
        """Moves on once the weights have moved; returns lines for the log."""
        return []
