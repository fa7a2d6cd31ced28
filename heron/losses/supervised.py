r"""Contrastive losses with labels: samples that share labels attract.

Throughout, :math:`f(a, b) = \exp(\cos(a, b) / \tau)`.
"""

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from heron.losses.inputs import (
    LossError,
    RowCounts,
    Views,
    as_columns,
    as_groups,
    as_views,
    is_whole,
    same_rows,
    shown,
)
from heron.losses.loss import Loss, options_of
from heron.objectives import hard, hierarchical, supcon, supervised


class _OfLabelled(Loss):
    """A loss of features that all have labels."""

    feature = "projections"

    def columns(self, labels: Tensor) -> Tensor:
        """Returns the labels as columns."""
        return as_groups(labels)

    def forward(self, features: Views, labels: Tensor, *, sizes: RowCounts = None) -> Tensor:
        """Returns the loss over the samples of all processes.

        Args:
            features: features of this process's labelled samples, [batch, dim], [batch, views, dim]
                or a tensor [batch, dim] for each view.
            labels: class numbers [batch], or 0 or 1 for each label, [batch, labels].
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        views, columns = as_views(features, "features"), self.columns(labels)
        same_rows({"features": views[0], "labels": columns})
        if self.feature == "hidden":
            views = [torch.cat(views, 1)]
        return self.evaluate({self.feature: views}, columns, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class Supcon(_OfLabelled):
    r"""SupCon's L_out (Khosla et al. 2020, Eq. 2), for one view or more.

    With A(i) all views of all samples except i, and P(i) those of its class, the mean over i of

    .. math:: \frac{-1}{|P(i)|} \sum_{p \in P(i)} \log \frac{f_{ip}}{\sum_{a \in A(i)} f_{ia}}

    Samples with several labels have the same class if all their labels agree.
    """

    def __init__(self, *, tau: float = 0.1, gather: bool = True) -> None:
        """Sets the temperature, at least 0.003; `gather`: compare the rows of all processes."""
        super().__init__(supcon.Supcon, {"tau": tau}, gather)


class WeightedSupervised(_OfLabelled):
    r"""HeroCon's weighted supervised loss L_s (KDD 2022, Eq. 7), for multi-label samples.

    For each label a, with positives P(a) and negatives N(a), the mean over ordered pairs (i, j) in
    :math:`P(a)^2` of

    .. math:: \log\big(\sigma_{ij} f_{ij} + \sum_{k \in N(a)} \gamma_{ik} f_{ik}\big)
              - \log(\sigma_{ij} f_{ij})

    averaged over labels; :math:`\sigma_{ij} = 1 - \mathrm{dist}(y_i, y_j) / c`,
    :math:`\gamma_{ik} = \mathrm{dist}(y_i, y_k)`. Several views are concatenated.
    """

    feature = "hidden"

    def __init__(
        self,
        *,
        tau: float = 1.0,
        distance: Literal["hamming", "indicator"] = "hamming",
        self_pairs: bool = False,
        num_classes: int | None = None,
        gather: bool = True,
    ) -> None:
        """Sets the options.

        Args:
            tau: temperature, at least 0.003.
            distance: `hamming`, or `indicator`: 0 if all labels agree, else 1 (Section 3.3).
            self_pairs: keep the pairs i = j, as the authors' code does.
            num_classes: number of classes, needed if labels are class numbers.
            gather: compare the rows of all processes.
        """
        options = {"tau": tau, "distance": distance, "self_pairs": self_pairs}
        super().__init__(supervised.WeightedSupervised, options, gather)
        self.num_classes = num_classes

    def columns(self, labels: Tensor) -> Tensor:
        """Returns the labels as columns."""
        return as_columns(labels, self.num_classes)


class Hierarchical(_OfLabelled):
    r"""HiMulCon, HiConE and HiMulConE (Zhang et al., CVPR 2022, Eq. 3 to 6).

    Labels are paths: whole numbers [batch, levels], coarsest level first. With P_l(i) the samples
    whose paths agree with that of i on the levels 1 to l and not on l + 1,

    .. math:: \frac{1}{L} \sum_l \lambda_l \operatorname{mean}_i \frac{1}{|P_l(i)|}
              \sum_{p \in P_l(i)} \Big(\log \sum_{a \in A(i)} f_{ia} - \log f_{ip}\Big)
    """

    def __init__(
        self,
        *,
        tau: float = 0.1,
        constrain: bool = True,
        penalty: Literal["exp_inverse"] | None = "exp_inverse",
        gather: bool = True,
    ) -> None:
        """Sets the options.

        Args:
            tau: temperature, at least 0.003.
            constrain: raise a pair's loss to the largest of all finer levels; False: HiMulCon.
            penalty: lambda_l: None is 1 (HiConE), `exp_inverse` that of the authors' code.
            gather: compare the rows of all processes.
        """
        options = {"tau": tau, "constrain": constrain, "penalty": penalty}
        super().__init__(hierarchical.Hierarchical, options, gather)

    def columns(self, labels: Tensor) -> Tensor:
        """Returns the paths, after a check."""
        if not is_whole(labels) or labels.dim() != 2 or not labels.shape[1]:
            raise LossError(
                f"labels are {shown(labels)}; expected paths: whole numbers [batch, levels], "
                "coarsest level first"
            )
        return as_groups(labels)


class Hard(Loss):
    r"""UCL, H-UCL, SCL and H-SCL: negatives weighted by hardness (H-SCL, Eq. 3 and 4).

    With :math:`g = \cos / \tau` and M views of other samples, the mean over positive pairs of

    .. math:: \log\big(1 + M e^{-g^+} E_q[e^{g^-}]\big), \qquad
              E_q = \frac{\sum \eta\, e^g}{\sum \eta}
    """

    def __init__(
        self,
        *,
        supervised: bool = True,
        tau: float = 0.5,
        hardening: Literal["none", "exp", "threshold"] = "none",
        beta: float = 1.0,
        threshold_start: float = -0.3,
        threshold_end: float = 0.0,
        threshold_epochs: int = 200,
        positives: Literal["label", "augmentation"] = "label",
        detach: bool = False,
        gather: bool = True,
    ) -> None:
        r"""Sets the options.

        Args:
            supervised: take negatives of other classes; False (UCL, H-UCL) uses no labels, and
                requires `positives="augmentation"`.
            tau: temperature, at least 0.003.
            hardening: :math:`\eta`: `none` is 1, `exp` is :math:`e^{\beta g}`, `threshold` is 1
                where :math:`e^g \ge e^{l / \tau}`, else 0.
            beta: :math:`\beta`, at least 0.
            threshold_start: l at first, a cosine.
            threshold_end: l from `threshold_epochs` on; linear in between.
            threshold_epochs: epochs from `threshold_start` to `threshold_end`.
            positives: all views of the anchor's class (`label`), or only the sample's other views.
            detach: stop the gradient through :math:`\eta`.
            gather: compare the rows of all processes.
        """
        super().__init__(hard.Hard, options_of(hard.Hard, locals()), gather)
        self.supervised, self.scheduled = supervised, hardening == "threshold"

    def forward(
        self,
        projections: Views,
        labels: Tensor | None = None,
        *,
        epoch: float | None = None,
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the loss over the samples of all processes.

        Args:
            projections: this process's, [batch, views, dim] or a tensor [batch, dim] for each view.
            labels: class numbers [batch] or columns [batch, labels]; None if not `supervised`.
            epoch: the current epoch, which may be fractional; needed for `hardening="threshold"`.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: projections, labels or epoch do not fit the options.
        """
        if (labels is None) == self.supervised:
            raise LossError(
                f"labels are {'missing' if labels is None else 'given'}, and supervised is "
                f"{self.supervised}; expected labels exactly where it is True"
            )
        if epoch is None and self.scheduled:
            raise LossError(
                "epoch is missing, and its threshold moves with it; expected epoch=..., 0.0 "
                "at the start"
            )
        targets = None if labels is None else as_groups(labels)
        features = {"projections": projections}
        return self.evaluate(features, targets, sizes=sizes, epoch=epoch or 0.0)

    if TYPE_CHECKING:
        __call__ = forward
