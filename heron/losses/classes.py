"""Losses of the pairs inside the classes of a batch, which may form a tree.

Rows are visited in the order of their classes, so an anchor's keys are a contiguous range: the work
is proportional to the pairs that count, in matrix products and without a list of pairs.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from heron.losses import products
from heron.losses.engine import count_members, group_numbers, strip_elements, with_gradients
from heron.losses.pairs import OwnRows, Rows
from heron.losses.products import coefficients, factors, multiply

# Rows of a strip of pairs at least: a GPU is kept busy by launches of many classes at once (a strip
# of 82 rows took 123 ms for 16,384 rows on an H200), a CPU is better off with few other pairs.
FEWEST_ROWS = {"cpu": 64, "cuda": 4096}
STRIP_PART = 4  # tensors of its size that a strip of pairs needs
NO_CUT = 40.0  # above it log(1 + e^x) is x in float64, too


@dataclass(frozen=True)
class Classes:
    """Which pairs of rows share a class, and their weights.

    Attributes:
        groups: for each level, coarsest first, the class number of every key; classes are nested. A
            pair belongs to the finest level on which it agrees; one that agrees on none does not
            count, nor does a row with itself.
        weight: weight of an anchor's pairs at each level, [keys, levels]; no gradient.
        positions: the anchors' positions among the keys.
        soft: whether the loss of a pair is softplus(u) or u, where u = log_total_i - l_ik.
    """

    groups: Sequence[Int[Tensor, " keys"]]
    weight: Float[Tensor, "keys levels"]
    positions: Int[Tensor, " anchors"]
    soft: bool

    def levels(self, rows: Tensor, columns: Tensor) -> list[Tensor]:
        """Returns, for each level, the mask of its pairs among `rows` and `columns` of the keys."""
        agree = [group[rows, None] == group[columns] for group in self.groups]
        agree.append(rows[:, None] == columns)
        return [above ^ below for above, below in zip(agree, agree[1:], strict=False)]

    def strips(self, anchors: Tensor, keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields strips, by class, as (indices into `anchors`, indices into `keys`)."""
        coarsest = group_numbers(self.groups[0])
        if not len(coarsest):
            return
        size = count_members(coarsest[keys], len(coarsest))
        key_order = coarsest[keys].argsort(stable=True)
        anchor_order = coarsest[anchors].argsort(stable=True)
        # The sizes of the strips: the one thing that the host waits for.
        known = torch.cat([size, coarsest[anchors][anchor_order]]).tolist()
        sizes, anchor_class = known[: len(size)], known[len(size) :]
        end, largest = list(itertools.accumulate(sizes)), max(1, *sizes)
        fewest = FEWEST_ROWS.get(anchors.device.type, FEWEST_ROWS["cuda"])
        columns = 2 * largest + fewest - FEWEST_ROWS["cpu"]  # of a strip, about
        max_rows = strip_elements(anchors.device) // STRIP_PART // columns
        step = max(32, min(max(fewest, largest // 2), max_rows))
        for start in range(0, len(anchor_order), step):
            stop = min(start + step, len(anchor_order))
            first, last = anchor_class[start], anchor_class[stop - 1]
            span = slice(end[first - 1] if first else 0, end[last])
            yield anchor_order[start:stop], key_order[span]


def class_losses(
    anchors: Float[Tensor, "anchors dim"],
    keys: Float[Tensor, "keys dim"],
    log_total: Float[Tensor, " anchors"],
    floor: Float[Tensor, " levels"],
    classes: Classes,
    rows: Rows,
    key_totals: Float[Tensor, " every"] | None,
) -> Float[Tensor, ""]:
    """Sums the losses of the anchors' pairs, weight_il loss(max(u_ik, floor_l)).

    Anchors have 1 / tau inside and belong to `rows`. Where `log_total` is -inf, a soft loss is 0
    and so is every gradient; `floor` is the least value of u at each level, -inf for none. The
    result is differentiable once with respect to anchors, log_total, floor and, without
    `key_totals`, keys.

    `key_totals` is log_total of every key, if all keys are anchors of some process: then the
    anchors get the full gradient of their rows, as in `mirrored_sums`, and `floor` the sum over all
    processes.
    """
    if key_totals is not None:
        keys = keys.detach()
    tensors = anchors, keys, log_total, floor
    with torch.no_grad():
        grads = [torch.zeros_like(x) for x in tensors]
        d_anchors, d_keys, d_total, d_floor = grads
        loss = torch.zeros((), dtype=torch.float64, device=anchors.device)
        all_keys = torch.arange(len(classes.weight), device=keys.device)
        x, y = factors(anchors, keys)
        for strip, columns in classes.strips(classes.positions, all_keys):
            positions = classes.positions[strip]
            logits = products.logits(x[strip], y[columns])
            masks = classes.levels(positions, columns)
            weight = classes.weight[positions].T[:, :, None]
            share, d_u, d_level = _strip_loss(
                log_total[strip, None] - logits, masks, weight, floor, classes.soft
            )
            loss += share
            d_floor += d_level
            d_total[strip] += d_u.sum(1)
            if isinstance(rows, OwnRows) and key_totals is not None:
                weight = classes.weight[columns].T[:, None, :]
                d_u += _strip_loss(
                    key_totals[None, columns] - logits, masks, weight, floor, classes.soft
                )[1]
            d = coefficients(d_u, y)
            if key_totals is None:
                d_keys.index_add_(0, columns, multiply(d.T, x[strip]), alpha=-1)
            elif not isinstance(rows, OwnRows):  # anchors are the keys in order, scaled
                d_anchors.index_add_(0, columns, multiply(d.T, y[positions]), alpha=-1)
            d_anchors.index_add_(0, strip, multiply(d, y[columns]), alpha=-1)
        if isinstance(rows, OwnRows) and len(classes.groups) > 1:
            to_gather = d_floor.new_zeros(rows.slice.stop - rows.slice.start, len(d_floor))
            to_gather[:1] = d_floor
            grads[3] = rows.gather(to_gather).sum(0)
    return with_gradients(loss.to(anchors.dtype), tensors, grads)


def _strip_loss(
    u: Tensor, masks: Sequence[Tensor], weight: Tensor, floor: Tensor, soft: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss of some pairs, and its gradients with respect to u and each level's floor.

    `weight` is [levels, rows, 1], or [levels, 1, columns] if the columns are the anchors.
    """
    loss, d_u, d_floor = u.new_zeros(()), torch.zeros_like(u), torch.zeros_like(floor)
    for level, (mask, level_weight) in enumerate(zip(masks, weight, strict=True)):
        pair_weight = mask * level_weight
        if soft:
            loss = loss + (F.softplus(u, threshold=NO_CUT) * pair_weight).sum()
            d_u += u.sigmoid() * pair_weight
            continue
        is_raised = u <= floor[level]
        loss = loss + (u.clamp(min=floor[level]) * pair_weight).sum()
        d_floor[level] = (is_raised * pair_weight).sum()
        d_u += pair_weight.masked_fill_(is_raised, 0.0)
    return loss, d_u, d_floor


@torch.no_grad()
def largest_pairs(
    keys: Float[Tensor, "keys dim"], log_total: Float[Tensor, " keys"], classes: Classes, tau: float
) -> list[tuple[float, int, int]]:
    """Returns each level's largest u of all pairs, its anchor and its key; -inf without a pair.

    Every process visits the pairs of all anchors, with the same result.
    """
    best = [(-torch.inf, 0, 0)] * len(classes.groups)
    all_rows = torch.arange(len(keys), device=keys.device)
    for rows, columns in classes.strips(all_rows, all_rows):
        u = log_total[rows, None] - (keys[rows] / tau) @ keys[columns].T
        for level, mask in enumerate(classes.levels(rows, columns)):
            value, flat_index = u.masked_fill(~mask, -torch.inf).view(-1).max(0)
            if float(value) > best[level][0]:
                row, column = divmod(int(flat_index), len(columns))
                best[level] = float(value), int(rows[row]), int(columns[column])
    return best
