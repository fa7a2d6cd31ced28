"""PiCO: a classifier trained on pseudo-targets, and contrast between predicted classes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from heron.base.artefact import Count
from heron.base.sections import Natural, Share
from heron.data.graphs import group_sums
from heron.losses.batch import GlobalBatch
from heron.losses.classification import TrainingSetLoss, complementary_columns
from heron.losses.contrast import contrast
from heron.losses.engine import count_members, unit, working_dtype
from heron.losses.inputs import RowCounts
from heron.losses.mirroring import Mirroring
from heron.losses.momentum import Decay, KeyQueue, MomentumLoss, MomentumQueue, one_hot_like
from heron.losses.mulco import mulco
from heron.losses.pairs import Pairs, Rows, as_slice
from heron.losses.run import RunSpec
from heron.losses.terms import Temperature

PLACES = 1 << 18  # of the prototypes' rows that are looked up at a time


class Disambiguation(nn.Module):
    """Prototypes mu and pseudo-targets s (Wang et al. 2022, Eq. 5 and 6), equal on all processes.

    A candidate of a row is a class that is not among its complementary labels.
    """

    prototypes: Tensor
    targets: Tensor
    rows: Tensor

    def __init__(
        self,
        rows: Int[Tensor, " labelled"],
        ybar: Float[Tensor, "labelled classes"],
        dim: int,
        gamma: float,
    ) -> None:
        """Starts with prototypes of zero, and pseudo-targets uniform over the candidates.

        `rows` are the numbers of all labelled rows, in any order; `gamma` is the share of a
        prototype that an update keeps.
        """
        super().__init__()
        self.gamma = gamma
        order = rows.argsort()
        candidates = 1 - ybar[order]
        self.register_buffer("prototypes", torch.zeros(ybar.shape[1], dim))
        self.register_buffer("targets", candidates / candidates.sum(1, keepdim=True))
        self.register_buffer("rows", rows[order], persistent=False)

    @torch.no_grad()
    def update_prototypes(
        self, q: Float[Tensor, "batch dim"], classes: Int[Tensor, " batch"]
    ) -> None:
        """Moves prototypes towards unit embeddings of their class, sample by sample (Eq. 6).

        mu_c = Normalize(gamma mu_c + (1 - gamma) q), where c is the sample's class. Round r takes
        the r-th sample of every class at once, so only samples of one class are sequential.
        """
        if not len(classes):
            return
        order, count = classes.argsort(stable=True), count_members(classes, len(self.prototypes))
        now, q = self.prototypes, (1 - self.gamma) * q.to(self.prototypes)
        rounds = torch.arange(int(count.max()), device=classes.device)[:, None]
        for block in torch.split(rounds, max(1, PLACES // len(count))):  # bounds the memory
            place = (count.cumsum(0) - count + block).clamp_(max=len(classes) - 1)
            sample, has_one = order[place], (block < count)[:, :, None]
            for r in range(len(block)):
                moved = F.normalize(self.gamma * now + q[sample[r]], dim=1)
                now = torch.where(has_one[r], moved, now)
        self.prototypes.copy_(now)

    @torch.no_grad()
    def update_targets(
        self,
        rows: Int[Tensor, " batch"],
        q: Float[Tensor, "batch dim"],
        ybar: Float[Tensor, "batch classes"],
        phi: float,
    ) -> None:
        """Moves pseudo-targets towards the candidate with the nearest prototype (Eq. 5).

        s = phi s + (1 - phi) z, where z is 1 at the candidate j with the largest q . mu_j, else 0.
        """
        similarity = q.to(self.prototypes) @ self.prototypes.T
        nearest = similarity.masked_fill(ybar == 1, -torch.inf).argmax(1)
        z = F.one_hot(nearest, len(self.prototypes)).to(self.targets)
        index = torch.searchsorted(self.rows, rows)
        self.targets[index] = phi * self.targets[index] + (1 - phi) * z

    def pseudo_targets(self, rows: Int[Tensor, " batch"]) -> Float[Tensor, "batch classes"]:
        """Returns the pseudo-targets of some rows."""
        return self.targets[torch.searchsorted(self.rows, rows)]


class Pico(MomentumLoss, TrainingSetLoss):
    r"""PiCO (Wang et al. 2022, Eq. 1 to 6) for complementary labels: L_cls + `contrast` L_cont.

    .. math:: L_{cls} = -\sum_j s_j \log p_j, \qquad
              L_{cont} = \frac{-1}{|P(i)|} \sum_{p \in P(i)}
                         \log \frac{f_{ip}}{\sum_{a \in A(i)} f_{ia}}

    with pseudo-targets s, which move towards the candidate class of the nearest prototype, and P(i)
    the keys of the class predicted for i. For `warmup_epochs` pseudo-targets stay as they are, and
    P(i) is the sample's own key.
    """

    needs = replace(MomentumLoss.needs, labelled_vectors=("projections",))
    remembers_rows = True

    def __init__(
        self,
        dim: int | None = None,
        labels: Tensor | None = None,
        *,
        tau: Temperature = 0.07,
        contrast: Annotated[float, Field(ge=0)] = 0.5,
        gamma: Share = 0.99,
        phi_start: Share = 0.95,
        phi_end: Share = 0.8,
        phi_epochs: Natural = 200,
        warmup_epochs: Count = 1,
        queue: Natural = 8192,
        momentum: Decay = 0.999,
    ) -> None:
        """Starts with an empty queue, zero prototypes and uniform pseudo-targets.

        Args:
            dim: width of the projections; a run has that of its model.
            labels: complementary labels of the whole training set, 0 or 1, [samples, classes]; a
                run has those of its data.
            tau: temperature, at least 0.003.
            contrast: weight of L_cont.
            gamma: share of a prototype that an update keeps.
            phi_start: share of a pseudo-target that a step keeps, at first.
            phi_end: the same share from `phi_epochs` on; linear in between.
            phi_epochs: epochs from `phi_start` to `phi_end`.
            warmup_epochs: epochs of the warm-up described above.
            queue: number of earlier samples' keys that are kept, at least the batch of all
                processes.
            momentum: of a run's key encoder, whose weights move by 1 - momentum a step.
        """
        ybar = None if labels is None else complementary_columns(labels)
        classes = None if ybar is None else ybar.shape[1]
        super().__init__(dim, classes, queue=queue, momentum=momentum)
        self.tau, self.contrast, self.gamma = tau, contrast, gamma
        self.phi_start, self.phi_end, self.phi_epochs = phi_start, phi_end, phi_epochs
        self.warmup_epochs = warmup_epochs
        if ybar is not None and dim is not None:
            self.register_buffer("labels", ybar, persistent=False)
            rows = torch.arange(len(ybar), device=ybar.device)
            self.memory.disambiguation = Disambiguation(rows, ybar, dim, gamma)

    def build_memory(self, run: RunSpec) -> MomentumQueue:
        """Returns the queue, of one-hot posteriors, with prototypes and pseudo-targets."""
        memory = super().build_memory(run)
        memory.disambiguation = Disambiguation(
            run.rows, run.read_targets(), memory.width, self.gamma
        )
        return memory

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `pseudo_target_loss` + `contrast` `pico`, in the order of Algorithm 1."""
        memory: KeyQueue = self.memory
        keys = memory.embed(batch)
        posteriors = batch.logits.detach().softmax(1)
        posteriors = posteriors.masked_fill(batch.own_targets == 1, -torch.inf)
        classes = batch.gather_labelled(posteriors.argmax(1))
        q, in_warmup = batch.labelled_vectors["projections"][0], batch.epoch < self.warmup_epochs
        indices = batch.indices[: len(keys)]
        disambiguation: Disambiguation = self.memory.disambiguation
        directions = unit(q.detach())
        disambiguation.update_prototypes(directions, classes)
        if not in_warmup:
            progress = min(batch.epoch / self.phi_epochs, 1.0)
            phi = self.phi_start + progress * (self.phi_end - self.phi_start)
            all_indices = batch.gather_labelled(indices)
            disambiguation.update_targets(all_indices, directions, batch.targets, phi)
        all_keys, one_hot = batch.gather_labelled(keys), one_hot_like(classes, posteriors)
        queue, queue_one_hot = memory.queue()
        memory.offer(all_keys, one_hot)
        targets = disambiguation.pseudo_targets(indices).to(posteriors)
        classifier_loss = pseudo_target_loss(batch.logits, targets, total=batch.num_labelled)

        def contrastive_loss(prefix: slice) -> Tensor:
            if not in_warmup:
                return pico(
                    q[:, prefix],
                    all_keys[:, prefix],
                    queue[:, prefix],
                    classes,
                    queue_one_hot.argmax(1),
                    tau=self.tau,
                    rows=batch.own_labelled_rows,
                )
            return mulco(  # MoCo: a sample's own key alone is positive
                q[batch.labelled, prefix],
                keys[:, prefix],
                queue[:, prefix],
                one_hot[batch.labelled],
                queue_one_hot,
                batch.own_targets,
                tau=self.tau,
                kind="standard",
                total=batch.num_labelled,
            )

        return classifier_loss + self.contrast * self.mean_over_widths(contrastive_loss)

    def forward(  # type: ignore[override]  # rows of the labels that it was built with
        self,
        queries: Tensor,
        keys: Tensor,
        logits: Tensor,
        indices: Tensor,
        *,
        epoch: float,
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the loss over all processes' samples; enqueues keys, updates pseudo-targets.

        Args:
            queries: projections of this process's samples, [batch, dim].
            keys: projections of another view by a `MomentumEncoder`, [batch, dim].
            logits: logits of the classifier, [batch, classes].
            indices: the samples' rows in the labels that the loss was built with, [batch].
            epoch: the current epoch, which may be fractional.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        indices, targets = self.labels_of(indices, logits)
        return self.evaluate_queries(
            queries, keys, logits, targets, indices=indices, epoch=epoch, sizes=sizes
        )


def pseudo_target_loss(
    logits: Float[Tensor, "rows classes"], s: Float[Tensor, "rows classes"], *, total: int
) -> Float[Tensor, ""]:
    """PiCO's L_cls (Wang et al. 2022, Eq. 1): the mean of -sum_j s_j log f_j.

    Args:
        logits: of this process's samples.
        s: their pseudo-targets; no gradient.
        total: samples in the whole batch; 0 gives a loss of 0.
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
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    """PiCO's L_cont (Wang et al. 2022, Eq. 2 and 3), as in `Pico`: the mean over queries i.

    A(i) are all queries but i itself, all keys and the queue, P(i) those of A(i) with the predicted
    class of i, and f = exp(cos / tau). A sample's own key is always in P(i).

    Args:
        q: projections of the whole batch by the model.
        keys: projections of the samples' other view by the momentum encoder; no gradient.
        queue: earlier keys; no gradient.
        classes: predicted class of each sample, its most probable candidate.
        queue_classes: those of the queue's samples at the time they were enqueued.
        tau: temperature, > 0.
        rows: as in `nt_xent`.

    Raises:
        ValueError: tau <= 0.
    """
    dtype = working_dtype(q.dtype, tau)
    queries = unit(q).to(dtype)
    # A(i) with i itself, the same for all queries.
    pool = torch.cat([queries, unit(keys.detach()).to(dtype), unit(queue.detach()).to(dtype)])
    pool_classes = torch.cat([classes, classes, queue_classes])
    own = torch.arange(len(q), device=q.device)[as_slice(rows)]
    anchors, own_classes = queries[own], classes[own]

    # As in `supcon`, log f is linear in the positive: a product with the sum of the class.
    mirroring = Mirroring.of(rows, len(q), [0], [0], [[0]])
    count = int(pool_classes.max()) + 1 if len(pool_classes) else 0
    positives = (count_members(pool_classes, count)[own_classes] - 1).to(dtype)
    positive_sum = group_sums(pool, pool_classes, count)[own_classes] - anchors
    attraction = (anchors * positive_sum).sum(1) / (tau * positives)
    if mirroring is not None:  # the gradient of a query as a positive of its class's queries, too
        query_sum = group_sums(queries, classes, count)[own_classes]
        both_sums = (positive_sum + query_sum - anchors).detach()
        gradient = (anchors * both_sums).sum(1) / (tau * positives)
        attraction = attraction.detach() + gradient - gradient.detach()
    mean = 1 / max(len(q), 1)

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        return (sums[:, 0].log() - per_anchor[0]).sum() * mean

    key_tag = torch.arange(len(pool), device=q.device)
    pairs = Pairs([anchors / tau], [pool], anchor_tag=own, key_tag=key_tag, exclude=own[:, None])
    return contrast(pairs, finish, [attraction], mirroring=mirroring)
