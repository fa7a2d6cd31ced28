"""The weighted sum of terms that a step minimises."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.objectives.classification import bce, cross_entropy
from pipeline.objectives.supervised import weighted_supervised
from pipeline.objectives.unsupervised import weighted_unsupervised
from pipeline.terms import Term


@dataclass(frozen=True)
class GlobalBatch:
    """What the terms see: vectors of the whole batch, and which rows are this process's own.

    Attributes:
        logits: of the classifier on the own labelled rows, or None without a classifier.
        targets: labels of the own labelled rows, 0/1.
        hidden: S of all labelled rows.
        all_targets: labels of all labelled rows.
        labelled: the own rows among all labelled rows.
        projections: z of all rows, a tensor a view.
        weights: H(z) of all rows, a tensor a view.
        rows: the own rows among all rows.
    """

    logits: Tensor | None
    targets: Tensor
    hidden: Tensor
    all_targets: Tensor
    labelled: slice
    projections: Sequence[Tensor]
    weights: Sequence[Tensor]
    rows: slice


@dataclass(frozen=True)
class Definition:
    """A term: its function, and what it needs the model to build and the processes to share."""

    loss: Callable[[GlobalBatch, Mapping[str, Any]], Tensor]
    classify: bool = False
    share_hidden: bool = False
    project: bool = False
    weigh: bool = False


def _bce(batch: GlobalBatch, options: Mapping[str, Any]) -> Tensor:
    assert batch.logits is not None
    return bce(batch.logits, batch.targets, total=len(batch.all_targets))


def _cross_entropy(batch: GlobalBatch, options: Mapping[str, Any]) -> Tensor:
    assert batch.logits is not None
    return cross_entropy(batch.logits, batch.targets, total=len(batch.all_targets))


def _weighted_unsupervised(batch: GlobalBatch, options: Mapping[str, Any]) -> Tensor:
    return weighted_unsupervised(batch.projections, batch.weights, rows=batch.rows, **options)


def _weighted_supervised(batch: GlobalBatch, options: Mapping[str, Any]) -> Tensor:
    return weighted_supervised(batch.hidden, batch.all_targets, rows=batch.labelled, **options)


TERMS = {
    "bce": Definition(_bce, classify=True),
    "cross_entropy": Definition(_cross_entropy, classify=True),
    "weighted_unsupervised": Definition(_weighted_unsupervised, project=True, weigh=True),
    "weighted_supervised": Definition(_weighted_supervised, share_hidden=True),
}


class Objective:
    """``sum_t weight_t(epoch) term_t(batch)``."""

    def __init__(self, terms: Mapping[str, Term]) -> None:
        """Take the terms of a configuration; see `pipeline.config.Objective.terms`."""
        self.terms = dict(terms)
        self.definitions = {name: TERMS[name] for name in terms}
        shared = set(Term.model_fields)
        self.options = {name: term.model_dump(exclude=shared) for name, term in terms.items()}

    def needs(self, part: str) -> bool:
        """Whether any term has the flag `part` of `Definition`."""
        return any(getattr(definition, part) for definition in self.definitions.values())

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
        """
        weights = self.weights(epoch)
        losses = {
            name: definition.loss(batch, self.options[name])
            for name, definition in self.definitions.items()
        }
        total = torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()
        return total, {name: loss.detach() for name, loss in losses.items()}
