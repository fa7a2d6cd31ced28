"""A slow encoder, and losses for complementary labels with a queue of its keys.

They move on in training mode (`train()`), once a call, and always compare rows of all processes,
which hold the same memory; `state_dict` has it.
"""

import copy
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from heron.losses.inputs import LossError, RowCounts, Views, as_columns, as_rows, expect_width
from heron.losses.loss import Loss, options_of
from heron.pipeline.objectives import comco, mulco
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.complementary import checked
from heron.pipeline.objectives.momentum import KeyQueue, MomentumTerm, follow


class MomentumEncoder(nn.Module):
    """A slow copy of a network, which makes keys (He et al. 2020, MoCo).

    Call `update` after every step of the optimizer:
    `optimizer.register_step_post_hook(lambda *_: slow.update())` does so in any loop.
    """

    def __init__(self, network: nn.Module, momentum: float = 0.999) -> None:
        """Copies a network.

        Args:
            network: what is followed, not yet wrapped by DistributedDataParallel.
            momentum: share of the copy that a step keeps, from 0 to 1.
        """
        super().__init__()
        if not 0 <= momentum <= 1:
            raise LossError(f"MomentumEncoder: momentum is {momentum}; expected 0 to 1, e.g. 0.999")
        self.momentum = momentum
        self.slow = copy.deepcopy(network).requires_grad_(False)
        self._network = (network,)  # in a tuple, so that it is no part of this module

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the slow copy makes of its inputs, without gradient."""
        return self.slow(*args, **kwargs)

    def update(self) -> None:
        """Moves every parameter of the copy towards the network's by 1 - momentum."""
        follow(self.slow, self._network[0], self.momentum)


class CallerKeyQueue(KeyQueue):
    """A queue whose keys are given to each call."""

    offered: tuple[Tensor, Tensor]

    def __init__(self, size: int, dim: int, classes: int) -> None:
        """Makes an empty queue; LossError where a number is none of those it can have."""
        for name, number in (("queue", size), ("dim", dim), ("classes", classes)):
            if type(number) is not int or number < 1:
                raise LossError(f"{name} is {number!r}; expected a whole number, 1 at least")
        super().__init__(size, dim, classes)

    def embed(self, batch: GlobalBatch) -> Tensor:
        """Returns the keys of this process's rows."""
        return batch.own["keys"][0].detach()

    def offer(self, keys: Tensor, posteriors: Tensor) -> None:
        """Takes the keys of the whole batch, which are enqueued once they were compared."""
        self.offered = keys, posteriors

    def queue(self) -> tuple[Tensor, Tensor]:
        """Returns copies, since backward comes after the queue is written."""
        keys, posteriors = super().queue()
        return keys.clone(), posteriors.clone()


def one_view(queries: Tensor, keys: Tensor, logits: Tensor) -> dict[str, Views]:
    """Returns the features of a loss that compares one view with one other."""
    given = {"queries": queries, "keys": keys, "logits": logits}
    rows = {name: as_rows(x, name) for name, x in given.items()}
    expect_width({"queries": queries}, keys.shape[1])
    return {"projections": rows.pop("queries"), **rows}


class MomentumLoss(Loss):
    """A loss of queries against keys."""

    term: MomentumTerm
    memory: CallerKeyQueue

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns this process's share of the loss."""
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
    """Returns complementary labels as columns, and refuses what does not fit the classes."""
    if logits.shape[1] != classes:
        raise LossError(
            f"logits are of {logits.shape[1]} classes; expected {classes}, which classes says"
        )
    columns = as_columns(labels, classes)
    checked(logits, columns)
    return columns


class Mulco(MomentumLoss):
    r"""MulCo's contrastive losses for complementary labels (Eq. 4, 5, 9 and 10).

    The mean over queries q with key :math:`k^+` of

    .. math:: \log\big(f(q, k^+) + \sum_{x^-} w\, f(q, k^-)\big) - \log f(q, k^+)

    over the queue, with the weight w of a negative by `kind`: 1 (`standard`),
    :math:`1[h(x) \ne h(x^-)]` (`sifted`), :math:`1 - f_{h(x)}(x^-)` (`soft`),
    :math:`\bar y \cdot f(x^-)` (`weighted`), or with the sum `debiased`. The classifier needs a
    loss beside it, such as `UbLog`.
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
        """Makes an empty queue.

        Args:
            dim: width of the projections.
            classes: how many there are.
            tau: temperature, at least 0.003.
            kind: how negatives are weighed.
            tau_plus: the prior of `debiased`, 1 / classes when None.
            queue: keys that it holds, at least those of a batch of all processes.
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
        """Returns the loss of the samples of all processes, and enqueues their keys.

        Args:
            queries: projections of this process's samples, [batch, dim].
            keys: those of another view by a `MomentumEncoder`, [batch, dim].
            logits: of the classifier, [batch, classes]; no gradient.
            labels: complementary: columns [batch, classes], or class numbers [batch].
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: an input is not what the loss expects; says what it found.
        """
        features = one_view(queries, keys, logits)
        targets = _targets(logits, labels, self.classes)
        return self.evaluate(features, targets, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class Comco(MomentumLoss):
    r"""ComCo (Jiang, Sun and Tian 2024, Eq. 3 and 5 to 9), for complementary labels.

    SCL-NL of the logits, and `contrast` times

    .. math:: \frac{-1}{|P(i)|} \sum_{p \in P(i)}
        \log \frac{f_{ip}}{\sum_{a \in P(i) \cup N(i)} f_{ia}}

    the mean over queries i. P(i) is the own key and the nearest `neighbours` of the same class;
    N(i) has the complementary label whose samples are farthest. Until `warmup_epochs` N(i) is all
    others; until `neighbour_epochs` P(i) is the own key.
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
        """Makes an empty queue.

        Args:
            dim: width of the projections.
            classes: how many there are.
            tau: temperature, at least 0.003.
            contrast: weight of the contrastive loss.
            neighbours: how many others are positive.
            neighbour_epochs: until when the own key is the one positive.
            warmup_epochs: until when all others are negatives.
            queue: keys that it holds, at least those of a batch of all processes.
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
        """Returns the loss of the samples of all processes, and enqueues their keys.

        Args:
            queries: projections of this process's samples, [batch, dim].
            keys: those of another view by a `MomentumEncoder`, [batch, dim].
            logits: of the classifier, [batch, classes].
            labels: complementary: columns [batch, classes], or class numbers [batch].
            epoch: now; a fraction of it counts.
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: an input is not what the loss expects; says what it found.
        """
        features = one_view(queries, keys, logits)
        targets = _targets(logits, labels, self.classes)
        return self.evaluate(features, targets, epoch=epoch, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward
