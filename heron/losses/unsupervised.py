r"""Contrastive losses without labels: views of a sample attract, other samples repel.

Throughout, :math:`f(a, b) = \exp(\cos(a, b) / \tau)`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from heron.config.model import ModelConfig
from heron.config.sections import check
from heron.losses.inputs import RowCounts, Views, as_inputs, as_views
from heron.losses.loss import Loss
from heron.models.heterogeneous import ModelSpec
from heron.objectives import clip, hard, single_view, unsupervised


class _OfProjections(Loss):
    """A loss of projections alone."""

    def forward(self, projections: Views, *, sizes: RowCounts = None) -> Tensor:
        """Returns the loss over the samples of all processes.

        Args:
            projections: this process's, [batch, views, dim] or a tensor [batch, dim] for each view.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        return self.evaluate({"projections": projections}, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class NtXent(_OfProjections):
    r"""SimCLR's NT-Xent, InfoNCE (Chen et al. 2020, Eq. 1), for two views or more.

    The mean over anchors :math:`z_{iu}` and positives :math:`z_{iv}, v \ne u`, of

    .. math:: \log\big(f(z_{iu}, z_{iv}) + \sum_{k \ne i} \sum_j f(z_{iu}, z_{kj})\big)
              - \log f(z_{iu}, z_{iv})
    """

    def __init__(self, *, tau: float = 0.5, gather: bool = True) -> None:
        """Sets the temperature, at least 0.003; `gather`: compare the rows of all processes."""
        super().__init__(unsupervised.NtXent, {"tau": tau}, gather)


class Cmc(_OfProjections):
    r"""Contrastive multiview coding (Tian et al. 2020, Eq. 3), for two views or more.

    The mean over ordered pairs of views (u, v) and samples i of

    .. math:: \log \sum_k f(z_{iu}, z_{kv}) - \log f(z_{iu}, z_{iv})
    """

    def __init__(self, *, tau: float = 0.5, gather: bool = True) -> None:
        """Sets the temperature, at least 0.003; `gather`: compare the rows of all processes."""
        super().__init__(unsupervised.Cmc, {"tau": tau}, gather)


class Clip(_OfProjections):
    r"""CLIP's loss (Radford et al. 2021, Fig. 3), with a learnt scale s, for two views or more.

    The mean over ordered pairs of views (u, v) and samples i of

    .. math:: \log \sum_k e^{s \cos(z_{iu}, z_{kv})} - s \cos(z_{iu}, z_{iv})

    where :math:`s \le 100` is the exponential of a parameter of this module.
    """

    def __init__(self, *, tau: float = 0.07, gather: bool = True) -> None:
        """Sets the initial 1 / s, at least 0.003; `gather`: compare the rows of all processes."""
        super().__init__(clip.Clip, {"tau": tau}, gather, _spec(1))
        self.width = None  # its only part is the scale, which fits projections of any width


class Siglip(_OfProjections):
    r"""SigLIP's loss (Zhai et al. 2023, Eq. 1), with learnt s and b, for two views or more.

    The mean over pairs of views u < v of

    .. math:: \frac{1}{B} \sum_i \sum_k \log\big(1 + e^{-y_{ik} (s \cos(z_{iu}, z_{kv}) + b)}\big)

    with B samples, :math:`s \le 100`, and y = 1 if i = k, else -1.
    """

    def __init__(
        self, *, scale: float = 10.0, bias: float | None = None, gather: bool = True
    ) -> None:
        """Sets the initial s and b; `gather`: compare the rows of all processes.

        By default b is the paper's -10, chosen for 32,768 rows; -log(B - 1) suits B rows. Far below
        that, only the pairs of a row are learnt, and all projections become equal.
        """
        super().__init__(clip.Siglip, {"scale": scale, "bias": bias}, gather, _spec(1))
        self.width = None  # as for Clip


class Debiased(_OfProjections):
    r"""The debiased contrastive loss (Chuang et al. 2020, Eq. 7 and 8).

    `NtXent` with the sum over an anchor's N negatives replaced by

    .. math:: \max\Big(\frac{\sum f^- - N \tau^+ f^+}{1 - \tau^+},\; N e^{-1/\tau}\Big)
    """

    def __init__(self, *, tau: float = 0.5, tau_plus: float = 0.1, gather: bool = True) -> None:
        """Sets the options.

        Args:
            tau: temperature, at least 0.003.
            tau_plus: prior probability that a negative has the anchor's class, in [0, 1).
            gather: compare the rows of all processes.
        """
        super().__init__(hard.Debiased, {"tau": tau, "tau_plus": tau_plus}, gather)


class WeightedUnsupervised(_OfProjections):
    r"""HeroCon's weighted unsupervised loss L_u (KDD 2022, Eq. 5), with its weight network H.

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
            anchors: views that are anchors: `all`, or the `first` only.
            negatives: `all_views` of the other samples (the paper), or `cross_view`: only the
                positive's view of them (the authors' code).
            gather: compare the rows of all processes.
        """
        options = {"tau": tau, "anchors": anchors, "negatives": negatives}
        super().__init__(unsupervised.WeightedUnsupervised, options, gather, _spec(dim))


class _OfInputs(Loss):
    """A loss of projections and the inputs that they were computed from."""

    def forward(
        self,
        projections: Views,
        inputs: Tensor | Sequence[Tensor],
        *,
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the loss over the samples of all processes.

        Args:
            projections: this process's, [batch, views, dim] or a tensor [batch, dim] for each view.
            inputs: a tensor [batch, ...] for each view; their widths may differ.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        views = as_views(projections, "projections")
        features = {"projections": views, "inputs": as_inputs(inputs, len(views))}
        return self.evaluate(features, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class InputWeightedUnsupervised(_OfInputs):
    r"""HCL's weighted unsupervised loss L_u (2021, Eq. 4), with weights from the raw inputs.

    As `WeightedUnsupervised`, with :math:`g = e^{1 - \cos(x_{iu}, x_{kj})}`; where views j and u
    have different widths, :math:`x_{ku}` replaces :math:`x_{kj}`.
    """

    def __init__(
        self, *, tau: float = 1.0, anchors: Literal["first", "all"] = "all", gather: bool = True
    ) -> None:
        """Sets the options.

        Args:
            tau: temperature, at least 0.003.
            anchors: views that are anchors: `all`, or the `first` only.
            gather: compare the rows of all processes.
        """
        super().__init__(
            unsupervised.InputWeightedUnsupervised, {"tau": tau, "anchors": anchors}, gather
        )


class SingleViewUnsupervised(_OfInputs):
    r"""HeroCon's L_u of one view (KDD 2022, Eq. 4), with its H and its map of the inputs.

    With :math:`x_i` an input, mapped linearly to the width of z, the mean over samples of

    .. math:: \log\big(f(x_i, z_i) + \sum_{k \ne i} g(z_i, z_k) f(x_i, z_k)\big) - \log f(x_i, z_i)

    and over views, if there are several; g as in `WeightedUnsupervised`.
    """

    def __init__(
        self, dim: int, input_dims: Sequence[int], *, tau: float = 1.0, gather: bool = True
    ) -> None:
        """Builds H and the maps.

        Args:
            dim: width of the projections.
            input_dims: width of each view's flattened inputs; one alone: all views share a map.
            tau: temperature, at least 0.003.
            gather: compare the rows of all processes.
        """
        spec = _spec(dim, input_dims)
        super().__init__(single_view.SingleViewUnsupervised, {"tau": tau}, gather, spec)


def _spec(dim: int, input_dims: Sequence[int] = ()) -> ModelSpec:
    """Returns the model that parts are built for."""
    config = check(ModelConfig, {"projection_width": dim}, "dim")
    return ModelSpec(config, [[width] for width in input_dims], 0, [], 0)
