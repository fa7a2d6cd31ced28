"""Classifier losses on the labelled samples."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from heron.config.terms import CLASS_LABELS, SINGLE_CLASS_LABELS, Needs
from heron.objectives.batch import GlobalBatch
from heron.objectives.term import Term


class LogitsTerm(Term):
    """A term that is a `function` of the logits and labels of this process's labelled rows."""

    missing_views: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def function(logits: Tensor, targets: Tensor, /, *, total: int) -> Tensor:
        """Returns the process's share of the mean over `total` rows; see `bce`."""

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """Calls `function`."""
        return self.function(batch.logits, batch.own_targets, total=batch.num_labelled)


def bce(
    logits: Float[Tensor, "labelled labels"],
    y: Float[Tensor, "labelled labels"],
    *,
    total: int,
    known: int | None = None,
) -> Float[Tensor, ""]:
    """Binary cross-entropy of multi-label targets, averaged over `total` samples and all labels.

    Args:
        logits: logits of this process's labelled samples.
        y: their labels, 0 or 1; NaN where unknown, which the mean leaves out.
        total: number of labelled samples in the whole batch; 0 gives a loss of 0.
        known: number of known labels in the whole batch; None: all labels are known.

    Returns:
        The process's share of the loss, differentiable also when it has no sample.
    """
    if known is not None:
        is_known = ~y.isnan()
        loss = F.binary_cross_entropy_with_logits(
            logits.to(y.dtype)[is_known], y[is_known], reduction="sum"
        )
        return loss / max(known, 1)
    loss = F.binary_cross_entropy_with_logits(logits.to(y.dtype), y, reduction="sum")
    return loss / max(total * y.shape[1], 1)


def cross_entropy(
    logits: Float[Tensor, "labelled labels"], y: Float[Tensor, "labelled labels"], *, total: int
) -> Float[Tensor, ""]:
    """Cross-entropy of one-hot targets, averaged over `total` samples; see `bce`."""
    loss = F.cross_entropy(logits.to(y.dtype), y, reduction="sum")
    return loss / max(total, 1)


class Bce(LogitsTerm):
    """Binary cross-entropy of each label."""

    needs: ClassVar[Needs] = Needs(own=("logits",), labels=CLASS_LABELS)
    unknown_labels: ClassVar[bool] = True
    function = staticmethod(bce)

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """Calls `bce` with the number of known labels."""
        known = None if batch.unknown is None else int((~batch.unknown).sum())
        return bce(batch.logits, batch.own_targets, total=batch.num_labelled, known=known)


class CrossEntropy(LogitsTerm):
    """Cross-entropy of exclusive classes."""

    needs: ClassVar[Needs] = Needs(own=("logits",), labels=SINGLE_CLASS_LABELS)
    function = staticmethod(cross_entropy)
