"""A momentum encoder, and losses for complementary labels with a queue of its keys.

The queue is equal on all processes and part of `state_dict`. Each call in training mode updates it.
The losses always compare the rows of all processes.
"""

import copy
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from heron.losses.inputs import LossError, RowCounts, Views, as_columns, as_rows, expect_width
from heron.losses.loss import Loss, options_of
from heron.objectives import comco, mulco
from heron.objectives.batch import GlobalBatch
from heron.objectives.complementary import checked_logits
from heron.objectives.momentum import KeyQueue, MomentumTerm, move_towards


class MomentumEncoder(nn.Module):
    """An exponential moving average of a network, which computes keys (He et al. 2020, MoCo).

    Call `update` after every step of the optimizer, for instance by
    `optimizer.register_step_post_hook(lambda *_: slow.update())`.
    """

    def __init__(self, network: nn.Module, momentum: float = 0.999) -> None:
        """Copies a network.

        Args:
            network: the network to follow, before DistributedDataParallel wraps it.
            momentum: decay of the moving average per step, from 0 to 1.
        """
        super().__init__()
        if not 0 <= momentum <= 1:
            raise LossError(f"MomentumEncoder: momentum is {momentum}; expected 0 to 1, e.g. 0.999")
        self.momentum = momentum
        self.slow = copy.deepcopy(network).requires_grad_(False)
        self._network = (network,)  # in a tuple, so that it is not registered as a submodule

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the slow copy, without gradient."""
        return self.slow(*args, **kwargs)

    def update(self) -> None:
        """Moves every parameter of the copy towards the network's, by 1 - momentum."""
        move_towards(self.slow, self._network[0], self.momentum)


class CallerKeyQueue(KeyQueue):
    """A queue of keys that the caller passes to the loss."""

    offered: tuple[Tensor, Tensor]

    def __init__(self, size: int, dim: int, classes: int) -> None:
        """Builds an empty queue; raises LossError unless all numbers are whole and positive."""
        for name, value in (("queue", size), ("dim", dim), ("classes", classes)):
            if type(value) is not int or value < 1:
                raise LossError(f"{name} is {value!r}; expected a whole number, 1 at least")
        super().__init__(size, dim, classes)

    def embed(self, batch: GlobalBatch) -> Tensor:
        """Returns the keys of this process's rows."""
        return batch.own["keys"][0].detach()

    def offer(self, keys: Tensor, posteriors: Tensor) -> None:
        """Stores the keys of the whole batch, to be enqueued after the comparison."""
        self.offered = keys, posteriors

    def queue(self) -> tuple[Tensor, Tensor]:
        """Returns copies, since the queue is overwritten before backward."""
        keys, posteriors = super().queue()
        return keys.clone(), posteriors.clone()


def one_view(queries: Tensor, keys: Tensor, logits: Tensor) -> dict[str, Views]:
    """Returns the features, by name, of a loss that compares one view with another."""
    inputs = {"queries": queries, "keys": keys, "logits": logits}
    features = {name: as_rows(x, name) for name, x in inputs.items()}
    expect_width({"queries": queries}, keys.shape[1])
    return {"projections": features.pop("queries"), **features}


class MomentumLoss(Loss):
    """A loss of queries against keys of a momentum encoder."""

    term: MomentumTerm
    memory: CallerKeyQueue

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns this process's share of the loss, and in training enqueues the batch's keys."""
        size, width = self.memory.keys.shape
        if batch.num_labelled > size:
            raise LossError(
                f"queue is {size}, smaller than the {batch.num_labelled} rows of all processes, "
                f"which would push each other out; expected at least {batch.num_labelled}"
            )
        expect_width({"keys": batch.own["keys"][0]}, width)
        loss = super().share(batch)
        if self.training:
            offered = self.memory.offered
            del self.memory.offered
            for name, x in zip(("keys", "logits"), offered, strict=True):
                if not x.isfinite().all():  # in the queue they would spoil many steps
                    row = int((~x.isfinite()).any(1).nonzero()[0])
                    raise LossError(
                        f"{name} of row {row} of all processes are not finite; expected finite "
                        "numbers, since the queue keeps them; leave such rows out"
                    )
            self.memory.enqueue(*offered)
        return loss


def _targets(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Returns complementary labels as columns; refuses logits or labels of other classes."""
    if logits.shape[1] != classes:
        raise LossError(f"logits are of {logits.shape[1]} classes; expected classes={classes}")
    columns = as_columns(labels, classes)
    checked_logits(logits, columns)
    return columns


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
        dim: int,
        classes: int,
        *,
        tau: float = 0.05,
        kind: Literal["standard", "sifted", "soft", "weighted", "debiased"] = "weighted",
        tau_plus: float | None = None,
        queue: int = 8192,
    ) -> None:
        """Builds an empty queue.

        Args:
            dim: width of the projections.
            classes: number of classes.
            tau: temperature, at least 0.003.
            kind: how negatives are weighted.
            tau_plus: class prior of `debiased`; None: 1 / classes.
            queue: size of the queue, at least the batch of all processes.
        """
        memory = CallerKeyQueue(queue, dim, classes)
        super().__init__(mulco.Mulco, options_of(mulco.Mulco, locals()), memory=memory)
        self.classes = classes

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        logits: Tensor,
        labels: Tensor,
        *,
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the loss over the samples of all processes, and enqueues their keys.

        Args:
            queries: projections of this process's samples, [batch, dim].
            keys: projections of another view by a `MomentumEncoder`, [batch, dim].
            logits: logits of the classifier, [batch, classes]; no gradient.
            labels: complementary labels, columns [batch, classes] or class numbers [batch].
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        features = one_view(queries, keys, logits)
        targets = _targets(logits, labels, self.classes)
        return self.evaluate(features, targets, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class Comco(MomentumLoss):
    r"""ComCo (Jiang, Sun and Tian 2024, Eq. 3 and 5 to 9), for complementary labels.

    SCL-NL of the logits plus `contrast` times

    .. math:: \frac{-1}{|P(i)|} \sum_{p \in P(i)}
        \log \frac{f_{ip}}{\sum_{a \in P(i) \cup N(i)} f_{ia}}

    averaged over queries i. P(i) is the query's own key and the nearest `neighbours` keys of its
    class; N(i) are the keys with the complementary label whose samples are farthest away. Until
    `warmup_epochs` N(i) is all other keys; until `neighbour_epochs` P(i) is the own key.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        tau: float = 0.17,
        contrast: float = 0.3,
        neighbours: int = 1,
        neighbour_epochs: int = 100,
        warmup_epochs: int = 1,
        queue: int = 8192,
    ) -> None:
        """Builds an empty queue.

        Args:
            dim: width of the projections.
            classes: number of classes.
            tau: temperature, at least 0.003.
            contrast: weight of the contrastive loss.
            neighbours: number of positives beside the own key.
            neighbour_epochs: epochs in which the own key is the only positive.
            warmup_epochs: epochs in which all other keys are negatives.
            queue: size of the queue, at least the batch of all processes.
        """
        memory = CallerKeyQueue(queue, dim, 2 * classes)
        super().__init__(comco.Comco, options_of(comco.Comco, locals()), memory=memory)
        self.classes = classes

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        logits: Tensor,
        labels: Tensor,
        *,
        epoch: float,
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the loss over the samples of all processes, and enqueues their keys.

        Args:
            queries: projections of this process's samples, [batch, dim].
            keys: projections of another view by a `MomentumEncoder`, [batch, dim].
            logits: logits of the classifier, [batch, classes].
            labels: complementary labels, columns [batch, classes] or class numbers [batch].
            epoch: the current epoch, which may be fractional.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        features = one_view(queries, keys, logits)
        targets = _targets(logits, labels, self.classes)
        return self.evaluate(features, targets, epoch=epoch, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward
