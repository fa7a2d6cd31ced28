"""The pairs inside the classes of a batch, which may lie in a tree: a loss of each pair.

Rows are visited in the order of their classes, so that those of a strip meet their class's rows
alone, side by side: the work is that of the pairs that count, in products, and no list of pairs is
made.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from heron.pipeline.objectives.engine import strip_elements
from heron.pipeline.objectives.present import OwnRows, Rows
from heron.pipeline.objectives.ring import Block

STRIP_PART = 4  # a strip of pairs takes so many tensors of its size
NO_CUT = 40.0  # above it log(1 + e^x) is x in float64, too


@dataclass(frozen=True)
class Classes:
    """Which pairs of rows share a class, and what they weigh.

    Attributes:
        groups: a class number of every key a level, coarsest level first; rows that share a class
            of a level share those of all levels above. A pair is of the finest level on which it
            agrees; one that agrees on none does not count, nor does a row with itself.
        weight: of an anchor's pairs of a level, [keys, levels]; no gradient.
        own: the anchors' places among the keys.
        soft: the loss of a pair is softplus(u), else u: u = log_total_i - l_ik.
    """

    groups: Sequence[Int[Tensor, " keys"]]
    weight: Float[Tensor, "keys levels"]
    own: Int[Tensor, " anchors"]
    soft: bool

    def levels(self, rows: Tensor, columns: Tensor) -> list[Tensor]:
        """Which pairs of some rows and columns, by their places, are of each level."""
        agree = [group[rows, None] == group[columns] for group in self.groups]
        agree.append(rows[:, None] == columns)
        return [above ^ below for above, below in zip(agree, agree[1:], strict=False)]

    def visits(self, own: Tensor, keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Strips as (places among the anchors `own`, places among `keys`), by class."""
        coarsest = self.groups[0]
        if not len(coarsest):
            return
        size = torch.bincount(coarsest[keys], minlength=int(coarsest.max()) + 1)
        end = size.cumsum(0).tolist()
        order, mine = coarsest[keys].argsort(stable=True), coarsest[own].argsort(stable=True)
        of_anchor = coarsest[own][mine].tolist()
        largest = max(int(size.max()), 1)
        room = strip_elements(own.device) // STRIP_PART // (2 * largest)
        step = max(32, min(max(64, largest // 2), room))
        for start in range(0, len(mine), step):
            stop = min(start + step, len(mine))
            first, last = of_anchor[start], of_anchor[stop - 1]
            yield mine[start:stop], order[end[first - 1] if first else 0 : end[last]]


def class_losses(
    anchors: Float[Tensor, "anchors dim"],
    keys: Float[Tensor, "held dim"],
    log_total: Float[Tensor, " anchors"],
    least: Float[Tensor, " levels"],
    classes: Classes,
    rows: Rows,
    others: Float[Tensor, " every"] | None,
    around: Callable[[Sequence[Tensor]], Iterator[Block]] | None = None,
) -> Float[Tensor, ""]:
    r"""Sums the losses of the pairs of the anchors, weight_il loss(max(u_ik, least_l)).

    Args:
        anchors: with 1 / tau already inside.
        keys: vectors of the same width.
        log_total: where it is -inf a soft loss is 0 and so is every gradient.
        least: the least u that counts, a level; -inf: any.
        classes: the pairs.
        rows: of which the anchors are.
        others: log_total of every key, where all keys are anchors of some process: then the
            gradient with respect to the anchors is all that is owed to their rows, as of
            `mirrored_sums`, and that of `least` the sum over all processes.
        around: begins a round of the keys, of which own rows' alone are here; None: all are.

    Returns:
        Differentiable once with respect to anchors, log_total, least and, without `others`, keys.
    """
    loss: Tensor = _ClassLosses.apply(  # type: ignore[no-untyped-call]
        anchors,
        keys if others is None else keys.detach(),
        log_total,
        least,
        classes,
        rows,
        others,
        around,
    )
    return loss


class _ClassLosses(torch.autograd.Function):
    """The loss is a scalar: forward makes its gradient along with it, backward scales that."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        anchors: Tensor,
        keys: Tensor,
        log_total: Tensor,
        least: Tensor,
        classes: Classes,
        rows: Rows,
        others: Tensor | None,
        around: Callable[[Sequence[Tensor]], Iterator[Block]] | None,
    ) -> Tensor:
        grads = [torch.zeros_like(x) for x in (anchors, keys, log_total, least)]
        d_anchors, d_keys, d_total, d_least = grads
        loss = torch.zeros((), dtype=torch.float64, device=anchors.device)
        every = torch.arange(len(classes.weight), device=keys.device)
        whole = [(every, keys)]
        came = whole if around is None else ((b.places[0], b.keys[0]) for b in around([keys]))
        for mine, columns, vectors in (
            (mine, here[some], found[some])
            for here, found in came
            for mine, some in classes.visits(classes.own, here)
        ):
            places = classes.own[mine]
            logits = anchors[mine] @ vectors.T
            masks = classes.levels(places, columns)
            weight = classes.weight[places]
            part, slope, raised = _visit(
                log_total[mine, None] - logits, masks, weight.T[:, :, None], least, classes.soft
            )
            loss += part
            d_least += raised
            d_total[mine] += slope.sum(1)
            if others is None:
                d_keys.index_add_(0, columns, slope.T @ anchors[mine], alpha=-1)
            elif not isinstance(rows, OwnRows):  # anchors are the keys in order, scaled
                d_anchors.index_add_(0, columns, slope.T @ keys[places], alpha=-1)
            else:
                turned = classes.weight[columns].T[:, None, :]
                slope += _visit(others[None, columns] - logits, masks, turned, least, classes.soft)[
                    1
                ]
            d_anchors.index_add_(0, mine, slope @ vectors, alpha=-1)
        if isinstance(rows, OwnRows) and len(classes.groups) > 1:
            told = d_least.new_zeros(rows.slice.stop - rows.slice.start, len(d_least))
            told[:1] = d_least
            grads[3] = rows.gather(told).sum(0)
        ctx.save_for_backward(*grads)
        return loss.to(anchors.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        return *(grad * x for x in saved), None, None, None, None


def _visit(
    u: Tensor, masks: Sequence[Tensor], weight: Tensor, least: Tensor, soft: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of some pairs, its slope by u, and by the least of each level.

    `weight` is [levels, rows, 1], or [levels, 1, columns] of pairs turned over.
    """
    loss, slope, raised = u.new_zeros(()), torch.zeros_like(u), torch.zeros_like(least)
    for level, (mask, of_level) in enumerate(zip(masks, weight, strict=True)):
        counted = mask * of_level
        if soft:
            loss = loss + (F.softplus(u, threshold=NO_CUT) * counted).sum()
            slope += u.sigmoid() * counted
            continue
        value, low = float(least[level]), u <= least[level]
        loss = loss + (u.clamp(min=value) * counted).sum()
        raised[level] = (low * counted).sum()
        slope += counted.masked_fill_(low, 0.0)
    return loss, slope, raised


@torch.no_grad()
def largest_pairs(
    keys: Float[Tensor, "keys dim"],
    log_total: Float[Tensor, " keys"],
    classes: Classes,
    tau: float,
) -> list[tuple[float, int, int]]:
    """The largest u of all pairs of each level, with its anchor and key; -inf where there is none.

    It is one pass over the pairs of all anchors, the same on every process.
    """
    best = [(-torch.inf, 0, 0)] * len(classes.groups)
    every = torch.arange(len(keys), device=keys.device)
    for mine, columns in classes.visits(every, every):
        u = log_total[mine, None] - (keys[mine] / tau) @ keys[columns].T
        for level, mask in enumerate(classes.levels(mine, columns)):
            value, place = u.masked_fill(~mask, -torch.inf).view(-1).max(0)
            if float(value) > best[level][0]:
                row, column = divmod(int(place), len(columns))
                best[level] = float(value), int(mine[row]), int(columns[column])
    return best
