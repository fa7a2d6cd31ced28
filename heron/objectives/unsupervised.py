"""Unsupervised contrastive terms: views of a sample attract, other samples repel."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heron.config.terms import Needs, Temperature
from heron.models.heterogeneous import Encoded, Features, ModelSpec
from heron.objectives.batch import GlobalBatch
from heron.objectives.engine import unit
from heron.objectives.own_positives import (
    Head,
    all_views_loss,
    cross_view_loss,
    unit_views,
)
from heron.objectives.present import Present, Rows
from heron.objectives.term import Term

Anchors = Literal["first", "all"]
Negatives = Literal["all_views", "cross_view"]


class NtXent(Term):
    """SimCLR's NT-Xent: InfoNCE, UCL."""

    tau: Temperature = 0.5

    needs: ClassVar[Needs] = Needs(vectors=("projections",), views=2)
    repels_all: ClassVar[bool] = True
    missing_views: ClassVar[bool] = True

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """Computes `nt_xent`."""
        z = batch.vectors["projections"]
        return nt_xent(z, tau=self.tau, rows=batch.own_rows, present=batch.present)


class Cmc(Term):
    """Contrastive multiview coding.

    Attributes:
        tau: temperature, > 0.
    """

    tau: Temperature = 0.5

    needs: ClassVar[Needs] = Needs(vectors=("projections",), views=2)
    repels_all: ClassVar[bool] = True
    negatives: ClassVar[Negatives] = "cross_view"
    missing_views: ClassVar[bool] = True

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """Computes `cmc`."""
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


class WeightedUnsupervised(Term):
    """HeroCon's L_u, Eq. 5."""

    tau: Temperature = 1.0
    anchors: Anchors = "all"
    negatives: Negatives = "all_views"

    needs: ClassVar[Needs] = Needs(vectors=("projections", "weights"), views=2)
    nested: ClassVar[tuple[str, ...] | None] = ("projections", "weights")
    repels_all: ClassVar[bool] = True
    missing_views: ClassVar[bool] = True

    def parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns what builds H."""
        return {"weight": lambda: WeightNet(spec.config.projection_width)}

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """Computes `weighted_unsupervised`."""
        return weighted_unsupervised(
            batch.vectors["projections"],
            batch.vectors["weights"],
            tau=self.tau,
            anchors=self.anchors,
            negatives=self.negatives,
            rows=batch.own_rows,
            present=batch.present,
        )


class InputWeightedUnsupervised(Term):
    """HCL's L_u, Eq. 4: weights from the raw inputs."""

    tau: Temperature = 1.0
    anchors: Anchors = "all"

    # Inputs take no gradient, so nothing is sent back; as `vectors` they would also be rounded.
    needs: ClassVar[Needs] = Needs(gathered=("inputs",), vectors=("projections",), views=2)
    repels_all: ClassVar[bool] = True

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """Computes `input_weighted_unsupervised`."""
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
    r"""NT-Xent of SimCLR (Chen et al. 2020, Eq. 1), for any number of views; InfoNCE, UCL.

    The mean over anchors z_iu and positives z_iv, v != u, of

    .. math:: \log\big(f(z_{iu}, z_{iv}) + \sum_{k \ne i} \sum_j f(z_{iu}, z_{kj})\big)
              - \log f(z_{iu}, z_{iv})

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
    vectors = unit_views(z, tau, "nt_xent")
    head = [v / tau for v in vectors], vectors
    return all_views_loss(vectors, [head], range(len(z)), tau, 1.0, rows, present) / len(z)


def cmc(
    z: Sequence[Float[Tensor, "batch dim"]],
    *,
    tau: float = 0.5,
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    r"""Contrastive multiview coding (Tian et al. 2020, Eq. 3 over all pairs of views).

    The mean over ordered pairs of views (u, v) and samples i of

    .. math:: \log \sum_k f(z_{iu}, z_{kv}) - \log f(z_{iu}, z_{iv})

    Arguments, result and errors are those of `nt_xent`.
    """
    vectors = unit_views(z, tau, "cmc")
    head = [v / tau for v in vectors], vectors
    return cross_view_loss(head, [head], range(len(z)), 1.0, rows, present) / len(z)


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
    r"""HeroCon's weighted unsupervised loss L_u (KDD 2022, Eq. 5).

    The mean over anchors z_iu and positives z_iv, v != u, of

    .. math:: \log\big(f(z_{iu}, z_{iv}) + \sum_{k \ne i} \sum_j g\, f(z_{iu}, z_{kj})\big)
              - \log f(z_{iu}, z_{iv})

    with f = exp(cos / tau) and the learnt weight of a negative
    g = 1/2 [exp(1 - cos(z_iu, H(z_kj))) + exp(1 - cos(z_kj, H(z_iu)))]: close samples, which may
    be false negatives, are pushed less. Gradients flow through g.

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
    vectors = unit_views(z, tau, "weighted_unsupervised")
    weights = [unit(weight).to(vectors[0].dtype) for weight in h]
    p = [v / tau - weight for v, weight in zip(vectors, weights, strict=True)]
    views = range(1 if anchors == "first" else len(z))
    heads: list[Head] = [(vectors, p), (p, vectors)]
    if negatives == "all_views":
        return all_views_loss(vectors, heads, views, tau, math.e / 2, rows, present) / len(views)
    attraction = [v / tau for v in vectors], vectors
    return cross_view_loss(attraction, heads, views, math.e / 2, rows, present) / len(views)


def input_weighted_unsupervised(
    z: Sequence[Float[Tensor, "batch dim"]],
    x: Sequence[Float[Tensor, "batch _"]],
    *,
    tau: float = 1.0,
    anchors: Anchors = "all",
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    r"""HCL's weighted unsupervised loss (2021, Eq. 4): L_u with weights from the raw inputs.

    As `weighted_unsupervised` with g = exp(1 - cos(x_iu, x_kj)); where the widths of views j and u
    differ, x_ku replaces x_kj. g f = e exp(z_i . z_k / tau - x_i . x_k) is one product of
    concatenated vectors.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        x: raw inputs, one tensor [batch, width of the view] a view; no gradient is taken.
        tau: temperature, > 0.
        anchors: `all` views are anchors, or the `first` only.
        rows: as in `nt_xent`.

    Raises:
        ValueError: fewer than two views, or tau <= 0.
    """
    vectors = unit_views(z, tau, "input_weighted_unsupervised")
    inputs = [unit(view.detach().flatten(1)).to(vectors[0].dtype) for view in x]
    views = range(1 if anchors == "first" else len(z))
    # If all views have one width, the inputs that weight a pair do not depend on the anchor's view.
    same_width = len({view.shape for view in inputs}) == 1
    shares = []
    for anchor_views in [views] if same_width else [[u] for u in views]:
        first = inputs[anchor_views[0]]
        weights = [own if own.shape == first.shape else first for own in inputs]
        anchor_side = [torch.cat([v / tau, -w], 1) for v, w in zip(vectors, weights, strict=True)]
        key_side = [torch.cat(pair, 1) for pair in zip(vectors, weights, strict=True)]
        head = anchor_side, key_side
        shares.append(all_views_loss(vectors, [head], anchor_views, tau, math.e, rows))
    return torch.stack(shares).sum() / len(views)
