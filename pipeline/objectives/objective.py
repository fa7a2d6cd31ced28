"""The weighted sum of terms that a step minimises."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heron.pipeline.config.errors import ConfigError, TrainingError
from heron.pipeline.config.experiment import ModelView
from heron.pipeline.config.model import Model
from heron.pipeline.config.terms import Needs, Term, TermSetting, named_terms
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.memory import Memory, RunSpec, StepEnd


class Objective:
    """``sum_t weight_t(epoch) term_t(batch)``.

    Attributes:
        terms: by name.
        needs: what any of them needs.
        memories: of the terms that have one, by the term's name; see `remember`.
    """

    def __init__(self, terms: Mapping[str, Term]) -> None:
        """Takes the terms of a configuration: see `config.terms.Terms.terms`."""
        self.terms = dict(terms)
        needs = [term.requires() for term in terms.values()]

        def union(scope: str) -> tuple[str, ...]:
            return tuple(dict.fromkeys(name for one in needs for name in getattr(one, scope)))

        self.needs = Needs(union("gathered"), union("labelled"), union("own"))
        self.memories: dict[str, Memory] = {}

    @property
    def supervised(self) -> bool:
        """Whether every term looks at labels, and none at a row that has none."""
        return all(term.requires().labels for term in self.terms.values())

    def refuse(self, kind: str, views: Sequence[ModelView], labelled: int, model: Model) -> None:
        """Refuses terms that do not fit the data.

        Args:
            kind: of the labels that training sees.
            views: what the model sees.
            labelled: labelled rows of a batch.
            model: its configuration.

        Raises:
            ConfigError: names the term, what it needs and what there is.
        """
        if labelled == 0 and self.supervised:
            raise ConfigError(
                f"objective: {', '.join(sorted(self.terms))} need labelled rows, and "
                "data.batch.labelled is 0: there is nothing to train on; expected above 0"
            )
        for name, term in self.terms.items():
            needs = term.requires()
            if needs.labels and kind not in needs.labels:
                fitting = [
                    other
                    for other, found in named_terms().items()
                    if "logits" in found.needs.own and kind in found.needs.labels
                ]
                raise ConfigError(
                    f"objective.{name} needs labels of kind {' or '.join(needs.labels)}, but "
                    f"training sees {kind} labels, for which there are {', '.join(fitting)}"
                )
            if len(views) < needs.views:
                raise ConfigError(
                    f"objective.{name} needs at least {needs.views} views; data.views has "
                    f"{len(views)}; give the stored view twice, each with its augmentation"
                )
            term.refuse(name, TermSetting(model, self.terms, labelled))

    def weights(self, epoch: float) -> dict[str, float]:
        """Returns each term's weight at an epoch (a fraction of it counts)."""
        return {
            name: term.weight * (min(epoch / term.ramp_epochs, 1.0) if term.ramp_epochs else 1.0)
            for name, term in self.terms.items()
        }

    def __call__(self, batch: GlobalBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """This process's share of the objective and of every term, before its weight.

        Returns:
            The objective's share, differentiable, and the terms' shares by name, detached; sums
            over the processes are the values of the whole batch.

        Raises:
            TrainingError: a term refuses its input; names the term.
        """
        weights, losses = self.weights(batch.epoch), {}
        for name, term in self.terms.items():
            try:
                loss = term.loss(batch, self.memories.get(name))
            except ValueError as fault:
                raise TrainingError(f"objective.{name}: {fault}") from None
            if loss is not None:
                losses[name] = loss
        total = torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()
        return total, {name: loss.detach() for name, loss in losses.items()}

    def remember(self, run: RunSpec) -> None:
        """Makes the memories of the terms, on the device of the model."""
        made = {name: term.memory(run) for name, term in self.terms.items()}
        device = next(run.model.parameters()).device
        self.memories = {
            name: memory.to(device) for name, memory in made.items() if memory is not None
        }

    def update(self, step: StepEnd) -> list[str]:
        """Lets every memory move on after a step; returns lines for the log."""
        return [line for memory in self.memories.values() for line in memory.update(step)]

    def memory_state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint keeps of the memories, as TERM/NAME."""
        return {
            f"{term}/{name}": value
            for term, memory in self.memories.items()
            for name, value in memory.state_dict().items()
        }

    def load_memory_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `memory_state` gave."""
        if not any("/" in key for key in state):  # of the first edition, which had one memory
            state = {f"{term}/{name}": x for term in self.memories for name, x in state.items()}
        for term, memory in self.memories.items():
            start = f"{term}/"
            own: dict[str, Any] = {
                key.removeprefix(start): value
                for key, value in state.items()
                if key.startswith(start)
            }
            memory.load_state_dict(own)
