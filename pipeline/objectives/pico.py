"""PiCO: a classifier of pseudo-targets, and contrast of what is taken for one class."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heron.pipeline.objectives.contrast import Matches, Pairs, contrast
from heron.pipeline.objectives.engine import unit, working_dtype


def pseudo_target_loss(
    logits: Float[Tensor, "rows classes"], s: Float[Tensor, "rows classes"], *, total: int
) -> Float[Tensor, ""]:
    """PiCO's L_cls (Wang et al. 2022, Eq. 1): the mean of -sum_j s_j log f_j.

    Args:
        logits: of this process's samples.
        s: their pseudo-targets; no gradient.
        total: samples in the whole batch; 0 gives a loss of 0.

    Returns:
        The process's share of the mean.
    """
    return -(s.detach() * logits.to(s.dtype).log_softmax(1)).sum() / max(total, 1)


def pico(
    q: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "batch dim"],
    queue: Float[Tensor, "queue dim"],
    classes: Int[Tensor, " batch"],
    queue_classes: Int[Tensor, " queue"],
    *,
    tau: float = 0.07,
    rows: slice = slice(None),
) -> Float[Tensor, ""]:
    r"""PiCO's L_cont (Wang et al. 2022, Eq. 2 and 3).

    With A(i) all queries but i itself, all keys and the queue, and P(i) those of A(i) that are
    taken for the class of i, the mean over queries i of

    .. math:: \frac{-1}{|P(i)|} \sum_{p \in P(i)} \log \frac{f_{ip}}{\sum_{a \in A(i)} f_{ia}}

    where f = exp(cos / tau). A sample's own key is always in P(i).

    Args:
        q: projections of the whole batch by the model.
        keys: projections of the samples' other view by the momentum encoder; no gradient.
        queue: earlier keys; no gradient.
        classes: the most probable candidate of each sample.
        queue_classes: those of the queue's samples when they were put there.
        tau: temperature, > 0.
        rows: the samples whose queries are summed here; counts are those of the whole batch.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: tau <= 0.
    """
    dtype = working_dtype(q.dtype, tau)
    queries = unit(q).to(dtype)
    others = torch.cat([queries, unit(keys.detach()).to(dtype), unit(queue.detach()).to(dtype)])
    of_other = torch.cat([classes, classes, queue_classes])
    own = torch.arange(len(q), device=q.device)[rows]
    anchors, same = queries[rows], classes[rows]

    # As in `supcon`, log f is linear in the positive: a product with the sum of the class.
    count = int(of_other.max()) + 1 if len(of_other) else 0
    positives = (torch.bincount(of_other, minlength=count)[same] - 1).to(dtype)
    whole = others.new_zeros(count, others.shape[1]).index_add(0, of_other, others)
    attraction = (anchors * (whole[same] - anchors)).sum(1) / (tau * positives)
    mean = 1 / max(len(q), 1)

    def finish(sums: Tensor, per_anchor: Sequence[Tensor], _: Matches | None) -> Tensor:
        return (sums[:, 0].log() - per_anchor[0]).sum() * mean

    place = torch.arange(len(others), device=q.device)
    pairs = Pairs([anchors / tau], [others], anchor_tag=own, key_tag=place, exclude=own[:, None])
    return contrast(pairs, finish, [attraction])
