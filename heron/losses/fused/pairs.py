"""The attraction of pairs that share a label: HeroCon's L_s, and losses over classes."""

from dataclasses import dataclass
from functools import cached_property
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
    total: Float[Tensor, "anchors labels"],
    anchor_y: Num[Tensor, "anchors labels"],
    key_y: Num[Tensor, "keys labels"],
    weight: Float[Tensor, " labels"],
    anchor_number: Int32[Tensor, " anchors"],
    distance: Literal["hamming", "indicator", "none"],
    precision: Precision | None = None,
    sides: Sides | None = None,
) -> Float[Tensor, ""]:
    r"""Computes the loss of pairs that share a label, as in HeroCon's L_s (KDD 2022, Eq. 7).

    .. math:: \sum_i \sum_a w_a y_{ia} \sum_{j \ne i} y_{ja}\,
              softplus(\log D_{ia} - l_{ij} - \log\sigma_{ij})

    The loss is float32, differentiable once with respect to anchors, keys and D, `total`. Only the
    sum_a |P(a)|^2 pairs inside P(a) are visited, label by label, which saves logarithms (with 40
    labels of which a row has 9, about 4 a pair instead of 40). A visited pair takes one product, or
    four with the gradient, which is computed with the loss; `hamming` takes one product of labels
    more. Until it is added up, the gradient takes (labels of a row) x dim float32 per row.

    Anchors have 1 / tau inside. Where D is 0, the loss and all gradients are
    0. Labels are 0 or 1, with `hamming` at most 128 of them; no gradient flows to w. The key
    `anchor_number` is the anchor itself, which is no pair; -1 for none. With `hamming`,
    sigma = 1 - hamming / labels; otherwise it is 1. For `precision` and `sides` see `label_sums`.

    Raises:
        ValueError: widths differ or exceed 512, an unknown distance, or too many labels.
        TypeError: the vectors are float64.
        TrainingError: there is no suitable GPU, or no Triton.
    """
    layout.check_vectors(anchors, keys)
    precision = layout.choose_precision(precision, anchors, keys)
    if distance not in ("hamming", "indicator", "none"):
        raise ValueError(f"distance must be hamming, indicator or none, got {distance!r}")
    if distance == "hamming" and sides is None:
        sides = Sides.of(anchors, keys, anchor_y, key_y, precision)
    entries = _Entries.by_label(anchor_y)
    job = _Job(
        anchors=entries,
        keys=entries if key_y is anchor_y else _Entries.by_label(key_y),
        weight=weight.detach().float().index_select(0, entries.tag),
        own_key=anchor_number.index_select(0, entries.row),
        vectors=layout.operands(anchors, keys, precision, layout.LOG2E)
        if sides is None
        else (sides.x, sides.y, sides.power),
        sides=sides if distance == "hamming" else None,
        labels=anchor_y.shape[1],
        is_log=False,
        precision=precision,
    )
    return _apply(anchors, keys, total, job)


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
    precision = layout.choose_precision(precision, anchors, keys)
    entries = _Entries.by_tag(anchor_tag)
    job = _Job(
        anchors=entries,
        keys=_Entries.by_tag(key_tag),
        weight=anchor_weight.detach().float().index_select(0, entries.row),
        own_key=anchor_number.index_select(0, entries.row),
        vectors=layout.operands(anchors, keys, precision, layout.LOG2E),
        sides=None,
        labels=1,
        is_log=True,
        precision=precision,
    )
    return _apply(anchors, keys, log_total, job)


@dataclass(frozen=True)
class _Entries:
    """One entry for every label of every row, sorted by label.

    An entry has its row and its label, the tag, as int32, and its index in a flat [rows, labels];
    `entry_of` has there the number of the entry, or -1.
    """

    row: Tensor
    tag: Tensor
    flat_index: Tensor
    entry_of: Tensor

    @classmethod
    def by_label(cls, y: Tensor) -> "_Entries":
        """Builds the entries of a 0/1 matrix; only this waits for the device, to count them."""
        tag, row = (y.T > 0.5).nonzero(as_tuple=True)
        return cls._of(row, tag.int(), torch.add(tag, row, alpha=y.shape[1]), y.numel())

    @classmethod
    def by_tag(cls, tag: Tensor) -> "_Entries":
        row = torch.argsort(tag, stable=True)
        return cls._of(row, tag[row], row, len(tag))

    @classmethod
    def _of(cls, row: Tensor, tag: Tensor, flat_index: Tensor, size: int) -> "_Entries":
        numbers = torch.arange(len(row), dtype=torch.int32, device=row.device)
        entry_of = torch.full((size,), -1, dtype=torch.int32, device=row.device)
        return cls(row.int(), tag, flat_index, entry_of.index_copy_(0, flat_index, numbers))

    def ranges_in(self, others: "_Entries") -> tuple[Tensor, Tensor]:
        """Returns, for each entry, the range of `others` that have its tag."""
        first = torch.searchsorted(others.tag, self.tag, out_int32=True)
        return first, torch.searchsorted(others.tag, self.tag, right=True, out_int32=True)


@dataclass(frozen=True)
class _Job:
    """The pairs and their weights; `weight` and `own_key` belong to the anchors' entries."""

    anchors: _Entries
    keys: _Entries
    weight: Tensor
    own_key: Tensor
    vectors: tuple[Tensor, Tensor, Tensor]
    sides: Sides | None
    labels: int
    is_log: bool  # whether log D is given, not D
    precision: Precision

    @cached_property
    def ranges(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The ranges of the anchors' entries in the keys', and the reverse."""
        of_anchors = self.anchors.ranges_in(self.keys)
        same = self.keys is self.anchors
        return of_anchors, of_anchors if same else self.keys.ranges_in(self.anchors)


def _apply(anchors: Tensor, keys: Tensor, total: Tensor, job: _Job) -> Tensor:
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (anchors, keys, total))
    loss: Tensor = _PairLosses.apply(  # type: ignore[no-untyped-call]
        anchors, keys, total, job, gradient
    )
    return loss


class _PairLosses(torch.autograd.Function):
    """Forward computes the scalar loss with its gradient, which backward scales."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, anchors: Tensor, keys: Tensor, total: Tensor, job: _Job, gradient: bool
    ) -> Tensor:
        given = total.detach().float().reshape(-1)
        log2 = given[job.anchors.flat_index]
        log2 = log2 * layout.LOG2E if job.is_log else log2.log2()
        n, m, d = len(anchors), len(keys), anchors.shape[1]
        room = job.vectors[2]
        if len(job.weight):  # keeps the weights of labels or anchors in fp16's range
            room = layout.headroom(torch.linalg.vector_norm(job.weight, torch.inf))
        losses, d_anchors, d_total = _visit(n, job, (given, log2), None, gradient)
        if gradient:
            _, d_keys, _ = _visit(m, job, (given, log2), room, gradient)
            ctx.save_for_backward(
                d_anchors[:, :d].to(anchors.dtype),
                d_keys[:, :d].to(keys.dtype),
                d_total.view_as(total).to(total.dtype),
            )
        return (losses * job.weight).sum(dtype=torch.float64).float()

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        return *((grad * x).to(x.dtype) for x in saved), None, None


def _visit(
    count: int, job: _Job, totals: tuple[Tensor, Tensor], room: Tensor | None, gradient: bool
) -> tuple[Tensor, ...]:
    """Visits all pairs of entries of equal tag, from the anchors, or with `room` from the keys.

    `totals` are all that were given, and log2 D of the anchors' entries; `room` is a factor of the
    weights. Returns the losses of the anchors' entries, the gradient of the side's `count` rows,
    and of anchors that of what was given.
    """
    from heron.losses.fused.pair_kernels import collect_kernel, pair_kernel

    sides = [(job.anchors, job.own_key), (job.keys, job.keys.row)]
    of_anchors, (x, y, power) = room is None, job.vectors
    weight = job.weight if room is None else job.weight * room
    (x_entries, own_x), (y_entries, own_y) = sides if of_anchors else sides[::-1]
    x, y = (x, y) if of_anchors else (y, x)
    n, m, d = len(x_entries.row), len(y_entries.row), x.shape[1]
    kind: layout.Kind = "pair" if job.sides is None else "label_pair"
    tile, out = layout.choose_tile(kind, job.precision, d), min(d, layout.WIDEST_SLICE)
    if n == 0 or m == 0:
        sizes = (n,), (count, d), (count, job.labels)
        return tuple(x.new_zeros(size, dtype=torch.float32) for size in sizes)
    labels: tuple[Tensor | None, ...] = (None,) * 4
    if job.sides is not None:
        labels = job.sides.label_vectors(of_anchors)
    by_side = zip((own_x, own_y), (tile.rows, tile.columns), strict=True)
    own_ranges = [layout.tile_ranges(*side) for side in by_side]
    first, last = job.ranges[0 if of_anchors else 1]
    losses, shares = (torch.zeros if of_anchors else torch.empty)(2, n, device=x.device)

    def chain(link: int) -> Tensor:
        entry_grads = x.new_empty(n if gradient else 0, d, dtype=torch.float32)
        layout.launch(
            pair_kernel, (-(-n // tile.rows), d // out if gradient else 1), tile, x,
            x, y, x_entries.row, y_entries.row, x_entries.tag, y_entries.tag, own_x, own_y,
            *own_ranges, first, last, *labels, totals[1], weight, losses, shares, entry_grads,
            n, m, link, float(job.labels),
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
    rows, tile = count if gradient else 0, layout.COLLECT
    row_grads, d_total = (x.new_empty(rows, w, dtype=torch.float32) for w in (d, job.labels))
    if gradient:
        layout.launch(
            collect_kernel, (-(-count // tile.rows),), tile, x,
            entry_grads, x_entries.entry_of, shares, weight, totals[0], power, room,
            row_grads, d_total, count, job.labels, layout.LOG2E,
            D=d, ROWS=tile.rows, OF_ANCHORS=of_anchors, IS_LOG=job.is_log,
        )  # fmt: skip
    return losses, row_grads, d_total
