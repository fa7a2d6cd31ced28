"""Classifier losses for complementary labels: a set of classes that each sample is known not to be.

All take the logits of this process's samples and their sets as 0/1 columns, and return the share of
the mean over the whole batch. p = softmax(logits), K classes, s = |Y|.
"""

from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from heron.config.terms import COMPLEMENTARY_LABELS, Needs
from heron.objectives.batch import GlobalBatch
from heron.objectives.classification import LogitsTerm

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
        raise ValueError(f"q is {q}; expected above 0 and at most 1, e.g. 0.7")
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
    if not ((ybar == 0) | (ybar == 1)).all():
        row = int(((ybar != 0) & (ybar != 1)).any(1).nonzero()[0])
        raise ValueError(
            f"complementary labels of row {row} are {ybar[row].tolist()}; expected 0/1"
        )
    size = ybar.sum(1)
    if ((size < 1) | (size > ybar.shape[1] - 1)).any():
        row = int(((size < 1) | (size > ybar.shape[1] - 1)).nonzero()[0])
        raise ValueError(
            f"row {row} has {int(size[row])} complementary labels of {ybar.shape[1]} classes; "
            f"expected 1 to {ybar.shape[1] - 1}: none says nothing, all leave no class"
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


class ComplementaryTerm(LogitsTerm):
    """A loss of the logits and the complementary labels."""

    needs: ClassVar[Needs] = Needs(own=("logits",), labels=COMPLEMENTARY_LABELS)


class UbLog(ComplementaryTerm):
    """UB-LOG of complementary labels (Feng et al. 2020): see `ub_log`."""

    function = staticmethod(ub_log)


class UbExp(ComplementaryTerm):
    """UB-EXP of complementary labels (Feng et al. 2020): see `ub_exp`."""

    function = staticmethod(ub_exp)


class Mse(ComplementaryTerm):
    """Unbiased squared error from complementary labels (Feng et al. 2020): see `mse`."""

    function = staticmethod(mse)


class Gce(ComplementaryTerm):
    """Unbiased generalised cross-entropy from complementary labels, of exponent `q`: see `gce`."""

    q: Annotated[float, Field(gt=0, le=1)] = 0.7

    function = staticmethod(gce)

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `gce`."""
        return gce(batch.logits, batch.own_targets, total=batch.num_labelled, q=self.q)


class LUw(ComplementaryTerm):
    """L-UW of complementary labels (Gao and Zhang 2021): see `l_uw`."""

    function = staticmethod(l_uw)


class Mlcl(ComplementaryTerm):
    """MLCL of complementary labels (Gao, Xu and Zhang 2024), uniform case: see `mlcl`."""

    function = staticmethod(mlcl)
