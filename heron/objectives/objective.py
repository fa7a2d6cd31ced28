"""The weighted sum of terms that a step minimises."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heron.config.data import ModelView
from heron.config.errors import ConfigError, TrainingError
from heron.config.model import ModelConfig
from heron.config.terms import Needs, named_terms
from heron.objectives.batch import GlobalBatch
from heron.objectives.term import Memory, RunSpec, StepEnd, Term, TermSetting


class Objective:
    r"""``sum_t weight_t(epoch) term_t(batch)``.

    With `matryoshka`, a term t that reads projections is its mean over the widths m of their first
    m numbers (Kusupati et al. 2022, Eq. 1, of a contrastive loss):

    .. math:: \frac{1}{|M|} \sum_{m \in M} L_t(z_{1:m})

    The paper adds them up; the mean keeps a term's scale, and so the learning rate. Every loss
    normalises the vectors that it compares, so each z_{1:m} too.

    Attributes:
        terms: the terms by name.
        matryoshka: the widths; empty: projections are compared whole.
        needs: the union of the terms' needs.
        memories: the memories of the terms that have one, by the term's name; see `build_memories`.
    """

    def __init__(self, terms: Mapping[str, Term], matryoshka: Sequence[int] = ()) -> None:
        """Takes the terms by name, and the widths of `config.model.ModelConfig.matryoshka`."""
        self.terms, self.matryoshka = dict(terms), tuple(matryoshka)
        needs_of_terms = [term.requires() for term in terms.values()]

        def union(scope: str) -> tuple[str, ...]:
            names = (name for needs in needs_of_terms for name in getattr(needs, scope))
            return tuple(dict.fromkeys(names))

        self.needs = Needs(
            gathered=union("gathered"),
            labelled=union("labelled"),
            own=union("own"),
            vectors=union("vectors"),
            labelled_vectors=union("labelled_vectors"),
        )
        self.memories: dict[str, Memory] = {}

    @property
    def supervised(self) -> bool:
        """Whether every term needs labels, so that unlabelled rows train nothing."""
        return all(term.requires().labels for term in self.terms.values())

    def refuse_unfit(
        self, kind: str, views: Sequence[ModelView], labelled: int, model: ModelConfig
    ) -> None:
        """Raises ConfigError for a term that does not fit the data.

        `kind` is that of the labels that training sees, `labelled` the labelled rows of a batch.
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
                    other_name
                    for other_name, other in named_terms().items()
                    if "logits" in other.needs.own and kind in other.needs.labels
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
            if model.matryoshka and term.nested is None and "projections" in needs.features:
                raise ConfigError(
                    f"objective.{name} has no meaning on the first numbers of a projection: its "
                    "`nested` is None; expected model.matryoshka: [] beside it, or another term"
                )
            term.refuse(name, TermSetting(model, self.terms, labelled))
        projected = any("projections" in t.requires().features for t in self.terms.values())
        if model.matryoshka and not projected:
            raise ConfigError(
                f"model.matryoshka is {model.matryoshka}, and none of {', '.join(self.terms)} "
                "compares projections; expected a term that does, such as nt_xent, or []"
            )

    def refuse_partial_rows(self, missing: bool, unknown: bool) -> None:
        """Raises ConfigError for a term that is undefined for missing views or unknown labels."""
        for name, term in self.terms.items():
            needs = term.requires()
            if missing and not term.missing_views:
                fitting = [n for n, t in named_terms().items() if t.missing_views]
                raise ConfigError(
                    f"objective.{name} is not defined for rows that lack views, and some do; "
                    f"expected some of {', '.join(fitting)}; or train on whole rows alone: "
                    "data.protocol.partial_rows=drop"
                )
            if unknown and needs.labels and not term.unknown_labels:
                fitting = [n for n, t in named_terms().items() if t.unknown_labels]
                raise ConfigError(
                    f"objective.{name} is not defined for rows whose labels are known in part, and "
                    f"some are; expected some of {', '.join(fitting)}; or train on whole rows "
                    "alone: data.protocol.partial_rows=drop"
                )

    def weights(self, epoch: float) -> dict[str, float]:
        """Returns each term's weight at an epoch, which may be fractional."""
        return {
            name: term.weight * (min(epoch / term.ramp_epochs, 1.0) if term.ramp_epochs else 1.0)
            for name, term in self.terms.items()
        }

    def __call__(self, batch: GlobalBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes this process's share of the objective, and of every term before its weight.

        The objective's share is differentiable, those of the terms by name are detached; summed
        over the processes they are the values of the whole batch.

        Raises:
            TrainingError: a term refuses its input or returns no scalar, or no term has a loss.
        """
        weights, losses = self.weights(batch.epoch), {}
        batch = replace(batch, widths=self.matryoshka)
        for name, term in self.terms.items():
            try:
                loss = self._loss(name, term, batch)
            except ValueError as fault:
                raise TrainingError(f"objective.{name}: {fault}") from None
            if loss is None:
                continue
            if not isinstance(loss, Tensor) or loss.dim():
                shown = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
                raise TrainingError(
                    f"objective.{name}: its loss is {shown}; expected a scalar tensor"
                )
            losses[name] = loss
        if not losses:
            raise TrainingError(
                f"objective: {', '.join(self.terms)} gave no loss; expected one that does beside it"
            )
        total = torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()
        return total, {name: loss.detach() for name, loss in losses.items()}

    def _loss(self, name: str, term: Term, batch: GlobalBatch) -> Any:
        """Returns a term's loss: the mean over the widths if it compares projections."""
        memory, nested = self.memories.get(name), set(term.nested or ())
        if not self.matryoshka or not (names := nested & term.requires().features):
            return term.loss(batch, memory)
        losses: list[Any] = [
            term.loss(batch.prefix(names, width), memory) for width in self.matryoshka
        ]
        return None if losses[0] is None else sum(losses) / len(losses)

    def build_memories(self, run: RunSpec) -> None:
        """Builds the terms' memories on the model's device; TrainingError if one is no `Memory`."""
        memories = {name: term.memory(run) for name, term in self.terms.items()}
        device = next(run.model.parameters()).device
        for name, memory in memories.items():
            if not isinstance(memory, Memory | None):
                raise TrainingError(
                    f"objective.{name}: its memory is {type(memory).__name__}; expected a Memory"
                )
        self.memories = {
            name: memory.to(device) for name, memory in memories.items() if memory is not None
        }

    def update_memories(self, step: StepEnd) -> list[str]:
        """Updates every memory after a step; returns lines for the log."""
        return [line for memory in self.memories.values() for line in memory.update(step)]

    def memory_state(self) -> dict[str, Tensor]:
        """Returns the state of all memories, by keys `TERM/NAME`, for a checkpoint."""
        return {
            f"{term}/{name}": value
            for term, memory in self.memories.items()
            for name, value in memory.state_dict().items()
        }

    def load_memory_state(self, state: Mapping[str, Tensor]) -> None:
        """Loads what `memory_state` returned."""
        if not any("/" in key for key in state):  # written when there was one memory alone
            state = {f"{term}/{name}": x for term in self.memories for name, x in state.items()}
        for term, memory in self.memories.items():
            prefix = f"{term}/"
            own_state: dict[str, Any] = {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix)
            }
            memory.load_state_dict(own_state)
