r"""Losses of a classifier's logits, for ordinary labels and for complementary ones.

A complementary label names a class that a sample is known not to have. In the equations K is the
number of classes, :math:`p = \mathrm{softmax}(\text{logits})`, and :math:`\bar Y` a sample's s
complementary labels. Every loss is a mean over the samples of all processes, or with `gather=False`
over those of this one.
"""

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from heron.losses.inputs import RowCounts, as_columns, as_probabilities, as_rows
from heron.losses.loss import Loss
from heron.objectives import classification, complementary
from heron.objectives.term import Term


class _OfLogits(Loss):
    """A loss of logits and labels."""

    columns = staticmethod(as_columns)

    def forward(self, logits: Tensor, labels: Tensor, *, sizes: RowCounts = None) -> Tensor:
        """Returns the mean over the samples of all processes.

        Args:
            logits: logits of this process's samples, [batch, labels].
            labels: columns [batch, labels] or class numbers [batch]; `Bce` and `CrossEntropy` take
                columns from 0 to 1.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        columns = self.columns(labels, as_rows(logits, "logits").shape[1])
        return self.evaluate({"logits": logits}, columns, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class _WithoutOptions(_OfLogits):
    """A loss whose term has no options."""

    kind: ClassVar[type[Term]]

    def __init__(self, *, gather: bool = True) -> None:
        """Sets `gather`: take the mean over the samples of all processes."""
        super().__init__(self.kind, {}, gather)


class Bce(_WithoutOptions):
    """Binary cross-entropy of each label, averaged over samples and labels."""

    kind = classification.Bce
    columns = staticmethod(as_probabilities)


class CrossEntropy(_WithoutOptions):
    """Cross-entropy of classes, averaged over samples."""

    kind = classification.CrossEntropy
    columns = staticmethod(as_probabilities)


class UbLog(_WithoutOptions):
    r"""UB-LOG (Feng et al. 2020, Eq. 13; MulCo, Eq. 2), for complementary labels.

    .. math:: -\log \sum_{k \notin \bar Y} p_k
    """

    kind = complementary.UbLog


class UbExp(_WithoutOptions):
    r"""UB-EXP (Feng et al. 2020, Eq. 12), for complementary labels.

    .. math:: \exp\Big(-\sum_{k \notin \bar Y} p_k\Big)
    """

    kind = complementary.UbExp


class Mse(_WithoutOptions):
    r"""Unbiased squared error for complementary labels (Feng et al. 2020, Theorem 3).

    .. math:: \sum_{k \notin \bar Y} \ell_k - \frac{K - 1 - s}{s} \sum_{k \in \bar Y} \ell_k,
              \qquad \ell_k = |p - e_k|^2
    """

    kind = complementary.Mse


class Gce(_OfLogits):
    r"""Unbiased generalised cross-entropy (Zhang and Sabuncu 2018) for complementary labels.

    The equation of `Mse` with :math:`\ell_k = (1 - p_k^q) / q`.
    """

    def __init__(self, *, q: float = 0.7, gather: bool = True) -> None:
        """Sets q, above 0 and at most 1; `gather`: take the mean over all processes' samples."""
        super().__init__(complementary.Gce, {"q": q}, gather)


class LUw(_WithoutOptions):
    r"""L-UW (Gao and Zhang 2021, Eq. 8), for complementary labels.

    .. math:: -\frac1s \sum_{k \in \bar Y} \log \mathrm{softmax}(1 - p)_k
    """

    kind = complementary.LUw


class Mlcl(_WithoutOptions):
    r"""MLCL (Gao, Xu and Zhang 2024), for complementary sets that are drawn uniformly.

    The binary cross-entropy of each class's membership in :math:`\bar Y`, which has probability
    :math:`s (1 - p_k) / (K - 1)`, summed over classes.
    """

    kind = complementary.Mlcl
