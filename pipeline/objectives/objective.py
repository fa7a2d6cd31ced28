"""The weighted sum of terms that a step minimises."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from heron.pipeline.config.errors import ConfigError, TrainingError
from heron.pipeline.config.experiment import View
from heron.pipeline.config.model import Model
from heron.pipeline.config.terms import (
    CLASSIFIERS,
    Comco,
    CustomTerm,
    Hard,
    Mulco,
    Pico,
    Plnl,
    Term,
)
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.catalogue import KNOWN, PARTS, TERMS, custom

KEYED = Mulco, Pico, Comco  # terms with a momentum encoder


class Objective:
    """``sum_t weight_t(epoch) term_t(batch)``."""

    def __init__(self, terms: Mapping[str, Term]) -> None:
        """Take the terms of a configuration; see `pipeline.config.terms.Objective.terms`."""
        self.terms = dict(terms)
        self.definitions = {
            name: custom(term) if isinstance(term, CustomTerm) else TERMS[name]
            for name, term in terms.items()
        }
        shared = set(Term.model_fields)
        self.options = {name: term.model_dump(exclude=shared) for name, term in terms.items()}

    def needs(self, part: str) -> bool:
        """Whether any term has the flag `part` of `Definition`."""
        return any(getattr(definition, part) for definition in self.definitions.values())

    @property
    def parts(self) -> dict[str, bool]:
        """The parts of a model by name, and whether any term needs them."""
        return {part: self.needs(part) for part in PARTS}

    @property
    def keyed(self) -> Mulco | Pico | Comco | None:
        """The term with a momentum encoder and a queue of keys, if there is one."""
        return next((term for term in self.terms.values() if isinstance(term, KEYED)), None)

    @property
    def exclusive(self) -> bool:
        """Whether the classifier is trained to tell classes apart, of which a row has one."""
        return "cross_entropy" in self.terms

    @property
    def supervised(self) -> bool:
        """Whether every term looks at labels, and none at a row that has none."""
        return all(self._kinds(name) for name in self.terms)

    @property
    def selecting(self) -> Plnl | None:
        """PLNL's term, if there is one."""
        return next((term for term in self.terms.values() if isinstance(term, Plnl)), None)

    def refuse(self, kind: str, views: Sequence[View], labelled: int, model: Model) -> None:
        """Say so when a term does not fit the data.

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
        trained = self.terms.keys() & CLASSIFIERS and not self.needs("encode_labels")
        if model.task_groups is not None and not trained:
            raise ConfigError(
                "model.task_groups are layers of a classifier that labels train; found the terms "
                f"{', '.join(self.terms)}; expected {' or '.join(CLASSIFIERS)} among them "
                "and no c2ae, or model.task_groups=null"
            )
        for name, definition in self.definitions.items():
            term, kinds = self.terms[name], self._kinds(name)
            if kinds and kind not in kinds:
                fitting = [other for other, d in TERMS.items() if d.classify and kind in d.kinds]
                raise ConfigError(
                    f"objective.{name} needs labels of kind {' or '.join(kinds)}, but training "
                    f"sees {kind} labels, for which there are {', '.join(fitting)}"
                )
            if len(views) < definition.views:
                raise ConfigError(
                    f"objective.{name} needs at least {definition.views} views; data.views has "
                    f"{len(views)}; give the stored view twice, each with its augmentation"
                )
            lone = len(self.terms) == 1 and model.shared_encoder
            if isinstance(term, Plnl) and not (lone and model.classify_on == "first_view"):
                raise ConfigError(
                    f"objective.{name} has two networks, each of which sees every view and is "
                    f"scored on the first; found model.shared_encoder {model.shared_encoder}, "
                    f"model.classify_on {model.classify_on}, terms {', '.join(self.terms)}; "
                    "expected true, first_view and this term alone"
                )
            if isinstance(term, KEYED) and term is not self.keyed:
                raise ConfigError(
                    f"objective.{name} has a queue and a momentum encoder, and so has another "
                    "term; expected one such term: give the other the weight 0"
                )
            if isinstance(term, KEYED) and not (model.shared_encoder and model.shared_projector):
                raise ConfigError(
                    f"objective.{name} compares a sample with another view of it by a slow copy of "
                    "the same encoder; set model.shared_encoder and model.shared_projector to true"
                )
            if isinstance(term, KEYED) and term.queue < labelled:
                raise ConfigError(
                    f"objective.{name}.queue is {term.queue}, smaller than the {labelled} labelled "
                    "rows of a batch, which would push each other out; expected at least "
                    f"{labelled}"
                )

    def _kinds(self, name: str) -> tuple[str, ...]:
        """The kinds of labels that a term needs; none: it looks at no label."""
        term = self.terms[name]
        labelled = isinstance(term, Hard) and term.supervised
        return KNOWN if labelled else self.definitions[name].kinds

    def weights(self, epoch: float) -> dict[str, float]:
        """Each term's weight at an epoch (a fraction of it counts)."""
        return {
            name: term.weight * (min(epoch / term.ramp_epochs, 1.0) if term.ramp_epochs else 1.0)
            for name, term in self.terms.items()
        }

    def __call__(self, batch: GlobalBatch, epoch: float) -> tuple[Tensor, dict[str, Tensor]]:
        """This process's share of the objective and of every term, before its weight.

        Returns:
            The objective's share, differentiable, and the terms' shares by name, detached; sums
            over the processes are the values of the whole batch.

        Raises:
            TrainingError: a term refuses its input; names the term.
        """
        weights = self.weights(epoch)
        losses = {}
        for name, definition in self.definitions.items():
            try:
                losses[name] = definition.loss(batch, self.options[name], epoch)
            except ValueError as fault:
                raise TrainingError(f"objective.{name}: {fault}") from None
        total = torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()
        return total, {name: loss.detach() for name, loss in losses.items()}
