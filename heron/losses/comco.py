"""ComCo: positives by similarity, negatives by the complementary label that is farthest away."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from heron.base.artefact import Count
from heron.base.sections import Natural
from heron.losses.batch import GlobalBatch
from heron.losses.classification import checked_logits, log1m_exp
from heron.losses.contrast import contrast
from heron.losses.engine import strips, unit, working_dtype
from heron.losses.momentum import Decay, KeyQueue, MomentumLoss, one_hot_like
from heron.losses.pairs import OwnRows, Pairs, Rows, as_slice
from heron.losses.terms import Temperature


class Comco(MomentumLoss):
    r"""ComCo (Jiang, Sun and Tian 2024, Eq. 3 and 5 to 9), for complementary labels.

    SCL-NL of the logits plus `contrast` times

    .. math:: \frac{-1}{|P(i)|} \sum_{p \in P(i)}
        \log \frac{f_{ip}}{\sum_{a \in P(i) \cup N(i)} f_{ia}}

    averaged over queries i. P(i) is the query's own key and the nearest `neighbours` keys of its
    class; N(i) are the keys with the complementary label whose samples are farthest away. Until
    `warmup_epochs` N(i) is all other keys; until `neighbour_epochs` P(i) is the own key.
    """

    needs = replace(MomentumLoss.needs, labelled_vectors=("projections",))
    label_columns = 2  # a key's class and its complementary labels
    by_epoch = True

    def __init__(
        self,
        dim: int | None = None,
        classes: int | None = None,
        *,
        tau: Temperature = 0.17,
        contrast: Annotated[float, Field(ge=0)] = 0.3,
        neighbours: Natural = 1,
        neighbour_epochs: Count = 100,
        warmup_epochs: Count = 1,
        queue: Natural = 8192,
        momentum: Decay = 0.999,
    ) -> None:
        """Builds an empty queue.

        Args:
            dim: width of the projections; a run has that of its model.
            classes: number of classes; a run has that of its data.
            tau: temperature, at least 0.003.
            contrast: weight of the contrastive loss.
            neighbours: number of positives beside the own key.
            neighbour_epochs: epochs in which the own key is the only positive.
            warmup_epochs: epochs in which all other keys are negatives.
            queue: number of earlier samples' keys that are kept, at least the batch of all
                processes.
            momentum: of a run's key encoder, whose weights move by 1 - momentum a step.
        """
        super().__init__(dim, classes, queue=queue, momentum=momentum)
        self.tau, self.contrast, self.neighbours = tau, contrast, neighbours
        self.neighbour_epochs, self.warmup_epochs = neighbour_epochs, warmup_epochs

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `scl_nl` + `contrast` `comco` of this process's queries; offers their keys."""
        memory: KeyQueue = self.memory
        keys = batch.gather_labelled(memory.embed(batch))
        posteriors = batch.logits.detach().softmax(1)
        classes = batch.gather_labelled(posteriors.argmax(1))
        one_hot = one_hot_like(classes, posteriors)
        queue, queue_labels = memory.queue()
        memory.offer(keys, torch.cat([one_hot, batch.targets.to(one_hot)], 1))
        queue_one_hot, queue_ybar = queue_labels.chunk(2, 1)

        def contrastive_loss(prefix: slice) -> Tensor:
            return comco(
                batch.labelled_vectors["projections"][0][:, prefix],
                keys[:, prefix],
                queue[:, prefix],
                classes,
                queue_one_hot.argmax(1),
                batch.targets,
                queue_ybar,
                tau=self.tau,
                neighbours=self.neighbours if batch.epoch >= self.neighbour_epochs else 0,
                select=batch.epoch >= self.warmup_epochs,
                rows=batch.own_labelled_rows,
            )

        classifier_loss = scl_nl(batch.logits, batch.own_targets, total=batch.num_labelled)
        return classifier_loss + self.contrast * self.mean_over_widths(contrastive_loss)


def scl_nl(
    logits: Float[Tensor, "rows classes"], ybar: Float[Tensor, "rows classes"], *, total: int
) -> Float[Tensor, ""]:
    """SCL-NL (Chou et al. 2020): the mean of -log(1 - p_j) over a sample's complementary labels j.

    Args:
        logits: of this process's samples.
        ybar: 1 where a class is known to be wrong.
        total: samples in the whole batch; 0 gives a loss of 0.

    Raises:
        ValueError: a set is empty or holds every class, or is not of 0 and 1.
    """
    log_right = log1m_exp(checked_logits(logits, ybar).log_softmax(1))
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
    """ComCo's contrastive loss (Jiang, Sun and Tian 2024, Eq. 5 to 9, strategies B and 1).

    A(i) is all queries but i itself, all keys and the queue. P(i) is the own key and, of the other
    members of A(i) with the predicted class of i, the `neighbours` with the largest cosine. S_c are
    the samples with the complementary label c, and N(i) is the S_c whose nearest member is farthest
    from i, which most likely holds no sample of the class of i. The loss is the mean over queries i
    of the equation of `Comco`, f = exp(cos / tau). The choice of P and N takes no gradient.

    Args:
        q: projections of the whole batch by the model.
        keys: projections of the samples' other view by the momentum encoder; no gradient.
        queue: earlier keys; no gradient.
        classes: predicted, most probable class of each sample.
        queue_classes: those of the queue's samples at the time they were enqueued.
        ybar: complementary labels of the samples, 0 or 1.
        queue_ybar: those of the queue's samples.
        tau: temperature, > 0.
        neighbours: number of positives beside the own key.
        select: whether N(i) is chosen as above, or is all of A(i).
        rows: as in `nt_xent`.

    Raises ValueError if tau <= 0.
    """
    dtype = working_dtype(q.dtype, tau)
    batch = len(q)
    # A(i) with i itself, the same for all queries.
    pool = torch.cat([unit(x).to(dtype) for x in (q, keys.detach(), queue.detach())])
    pool_ybar = torch.cat([ybar, ybar, queue_ybar]).to(dtype)
    pool_classes = torch.cat([classes, classes, queue_classes])
    own = torch.arange(batch, device=q.device)[as_slice(rows)]
    anchors = pool[own]
    near, far_label = _choose_pairs(
        anchors.detach(), pool.detach(), own, batch, pool_classes, pool_ybar, neighbours
    )
    if isinstance(rows, OwnRows):
        pool = pool.detach()  # `_gradient_as_keys` has the gradient of own rows as keys

    # The members of P(i): their logits, whether they exist, and whether N(i) has them already.
    positives = torch.cat([(own + batch)[:, None], near], 1)
    exists, positives = (positives >= 0).to(dtype), positives.clamp(min=0)
    logits = torch.einsum("id,ipd->ip", anchors, pool[positives]) / tau
    in_sum = pool_ybar[positives, far_label[:, None]] if select else torch.ones_like(exists)
    pairs = Pairs(
        [anchors / tau],
        [pool],
        anchor_tag=own,
        key_tag=torch.arange(len(pool), device=q.device),
        exclude=own[:, None],
        anchor_weight=one_hot_like(far_label, pool_ybar) if select else None,
        key_weight=pool_ybar if select else None,
    )
    # Zeros are added to the sums, so that their gradient is the gradient of the sums.
    zeros = logits.new_zeros(len(own), requires_grad=anchors.requires_grad)
    finish = partial(_finish, mean=1 / max(batch, 1))
    loss = contrast(pairs, finish, [logits, exists, in_sum, zeros])
    if not isinstance(rows, OwnRows) or not torch.is_grad_enabled():
        return loss
    own_choices = _choices_and_gradients(loss, zeros, logits, near, far_label)
    query_ybar = pool_ybar[:batch] if select else None
    choices = rows.gather(own_choices)
    as_keys = _gradient_as_keys(anchors, pool[:batch] / tau, query_ybar, choices, own)
    return loss + (as_keys - as_keys.detach())


def _finish(sums: Tensor, per_anchor: Sequence[Tensor], mean: float) -> Tensor:
    logits, exists, in_sum, zeros = per_anchor
    total = sums[:, 0] + zeros + (exists * (1 - in_sum) * logits.exp()).sum(1)
    attraction = (exists * logits).sum(1) / exists.sum(1)
    return (total.log() - attraction).sum() * mean


def _choices_and_gradients(
    loss: Tensor, zeros: Tensor, logits: Tensor, near: Tensor, far_label: Tensor
) -> Tensor:
    """Returns, for each own anchor, the row of `choices` that `_gradient_as_keys` describes."""
    d_sums, d_logits = torch.zeros_like(zeros), torch.zeros_like(logits)
    if zeros.requires_grad:  # not with a frozen encoder
        d_sums, d_logits = torch.autograd.grad(
            loss, [zeros, logits], retain_graph=True, allow_unused=True, materialize_grads=True
        )
    return torch.cat([d_sums[:, None], far_label[:, None], near, d_logits[:, 1:]], 1)


def _gradient_as_keys(
    anchors: Tensor, queries: Tensor, ybar: Tensor | None, choices: Tensor, own: Tensor
) -> Tensor:
    """Returns a scalar whose gradient is that of the rows `own` as keys of all queries.

    `queries` are divided by tau; `ybar` is None where N(i) is all of A(i). `choices` has for every
    query the gradient of its sum, the c of N(i), its neighbours, and the gradients of their logits.
    """
    d_sums, far_label = choices[:, :1], choices[:, 1].long()
    near, d_near = choices[:, 2:].chunk(2, 1)
    # Scale the weights to at most 1, since kernels take them in half precision.
    scale = d_sums.abs().amax().clamp(min=torch.finfo(d_sums.dtype).tiny) if len(d_sums) else 1
    weight = d_sums / scale
    pairs = Pairs(
        [anchors],
        [queries],
        anchor_tag=own,
        key_tag=torch.arange(len(queries), device=own.device),
        exclude=own[:, None],
        anchor_weight=torch.ones_like(anchors[:, :1]) if ybar is None else ybar[own],
        key_weight=weight if ybar is None else weight * one_hot_like(far_label, ybar),
    )
    from_sums = contrast(pairs, lambda sums, _: sums.sum() * scale)
    query, column = torch.isin(near.long(), own).nonzero(as_tuple=True)
    neighbour = anchors[torch.searchsorted(own, near[query, column].long())]
    return from_sums + (d_near[query, column] * (queries[query] * neighbour).sum(1)).sum()


@torch.no_grad()
def _choose_pairs(
    anchors: Tensor,
    pool: Tensor,
    own: Tensor,
    batch: int,
    classes: Tensor,
    ybar: Tensor,
    neighbours: int,
) -> tuple[Int[Tensor, "anchors neighbours"], Int[Tensor, " anchors"]]:
    """Returns the neighbours of each anchor, -1 where there are too few, and the c of its N(i)."""
    near, far_label = [], []
    unused = ~(ybar == 1).any(0)
    for strip in strips(len(anchors), len(pool), anchors.device):
        cosines = anchors[strip] @ pool.T
        cosines.scatter_(1, own[strip, None], -torch.inf)
        largest = [cosines.masked_fill(column != 1, -torch.inf).amax(1) for column in ybar.T]
        # Dist_min = (1 - the largest cosine) / 2: the farthest S_c has the least; empty ones do not
        # count.
        far_label.append(torch.stack(largest, 1).masked_fill(unused, torch.inf).argmin(1))
        cosines.scatter_(1, (own + batch)[strip, None], -torch.inf)
        cosines.masked_fill_(classes[own[strip], None] != classes, -torch.inf)
        value, index = cosines.topk(min(neighbours, cosines.shape[1]), 1)
        near.append(index.masked_fill(value == -torch.inf, -1))
    if not near:
        return own.new_zeros(0, min(neighbours, len(pool))), own
    return torch.cat(near), torch.cat(far_label)
