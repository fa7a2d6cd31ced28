"""Classifier losses on the labelled samples."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from heron.pipeline.config.terms import KNOWN, ONE, Needs, Term
from heron.pipeline.objectives.batch import GlobalBatch


class LogitsTerm(Term):
    """A loss of the logits and the labels of this process's labelled rows: `function`."""

    @staticmethod
    @abstractmethod
    def function(logits: Tensor, targets: Tensor, /, *, total: int) -> Tensor:
        """The process's share of the mean over `total` rows; see `bce`."""

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """Calls `function`."""
        return self.function(batch.logits, batch.own_targets, total=batch.num_labelled)


def bce(
    logits: Float[Tensor, "labelled labels"], y: Float[Tensor, "labelled labels"], *, total: int
) -> Float[Tensor, ""]:
    """Binary cross-entropy of multi-label targets, the mean over `total` samples and labels.

    Args:
        logits: of this process's labelled samples.
        y: their labels, 0 or 1.
        total: labelled samples in the whole batch; 0 gives a loss of 0.

    Returns:
        The process's share of the loss, differentiable also when it has no sample.
    """
    loss = F.binary_cross_entropy_with_logits(logits.to(y.dtype), y, reduction="sum")
    return loss / max(total * y.shape[1], 1)


def cross_entropy(
    logits: Float[Tensor, "labelled labels"], y: Float[Tensor, "labelled labels"], *, total: int
) -> Float[Tensor, ""]:
    """Cross-entropy of one-hot targets, the mean over `total` samples; see `bce`."""
    loss = F.cross_entropy(logits.to(y.dtype), y, reduction="sum")
    return loss / max(total, 1)


class Bce(LogitsTerm):
    """Binary cross-entropy of each label."""

    needs: ClassVar[Needs] = Needs(own=("logits",), labels=KNOWN)
    function = staticmethod(bce)


class CrossEntropy(LogitsTerm):
    """Cross-entropy of classes, of which a row has one."""

    needs: ClassVar[Needs] = Needs(own=("logits",), labels=ONE)
    function = staticmethod(cross_entropy)
