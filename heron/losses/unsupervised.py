"""Unsupervised contrastive terms: views of a sample attract, other samples repel."""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heron.losses.batch import GlobalBatch
from heron.losses.engine import sum_of, unit
from heron.losses.families import InputLoss, ProjectionLoss
from heron.losses.loss import projection_spec
from heron.losses.own_positives import Head, all_views_loss, cross_view_loss, unit_head
from heron.losses.pairs import Present, Rows
from heron.losses.terms import Needs, Temperature
from heron.models.heterogeneous import Encoded, Features, ModelSpec

Anchors = Literal["first", "all"]
Negatives = Literal["all_views", "cross_view"]


class NtXent(ProjectionLoss):
    r"""SimCLR's NT-Xent, InfoNCE (Chen et al. 2020, Eq. 1), for two views or more.

    The mean over anchors :math:`z_{iu}` and positives :math:`z_{iv}, v \ne u`, of

    .. math:: \log\big(f(z_{iu}, z_{iv}) + \sum_{k \ne i} \sum_j f(z_{iu}, z_{kj})\big)
              - \log f(z_{iu}, z_{iv}), \qquad f(a, b) = \exp(\cos(a, b) / \tau)
    """

    needs = Needs(vectors=("projections",), views=2)
    repels_all = True
    missing_views = True

    def __init__(self, *, tau: Temperature = 0.5, gather: bool = True) -> None:
        """Sets the options.

        Args:
            tau: temperature, at least 0.003.
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.tau = tau

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `nt_xent` of this process's anchors."""
        z = batch.vectors["projections"]
        return nt_xent(z, tau=self.tau, rows=batch.own_rows, present=batch.present)


class Cmc(NtXent):
    r"""Contrastive multiview coding (Tian et al. 2020, Eq. 3), for two views or more.

    The mean over ordered pairs of views (u, v) and samples i of

    .. math:: \log \sum_k f(z_{iu}, z_{kv}) - \log f(z_{iu}, z_{iv}), \qquad
              f(a, b) = \exp(\cos(a, b) / \tau)
    """

    negatives: ClassVar[Negatives] = "cross_view"

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `cmc` of this process's anchors."""
        z = batch.vectors["projections"]
        return cmc(z, tau=self.tau, rows=batch.own_rows, present=batch.present)


class WeightNet(nn.Sequential):
    """HeroCon's H, which learns the weight of a negative: H(z) of each view's z."""

    def __init__(self, width: int) -> None:
        """Builds one layer of the width of z."""
        super().__init__(nn.Linear(width, width), nn.Sigmoid())

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `weights`: H(z) of each view."""
        return {"weights": [self(z) for z in encoded.projections]}


class WeightedUnsupervised(ProjectionLoss):
    r"""HeroCon's weighted unsupervised loss L_u (KDD 2022, Eq. 5), with its weight network H.

    The mean over anchors :math:`z_{iu}` and positives :math:`z_{iv}, v \ne u`, of

    .. math:: \log\big(f(z_{iu}, z_{iv}) + \sum_{k \ne i} \sum_j g\, f(z_{iu}, z_{kj})\big)
              - \log f(z_{iu}, z_{iv}), \qquad f(a, b) = \exp(\cos(a, b) / \tau)

    with the learnt weight of a negative
    :math:`g = \frac12 [e^{1 - \cos(z_{iu}, H(z_{kj}))} + e^{1 - \cos(z_{kj}, H(z_{iu}))}]`.
    """

    needs = Needs(vectors=("projections", "weights"), views=2)
    truncated = ("projections", "weights")
    repels_all = True
    missing_views = True

    def __init__(
        self,
        dim: int | None = None,
        *,
        tau: Temperature = 1.0,
        anchors: Anchors = "all",
        negatives: Negatives = "all_views",
        gather: bool = True,
    ) -> None:
        """Builds H.

        Args:
            dim: width of the projections; a run has that of its model.
            tau: temperature, at least 0.003.
            anchors: views that are anchors: `all`, or the `first` only.
            negatives: `all_views` of the other samples (the paper), or `cross_view`: only the
                positive's view of them (the authors' code).
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.tau, self.anchors, self.negatives = tau, anchors, negatives
        if dim is not None:
            self.build_own_parts(projection_spec(dim), dim)

    def build_parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns what builds H."""
        return {"weight": lambda: WeightNet(spec.config.projection_width)}

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `weighted_unsupervised` of this process's anchors."""
        return weighted_unsupervised(
            batch.vectors["projections"],
            batch.vectors["weights"],
            tau=self.tau,
            anchors=self.anchors,
            negatives=self.negatives,
            rows=batch.own_rows,
            present=batch.present,
        )


class InputWeightedUnsupervised(InputLoss):
    r"""HCL's weighted unsupervised loss L_u (2021, Eq. 4), with weights from the raw inputs.

    As `WeightedUnsupervised`, with :math:`g = e^{1 - \cos(x_{iu}, x_{kj})}`; where views j and u
    have different widths, :math:`x_{ku}` replaces :math:`x_{kj}`.
    """

    # Inputs take no gradient, so nothing is sent back; as `vectors` they would also be rounded.
    needs = Needs(gathered=("inputs",), vectors=("projections",), views=2)
    repels_all = True

    def __init__(
        self, *, tau: Temperature = 1.0, anchors: Anchors = "all", gather: bool = True
    ) -> None:
        """Sets the options.

        Args:
            tau: temperature, at least 0.003.
            anchors: views that are anchors: `all`, or the `first` only.
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.tau, self.anchors = tau, anchors

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `input_weighted_unsupervised` of this process's anchors."""
        inputs, z = batch.gathered["inputs"], batch.vectors["projections"]
        return input_weighted_unsupervised(
            z, inputs, tau=self.tau, anchors=self.anchors, rows=batch.own_rows
        )


def nt_xent(
    z: Sequence[Float[Tensor, "batch dim"]],
    *,
    tau: float = 0.5,
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    """NT-Xent of SimCLR (Chen et al. 2020, Eq. 1), InfoNCE, UCL: the equation of `NtXent`.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        tau: temperature, > 0.
        rows: the samples whose anchors are summed here; the loss is still divided by the count of
            the whole batch, so that the shares of all processes add up to the loss. With `OwnRows`
            the gradient is that of the whole loss, with respect to these rows alone.
        present: which views each sample has: i, u, v and k, j run over these, and the mean over
            the pairs that exist.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: fewer than two views, or tau <= 0.
    """
    head = unit_head(z, tau, "nt_xent")
    return all_views_loss(head[1], [head], range(len(z)), tau, 1.0, rows, present)


def cmc(
    z: Sequence[Float[Tensor, "batch dim"]],
    *,
    tau: float = 0.5,
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    """Contrastive multiview coding (Tian et al. 2020, Eq. 3): the equation of `Cmc`.

    Arguments, result and errors are those of `nt_xent`.
    """
    head = unit_head(z, tau, "cmc")
    return cross_view_loss(head, [head], range(len(z)), 1.0, rows, present)


def weighted_unsupervised(
    z: Sequence[Float[Tensor, "batch dim"]],
    h: Sequence[Float[Tensor, "batch dim"]],
    *,
    tau: float = 1.0,
    anchors: Anchors = "all",
    negatives: Negatives = "all_views",
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    """HeroCon's weighted unsupervised loss L_u (KDD 2022, Eq. 5): see `WeightedUnsupervised`.

    By the weights g close samples, which may be false negatives, are pushed less. Gradients flow
    through g.

    With unit vectors z, h and p = z / tau - h, the two halves of g f are e/2 exp(z_i . p_k) and
    e/2 exp(p_i . z_k): two products and two exponentials a pair, where the formula as printed
    takes three of each.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        h: H(z), same shapes.
        tau: temperature, > 0.
        anchors: `all` views are anchors, or the `first` only.
        negatives: `all_views` of the other samples (the paper), or `cross_view`: only the
            positive's view of them, the positive pair weighted by g like the negatives and not
            counted again (the authors' code, up to a constant).
        rows: as in `nt_xent`.
        present: as in `nt_xent`.

    Raises:
        ValueError: fewer than two views, or tau <= 0.
    """
    scaled, vectors = unit_head(z, tau, "weighted_unsupervised")
    p = scaled - unit(torch.stack(list(h))).to(vectors.dtype)
    views = range(1 if anchors == "first" else len(z))
    heads: list[Head] = [(vectors, p), (p, vectors)]
    if negatives == "all_views":
        return all_views_loss(vectors, heads, views, tau, math.e / 2, rows, present)
    return cross_view_loss((scaled, vectors), heads, views, math.e / 2, rows, present)


def input_weighted_unsupervised(
    z: Sequence[Float[Tensor, "batch dim"]],
    x: Sequence[Float[Tensor, "batch _"]],
    *,
    tau: float = 1.0,
    anchors: Anchors = "all",
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    """HCL's weighted unsupervised loss (2021, Eq. 4): see `InputWeightedUnsupervised`.

    g f = e exp(z_i . z_k / tau - x_i . x_k) is one product of concatenated vectors.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        x: raw inputs, one tensor [batch, width of the view] a view; no gradient is taken.
        tau: temperature, > 0.
        anchors: `all` views are anchors, or the `first` only.
        rows: as in `nt_xent`.

    Raises:
        ValueError: fewer than two views, or tau <= 0.
    """
    scaled, vectors = unit_head(z, tau, "input_weighted_unsupervised")
    inputs = [unit(view.detach().flatten(1)).to(vectors.dtype) for view in x]
    views = range(1 if anchors == "first" else len(z))
    # If all views have one width, the inputs that weight a pair do not depend on the anchor's view.
    same_width = len({view.shape for view in inputs}) == 1
    shares = []
    for anchor_views in [views] if same_width else [range(u, u + 1) for u in views]:
        first = inputs[anchor_views[0]]
        weights = torch.stack([own if own.shape == first.shape else first for own in inputs])
        head = torch.cat([scaled, -weights], 2), torch.cat([vectors, weights], 2)
        shares.append(all_views_loss(vectors, [head], anchor_views, tau, math.e, rows))
    return sum_of(shares) / len(shares)
