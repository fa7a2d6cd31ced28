"""CLIP's and SigLIP's losses: rows of two views are matched, at a learnt temperature."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import softplus

from heron.base.sections import Positive
from heron.distributed.derivatives import first_derivative
from heron.losses.batch import GlobalBatch
from heron.losses.engine import Rule, RuleResult, blockwise, unit, working_dtype
from heron.losses.families import ProjectionLoss
from heron.losses.loss import projection_spec
from heron.losses.own_positives import cross_view_loss
from heron.losses.pairs import OwnRows, Present, Rows, as_slice, join_views, rows_of_views
from heron.losses.terms import Needs, Temperature
from heron.models.heterogeneous import Encoded, Features, ModelSpec

MAX_SCALE = 100.0  # CLIP's bound on the factor of cosines
PAPER_BIAS = -10.0  # SigLIP's initial bias, used where the batch size is not known


class _BoundedExp(torch.autograd.Function):
    """exp, at most `MAX_SCALE`, with the gradient of an exp.

    With that of clamp, 0, a scale that once exceeded the bound would never come back.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, log_scale: Tensor) -> Tensor:
        scale = log_scale.clamp(max=math.log(MAX_SCALE)).exp()
        ctx.save_for_backward(scale)
        return scale

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        (scale,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0].mul(scale)


class LearntScale(nn.Module):
    """The learnt factor of cosines, exp(log_scale), at most 100; for SigLIP with a bias."""

    def __init__(self, term: str, scale: float, bias: float | None = None) -> None:
        """Starts at a scale, and at a bias if one is given; feature names begin with `term`."""
        super().__init__()
        self.term = term
        self.log_scale = nn.Parameter(torch.tensor([math.log(scale)]))
        if bias is not None:
            self.bias = nn.Parameter(torch.tensor([bias]))

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `TERM_scale` and `TERM_bias`, if any, the same for every row: [rows]."""
        rows = encoded.rng_keys.shape[0]
        scale: Tensor = _BoundedExp.apply(self.log_scale)  # type: ignore[no-untyped-call]
        features = {f"{self.term}_scale": [scale.expand(rows)]}
        if hasattr(self, "bias"):
            features[f"{self.term}_bias"] = [self.bias.expand(rows)]
        return features


class Clip(ProjectionLoss):
    r"""CLIP's loss (Radford et al. 2021, Fig. 3), with a learnt scale s, for two views or more.

    The mean over ordered pairs of views (u, v) and samples i of

    .. math:: \log \sum_k e^{s \cos(z_{iu}, z_{kv})} - s \cos(z_{iu}, z_{iv})

    where :math:`s \le 100` is the exponential of a parameter of this module.
    """

    needs = Needs(vectors=("projections",), own=("clip_scale",), views=2)
    missing_views = True
    repels_all = True

    def __init__(self, *, tau: Temperature = 0.07, gather: bool = True) -> None:
        """Builds the scale.

        Args:
            tau: initial temperature 1 / s, at least 0.003; it is learnt, and stays at least 0.01.
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.tau = tau
        self.build_own_parts(projection_spec(1))

    def build_parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns the module that learns the temperature."""
        return {"clip_scale": lambda: LearntScale("clip", 1 / self.tau)}

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `clip` of this process's anchors."""
        z, scale = batch.vectors["projections"], batch.own["clip_scale"][0]
        return clip(z, scale, rows=batch.own_rows, present=batch.present)


class Siglip(ProjectionLoss):
    r"""SigLIP's loss (Zhai et al. 2023, Eq. 1), with learnt s and b, for two views or more.

    The mean over pairs of views u < v of

    .. math:: \frac{1}{B} \sum_i \sum_k \log\big(1 + e^{-y_{ik} (s \cos(z_{iu}, z_{kv}) + b)}\big)

    with B samples, :math:`s \le 100`, and y = 1 if i = k, else -1.
    """

    needs = Needs(vectors=("projections",), own=("siglip_scale", "siglip_bias"), views=2)
    missing_views = True

    def __init__(
        self, *, scale: Positive = 10.0, bias: float | None = None, gather: bool = True
    ) -> None:
        """Builds the scale and the bias.

        Args:
            scale: initial factor s of cosines; it is learnt, and at most 100.
            bias: initial b; it is learnt. None: -log(B - 1) in a run with global batches of B
                rows, the log-odds that a pair is of one row; elsewhere the paper's -10, for its
                32,768. Far below -log(B - 1) only the pairs of a row are learnt, and all
                projections become equal.
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.scale, self.bias = scale, bias
        self.build_own_parts(projection_spec(1))

    def build_parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns the module that learns scale and bias."""
        bias = self.bias
        if bias is None:
            bias = -math.log(max(spec.batch - 1, 1)) if spec.batch else PAPER_BIAS
        return {"siglip_scale": lambda: LearntScale("siglip", self.scale, bias)}

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `siglip` of this process's pairs."""
        scale, bias = batch.own["siglip_scale"][0], batch.own["siglip_bias"][0]
        z = batch.vectors["projections"]
        return siglip(z, scale, bias, rows=batch.own_rows, present=batch.present)


def clip(
    z: Sequence[Float[Tensor, "batch dim"]],
    scale: Float[Tensor, " own"],
    *,
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    """CLIP's loss (Radford et al. 2021, Fig. 3), for any number of views: the equation of `Clip`.

    It is CMC's at the temperature 1 / s. Exponentials are taken in float64, as s may grow to 100.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        scale: s of each row in `rows`; with `OwnRows` it must be the same for all rows.
        rows: as in `nt_xent`.
        present: which views each row has: i and k run over rows with both views and with v, and
            the mean over the (i, u, v) that exist.

    Raises:
        ValueError: fewer than two views.
    """
    vectors = _unit_views(z, "clip", working_dtype(z[0].dtype, 1 / MAX_SCALE))
    own, batch = as_slice(rows), vectors.shape[1]
    start, stop, _ = own.indices(batch)
    one_scale = (start, stop) == (0, batch) and batch > 0 and scale.stride() == (0,)
    mirrored = one_scale or isinstance(rows, OwnRows)
    scale = (scale[:1] if one_scale else scale).to(vectors.dtype)
    # With the root of the scale on either side, transposed logits have the same scale.
    if isinstance(rows, OwnRows):
        all_scales = rows.gather(scale.detach().expand(stop - start))
        scale = torch.cat([all_scales[:start], scale, all_scales[stop:]])
    if mirrored:
        scaled = vectors * scale.sqrt()[:, None]
        head = scaled, scaled
    else:
        scale = torch.nn.functional.pad(scale, (start, batch - stop), value=1.0)
        head = vectors * scale[:, None], vectors
    return cross_view_loss(head, [head], range(len(z)), 1.0, rows, present, mirrored)


def siglip(
    z: Sequence[Float[Tensor, "batch dim"]],
    scale: Float[Tensor, " own"],
    bias: Float[Tensor, " own"],
    *,
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    """SigLIP's loss (Zhai et al. 2023, Eq. 1), for any number of views: the equation of `Siglip`.

    Result and errors are those of `clip`. Where rows lack views, i runs over the rows with u and k
    over those with v, and the sum over all pairs of views is divided by the number of their (i, u).

    Args:
        z: as in `clip`.
        scale: s of each row in `rows`.
        bias: b of each row in `rows`.
        rows: as in `nt_xent`.
        present: which views each row has.
    """
    vectors = _unit_views(z, "siglip", working_dtype(z[0].dtype, 1.0))
    count, batch = vectors.shape[:2]
    own, dtype = as_slice(rows), vectors.dtype
    mean = 2 / (max(batch, 1) * count * (count - 1))
    if present is not None:
        mean = 1 / max(sum(int(present[:, u].sum()) * (count - 1 - u) for u in range(count)), 1)

    def share(
        anchor_rows: slice, key_rows: slice, scale: Tensor, bias: Tensor, vectors: Sides
    ) -> Tensor:
        """Returns the loss of the pairs of some rows' anchors and some rows' keys."""
        key_range = range(batch)[key_rows]
        losses = [bias.sum() * 0]
        for u in range(count):
            anchors = vectors[0][u] * scale[:, None]
            has_anchor = slice(None) if present is None else present[anchor_rows, u]
            for v in range(u + 1, count):
                positions = torch.arange(batch, device=anchors.device)
                is_key = (positions >= key_range.start) & (positions < key_range.stop)
                if present is not None:
                    is_key &= present[:, v]
                positions = torch.where(is_key, is_key.cumsum(0) - 1, -1)
                key_present = None if present is None else present[key_rows]
                keys = join_views(vectors[1], key_present, view_numbers=[v])
                rule = _sigmoid_rule(positions[anchor_rows][has_anchor], mean)
                losses.append(blockwise(rule, [anchors[has_anchor]], [keys], [bias[has_anchor]]))
        return torch.stack(losses).sum()

    scale, bias = scale.to(dtype), bias.to(dtype)
    all_rows, own_vectors = slice(None), rows_of_views(vectors, own)
    if not isinstance(rows, OwnRows):
        return share(own, all_rows, scale, bias, (own_vectors, vectors)).to(bias.dtype)
    all_scales, all_biases = rows.gather(torch.stack([scale, bias], 1).detach()).unbind(1)
    constant = vectors.detach()
    loss = share(own, all_rows, scale, bias, (own_vectors, constant))
    # `as_keys` adds the own keys' gradient, but no value.
    as_keys = share(all_rows, own, all_scales, all_biases, (constant, own_vectors))
    return loss + as_keys - as_keys.detach()


Sides = tuple[Tensor, Tensor]  # the views of the anchors, and of the keys


def _sigmoid_rule(positives: Tensor, mean: float) -> Rule:
    """Returns SigLIP's rule for anchors whose rows' keys lie at `positives`; -1 means no key."""

    def negate(x: Tensor, positive: Tensor) -> None:
        """Negates each row's element for its positive; without keys there is none."""
        if not x.shape[1]:
            return
        place, exists = positive.clamp(min=0)[:, None], positive[:, None] >= 0
        own = x.gather(1, place)
        x.scatter_(1, place, torch.where(exists, -own, own))

    def rule(strip: slice, logits: Sequence[Tensor], per_anchor: Sequence[Tensor]) -> RuleResult:
        negated = logits[0].add_(per_anchor[0][:, None])  # -y (s cos + b)
        negate(negated, positives[strip])
        loss = softplus(negated).sum() * mean
        d_logits = negated.sigmoid_().mul_(mean)
        negate(d_logits, positives[strip])
        return loss, [d_logits], [d_logits.sum(1)]

    return rule


def _unit_views(z: Sequence[Tensor], term: str, dtype: torch.dtype) -> Tensor:
    if len(z) < 2:
        raise ValueError(f"{term} needs at least 2 views, such as picture and text, got {len(z)}")
    return unit(torch.stack(list(z))).to(dtype)
