"""MulCo: queries against momentum keys, with negatives weighted by their class probabilities."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from heron.base.sections import Natural
from heron.losses.batch import GlobalBatch
from heron.losses.contrast import contrast
from heron.losses.engine import unit, working_dtype
from heron.losses.hard import debias
from heron.losses.momentum import Decay, KeyQueue, MomentumLoss
from heron.losses.pairs import Pairs
from heron.losses.terms import Temperature

Kind = Literal["standard", "sifted", "soft", "weighted", "debiased"]


class Mulco(MomentumLoss):
    r"""MulCo's contrastive losses for complementary labels (Eq. 4, 5, 9 and 10).

    The mean over queries q with key :math:`k^+` of

    .. math:: \log\big(f(q, k^+) + \sum_{x^-} w\, f(q, k^-)\big) - \log f(q, k^+)

    over the queue. The weight w of a negative is 1 (`standard`), :math:`1[h(x) \ne h(x^-)]`
    (`sifted`), :math:`1 - f_{h(x)}(x^-)` (`soft`) or :math:`\bar y \cdot f(x^-)` (`weighted`);
    `debiased` corrects the unweighted sum instead. Train the classifier by another loss, such as
    `UbLog`.
    """

    def __init__(
        self,
        dim: int | None = None,
        classes: int | None = None,
        *,
        tau: Temperature = 0.05,
        kind: Kind = "weighted",
        tau_plus: Annotated[float, Field(ge=0, lt=1)] | None = None,
        queue: Natural = 8192,
        momentum: Decay = 0.999,
    ) -> None:
        """Builds an empty queue.

        Args:
            dim: width of the projections; a run has that of its model.
            classes: number of classes; a run has that of its data.
            tau: temperature, at least 0.003.
            kind: how negatives are weighted.
            tau_plus: class prior of `debiased`; None: 1 / classes.
            queue: number of earlier samples' keys that are kept, at least the batch of all
                processes.
            momentum: of a run's key encoder, whose weights move by 1 - momentum a step.
        """
        super().__init__(dim, classes, queue=queue, momentum=momentum)
        self.tau, self.kind, self.tau_plus = tau, kind, tau_plus

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `mulco` of this process's queries, and offers their keys to the queue."""
        memory: KeyQueue = self.memory
        keys, posteriors = memory.embed(batch), batch.logits.detach().softmax(1)
        memory.offer(batch.gather_labelled(keys), batch.gather_labelled(posteriors))
        queue, queue_posteriors = memory.queue()
        q = batch.own_labelled("projections")[0]

        def loss_of_columns(columns: slice) -> Tensor:
            return mulco(
                q[:, columns],
                keys[:, columns],
                queue[:, columns],
                posteriors,
                queue_posteriors,
                batch.own_targets,
                tau=self.tau,
                kind=self.kind,
                tau_plus=self.tau_plus,
                total=batch.num_labelled,
            )

        return self.mean_over_widths(loss_of_columns)


def mulco(
    q: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    queue: Float[Tensor, "queue dim"],
    prob_q: Float[Tensor, "batch classes"],
    prob_queue: Float[Tensor, "queue classes"],
    ybar: Float[Tensor, "batch classes"],
    *,
    tau: float = 0.05,
    kind: Kind = "weighted",
    tau_plus: float | None = None,
    total: int | None = None,
) -> Float[Tensor, ""]:
    """MulCo's contrastive losses for complementary labels (Eq. 4, 5, 9 and 10), as in `Mulco`.

    With f = exp(cos / tau), h is the most probable class, and `debiased` corrects the unweighted
    sum by a class prior (Chuang et al. 2020).

    Args:
        q: projections of this process's samples.
        key: projections of the same samples' other view by the momentum encoder; no gradient.
        queue: earlier keys; an empty queue makes the loss 0.
        prob_q: class probabilities of the samples; no gradient.
        prob_queue: class probabilities of the queue's samples when they were enqueued.
        ybar: complementary labels, 1 where a class is known to be wrong.
        tau: temperature, > 0.
        kind: how negatives are weighted.
        tau_plus: class prior of `debiased`; None: 1 / classes.
        total: samples in the whole batch; None when q holds all of them.

    Raises:
        ValueError: tau <= 0, or tau_plus outside [0, 1).
    """
    dtype = working_dtype(q.dtype, tau)
    anchors = unit(q).to(dtype) / tau
    positives, negatives = unit(key.detach()).to(dtype), unit(queue).to(dtype)
    prob_q, prob_queue = prob_q.detach().to(dtype), prob_queue.to(dtype)
    mean = 1 / max(len(q) if total is None else total, 1)
    pairs = Pairs([anchors], [negatives])
    if kind == "sifted":
        pairs = Pairs(
            [anchors], [negatives], anchor_tag=prob_q.argmax(1), key_tag=prob_queue.argmax(1)
        )
    elif kind == "soft":
        predicted = torch.zeros_like(prob_q).scatter_(1, prob_q.argmax(1, keepdim=True), 1.0)
        pairs = Pairs([anchors], [negatives], anchor_weight=predicted, key_weight=1 - prob_queue)
    elif kind == "weighted":
        pairs = Pairs([anchors], [negatives], anchor_weight=ybar.to(dtype), key_weight=prob_queue)
    prior = 1 / prob_q.shape[1] if tau_plus is None else tau_plus

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        positive = per_anchor[0][:, None]
        if kind == "debiased":
            sums = debias(sums, positive, len(negatives), tau, prior)
        return torch.log1p(sums * torch.exp(-positive)).sum() * mean

    return contrast(pairs, finish, [(anchors * positives).sum(1)])
