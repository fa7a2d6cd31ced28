"""What a run gives to its losses, and the memory of a loss between steps."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from heron.models.heterogeneous import Heterogeneous
from heron.models.options import ModelConfig


@dataclass(frozen=True)
class TermSetting:
    """The context of a term in a configuration, which its loss may refuse.

    Attributes:
        model: the model's configuration.
        terms: the losses of all terms by name.
        labelled: number of labelled rows in a global batch.
    """

    model: ModelConfig
    terms: Mapping[str, nn.Module]
    labelled: int


@dataclass(frozen=True)
class RunSpec:
    """The run that a memory is built for.

    Attributes:
        model: the model in its initial state, unwrapped.
        rows: numbers of all labelled rows, in any order.
        labels: the number of labels.
        read_targets: returns the labels of `rows` that training sees, 0/1, [labelled, labels].
        terms: the losses of all terms by name.
    """

    model: Heterogeneous
    rows: Int[Tensor, " labelled"]
    labels: int
    read_targets: Callable[[], Float[Tensor, "labelled labels"]]
    terms: Mapping[str, nn.Module]


@dataclass(frozen=True)
class StepEnd:
    """A finished step, with its number from 0.

    Every process must enter `gathered_parameters`, a context in which all weights of the model can
    be read, and call `broadcast_object`, which returns the first process's small value to all.
    """

    number: int
    steps_per_epoch: int
    gathered_parameters: Callable[[], AbstractContextManager[None]]
    broadcast_object: Callable[[Any], Any]


class Memory(nn.Module):
    """Buffers that are equal on all processes; a checkpoint keeps them under the term's name."""

    def update(self, step: StepEnd) -> list[str]:
        """Updates the memory after the optimizer's step; returns lines for the log."""
        return []
