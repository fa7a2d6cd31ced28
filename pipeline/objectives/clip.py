"""CLIP's and SigLIP's losses: rows of two views are matched, at a learnt temperature."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from heron.pipeline.config.sections import Positive
from heron.pipeline.config.terms import Needs, Temperature, Term
from heron.pipeline.models.heterogeneous import Encoded, Features, ModelSpec
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.engine import Rule, RuleResult, blockwise, unit, working_dtype
from heron.pipeline.objectives.own_positives import cross_view_loss
from heron.pipeline.objectives.present import OwnRows, Present, Rows, as_slice, join_views
from heron.pipeline.objectives.ring import Block, blocks, over_blocks, ring_of, row_count
from heron.pipeline.objectives.unsupervised import pair_widths

MOST = 100.0  # times a cosine: CLIP's bound
PAPERS_BIAS = -10.0  # SigLIP's at the start, where the batch is not known


class LearntScale(nn.Module):
    """The learnt factor of cosines, exp(log_scale), at most 100; SigLIP's has a bias too."""

    def __init__(self, term: str, scale: float, bias: float | None = None) -> None:
        """Begins at a scale, and a bias if there is to be one; names begin with `term`."""
        super().__init__()
        self.term = term
        self.log_scale = nn.Parameter(torch.tensor([math.log(scale)]))
        if bias is not None:
            self.bias = nn.Parameter(torch.tensor([bias]))

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `TERM_scale`, and `TERM_bias`, the same for each row: [rows]."""
        rows = encoded.rng_keys.shape[0]
        # What is above the bound is taken off as a number: clamp's gradient is 0 there, and a scale
        # that is once above would stay there for good.
        above = (self.log_scale.detach() - math.log(MOST)).clamp(min=0)
        found = {f"{self.term}_scale": [(self.log_scale - above).exp().expand(rows)]}
        if hasattr(self, "bias"):
            found[f"{self.term}_bias"] = [self.bias.expand(rows)]
        return found


class Clip(Term):
    """CLIP's loss.

    Attributes:
        tau: temperature at the start; it is learnt, and at least .01.
    """

    tau: Temperature = 0.07

    needs: ClassVar[Needs] = Needs(vectors=("projections",), own=("clip_scale",), views=2)
    rings: ClassVar[bool] = True
    missing_views: ClassVar[bool] = True
    repels_all: ClassVar[bool] = True

    def parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Brings the temperature."""
        return {"clip_scale": lambda: LearntScale("clip", 1 / self.tau)}

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """The scale, and the slopes as `Cmc`; in float64."""
        return [2, *[4] * len(pair_widths(len(shapes), 0))]

    def ring_widths(self, views: int, widths: Mapping[str, int]) -> list[int]:
        """As `Cmc`, in float64."""
        return [2 * n for n in pair_widths(views, widths["projections"]) * 2]

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `clip`."""
        z, scale = batch.vectors["projections"], batch.own["clip_scale"][0]
        return clip(z, scale, rows=batch.own_rows, present=batch.present)


class Siglip(Term):
    """SigLIP's loss.

    Attributes:
        scale: of cosines at the start; it is learnt, and at most 100.
        bias: of logits at the start; it is learnt. null: -log(B - 1) for a global batch of B rows,
            the log-odds that a pair is of one row; the paper's is -10, for its 32,768.
    """

    scale: Positive = 10.0
    bias: float | None = None

    needs: ClassVar[Needs] = Needs(
        vectors=("projections",), own=("siglip_scale", "siglip_bias"), views=2
    )
    rings: ClassVar[bool] = True
    missing_views: ClassVar[bool] = True

    def parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Brings scale and bias."""
        bias = self.bias
        if bias is None:
            bias = -math.log(max(spec.batch - 1, 1)) if spec.batch else PAPERS_BIAS
        return {"siglip_scale": lambda: LearntScale("siglip", self.scale, bias)}

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """Scale and bias."""
        return [2]

    def ring_widths(self, views: int, widths: Mapping[str, int]) -> list[int]:
        """Loss and gradient in one round."""
        return [widths["projections"]]

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `siglip`."""
        own = batch.own["siglip_scale"][0], batch.own["siglip_bias"][0]
        z, rows = batch.vectors["projections"], batch.own_rows
        return siglip(z, *own, rows=rows, present=batch.present)


def clip(
    z: Sequence[Float[Tensor, "held dim"]],
    scale: Float[Tensor, " own"],
    *,
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    r"""CLIP's loss (Radford et al. 2021, Fig. 3), for any number of views.

    The mean over ordered pairs of views (u, v) and rows i of

    .. math:: \log \sum_k e^{s \cos(z_{iu}, z_{kv})} - s \cos(z_{iu}, z_{iv})

    It is CMC's at the temperature 1 / s. Exponentials are taken in float64, as s may grow to 100.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        scale: s, of each row in `rows`; of `OwnRows` the same of all.
        rows: as of `nt_xent`.
        present: which views each row has: i and k run over rows with both views and with v, and
            the mean over the (i, u, v) that there are.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: fewer than two views.
    """
    vectors = _views(z, "clip", working_dtype(z[0].dtype, 1 / MOST))
    own, scale = as_slice(rows), scale.to(vectors[0].dtype)
    start, stop, _ = own.indices(len(vectors[0]))
    if ring_of(rows) is not None:
        halves = [v * scale.sqrt()[:, None] for v in vectors]
        head = halves, halves
    elif isinstance(rows, OwnRows):
        # Half of the scale on either side, so that logits turned over have the same.
        others = rows.gather(scale.detach())
        scale = torch.cat([others[:start], scale, others[stop:]]).sqrt()[:, None]
        halves = [v * scale for v in vectors]
        head = halves, halves
    else:
        scale = torch.nn.functional.pad(scale, (start, len(vectors[0]) - stop), value=1.0)
        head = [v * scale[:, None] for v in vectors], vectors
    mirrored = isinstance(rows, OwnRows)
    return cross_view_loss(head, [head], range(len(z)), 1.0, rows, present, mirrored) / len(z)


def siglip(
    z: Sequence[Float[Tensor, "held dim"]],
    scale: Float[Tensor, " own"],
    bias: Float[Tensor, " own"],
    *,
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    r"""SigLIP's loss (Zhai et al. 2023, Eq. 1), for any number of views.

    The mean over pairs of views u < v of

    .. math:: \frac{1}{B} \sum_i \sum_k \log\big(1 + e^{-y_{ik} (s \cos(z_{iu}, z_{kv}) + b)}\big)

    with y = 1 where i = k, else -1. See `clip` for the other arguments, the result and the errors.
    Where rows lack views, i runs over the rows with u and k over those with v, and the sum over all
    pairs of views is divided by the number of their (i, u).

    Args:
        z: as of `clip`.
        scale: s, of each row in `rows`.
        bias: b, likewise.
        rows: as of `clip`.
        present: which views each row has.
    """
    vectors = _views(z, "siglip", working_dtype(z[0].dtype, 1.0))
    batch, count = row_count(rows, vectors[0]), len(vectors)
    own, dtype = as_slice(rows), vectors[0].dtype
    mean = 2 / (max(batch, 1) * count * (count - 1))
    if present is not None:
        mean = 1 / max(sum(int(present[:, u].sum()) * (count - 1 - u) for u in range(count)), 1)

    def share(own: slice, keys: slice, factor: Tensor, offset: Tensor, vectors: Views) -> Tensor:
        """The loss of some rows' anchors with some rows' keys, whose vectors these are."""
        among = range(batch)[keys]
        shares = [offset.sum() * 0]
        for u in range(count):
            anchors = vectors[0][u] * factor[:, None]
            here = slice(None) if present is None else present[own, u]
            for v in range(u + 1, count):
                places = torch.arange(batch, device=anchors.device)
                there = (places >= among.start) & (places < among.stop)
                if present is not None:
                    there &= present[:, v]
                places = torch.where(there, there.cumsum(0) - 1, -1)
                kept = None if present is None else present[keys]
                far = join_views(vectors[1], kept, among=[v])
                rule = _pairwise(places[own][here], mean)
                shares.append(blockwise(rule, [anchors[here]], [far], [offset[here]]))
        return torch.stack(shares).sum()

    scale, bias = scale.to(dtype), bias.to(dtype)
    every = slice(None)
    if not isinstance(rows, OwnRows):
        mine = [x[own] for x in vectors]
        return share(own, every, scale, bias, (mine, vectors)).to(bias.dtype)
    # What own anchors find, and then what the anchors of all find for own keys: its gradient.
    factor, offset = rows.gather(torch.stack([scale, bias], 1).detach()).unbind(1)

    def both(own_ones: Sequence[Tensor], block: Block) -> Tensor:
        *mine, scale, bias = own_ones
        found = share(own, block.rows, scale, bias, (mine, block.keys))
        others = factor[block.rows], offset[block.rows]
        pull = share(block.rows, own, *others, (block.keys, mine))
        return found + pull - pull.detach()

    def around() -> Iterator[Block]:
        return blocks(vectors, rows, [[0]] * count)

    if ring_of(rows) is not None:
        return over_blocks(both, [*vectors, scale, bias], around)
    constant = [view.detach() for view in vectors]
    mine = [x[own] for x in vectors]
    return both([*mine, scale, bias], Block(every, False, constant, []))


Views = tuple[Sequence[Tensor], Sequence[Tensor]]  # on the anchors' side, and on the keys'


def _pairwise(places: Tensor, mean: float) -> Rule:
    """SigLIP's loss of some anchors, whose rows' keys lie at `places`, -1 where there is none."""

    def rule(strip: slice, logits: Sequence[Tensor], per_anchor: Sequence[Tensor]) -> RuleResult:
        wrong = logits[0].add_(per_anchor[0][:, None])  # s cos + b; of a row's own views -(...)
        anchor = (places[strip] >= 0).nonzero()[:, 0]
        own = anchor, places[strip][anchor]
        wrong[own] = -wrong[own]
        loss = softplus(wrong).sum() * mean
        slope = wrong.sigmoid_().mul_(mean)
        slope[own] = -slope[own]
        return loss, [slope], [slope.sum(1)]

    return rule


def _views(z: Sequence[Tensor], term: str, dtype: torch.dtype) -> list[Tensor]:
    """Returns unit vectors of a type."""
    if len(z) < 2:
        raise ValueError(f"{term} has {len(z)} view; expected at least 2, such as picture and text")
    return [unit(view).to(dtype) for view in z]
