"""ComCo: positives that look alike, negatives whose complementary label sets them far apart."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from heron.pipeline.config.sections import Natural
from heron.pipeline.config.terms import Needs, Temperature
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.complementary import checked, log1m_exp
from heron.pipeline.objectives.contrast import contrast
from heron.pipeline.objectives.engine import strips, unit, working_dtype
from heron.pipeline.objectives.memory import RunSpec
from heron.pipeline.objectives.momentum import KeyQueue, MomentumQueue, MomentumTerm, columns
from heron.pipeline.objectives.pairs import Pairs
from heron.pipeline.objectives.present import OwnRows, Rows, as_slice
from heron.shards.artefact import Count


class Comco(MomentumTerm):
    """ComCo's objective, SCL-NL + `contrast` times its contrastive loss.

    Attributes:
        contrast: weight of the contrastive loss.
        neighbours: positives of a sample.
        neighbour_epochs: epochs in which a sample's own key is its one positive.
        warmup_epochs: epochs in which all others are negatives.
    """

    tau: Temperature = 0.17
    contrast: Annotated[float, Field(ge=0)] = 0.3
    neighbours: Natural = 1
    neighbour_epochs: Count = 100
    warmup_epochs: Count = 1

    needs: ClassVar[Needs] = replace(MomentumTerm.needs, labelled_vectors=("projections",))

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """The slope by an anchor's sum, its N(i), and its neighbours with the slopes by them.

        So many once they are taken; before `neighbour_epochs` there are none.
        """
        return [2 + 2 * self.neighbours]

    def memory(self, run: RunSpec) -> MomentumQueue:
        """Returns a queue of keys, each with its class and its complementary labels."""
        return MomentumQueue(run.model, self.queue, 2 * run.labels, self.momentum)

    def loss(self, batch: GlobalBatch, memory: KeyQueue) -> Tensor:
        """See `scl_nl` and `comco`."""
        keys = batch.gather_labelled(memory.embed(batch))
        posteriors = batch.logits.detach().softmax(1)
        classes = batch.gather_labelled(posteriors.argmax(1))
        of_rows = columns(classes, posteriors)
        queue, of_queue = memory.queue()
        memory.offer(keys, torch.cat([of_rows, batch.targets.to(of_rows)], 1))
        queue_classes, queue_ybar = of_queue.chunk(2, 1)

        def compared(part: slice) -> Tensor:
            return comco(
                batch.labelled_vectors["projections"][0][:, part],
                keys[:, part],
                queue[:, part],
                classes,
                queue_classes.argmax(1),
                batch.targets,
                queue_ybar,
                tau=self.tau,
                neighbours=self.neighbours if batch.epoch >= self.neighbour_epochs else 0,
                select=batch.epoch >= self.warmup_epochs,
                rows=batch.own_labelled_rows,
            )

        classified = scl_nl(batch.logits, batch.own_targets, total=batch.num_labelled)
        return classified + self.contrast * batch.mean_over_widths(compared)


def scl_nl(
    logits: Float[Tensor, "rows classes"], ybar: Float[Tensor, "rows classes"], *, total: int
) -> Float[Tensor, ""]:
    """SCL-NL (Chou et al. 2020): -log(1 - p_j) of a complementary label j, the mean over a set's.

    Args:
        logits: of this process's samples.
        ybar: 1 where a class is known to be wrong.
        total: samples in the whole batch; 0 gives a loss of 0.

    Returns:
        The process's share of the mean.

    Raises:
        ValueError: a set is empty or holds every class, or is not of 0 and 1.
    """
    log_right = log1m_exp(checked(logits, ybar).log_softmax(1))
    return -((ybar * log_right).sum(1) / ybar.sum(1)).sum() / max(total, 1)


def comco(
    q: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "batch dim"],
    queue: Float[Tensor, "queue dim"],
    classes: Int[Tensor, " batch"],
    queue_classes: Int[Tensor, " queue"],
    ybar: Float[Tensor, "batch classes"],
    queue_ybar: Float[Tensor, "queue classes"],
    *,
    tau: float = 0.17,
    neighbours: int = 1,
    select: bool = True,
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    r"""ComCo's contrastive loss (Jiang, Sun and Tian 2024, Eq. 5 to 9, strategies B and 1).

    A(i) is all queries but i itself, all keys and the queue. P(i) is the own key, and of the
    others in A(i) that are taken for the class of i the `neighbours` of largest cosine. S_c is what
    has the complementary label c, and N(i) the S_c whose nearest member is farthest from i, so that
    it holds most likely no sample of the class of i. The mean over queries i of

    .. math:: \frac{-1}{|P(i)|} \sum_{p \in P(i)}
        \log \frac{f_{ip}}{\sum_{a \in P(i) \cup N(i)} f_{ia}}

    where f = exp(cos / tau). The choice of P and N takes no gradient.

    Args:
        q: projections of the whole batch by the model.
        keys: projections of the samples' other view by the momentum encoder; no gradient.
        queue: earlier keys; no gradient.
        classes: the most probable class of each sample.
        queue_classes: those of the queue's samples when they were put there.
        ybar: complementary labels of the samples, 0 or 1.
        queue_ybar: those of the queue's samples.
        tau: temperature, > 0.
        neighbours: how many others are positive; 0 leaves the own key alone.
        select: take N(i) as above; else all of A(i).
        rows: the samples whose queries are summed here, as of `nt_xent`; counts are those of the
            whole batch.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: tau <= 0.
    """
    dtype = working_dtype(q.dtype, tau)
    batch = len(q)
    others = torch.cat([unit(part).to(dtype) for part in (q, keys.detach(), queue.detach())])
    wrong = torch.cat([ybar, ybar, queue_ybar]).to(dtype)
    taken = torch.cat([classes, classes, queue_classes])
    own = torch.arange(batch, device=q.device)[as_slice(rows)]
    anchors = others[own]
    near, far = _choose(anchors.detach(), others.detach(), own, batch, taken, wrong, neighbours)
    if isinstance(rows, OwnRows):
        others = others.detach()  # what own rows are owed as keys is `_owed_as_keys`

    # P(i) one by one: its logits, whether it is one, and whether N(i) has it already.
    positive = torch.cat([(own + batch)[:, None], near], 1)
    is_one, positive = (positive >= 0).to(dtype), positive.clamp(min=0)
    logits = torch.einsum("id,ipd->ip", anchors, others[positive]) / tau
    counted = wrong[positive, far[:, None]] if select else torch.ones_like(is_one)
    pairs = Pairs(
        [anchors / tau],
        [others],
        anchor_tag=own,
        key_tag=torch.arange(len(others), device=q.device),
        exclude=own[:, None],
        anchor_weight=columns(far, wrong) if select else None,
        key_weight=wrong if select else None,
    )
    # Nothing, added to the sums: its slope is that by the sum.
    more = logits.new_zeros(len(own), requires_grad=anchors.requires_grad)
    finish = partial(_finish, mean=1 / max(batch, 1))
    loss = contrast(pairs, finish, [logits, is_one, counted, more])
    if not isinstance(rows, OwnRows) or not torch.is_grad_enabled():
        return loss
    told, limits = _findings(loss, more, logits, near, far), wrong[:batch] if select else None
    owed = _owed_as_keys(anchors, others[:batch] / tau, limits, rows.gather(told), own)
    return loss + (owed - owed.detach())


def _finish(sums: Tensor, per_anchor: Sequence[Tensor], mean: float) -> Tensor:
    logits, is_one, counted, more = per_anchor
    total = sums[:, 0] + more + (is_one * (1 - counted) * logits.exp()).sum(1)
    attraction = (is_one * logits).sum(1) / is_one.sum(1)
    return (total.log() - attraction).sum() * mean


def _findings(loss: Tensor, more: Tensor, logits: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """What own anchors tell the other processes: see `_owed_as_keys`."""
    of_sums, of_logits = torch.zeros_like(more), torch.zeros_like(logits)
    if more.requires_grad:  # else they are of an encoder that is frozen
        of_sums, of_logits = torch.autograd.grad(
            loss, [more, logits], retain_graph=True, allow_unused=True, materialize_grads=True
        )
    return torch.cat([of_sums[:, None], far[:, None], near, of_logits[:, 1:]], 1)


def _owed_as_keys(
    anchors: Tensor, queries: Tensor, wrong: Tensor | None, told: Tensor, own: Tensor
) -> Tensor:
    """A number whose gradient own rows are owed for being keys of all queries.

    Args:
        anchors: own rows.
        queries: of all rows, divided by tau.
        wrong: complementary labels of all rows; None: N(i) is all of A(i).
        told: of all queries the slope by their sum, the c of N(i), neighbours, and slopes by these.
        own: numbers of the own rows.
    """
    slope, far = told[:, :1], told[:, 1].long()
    near, of_near = told[:, 2:].chunk(2, 1)
    # Weights of 1 at most: kernels take them in half precision.
    most = slope.abs().amax().clamp(min=torch.finfo(slope.dtype).tiny) if len(slope) else 1
    slope = slope / most
    pairs = Pairs(
        [anchors],
        [queries],
        anchor_tag=own,
        key_tag=torch.arange(len(queries), device=own.device),
        exclude=own[:, None],
        anchor_weight=torch.ones_like(anchors[:, :1]) if wrong is None else wrong[own],
        key_weight=slope if wrong is None else slope * columns(far, wrong),
    )
    owed = contrast(pairs, lambda sums, _: sums.sum() * most)
    query, place = torch.isin(near.long(), own).nonzero(as_tuple=True)
    chosen = anchors[torch.searchsorted(own, near[query, place].long())]
    return owed + (of_near[query, place] * (queries[query] * chosen).sum(1)).sum()


@torch.no_grad()
def _choose(
    anchors: Tensor,
    others: Tensor,
    own: Tensor,
    batch: int,
    taken: Tensor,
    wrong: Tensor,
    neighbours: int,
) -> tuple[Int[Tensor, "anchors neighbours"], Int[Tensor, " anchors"]]:
    """The neighbours of each anchor, -1 for one that is not there, and the c of its N(i)."""
    found, farthest = [], []
    empty = ~(wrong == 1).any(0)
    for part in strips(len(anchors), len(others), anchors.device):
        cosines = anchors[part] @ others.T
        cosines.scatter_(1, own[part, None], -torch.inf)
        reach = [_largest(cosines, column == 1) for column in wrong.T]
        # Dist_min = (1 - the largest cosine) / 2: the farthest has the least; none is no choice.
        farthest.append(torch.stack(reach, 1).masked_fill(empty, torch.inf).argmin(1))
        cosines.scatter_(1, (own + batch)[part, None], -torch.inf)
        cosines.masked_fill_(taken[own[part], None] != taken, -torch.inf)
        value, place = cosines.topk(min(neighbours, cosines.shape[1]), 1)
        found.append(place.masked_fill(value == -torch.inf, -1))
    if not found:
        return own.new_zeros(0, min(neighbours, len(others))), own
    return torch.cat(found), torch.cat(farthest)


def _largest(
    cosines: Float[Tensor, "rows keys"], of: Bool[Tensor, " keys"]
) -> Float[Tensor, " rows"]:
    return cosines.masked_fill(~of, -torch.inf).amax(1)
