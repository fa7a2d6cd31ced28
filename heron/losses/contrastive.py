r"""Contrastive losses: what belongs together attracts, other samples repel.

Throughout, :math:`f(a, b) = \exp(\cos(a, b) / \tau)`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from heron.losses.inputs import LossError, Views, as_columns, as_groups, as_inputs, as_views
from heron.losses.loss import Loss
from heron.pipeline.config.model import Model
from heron.pipeline.models.heterogeneous import ModelSpec
from heron.pipeline.objectives import (
    hard,
    hierarchical,
    single_view,
    supcon,
    supervised,
    unsupervised,
)


class _OfProjections(Loss):
    """A loss of the projections alone."""

    def forward(self, projections: Views, *, sizes: Sequence[int] | None = None) -> Tensor:
        """Returns the loss of the samples of all processes.

        Args:
            projections: of this process's samples: [batch, views, dim], or a tensor [batch, dim] a
                view.
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: the projections cannot be compared; says why.
        """
        return self.evaluate({"projections": projections}, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class _OfLabelled(Loss):
    """A loss of features and the labels of all of them."""

    feature = "projections"

    def columns(self, labels: Tensor) -> Tensor:
        """Returns the labels as columns."""
        return as_groups(labels)

    def forward(
        self, features: Views, labels: Tensor, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Returns the loss of the samples of all processes.

        Args:
            features: of this process's labelled samples: [batch, dim], [batch, views, dim], or a
                tensor [batch, dim] a view.
            labels: class numbers [batch], or 0 and 1 for each label, [batch, labels].
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: features or labels are not what the loss expects; says what it found.
        """
        views = as_views(features, "features")
        if self.feature == "hidden":
            views = [torch.cat(views, 1)]
        return self.evaluate({self.feature: views}, self.columns(labels), sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class NtXent(_OfProjections):
    r"""SimCLR's NT-Xent, InfoNCE (Chen et al. 2020, Eq. 1), for two views or more.

    The mean over anchors :math:`z_{iu}` and positives :math:`z_{iv}, v \ne u`, of

    .. math:: \log\big(f(z_{iu}, z_{iv}) + \sum_{k \ne i} \sum_j f(z_{iu}, z_{kj})\big)
              - \log f(z_{iu}, z_{iv})
    """

    def __init__(self, *, tau: float = 0.5, gather: bool = True) -> None:
        """Takes the temperature, at least 0.003; `gather`: compare rows of all processes."""
        super().__init__(unsupervised.NtXent, {"tau": tau}, gather)


class Cmc(_OfProjections):
    r"""Contrastive multiview coding (Tian et al. 2020, Eq. 3), for two views or more.

    The mean over ordered pairs of views (u, v) and samples i of

    .. math:: \log \sum_k f(z_{iu}, z_{kv}) - \log f(z_{iu}, z_{iv})
    """

    def __init__(self, *, tau: float = 0.5, gather: bool = True) -> None:
        """Takes the temperature, at least 0.003; `gather`: compare rows of all processes."""
        super().__init__(unsupervised.Cmc, {"tau": tau}, gather)


class Debiased(_OfProjections):
    r"""The debiased contrastive loss (Chuang et al. 2020, Eq. 7 and 8).

    `NtXent` with the sum over an anchor's N negatives replaced by

    .. math:: \max\Big(\frac{\sum f^- - N \tau^+ f^+}{1 - \tau^+},\; N e^{-1/\tau}\Big)
    """

    def __init__(self, *, tau: float = 0.5, tau_plus: float = 0.1, gather: bool = True) -> None:
        """Takes the options.

        Args:
            tau: temperature, at least 0.003.
            tau_plus: prior probability that a negative is of the anchor's class, in [0, 1).
            gather: compare rows of all processes.
        """
        super().__init__(hard.Debiased, {"tau": tau, "tau_plus": tau_plus}, gather)


class WeightedUnsupervised(_OfProjections):
    r"""HeroCon's weighted unsupervised loss L_u (KDD 2022, Eq. 5); H is a part of this module.

    The mean over anchors :math:`z_{iu}` and positives :math:`z_{iv}, v \ne u`, of

    .. math:: \log\big(f(z_{iu}, z_{iv}) + \sum_{k \ne i} \sum_j g\, f(z_{iu}, z_{kj})\big)
              - \log f(z_{iu}, z_{iv})

    with the learnt weight of a negative
    :math:`g = \frac12 [e^{1 - \cos(z_{iu}, H(z_{kj}))} + e^{1 - \cos(z_{kj}, H(z_{iu}))}]`.
    """

    def __init__(
        self,
        dim: int,
        *,
        tau: float = 1.0,
        anchors: Literal["first", "all"] = "all",
        negatives: Literal["all_views", "cross_view"] = "all_views",
        gather: bool = True,
    ) -> None:
        """Builds H.

        Args:
            dim: width of the projections.
            tau: temperature, at least 0.003.
            anchors: `all` views are anchors, or the `first` only.
            negatives: `all_views` of the other samples (the paper), or `cross_view`: the
                positive's view of them alone (the authors' code).
            gather: compare rows of all processes.
        """
        options = {"tau": tau, "anchors": anchors, "negatives": negatives}
        super().__init__(unsupervised.WeightedUnsupervised, options, gather, _spec(dim))


class _OfInputs(Loss):
    """A loss of projections and what they were made of."""

    def forward(
        self,
        projections: Views,
        inputs: Tensor | Sequence[Tensor],
        *,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Returns the loss of the samples of all processes.

        Args:
            projections: of this process's samples: [batch, views, dim], or a tensor [batch, dim] a
                view.
            inputs: a tensor [batch, ...] a view; widths may differ.
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: the projections cannot be compared; says why.
        """
        views = as_views(projections, "projections")
        features = {"projections": views, "inputs": as_inputs(inputs, len(views))}
        return self.evaluate(features, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class InputWeightedUnsupervised(_OfInputs):
    r"""HCL's weighted unsupervised loss L_u (2021, Eq. 4): weights from the raw inputs.

    As `WeightedUnsupervised`, with :math:`g = e^{1 - \cos(x_{iu}, x_{kj})}`; where view j is of
    another width than view u, :math:`x_{ku}` stands for :math:`x_{kj}`.
    """

    def __init__(
        self, *, tau: float = 1.0, anchors: Literal["first", "all"] = "all", gather: bool = True
    ) -> None:
        """Takes the options.

        Args:
            tau: temperature, at least 0.003.
            anchors: `all` views are anchors, or the `first` only.
            gather: compare rows of all processes.
        """
        super().__init__(
            unsupervised.InputWeightedUnsupervised, {"tau": tau, "anchors": anchors}, gather
        )


class SingleViewUnsupervised(_OfInputs):
    r"""HeroCon's L_u of one view (KDD 2022, Eq. 4); H and the map of inputs are its own.

    With :math:`x_i` the linear map of an input to the width of z, the mean over samples of

    .. math:: \log\big(f(x_i, z_i) + \sum_{k \ne i} g(z_i, z_k) f(x_i, z_k)\big) - \log f(x_i, z_i)

    and over views where there are several; g as in `WeightedUnsupervised`.
    """

    def __init__(
        self, dim: int, input_dims: Sequence[int], *, tau: float = 1.0, gather: bool = True
    ) -> None:
        """Builds H and the maps.

        Args:
            dim: width of the projections.
            input_dims: numbers of an input, of each view; one for all views that share a map.
            tau: temperature, at least 0.003.
            gather: compare rows of all processes.
        """
        spec = _spec(dim, input_dims)
        super().__init__(single_view.SingleViewUnsupervised, {"tau": tau}, gather, spec)


class Supcon(_OfLabelled):
    r"""SupCon's L_out (Khosla et al. 2020, Eq. 2), for one view or more.

    With A(i) all views of all samples but i and P(i) those of its class, the mean over i of

    .. math:: \frac{-1}{|P(i)|} \sum_{p \in P(i)} \log \frac{f_{ip}}{\sum_{a \in A(i)} f_{ia}}

    Samples with several labels are of one class where all labels agree.
    """

    def __init__(self, *, tau: float = 0.1, gather: bool = True) -> None:
        """Takes the temperature, at least 0.003; `gather`: compare rows of all processes."""
        super().__init__(supcon.Supcon, {"tau": tau}, gather)


class WeightedSupervised(_OfLabelled):
    r"""HeroCon's weighted supervised loss L_s (KDD 2022, Eq. 7), for several labels a sample.

    For each label a, with positives P(a) and negatives N(a), the mean over ordered pairs (i, j) in
    :math:`P(a)^2` of

    .. math:: \log\big(\sigma_{ij} f_{ij} + \sum_{k \in N(a)} \gamma_{ik} f_{ik}\big)
              - \log(\sigma_{ij} f_{ij})

    averaged over labels; :math:`\sigma_{ij} = 1 - \mathrm{dist}(y_i, y_j) / c`,
    :math:`\gamma_{ik} = \mathrm{dist}(y_i, y_k)`. Several views stand side by side.
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
        """Takes the options.

        Args:
            tau: temperature, at least 0.003.
            distance: `hamming`, or `indicator`: 0 where all labels agree, else 1 (Section 3.3).
            self_pairs: keep the pairs i = j, as the authors' code does.
            num_classes: where labels are class numbers: how many there are.
            gather: compare rows of all processes.
        """
        options = {"tau": tau, "distance": distance, "self_pairs": self_pairs}
        super().__init__(supervised.WeightedSupervised, options, gather)
        self.num_classes = num_classes

    def columns(self, labels: Tensor) -> Tensor:
        """Returns the labels as columns."""
        return as_columns(labels, self.num_classes)


class Hierarchical(_OfLabelled):
    r"""HiMulCon, HiConE and HiMulConE (Zhang et al., CVPR 2022, Eq. 3 to 6).

    Labels are paths [batch, levels], whole numbers, coarsest level first. With P_l(i) the samples
    whose paths agree with i's on the levels 1 to l and not on l + 1,

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
        """Takes the options.

        Args:
            tau: temperature, at least 0.003.
            constrain: raise a pair's loss to the largest of all finer levels; False is HiMulCon.
            penalty: lambda: None is 1 (HiConE), `exp_inverse` as in the authors' code.
            gather: compare rows of all processes.
        """
        options = {"tau": tau, "constrain": constrain, "penalty": penalty}
        super().__init__(hierarchical.Hierarchical, options, gather)

    def columns(self, labels: Tensor) -> Tensor:
        """Returns the paths."""
        if labels.dim() != 2 or labels.is_floating_point():
            raise LossError(
                f"labels are {labels.dtype} {tuple(labels.shape)}; expected paths: "
                "whole numbers [batch, levels], coarsest level first"
            )
        return labels


class Hard(Loss):
    r"""UCL, H-UCL, SCL and H-SCL: negatives tilted towards the anchor (H-SCL, Eq. 3 and 4).

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
        r"""Takes the options.

        Args:
            supervised: negatives are of other classes; False (UCL, H-UCL) looks at no label, and
                wants `positives="augmentation"`.
            tau: temperature, at least 0.003.
            hardening: :math:`\eta`: `none` is 1, `exp` is :math:`e^{\beta g}`, `threshold` is 1
                where :math:`e^g \ge e^{l / \tau}`, else 0.
            beta: at least 0.
            threshold_start: l at first, a cosine.
            threshold_end: l from `threshold_epochs` on; linear between.
            threshold_epochs: see there.
            positives: all views of the anchor's class, or the sample's other views only.
            detach: let no gradient flow through :math:`\eta`.
            gather: compare rows of all processes.
        """
        super().__init__(
            hard.Hard,
            {
                "supervised": supervised,
                "tau": tau,
                "hardening": hardening,
                "beta": beta,
                "threshold_start": threshold_start,
                "threshold_end": threshold_end,
                "threshold_epochs": threshold_epochs,
                "positives": positives,
                "detach": detach,
            },
            gather,
        )
        self.supervised, self.scheduled = supervised, hardening == "threshold"

    def forward(
        self,
        projections: Views,
        labels: Tensor | None = None,
        *,
        epoch: float | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Returns the loss of the samples of all processes.

        Args:
            projections: of this process's samples: [batch, views, dim], or a tensor [batch, dim] a
                view.
            labels: class numbers [batch], or columns [batch, labels]; None with
                `supervised=False`.
            epoch: now, a fraction of it counts; for `hardening="threshold"`.
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: projections, labels or epoch are not what the options ask for.
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


def _spec(dim: int, input_dims: Sequence[int] = ()) -> ModelSpec:
    """Returns what parts are built for."""
    return ModelSpec(Model(projection_width=dim), [[width] for width in input_dims], 0, 0, 0)
