"""A term of the objective: its options, required inputs, modules, memory and loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from heron.config.errors import ConfigError
from heron.config.model import ModelConfig
from heron.config.terms import Needs, Terms, TermSection
from heron.models.heterogeneous import Heterogeneous, ModelSpec
from heron.objectives.batch import GlobalBatch


@dataclass(frozen=True)
class TermSetting:
    """The context of a term in a configuration, which the term may refuse.

    Attributes:
        model: the model's configuration.
        terms: all terms of the objective by name.
        labelled: number of labelled rows in a global batch.
    """

    model: ModelConfig
    terms: Mapping[str, Term]
    labelled: int


class Term(TermSection):
    """A term of the objective: `weight * min(epoch / ramp_epochs, 1)` times its loss.

    Derive from it in a file of your own, and name the class by its dotted path:
    `objective: {my_lab.losses.Mine: {weight: 1}}`. The fields are the options in the YAML.

    Attributes:
        weight: factor of the term in the objective; 0 removes the term.
        ramp_epochs: epochs over which the weight rises from 0; 0: full weight from the start.
    """

    # Features as wide as a projection that are truncated under `model.matryoshka`. (): the loss
    # itself uses `batch.widths`, as it must if it updates its memory. None: the term has no meaning
    # on a part of a projection.
    nested: ClassVar[tuple[str, ...] | None] = ("projections",)
    repels_all: ClassVar[bool] = False  # whether all other samples are negatives, at exp(cos / tau)

    def requires(self) -> Needs:
        """Returns what the term's loss reads under its options."""
        return self.needs

    def refuse(self, name: str, setting: TermSetting) -> None:
        """Raises ConfigError if the term, `name` in the YAML, does not fit its setting."""

    def parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns functions, by name, that build the modules that this term adds to the model.

        A module with a method `add_features(encoded) -> {name: [tensor of each view]}` adds these
        features to the model's outputs (see `models.heterogeneous.Encoded`). A module that two
        terms request by the same name is built once, by the first term.
        """
        return {}

    def classifier(self, spec: ModelSpec) -> nn.Module | None:
        """Returns a module that replaces the linear classifier, or None."""
        return None

    def memory(self, run: RunSpec) -> Memory | None:
        """Returns the term's state between steps, or None."""
        return None

    @abstractmethod
    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor | None:
        """Returns this process's share of the loss, a scalar; the loss is the sum of the shares.

        A term that only adds modules or a memory returns None.

        Args:
            batch: the features of the global batch, and which rows are this process's own.
            memory: the result of `memory`.

        Raises:
            ValueError: the loss is not defined for the batch; the message says why.
        """


def terms_of(objective: Terms) -> dict[str, Term]:
    """Returns the terms of weight above 0, by name; ConfigError for a class that is no `Term`."""
    terms = {}
    for name, term in objective.terms().items():
        if not isinstance(term, Term):
            raise ConfigError(
                f"objective.{name} is no term; expected a class that derives from Term"
            )
        terms[name] = term
    return terms


@dataclass(frozen=True)
class RunSpec:
    """The run that a memory is built for.

    Attributes:
        model: the model in its initial state, unwrapped.
        rows: numbers of all labelled rows, in any order.
        labels: the number of labels.
        read_targets: returns the labels of `rows` that training sees, 0/1, [labelled, labels].
        terms: all terms of the objective by name.
    """

    model: Heterogeneous
    rows: Int[Tensor, " labelled"]
    labels: int
    read_targets: Callable[[], Float[Tensor, "labelled labels"]]
    terms: Mapping[str, Term]


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
