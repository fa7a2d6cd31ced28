"""Unsupervised contrastive terms: views of a sample attract, other samples repel."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heron.pipeline.config.terms import Needs, Temperature, Term
from heron.pipeline.models.heterogeneous import Encoded, Features, ModelSpec
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.engine import unit
from heron.pipeline.objectives.own_positives import Head, cross_view, own_excluded, unit_views
from heron.pipeline.objectives.present import Present, Rows

Anchors = Literal["first", "all"]
Negatives = Literal["all_views", "cross_view"]


class NtXent(Term):
    """SimCLR's NT-Xent: InfoNCE, UCL."""

    tau: Temperature = 0.5

    needs: ClassVar[Needs] = Needs(vectors=("projections",), views=2)
    repels_all: ClassVar[bool] = True
    rings: ClassVar[bool] = True
    missing_views: ClassVar[bool] = True

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """The slope by an anchor's sum."""
        return [len(shapes)]

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `nt_xent`."""
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
    rings: ClassVar[bool] = True
    negatives: ClassVar[Negatives] = "cross_view"
    missing_views: ClassVar[bool] = True

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """The slopes by the sums of either view, of two at a time."""
        return [2] * len(couples(len(shapes), 0))

    def ring_widths(self, views: int, widths: Mapping[str, int]) -> list[int]:
        """Of two views at a time, there and back."""
        return couples(views, widths["projections"]) * 2

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `cmc`."""
        z = batch.vectors["projections"]
        return cmc(z, tau=self.tau, rows=batch.own_rows, present=batch.present)


class WeightNet(nn.Sequential):
    """HeroCon's H, which learns the weight of a negative: H(z) of each view's z."""

    def __init__(self, width: int) -> None:
        """One layer of the width of z."""
        super().__init__(nn.Linear(width, width), nn.Sigmoid())

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `weights`, H(z) of each view."""
        return {"weights": [self(z) for z in encoded.projections]}


class WeightedUnsupervised(Term):
    """HeroCon's L_u, Eq. 5."""

    tau: Temperature = 1.0
    anchors: Anchors = "all"
    negatives: Negatives = "all_views"

    needs: ClassVar[Needs] = Needs(vectors=("projections", "weights"), views=2)
    nested: ClassVar[tuple[str, ...] | None] = ("projections", "weights")
    repels_all: ClassVar[bool] = True
    rings: ClassVar[bool] = True
    missing_views: ClassVar[bool] = True

    def parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Brings H."""
        return {"weight": lambda: WeightNet(spec.config.projection_width)}

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """As `NtXent`, or as `Cmc`."""
        return (
            [len(shapes)] if self.negatives == "all_views" else [2] * len(couples(len(shapes), 0))
        )

    def ring_widths(self, views: int, widths: Mapping[str, int]) -> list[int]:
        """As `NtXent`, or as `Cmc`, of two vectors a view."""
        both = widths["projections"] + widths["weights"]
        return ([both] if self.negatives == "all_views" else couples(views, both)) * 2

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `weighted_unsupervised`."""
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

    # Inputs take no gradient, so nothing is sent back for them; as vectors they would be rounded.
    needs: ClassVar[Needs] = Needs(gathered=("inputs",), vectors=("projections",), views=2)
    repels_all: ClassVar[bool] = True

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """The slope by an anchor's sum; where widths differ, for each view of anchors."""
        alike = len({math.prod(shape) for shape in shapes}) == 1
        return [len(shapes)] * (1 if alike or self.anchors == "first" else len(shapes))

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `input_weighted_unsupervised`."""
        inputs, z = batch.gathered["inputs"], batch.vectors["projections"]
        return input_weighted_unsupervised(
            z, inputs, tau=self.tau, anchors=self.anchors, rows=batch.own_rows
        )


def couples(views: int, width: int) -> list[int]:
    """Numbers a row of each two of so many views, of equal width, which are `width` in all."""
    return [2 * width // views] * (views * (views - 1) // 2)


def nt_xent(
    z: Sequence[Float[Tensor, "held dim"]],
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
            the whole batch, so that the shares of all processes add up to the loss. Of `OwnRows`
            the gradient is that of the whole loss, with respect to these rows alone; where they
            have a ring, vectors are of these rows alone, too.
        present: which views each sample has: i, u, v and k, j run over these, and the mean over
            the pairs that there are.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: fewer than two views, or tau <= 0.
    """
    vectors = unit_views(z, tau, "nt_xent")
    head = [v / tau for v in vectors], vectors
    return own_excluded(vectors, [head], range(len(z)), tau, 1.0, rows, present) / len(z)


def cmc(
    z: Sequence[Float[Tensor, "held dim"]],
    *,
    tau: float = 0.5,
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    r"""Contrastive multiview coding (Tian et al. 2020, Eq. 3 over all pairs of views).

    The mean over ordered pairs of views (u, v) and samples i of

    .. math:: \log \sum_k f(z_{iu}, z_{kv}) - \log f(z_{iu}, z_{iv})

    See `nt_xent` for the arguments, the result and the errors.
    """
    vectors = unit_views(z, tau, "cmc")
    head = [v / tau for v in vectors], vectors
    return cross_view(head, [head], range(len(z)), 1.0, rows, present) / len(z)


def weighted_unsupervised(
    z: Sequence[Float[Tensor, "held dim"]],
    h: Sequence[Float[Tensor, "held dim"]],
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
    g = 1/2 [exp(1 - cos(z_iu, H(z_kj))) + exp(1 - cos(z_kj, H(z_iu)))]: near samples, which may
    well be false negatives, are pushed less. Gradients flow through g.

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
        rows: see `nt_xent`.
        present: see `nt_xent`.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: fewer than two views, or tau <= 0.
    """
    vectors = unit_views(z, tau, "weighted_unsupervised")
    weights = [unit(weight).to(vectors[0].dtype) for weight in h]
    p = [v / tau - weight for v, weight in zip(vectors, weights, strict=True)]
    among = range(1 if anchors == "first" else len(z))
    heads: list[Head] = [(vectors, p), (p, vectors)]
    if negatives == "all_views":
        return own_excluded(vectors, heads, among, tau, math.e / 2, rows, present) / len(among)
    near = [v / tau for v in vectors]
    return cross_view((near, vectors), heads, among, math.e / 2, rows, present) / len(among)


def input_weighted_unsupervised(
    z: Sequence[Float[Tensor, "held dim"]],
    x: Sequence[Float[Tensor, "held _"]],
    *,
    tau: float = 1.0,
    anchors: Anchors = "all",
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    r"""HCL's weighted unsupervised loss (2021, Eq. 4): L_u with weights from the raw inputs.

    As `weighted_unsupervised` with g = exp(1 - cos(x_iu, x_kj)); where view j is of another width
    than view u, x_ku stands for x_kj. g f = e exp(z_i . z_k / tau - x_i . x_k) is one product of
    the two vectors side by side.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        x: raw inputs, one tensor [batch, width of the view] a view; no gradient is taken.
        tau: temperature, > 0.
        anchors: `all` views are anchors, or the `first` only.
        rows: see `nt_xent`.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: fewer than two views, or tau <= 0.
    """
    vectors = unit_views(z, tau, "input_weighted_unsupervised")
    raw = [unit(view.detach().flatten(1)).to(vectors[0].dtype) for view in x]
    among = range(1 if anchors == "first" else len(z))
    # Views of one width are weighed by the same inputs whichever of them has the anchor.
    alike = len({view.shape for view in raw}) == 1
    shares = []
    for some in [among] if alike else [[u] for u in among]:
        beside = [own if own.shape == raw[some[0]].shape else raw[some[0]] for own in raw]
        near = [torch.cat([v / tau, -own], 1) for v, own in zip(vectors, beside, strict=True)]
        far = [torch.cat(pair, 1) for pair in zip(vectors, beside, strict=True)]
        shares.append(own_excluded(vectors, [(near, far)], some, tau, math.e, rows))
    return torch.stack(shares).sum() / len(among)
