"""Classifier losses on the labelled samples, of their labels and of complementary labels.

A complementary label is a class that a sample is known not to be. Losses of them take the logits of
this process's samples and their sets as 0/1 columns, and return the share of the mean over the
whole batch. p = softmax(logits), K classes, s = |Y|.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from heron.losses.batch import GlobalBatch
from heron.losses.engine import refuse_labels
from heron.losses.families import LogitLoss
from heron.losses.inputs import LossError, as_columns, as_probabilities, is_whole, shown
from heron.losses.loss import Loss
from heron.losses.terms import CLASS_LABELS, COMPLEMENTARY_LABELS, SINGLE_CLASS_LABELS, Needs


def bce(
    logits: Float[Tensor, "labelled labels"],
    y: Float[Tensor, "labelled labels"],
    *,
    total: int,
    known: int | None = None,
    weights: Float[Tensor, "labelled labels"] | None = None,
    weight: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Binary cross-entropy of multi-label targets, averaged over `total` samples and all labels.

    Args:
        logits: logits of this process's labelled samples.
        y: their labels, 0 or 1; NaN where unknown, which the mean leaves out.
        total: number of labelled samples in the whole batch; 0 gives a loss of 0.
        known: number of known labels in the whole batch; None: all labels are known.
        weights: how much each label counts, 0 where it is unknown; None: all known ones count 1.
        weight: the sum of the weights of the whole batch.

    Returns:
        The process's share of the loss, differentiable also when it has no sample.
    """
    if weights is not None and weight is not None:
        y = y.nan_to_num(0.0)
        losses = F.binary_cross_entropy_with_logits(logits.to(y.dtype), y, reduction="none")
        return _weighted_mean(losses, weights, weight)
    if known is not None:
        is_known = ~y.isnan()
        loss = F.binary_cross_entropy_with_logits(
            logits.to(y.dtype)[is_known], y[is_known], reduction="sum"
        )
        return loss / max(known, 1)
    loss = F.binary_cross_entropy_with_logits(logits.to(y.dtype), y, reduction="sum")
    return loss / max(total * y.shape[1], 1)


def _weighted_mean(losses: Tensor, weights: Tensor, weight: Tensor) -> Tensor:
    return (losses * weights).sum() / weight.clamp(min=torch.finfo(losses.dtype).tiny)


def cross_entropy(
    logits: Float[Tensor, "labelled labels"],
    y: Float[Tensor, "labelled labels"],
    *,
    total: int,
    weights: Float[Tensor, " labelled"] | None = None,
    weight: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy of one-hot targets, averaged over `total` samples; see `bce`.

    `weights` are of the samples, `weight` is their sum over the whole batch.
    """
    if weights is not None and weight is not None:
        losses = F.cross_entropy(logits.to(y.dtype), y, reduction="none")
        return _weighted_mean(losses, weights, weight)
    loss = F.cross_entropy(logits.to(y.dtype), y, reduction="sum")
    return loss / max(total, 1)


class Bce(LogitLoss):
    """Binary cross-entropy of each label, averaged over samples and labels."""

    needs = Needs(own=("logits",), labels=CLASS_LABELS)
    unknown_labels = True
    weighs_labels = True
    columns = staticmethod(as_probabilities)
    function = staticmethod(bce)

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `bce` of this process's samples, with the number of known labels."""
        if batch.label_weights is not None and (weights := batch.known_weights) is not None:
            own, whole, total = weights[batch.labelled], weights.sum(), batch.num_labelled
            return bce(batch.logits, batch.own_targets, total=total, weights=own, weight=whole)
        known = None if batch.unknown is None else int((~batch.unknown).sum())
        return bce(batch.logits, batch.own_targets, total=batch.num_labelled, known=known)


class CrossEntropy(LogitLoss):
    """Cross-entropy of classes, averaged over samples."""

    needs = Needs(own=("logits",), labels=SINGLE_CLASS_LABELS)
    weighs_labels = True
    columns = staticmethod(as_probabilities)
    function = staticmethod(cross_entropy)

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `cross_entropy` of this process's samples, each weighed as its class."""
        if batch.label_weights is None:
            return super().share(batch)
        weights, y = (batch.label_weights * batch.targets).sum(1), batch.own_targets
        own, whole, total = weights[batch.labelled], weights.sum(), batch.num_labelled
        return cross_entropy(batch.logits, y, total=total, weights=own, weight=whole)


NEEDS = Needs(own=("logits",), labels=COMPLEMENTARY_LABELS)
Logits = Float[Tensor, "batch classes"]
Sets = Float[Tensor, "batch classes"]
Share = Float[Tensor, ""]


def ub_log(logits: Logits, ybar: Sets, *, total: int) -> Share:
    """UB-LOG (Feng et al. 2020, Eq. 13; MulCo, Eq. 2): -log of the probability outside the set.

    Args:
        logits: logits of this process's samples.
        ybar: 1 where a class is known to be wrong.
        total: number of samples in the whole batch; 0 gives a loss of 0.

    Returns:
        The process's share of the mean, differentiable also when it has no sample.

    Raises:
        ValueError: a set is empty or holds every class, or is not of 0 and 1.
    """
    return -_log_outside(logits, ybar).sum() / max(total, 1)


def ub_exp(logits: Logits, ybar: Sets, *, total: int) -> Share:
    """UB-EXP (Feng et al. 2020, Eq. 12): exp(-probability outside the set); see `ub_log`."""
    return torch.exp(-_log_outside(logits, ybar).exp()).sum() / max(total, 1)


def mse(logits: Logits, ybar: Sets, *, total: int) -> Share:
    """Squared error |p - e_j|^2 under the unbiased estimator of `_unbiased`; see `ub_log`."""
    p = checked_logits(logits, ybar).softmax(1)
    losses = p.square().sum(1, keepdim=True) - 2 * p + 1
    return _unbiased(losses, ybar) / max(total, 1)


def gce(logits: Logits, ybar: Sets, *, total: int, q: float = 0.7) -> Share:
    """Generalised cross-entropy (1 - p_j^q) / q (Zhang and Sabuncu 2018), as `mse`; see `ub_log`.

    Args:
        logits: logits of this process's samples.
        ybar: 1 where a class is known to be wrong.
        total: number of samples in the whole batch.
        q: in (0, 1]; cross-entropy in the limit 0, the mean absolute error at 1.
    """
    if not 0 < q <= 1:
        raise ValueError(f"q must be above 0 and at most 1, e.g. 0.7, got {q}")
    log_p = checked_logits(logits, ybar).log_softmax(1)
    return _unbiased(-torch.expm1(q * log_p) / q, ybar) / max(total, 1)


def l_uw(logits: Logits, ybar: Sets, *, total: int) -> Share:
    """L-UW (Gao and Zhang 2021, Eq. 8): -log softmax(1 - p) of a complementary label.

    Of several labels it is the mean, as Feng et al. 2020 decompose a set. See `ub_log`.
    """
    log_q = (1 - checked_logits(logits, ybar).softmax(1)).log_softmax(1)
    return -((ybar * log_q).sum(1) / ybar.sum(1)).sum() / max(total, 1)


def mlcl(logits: Logits, ybar: Sets, *, total: int) -> Share:
    """MLCL (Gao, Xu and Zhang 2024): a binary loss for each class, with forward correction.

    Sets drawn uniformly have P(j in Y | x) = s / (K - 1) (1 - p_j); the loss is the binary
    cross-entropy of that probability against `ybar`, summed over classes, with softmax for p as
    MulCo uses it. MulCo does not print the loss: this is the uniform case of the correction,
    without the label correlations that MLCL estimates for multi-label data. See `ub_log`.
    """
    classes = logits.shape[1]
    log_inside = checked_logits(logits, ybar).log_softmax(1)
    share = ybar.sum(1, keepdim=True) / (classes - 1)
    log_wrong = share.log() + log1m_exp(log_inside)
    tiny = torch.finfo(logits.dtype).tiny
    log_right = (1 - log_wrong.exp()).clamp(min=tiny).log()
    return -(ybar * log_wrong + (1 - ybar) * log_right).sum() / max(total, 1)


def checked_logits(logits: Tensor, ybar: Tensor) -> Tensor:
    """Checks the sets, and returns the logits in their dtype; see `ub_log` for the errors."""
    refuse_labels(
        lambda: (ybar != 0) & (ybar != 1),
        lambda row: f"complementary labels of row {row} must be 0 or 1, got {ybar[row].tolist()}",
    )
    size = ybar.sum(1)
    refuse_labels(
        lambda: (size < 1) | (size > ybar.shape[1] - 1),
        lambda row: (
            f"row {row} has {int(size[row])} complementary labels of {ybar.shape[1]} classes; it "
            f"must have 1 to {ybar.shape[1] - 1}: none says nothing, all leave no class"
        ),
    )
    return logits.to(ybar.dtype)


def _log_outside(logits: Tensor, ybar: Tensor) -> Tensor:
    """Returns the log of the sum of p outside the set, [batch]; accurate for tiny sums too."""
    log_p = checked_logits(logits, ybar).log_softmax(1)
    return torch.logsumexp(log_p.masked_fill(ybar == 1, -torch.inf), 1)


def _unbiased(losses: Tensor, ybar: Tensor) -> Tensor:
    """Sums an unbiased estimate of a loss from complementary labels (Feng et al. 2020, Theorem 3).

    Losses must be bounded: otherwise the estimate has no lower bound.
    """
    size = ybar.sum(1)
    factor = (ybar.shape[1] - 1 - size) / size
    return ((losses * (1 - ybar)).sum(1) - factor * (losses * ybar).sum(1)).sum()


def log1m_exp(x: Tensor) -> Tensor:
    """Returns log(1 - e^x) for x <= 0, at least the log of the smallest normal number."""
    tiny = torch.finfo(x.dtype).tiny
    return (-torch.expm1(x)).clamp(min=tiny).log()


class UbLog(LogitLoss):
    r"""UB-LOG (Feng et al. 2020, Eq. 13; MulCo, Eq. 2), for complementary labels.

    .. math:: -\log \sum_{k \notin \bar Y} p_k
    """

    needs = NEEDS
    function = staticmethod(ub_log)


class UbExp(LogitLoss):
    r"""UB-EXP (Feng et al. 2020, Eq. 12), for complementary labels.

    .. math:: \exp\Big(-\sum_{k \notin \bar Y} p_k\Big)
    """

    needs = NEEDS
    function = staticmethod(ub_exp)


class Mse(LogitLoss):
    r"""Unbiased squared error for complementary labels (Feng et al. 2020, Theorem 3).

    .. math:: \sum_{k \notin \bar Y} \ell_k - \frac{K - 1 - s}{s} \sum_{k \in \bar Y} \ell_k,
              \qquad \ell_k = |p - e_k|^2
    """

    needs = NEEDS
    function = staticmethod(mse)


class Gce(LogitLoss):
    r"""Unbiased generalised cross-entropy (Zhang and Sabuncu 2018) for complementary labels.

    The equation of `Mse` with :math:`\ell_k = (1 - p_k^q) / q`.
    """

    needs = NEEDS
    function = staticmethod(gce)

    def __init__(
        self, *, q: Annotated[float, Field(gt=0, le=1)] = 0.7, gather: bool = True
    ) -> None:
        """Sets the options.

        Args:
            q: in (0, 1]; cross-entropy in the limit 0, the mean absolute error at 1.
            gather: take the mean over the samples of all processes.
        """
        super().__init__(gather=gather)
        self.q = q

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `gce` of this process's samples."""
        return gce(batch.logits, batch.own_targets, total=batch.num_labelled, q=self.q)


class LUw(LogitLoss):
    r"""L-UW (Gao and Zhang 2021, Eq. 8), for complementary labels.

    .. math:: -\frac1s \sum_{k \in \bar Y} \log \mathrm{softmax}(1 - p)_k
    """

    needs = NEEDS
    function = staticmethod(l_uw)


class Mlcl(LogitLoss):
    r"""MLCL (Gao, Xu and Zhang 2024), for complementary sets that are drawn uniformly.

    The binary cross-entropy of each class's membership in :math:`\bar Y`, which has probability
    :math:`s (1 - p_k) / (K - 1)`, summed over classes.
    """

    needs = NEEDS
    function = staticmethod(mlcl)


class TrainingSetLoss(Loss):
    """A loss built with the complementary labels of the whole training set."""

    labels: Tensor

    def labels_of(self, indices: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices as int64, and the labels at them; refuses those out of range."""
        if not hasattr(self, "labels"):
            raise LossError("it has no labels; pass those of the whole training set: labels=")
        if logits.shape[1] != self.labels.shape[1]:
            raise LossError(
                f"logits must have {self.labels.shape[1]} classes, as the labels that the loss was "
                f"made with, got {logits.shape[1]}"
            )
        if not is_whole(indices) or indices.dim() != 1:
            raise LossError(
                "indices must be whole numbers [batch], the samples' rows in the labels that the "
                f"loss was made with, got {shown(indices)}"
            )
        if ((indices < 0) | (indices >= len(self.labels))).any():
            raise LossError(
                "indices must be rows of the labels that the loss was made with, 0 to "
                f"{len(self.labels) - 1}, got {int(indices.min())} to {int(indices.max())}"
            )
        indices = indices.long()  # uint8 would be a mask
        return indices, self.labels[indices]


def complementary_columns(labels: Tensor) -> Tensor:
    """Returns complementary labels of the whole training set as columns; refuses invalid ones."""
    columns = as_columns(labels, None)
    try:
        return checked_logits(columns, columns)
    except ValueError as fault:
        raise LossError(str(fault)) from None
