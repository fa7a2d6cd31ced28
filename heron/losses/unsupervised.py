r"""Contrastive losses without labels: views of a sample attract, other samples repel.

Throughout, :math:`f(a, b) = \exp(\cos(a, b) / \tau)`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from heron.losses.inputs import RowCounts, Views, as_inputs, as_views
from heron.losses.loss import Loss
from heron.pipeline.config.model import ModelConfig
from heron.pipeline.config.sections import check
from heron.pipeline.models.heterogeneous import ModelSpec
from heron.pipeline.objectives import clip, hard, single_view, unsupervised


class _OfProjections(Loss):
    """A loss of the projections alone."""

    def forward(self, projections: Views, *, sizes: RowCounts = None) -> Tensor:
        """Returns the loss of the samples of all processes.

        Args:
            projections: of this process: [batch, views, dim], or a tensor [batch, dim] a view.
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: the projections cannot be compared; says why.
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


class Clip(_OfProjections):
    r"""CLIP's loss (Radford et al. 2021, Fig. 3), for two views or more; s is learnt.

    The mean over ordered pairs of views (u, v) and samples i of

    .. math:: \log \sum_k e^{s \cos(z_{iu}, z_{kv})} - s \cos(z_{iu}, z_{iv})

    where :math:`s \le 100` is the exponential of a parameter of this module.
    """

    def __init__(self, *, tau: float = 0.07, gather: bool = True) -> None:
        """Takes 1 / s at the start, at least 0.003; `gather`: compare rows of all processes."""
        super().__init__(clip.Clip, {"tau": tau}, gather, _spec(1))
        self.width = None  # the one part is the scale, which fits any projections


class Siglip(_OfProjections):
    r"""SigLIP's loss (Zhai et al. 2023, Eq. 1), for two views or more; s and b are learnt.

    The mean over pairs of views u < v of

    .. math:: \frac{1}{B} \sum_i \sum_k \log\big(1 + e^{-y_{ik} (s \cos(z_{iu}, z_{kv}) + b)}\big)

    with y = 1 where i = k, else -1, and B samples; :math:`s \le 100`.
    """

    def __init__(
        self, *, scale: float = 10.0, bias: float | None = None, gather: bool = True
    ) -> None:
        """Takes s and b at the start; `gather`: compare rows of all processes.

        Without b it is the paper's, -10 for its 32,768 rows; -log(B - 1) suits B: from far below
        it, nothing but the pairs of a row is learnt, and all projections become one.
        """
        super().__init__(clip.Siglip, {"scale": scale, "bias": bias}, gather, _spec(1))
        self.width = None  # as Clip's


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
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the loss of the samples of all processes.

        Args:
            projections: of this process: [batch, views, dim], or a tensor [batch, dim] a view.
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


def _spec(dim: int, input_dims: Sequence[int] = ()) -> ModelSpec:
    """Returns what parts are built for."""
    config = check(ModelConfig, {"projection_width": dim}, "dim")
    return ModelSpec(config, [[width] for width in input_dims], 0, [], 0)
