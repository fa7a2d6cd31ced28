r"""Losses of a classifier's logits, for labels that are known and for complementary ones.

A complementary label names a class that a sample is known not to be;
:math:`p = \mathrm{softmax}(\text{logits})`, K classes, :math:`\bar Y` a sample's complementary
labels, s of them. All are means over the samples of all processes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from heron.losses.inputs import as_columns, as_rows, refuse_rows
from heron.losses.loss import Loss
from heron.pipeline.objectives import classification, complementary


class _OfLogits(Loss):
    """A loss of logits and labels."""

    def forward(
        self, logits: Tensor, labels: Tensor, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Returns the mean over the samples of all processes.

        Args:
            logits: of this process's samples, [batch, labels].
            labels: columns [batch, labels], or class numbers [batch].
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: logits or labels are not what the loss expects; says what it found.
        """
        classes = as_rows(logits, "logits").shape[1]
        return self.evaluate({"logits": logits}, as_columns(labels, classes), sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class _OfProbabilities(_OfLogits):
    """A loss whose labels may be probabilities."""

    def forward(
        self, logits: Tensor, labels: Tensor, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Returns the mean over the samples of all processes.

        Args:
            logits: of this process's samples, [batch, labels].
            labels: columns from 0 to 1, [batch, labels], or class numbers [batch].
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: logits or labels are not what the loss expects; says what it found.
        """
        columns = as_columns(labels, as_rows(logits, "logits").shape[1])
        refuse_rows(columns, (columns >= 0) & (columns <= 1), "0 to 1")
        return super().forward(logits, columns, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class Bce(_OfProbabilities):
    """Binary cross-entropy of each label, the mean over samples and labels."""

    def __init__(self, *, gather: bool = True) -> None:
        """`gather`: the mean is over the samples of all processes."""
        super().__init__(classification.Bce, {}, gather)


class CrossEntropy(_OfProbabilities):
    """Cross-entropy of classes, the mean over samples."""

    def __init__(self, *, gather: bool = True) -> None:
        """`gather`: the mean is over the samples of all processes."""
        super().__init__(classification.CrossEntropy, {}, gather)


class UbLog(_OfLogits):
    r"""UB-LOG (Feng et al. 2020, Eq. 13; MulCo, Eq. 2), for complementary labels.

    .. math:: -\log \sum_{k \notin \bar Y} p_k
    """

    def __init__(self, *, gather: bool = True) -> None:
        """`gather`: the mean is over the samples of all processes."""
        super().__init__(complementary.UbLog, {}, gather)


class UbExp(_OfLogits):
    r"""UB-EXP (Feng et al. 2020, Eq. 12), for complementary labels.

    .. math:: \exp\Big(-\sum_{k \notin \bar Y} p_k\Big)
    """

    def __init__(self, *, gather: bool = True) -> None:
        """`gather`: the mean is over the samples of all processes."""
        super().__init__(complementary.UbExp, {}, gather)


class Mse(_OfLogits):
    r"""Squared error for complementary labels, unbiased (Feng et al. 2020, Theorem 3).

    .. math:: \sum_{k \notin \bar Y} \ell_k - \frac{K - 1 - s}{s} \sum_{k \in \bar Y} \ell_k,
              \qquad \ell_k = |p - e_k|^2
    """

    def __init__(self, *, gather: bool = True) -> None:
        """`gather`: the mean is over the samples of all processes."""
        super().__init__(complementary.Mse, {}, gather)


class Gce(_OfLogits):
    r"""Generalised cross-entropy (Zhang and Sabuncu 2018) for complementary labels, unbiased.

    As `Mse`, with :math:`\ell_k = (1 - p_k^q) / q`.
    """

    def __init__(self, *, q: float = 0.7, gather: bool = True) -> None:
        """Takes q, above 0 and at most 1; `gather`: the mean is over all processes' samples."""
        super().__init__(complementary.Gce, {"q": q}, gather)


class LUw(_OfLogits):
    r"""L-UW (Gao and Zhang 2021, Eq. 8), for complementary labels.

    .. math:: -\frac1s \sum_{k \in \bar Y} \log \mathrm{softmax}(1 - p)_k
    """

    def __init__(self, *, gather: bool = True) -> None:
        """`gather`: the mean is over the samples of all processes."""
        super().__init__(complementary.LUw, {}, gather)


class Mlcl(_OfLogits):
    r"""MLCL (Gao, Xu and Zhang 2024), the case of sets that are drawn uniformly.

    The binary cross-entropy of each class's membership in :math:`\bar Y`, whose probability is
    :math:`s (1 - p_k) / (K - 1)`, summed over classes.
    """

    def __init__(self, *, gather: bool = True) -> None:
        """`gather`: the mean is over the samples of all processes."""
        super().__init__(complementary.Mlcl, {}, gather)
