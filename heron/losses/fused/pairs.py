"""The attraction of pairs that share a label: HeroCon's L_s, and losses over classes."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int32, Num
from torch import Tensor
from torch.autograd.function import FunctionCtx

from heron.distributed.derivatives import first_derivative
from heron.losses.fused import layout
from heron.losses.fused.labels import Sides
from heron.losses.fused.layout import Precision


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
    r"""Computes the loss of pairs that share a label, as in HeroCon's L_s (KDD 2022, Eq. 7).

    .. math:: \sum_i \sum_a w_a y_{ia} \sum_{j \ne i} y_{ja}\,
              softplus(\log D_{ia} - l_{ij} - \log\sigma_{ij})

    The loss is float32, differentiable once with respect to anchors, keys and log_total. Only the
    sum_a |P(a)|^2 pairs inside P(a) are visited, label by label, which saves logarithms (with 40
    labels of which a row has 9, about 4 a pair instead of 40). A visited pair takes one product, or
    four with the gradient, which is computed with the loss; `hamming` takes one product of labels
    more. Until it is added up, the gradient takes (labels of a row) x dim float32 per row.

    Anchors have 1 / tau inside. Where `log_total`, log D, is -inf, the loss and all gradients are
    0. Labels are 0 or 1, with `hamming` at most 128 of them; no gradient flows to w. The key
    `anchor_number` is the anchor itself, which is no pair; -1 for none. With `hamming`,
    sigma = 1 - hamming / labels; otherwise it is 1. For `precision` see `exponential_sums`.

    Raises:
        ValueError: widths differ or exceed 512, an unknown distance, or too many labels.
        TypeError: the vectors are float64.
        TrainingError: there is no suitable GPU, or no Triton.
    """
    layout.check_vectors(anchors, keys)
    precision = layout.choose_precision(precision, anchors, keys)
    if distance not in ("hamming", "indicator", "none"):
        raise ValueError(f"distance must be hamming, indicator or none, got {distance!r}")
    sides = Sides.of(anchor_y, key_y, precision) if distance == "hamming" else None
    entries = _Entries.by_label(anchor_y)
    job = _Job(
        anchors=entries,
        keys=_Entries.by_label(key_y),
        weight=weight.detach().float()[entries.tag.long()],
        own_key=anchor_number[entries.row.long()],
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
    r"""Computes the loss of pairs of equal tag, for any number of exclusive classes.

    .. math:: \sum_i w_i \sum_{k \ne i,\, t_k = t_i} softplus(\log D_i - l_{ik})

    Rows are visited in the order of their tags, so only tiles with pairs of equal tag are computed:
    one product per pair, or four with a gradient.

    Tags are any int32; no gradient flows to the weights w. For the other arguments, the result and
    the errors see `pair_losses`.
    """
    layout.check_vectors(anchors, keys)
    entries = _Entries.by_tag(anchor_tag)
    job = _Job(
        anchors=entries,
        keys=_Entries.by_tag(key_tag),
        weight=anchor_weight.detach().float()[entries.row.long()],
        own_key=anchor_number[entries.row.long()],
        sides=None,
        labels=1,
        precision=layout.choose_precision(precision, anchors, keys),
    )
    return _apply(anchors, keys, log_total, job)


@dataclass(frozen=True)
class _Entries:
    """One entry for every label of every row, sorted by label.

    An entry has its row and its label, the tag, as int32, and its index in a flat [rows, labels].
    """

    row: Tensor
    tag: Tensor
    flat_index: Tensor

    @classmethod
    def by_label(cls, y: Tensor) -> "_Entries":
        """Builds the entries of a 0/1 matrix; only this waits for the device, to count them."""
        tag, row = (y.T > 0.5).nonzero(as_tuple=True)
        return cls(row.int(), tag.int(), row * y.shape[1] + tag)

    @classmethod
    def by_tag(cls, tag: Tensor) -> "_Entries":
        row = torch.argsort(tag, stable=True)
        return cls(row.int(), tag[row], row)

    def ranges_in(self, others: "_Entries") -> tuple[Tensor, Tensor]:
        """Returns for every entry the first and past-last of `others` with its tag."""
        first = torch.searchsorted(others.tag, self.tag, out_int32=True)
        return first, torch.searchsorted(others.tag, self.tag, right=True, out_int32=True)


@dataclass(frozen=True)
class _Job:
    """The pairs and their weights; `weight` and `own_key` belong to the anchors' entries."""

    anchors: _Entries
    keys: _Entries
    weight: Tensor
    own_key: Tensor
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
    """Forward computes the scalar loss with its gradient, which backward scales."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        anchors: Tensor,
        keys: Tensor,
        log_total: Tensor,
        job: _Job,
        gradient: bool,
    ) -> Tensor:
        total = log_total.detach().float().reshape(-1)[job.anchors.flat_index] * layout.LOG2E
        a, k, power = layout.operands(anchors, keys, job.precision, layout.LOG2E)
        d, room = anchors.shape[1], power
        if len(job.weight):  # keeps the weights of labels or anchors in fp16's range
            room = layout.headroom(job.weight.abs().amax())
        losses, shares, d_anchors = _visit(
            a, k, len(anchors), job, total, -job.weight, gradient, of_anchors=True
        )
        if gradient:
            _, _, d_keys = _visit(
                k, a, len(keys), job, total, -job.weight * room, gradient, of_anchors=False
            )
            d_total = shares.new_zeros(log_total.numel())
            d_total[job.anchors.flat_index] = shares * job.weight
            ctx.save_for_backward(
                (d_anchors * power)[:, :d].to(anchors.dtype),
                (d_keys / (layout.LOG2E * power * room))[:, :d].to(keys.dtype),
                d_total.view_as(log_total).to(log_total.dtype),
            )
        return (losses.double() * job.weight.double()).sum().float()

    @staticmethod
    @first_derivative
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
    """Visits all pairs of entries of equal tag.

    Returns the losses of the anchors' entries, their derivatives by log D, and the gradient of the
    `count` rows of x.
    """
    from heron.losses.fused.pair_kernels import collect_kernel, pair_kernel

    sides = [(job.anchors, job.own_key), (job.keys, job.keys.row)]
    (x_entries, own_x), (y_entries, own_y) = sides if of_anchors else sides[::-1]
    n, m, d = len(x_entries.row), len(y_entries.row), x.shape[1]
    kind: layout.Kind = "pair" if job.sides is None else "label_pair"
    tile, out = layout.choose_tile(kind, job.precision, d), min(d, layout.WIDEST_SLICE)
    row_grads = x.new_zeros(count, d, dtype=torch.float32)
    if n == 0 or m == 0:
        return *x.new_zeros(2, n, dtype=torch.float32), row_grads
    labels: tuple[Tensor | None, ...] = (None,) * 4
    if job.sides is not None:
        labels = job.sides.anchor, job.sides.key, job.sides.anchor_size, job.sides.key_size
        if not of_anchors:
            labels = labels[1], labels[0], labels[3], labels[2]
    sizes = (tile.rows, tile.columns)
    tag_ranges, own_ranges = (
        [layout.tile_ranges(t, s) for t, s in zip(pair, sizes, strict=True)]
        for pair in ((x_entries.tag, y_entries.tag), (own_x, own_y))
    )
    first, last = x_entries.ranges_in(y_entries)
    losses, shares = x.new_zeros(2, n, dtype=torch.float32)

    def chain(link: int) -> Tensor:
        entry_grads = x.new_empty(n if gradient else 0, d, dtype=torch.float32)
        layout.launch(
            pair_kernel, (-(-n // tile.rows), d // out if gradient else 1), tile, x,
            x, y, x_entries.row, y_entries.row, x_entries.tag, y_entries.tag, own_x, own_y,
            *tag_ranges, *own_ranges,
            first, last, *labels, total, weight, losses, shares, entry_grads, n, m, link,
            float(job.labels),
            D=d, OUT=out, ROWS=tile.rows, COLUMNS=tile.columns, CHAIN=layout.CHAIN,
            WIDTH=0 if job.sides is None else job.sides.key.shape[1],
            HAMMING=job.sides is not None, ROWS_ARE_ANCHORS=of_anchors, GRADIENT=gradient,
        )  # fmt: skip
        return entry_grads

    links = 1
    if m > layout.CHAIN:  # then a block may visit more entries than a chain has
        ends = torch.arange(tile.rows - 1, n + tile.rows - 1, tile.rows, device=x.device)
        visits = last[ends.clamp(max=n - 1)] - first[:: tile.rows]
        links = int(visits.max() + tile.columns - 1) // layout.CHAIN + 1
    entry_grads = layout.sum_in_place(chain(link) for link in range(links))
    if gradient:
        entry_of = torch.full((count * job.labels,), -1, dtype=torch.int32, device=x.device)
        entry_of[x_entries.flat_index] = torch.arange(n, dtype=torch.int32, device=x.device)
        tile = layout.COLLECT
        layout.launch(
            collect_kernel, (-(-count // tile.rows),), tile, x,
            entry_grads, entry_of, row_grads, count, job.labels, D=d, ROWS=tile.rows,
        )  # fmt: skip
    return losses, shares, row_grads
