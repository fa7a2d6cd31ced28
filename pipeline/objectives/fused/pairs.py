"""The attraction of pairs that share a label: HeroCon's L_s, and any loss over classes."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int32, Num
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from heron.pipeline.objectives.fused import layout
from heron.pipeline.objectives.fused.labels import Sides
from heron.pipeline.objectives.fused.layout import Precision


def pair_losses(
    anchors: Float[Tensor, "anchors dim"],
    keys: Float[Tensor, "keys dim"],
    log_total: Float[Tensor, "anchors labels"],
    anchor_y: Num[Tensor, "anchors labels"],
    key_y: Num[Tensor, "keys labels"],
    weight: Float[Tensor, " labels"],
    anchor_number: Int32[Tensor, " anchors"],
    distance: Literal["hamming", "indicator", "none"],
    precision: Precision | None = None,
) -> Float[Tensor, ""]:
    r"""The loss of the pairs that share a label, as in HeroCon's L_s (KDD 2022, Eq. 7).

    .. math:: \sum_i \sum_a w_a y_{ia} \sum_{j \ne i} y_{ja}\,
              softplus(\log D_{ia} - l_{ij} - \log\sigma_{ij})

    Only the pairs inside P(a) are visited, label by label: sum_a |P(a)|^2 tiles' worth, which is
    less than a visit of all pairs with a loop over c labels whenever the logarithms cost more than
    the products (with 40 labels of which a row has 9, about 4 logarithms a pair instead of 40). A
    visited pair takes four products when a gradient is wanted, which is made with the loss, else
    one; with `hamming` one of the labels more for each visit. The gradient is held once for every
    label of every row before it is added up: (labels of a row) x dim float32 a row.

    Args:
        anchors: with 1 / tau already inside.
        keys: vectors of the same width.
        log_total: log D; where it is -inf the loss is 0 and so is every gradient.
        anchor_y: 0 or 1; with `hamming` at most 128 labels.
        key_y: 0 or 1.
        weight: w, of a label; no gradient.
        anchor_number: the key that is the anchor itself, which is no pair; -1 for none.
        distance: `hamming`: sigma = 1 - hamming / labels; `indicator` and `none`: sigma = 1.
        precision: of the products; see `exponential_sums`.

    Returns:
        float32, differentiable once with respect to anchors, keys and log_total.

    Raises:
        ValueError: widths that do not agree or above 512, an unknown distance, or too many labels.
        TypeError: float64 vectors.
        TrainingError: no GPU, or no Triton.
    """
    layout.check(anchors, keys)
    precision = layout.choose(precision, anchors, keys)
    if distance not in ("hamming", "indicator", "none"):
        raise ValueError(f"distance is {distance!r}; expected hamming, indicator or none")
    sides = Sides.of(anchor_y, key_y, precision) if distance == "hamming" else None
    own = _Entries.by_label(anchor_y)
    job = _Job(
        anchors=own,
        keys=_Entries.by_label(key_y),
        weight=weight.detach().float()[own.tag.long()],
        own=anchor_number[own.row.long()],
        sides=sides,
        labels=anchor_y.shape[1],
        precision=precision,
    )
    return _apply(anchors, keys, log_total, job)


def tagged_pair_losses(
    anchors: Float[Tensor, "anchors dim"],
    keys: Float[Tensor, "keys dim"],
    log_total: Float[Tensor, " anchors"],
    anchor_tag: Int32[Tensor, " anchors"],
    key_tag: Int32[Tensor, " keys"],
    anchor_number: Int32[Tensor, " anchors"],
    anchor_weight: Float[Tensor, " anchors"],
    precision: Precision | None = None,
) -> Float[Tensor, ""]:
    r"""The loss of the pairs of equal tag, for any number of classes of which a row has one.

    .. math:: \sum_i w_i \sum_{k \ne i,\, t_k = t_i} softplus(\log D_i - l_{ik})

    Rows are visited in the order of their tags, so the work is that of the pairs that count, in
    tiles: four products a visited pair when a gradient is wanted, else one.

    Args:
        anchors: with 1 / tau already inside.
        keys: vectors of the same width.
        log_total: log D; where it is -inf the loss is 0 and so is every gradient.
        anchor_tag: any int32.
        key_tag: any int32.
        anchor_number: the key that is the anchor itself, which is no pair; -1 for none.
        anchor_weight: w; no gradient.
        precision: of the products; see `exponential_sums`.

    Returns:
        float32, differentiable once with respect to anchors, keys and log_total.

    Raises:
        ValueError: widths that do not agree or above 512.
        TypeError: float64 vectors.
        TrainingError: no GPU, or no Triton.
    """
    layout.check(anchors, keys)
    own = _Entries.by_tag(anchor_tag)
    job = _Job(
        anchors=own,
        keys=_Entries.by_tag(key_tag),
        weight=anchor_weight.detach().float()[own.row.long()],
        own=anchor_number[own.row.long()],
        sides=None,
        labels=1,
        precision=layout.choose(precision, anchors, keys),
    )
    return _apply(anchors, keys, log_total, job)


@dataclass(frozen=True)
class _Entries:
    """One entry for every label of every row, sorted by label.

    Attributes:
        row: int32.
        tag: int32, ascending.
        place: in a flat [rows, labels], of what belongs to the entry.
    """

    row: Tensor
    tag: Tensor
    place: Tensor

    @classmethod
    def by_label(cls, y: Tensor) -> "_Entries":
        """Of a 0/1 matrix; the one place that waits for the device, to know how many there are."""
        tag, row = (y.T > 0.5).nonzero(as_tuple=True)
        return cls(row.int(), tag.int(), row * y.shape[1] + tag)

    @classmethod
    def by_tag(cls, tag: Tensor) -> "_Entries":
        """Of a tag for every row."""
        row = torch.argsort(tag, stable=True)
        return cls(row.int(), tag[row], row)

    def among(self, others: "_Entries") -> tuple[Tensor, Tensor]:
        """For every entry, the first and the past-last of the others with its tag."""
        first, last = (
            torch.searchsorted(others.tag, self.tag, right=right, out_int32=True)
            for right in (False, True)
        )
        return first, last


@dataclass(frozen=True)
class _Job:
    """The pairs and what they weigh; weight and own belong to the anchors' entries."""

    anchors: _Entries
    keys: _Entries
    weight: Tensor
    own: Tensor
    sides: Sides | None
    labels: int
    precision: Precision


def _apply(anchors: Tensor, keys: Tensor, log_total: Tensor, job: _Job) -> Tensor:
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (anchors, keys, log_total))
    loss: Tensor = _PairLosses.apply(  # type: ignore[no-untyped-call]
        anchors, keys, log_total, job, gradient
    )
    return loss


class _PairLosses(torch.autograd.Function):
    """The loss is a scalar: forward makes its gradient along with it, backward scales that."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        anchors: Tensor,
        keys: Tensor,
        log_total: Tensor,
        job: _Job,
        gradient: bool,
    ) -> Tensor:
        total = log_total.detach().float().reshape(-1)[job.anchors.place] * layout.LOG2E
        a, k, power = layout.operands(anchors, keys, job.precision, layout.LOG2E)
        d, room = anchors.shape[1], power
        if len(job.weight):  # the largest, of a label or an anchor, leaves fp16 its range
            room = layout.headroom(job.weight.abs().amax())
        options = len(anchors), job, total
        losses, shares, d_anchors = _visit(a, k, *options, -job.weight, gradient, of_anchors=True)
        if gradient:
            options = len(keys), job, total
            _, _, d_keys = _visit(k, a, *options, -job.weight * room, gradient, of_anchors=False)
            d_total = shares.new_zeros(log_total.numel())
            d_total[job.anchors.place] = shares * job.weight
            ctx.save_for_backward(
                (d_anchors * power)[:, :d].to(anchors.dtype),
                (d_keys / (layout.LOG2E * power * room))[:, :d].to(keys.dtype),
                d_total.view_as(log_total).to(log_total.dtype),
            )
        return (losses.double() * job.weight.double()).sum().float()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        return *((grad * x).to(x.dtype) for x in saved), None, None


def _visit(
    x: Tensor,
    y: Tensor,
    count: int,
    job: _Job,
    total: Tensor,
    weight: Tensor,
    gradient: bool,
    *,
    of_anchors: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and shares of the anchors' entries, the gradient of the `count` rows of x."""
    from heron.pipeline.objectives.fused.pair_kernels import collect_kernel, pair_kernel

    sides = [(job.anchors, job.own), (job.keys, job.keys.row)]
    (own, x_own), (others, y_own) = sides if of_anchors else sides[::-1]
    n, m, d = len(own.row), len(others.row), x.shape[1]
    kind: layout.Kind = "pair" if job.sides is None else "label_pair"
    cut, out = layout.blocks(kind, job.precision, d), min(d, layout.WIDEST_PART)
    of_rows = x.new_zeros(count, d, dtype=torch.float32)
    if n == 0 or m == 0:
        return *x.new_zeros(2, n, dtype=torch.float32), of_rows
    labels: tuple[Tensor | None, ...] = (None,) * 4
    if job.sides is not None:
        labels = job.sides.anchor, job.sides.key, job.sides.anchor_size, job.sides.key_size
        if not of_anchors:
            labels = labels[1], labels[0], labels[3], labels[2]
    sizes = (cut.rows, cut.columns)
    tags, owns = (
        [layout.ranges(t, s) for t, s in zip(pair, sizes, strict=True)]
        for pair in ((own.tag, others.tag), (x_own, y_own))
    )
    first, last = own.among(others)
    losses, shares = x.new_zeros(2, n, dtype=torch.float32)

    def chain(link: int) -> Tensor:
        of_entries = x.new_empty(n if gradient else 0, d, dtype=torch.float32)
        layout.launch(
            pair_kernel, (-(-n // cut.rows), d // out if gradient else 1), cut, x,
            x, y, own.row, others.row, own.tag, others.tag, x_own, y_own, *tags, *owns,
            first, last, *labels, total, weight, losses, shares, of_entries, n, m, link,
            float(job.labels),
            D=d, OUT=out, ROWS=cut.rows, COLUMNS=cut.columns, CHAIN=layout.CHAIN,
            WIDTH=0 if job.sides is None else job.sides.key.shape[1],
            HAMMING=job.sides is not None, ROWS_ARE_ANCHORS=of_anchors, GRADIENT=gradient,
        )  # fmt: skip
        return of_entries

    links = 1
    if m > layout.CHAIN:  # of the entries that a block visits
        ends = torch.arange(cut.rows - 1, n + cut.rows - 1, cut.rows, device=x.device)
        visits = last[ends.clamp(max=n - 1)] - first[:: cut.rows]
        links = int(visits.max() + cut.columns - 1) // layout.CHAIN + 1
    of_entries = layout.total(chain(link) for link in range(links))
    if gradient:
        place = torch.full((count * job.labels,), -1, dtype=torch.int32, device=x.device)
        place[own.place] = torch.arange(n, dtype=torch.int32, device=x.device)
        cut = layout.COLLECT
        layout.launch(
            collect_kernel, (-(-count // cut.rows),), cut, x,
            of_entries, place, of_rows, count, job.labels, D=d, ROWS=cut.rows,
        )  # fmt: skip
    return losses, shares, of_rows
