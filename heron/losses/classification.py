"""Classifier losses on the labelled samples."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from heron.config.terms import CLASS_LABELS, SINGLE_CLASS_LABELS, Needs
from heron.losses.batch import GlobalBatch
from heron.losses.families import LogitLoss
from heron.losses.inputs import as_probabilities


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


class Bce(LogitLoss):
    """Binary cross-entropy of each label, averaged over samples and labels."""

    needs = Needs(own=("logits",), labels=CLASS_LABELS)
    unknown_labels = True
    function = staticmethod(bce)

    def columns(self, labels: Tensor, classes: int) -> Tensor:
        """Returns the labels as columns from 0 to 1."""
        return as_probabilities(labels, classes)

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `bce` of this process's samples, with the number of known labels."""
        known = None if batch.unknown is None else int((~batch.unknown).sum())
        return bce(batch.logits, batch.own_targets, total=batch.num_labelled, known=known)


class CrossEntropy(LogitLoss):
    """Cross-entropy of classes, averaged over samples."""

    needs = Needs(own=("logits",), labels=SINGLE_CLASS_LABELS)
    function = staticmethod(cross_entropy)

    def columns(self, labels: Tensor, classes: int) -> Tensor:
        """Returns the labels as columns from 0 to 1."""
        return as_probabilities(labels, classes)
