"""Losses for complementary labels that remember: queues of keys, pseudo-labels, guesses.

They move on in training mode (`train()`), once a call, and always compare rows of all processes,
which hold the same memory; `state_dict` has it.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from heron.losses.inputs import LossError, Views, as_columns, as_views, expect_width
from heron.losses.loss import Loss
from heron.pipeline.objectives import comco, mulco, pico, plnl
from heron.pipeline.objectives.batch import GlobalBatch
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


class _GivenKeys(KeyQueue):
    """A queue whose keys are given to each call."""

    offered: tuple[Tensor, Tensor]

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


class _PicoKeys(_GivenKeys, pico.PicoQueue):
    """The same with what PiCO's labels are taken for."""

    def __init__(self, size: int, dim: int, labels: Tensor, gamma: float) -> None:
        super().__init__(size, dim, labels.shape[1])
        rows = torch.arange(len(labels), device=labels.device)
        self.disambiguation = pico.Disambiguation(rows, labels, dim, gamma)


class _Momentum(Loss):
    """A loss of queries against keys."""

    term: MomentumTerm
    memory: _GivenKeys

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
            self.memory.enqueue(*self.memory.offered)
            del self.memory.offered
        return loss


class _OfQueries(_Momentum):
    """A loss of queries, keys, logits and complementary labels."""

    classes: int

    def _compare(
        self,
        queries: Tensor,
        keys: Tensor,
        logits: Tensor,
        labels: Tensor,
        epoch: float,
        sizes: Sequence[int] | None,
    ) -> Tensor:
        features: dict[str, Views] = {"projections": queries, "keys": keys, "logits": logits}
        if logits.shape[1] != self.classes:
            raise LossError(
                f"logits are of {logits.shape[1]} classes; expected {self.classes}, which classes "
                "says"
            )
        targets = as_columns(labels, self.classes)
        return self.evaluate(features, targets, epoch=epoch, sizes=sizes)


class Mulco(_OfQueries):
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
        memory = _GivenKeys(queue, dim, classes)
        options = {"tau": tau, "kind": kind, "tau_plus": tau_plus, "queue": queue}
        super().__init__(mulco.Mulco, options, memory=memory)
        self.classes = classes

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        logits: Tensor,
        labels: Tensor,
        *,
        sizes: Sequence[int] | None = None,
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
        return self._compare(queries, keys, logits, labels, 0.0, sizes)

    if TYPE_CHECKING:
        __call__ = forward


class Comco(_OfQueries):
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
        super().__init__(
            comco.Comco,
            {
                "tau": tau,
                "contrast": contrast,
                "neighbours": neighbours,
                "neighbour_epochs": neighbour_epochs,
                "warmup_epochs": warmup_epochs,
                "queue": queue,
            },
            memory=_GivenKeys(queue, dim, 2 * classes),
        )
        self.classes = classes

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        logits: Tensor,
        labels: Tensor,
        *,
        epoch: float,
        sizes: Sequence[int] | None = None,
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
        return self._compare(queries, keys, logits, labels, epoch, sizes)

    if TYPE_CHECKING:
        __call__ = forward


class _OfRows(Loss):
    """A loss that knows the complementary labels of the whole training set."""

    labels: Tensor

    def of_rows(self, indices: Tensor, logits: Tensor) -> Tensor:
        """Returns the labels of some rows, and refuses numbers that are none."""
        if logits.shape[1] != self.labels.shape[1]:
            raise LossError(
                f"logits are of {logits.shape[1]} classes; expected {self.labels.shape[1]}, as the "
                "labels that the loss was made with"
            )
        whole = not (indices.is_floating_point() or indices.dtype == torch.bool)
        if indices.dim() != 1 or not whole:
            raise LossError(
                f"indices are {indices.dtype} {tuple(indices.shape)}; expected the samples' rows "
                "of the labels that the loss was made with, whole numbers [batch]"
            )
        if ((indices < 0) | (indices >= len(self.labels))).any():
            raise LossError(
                f"indices are {int(indices.min())} to {int(indices.max())}; expected rows of the "
                f"labels that the loss was made with, 0 to {len(self.labels) - 1}"
            )
        return self.labels[indices]


class Pico(_Momentum, _OfRows):
    r"""PiCO (Wang et al. 2022, Eq. 1 to 6) for complementary labels: L_cls + `contrast` L_cont.

    .. math:: L_{cls} = -\sum_j s_j \log p_j, \qquad
              L_{cont} = \frac{-1}{|P(i)|} \sum_{p \in P(i)}
                         \log \frac{f_{ip}}{\sum_{a \in A(i)} f_{ia}}

    with pseudo-targets s, moved towards the candidate of the nearest prototype, and P(i) what is
    taken for the class of i. For `warmup_epochs` pseudo-targets rest, and P(i) is the own key.
    """

    def __init__(
        self,
        dim: int,
        labels: Tensor,
        *,
        tau: float = 0.07,
        contrast: float = 0.5,
        gamma: float = 0.99,
        phi_start: float = 0.95,
        phi_end: float = 0.8,
        phi_epochs: int = 200,
        warmup_epochs: int = 1,
        queue: int = 8192,
    ) -> None:
        """Makes an empty queue, prototypes of zeros and even pseudo-targets.

        Args:
            dim: width of the projections.
            labels: complementary labels of the whole training set, 0 or 1, [samples, classes].
            tau: temperature, at least 0.003.
            contrast: weight of L_cont.
            gamma: share of a prototype that a sample leaves.
            phi_start: share of a pseudo-target that a step leaves, at first.
            phi_end: the same from `phi_epochs` on; linear between.
            phi_epochs: see there.
            warmup_epochs: see above.
            queue: keys that it holds, at least those of a batch of all processes.
        """
        labels = as_columns(labels, labels.shape[-1])
        super().__init__(
            pico.Pico,
            {
                "tau": tau,
                "contrast": contrast,
                "gamma": gamma,
                "phi_start": phi_start,
                "phi_end": phi_end,
                "phi_epochs": phi_epochs,
                "warmup_epochs": warmup_epochs,
                "queue": queue,
            },
            memory=_PicoKeys(queue, dim, labels, gamma),
        )
        self.register_buffer("labels", labels, persistent=False)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        logits: Tensor,
        indices: Tensor,
        *,
        epoch: float,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Returns the loss of the samples of all processes; enqueues keys, moves pseudo-targets.

        Args:
            queries: projections of this process's samples, [batch, dim].
            keys: those of another view by a `MomentumEncoder`, [batch, dim].
            logits: of the classifier, [batch, classes].
            indices: the samples' rows of the labels that the loss was made with, [batch].
            epoch: now; a fraction of it counts.
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: an input is not what the loss expects; says what it found.
        """
        features: dict[str, Views] = {"projections": queries, "keys": keys, "logits": logits}
        targets = self.of_rows(indices, logits)
        return self.evaluate(features, targets, indices=indices, epoch=epoch, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class Plnl(_OfRows):
    r"""PLNL (Li, Li and Jia 2025, as in the authors' code): two networks choose for each other.

    For each network

    .. math:: -\frac1n \sum_i \sum_{k \in \bar Y_i} \log(1 - p_{ik})
        + \frac{1}{m K} \sum_{i : y_i} \sum_k \mathrm{BCE}(\sigma(f_{ik}), [k = y_i])
        + \frac wn \sum_i \sum_{v > 1} \mathrm{KL}(q_i \,\|\, p^v_i)

    For `pretrain_epochs` the first sum alone; then w rises over `consistency_epochs`; from
    `warmup_epochs` later on labels :math:`y_i` are guessed and sets :math:`\bar Y_i` enhanced, at
    the ends of epochs, from what the networks gave of every sample.
    """

    term: plnl.Plnl
    memory: plnl.Selection

    def __init__(
        self,
        labels: Tensor,
        *,
        pretrain_epochs: int = 200,
        warmup_epochs: int = 20,
        consistency_epochs: int = 100,
        epochs: int = 3,
        sure: float = 0.99,
        neighbours: int = 500,
        share: float = 0.1,
    ) -> None:
        """Begins with what the labels say.

        Args:
            labels: complementary labels of the whole training set, 0 or 1, [samples, classes].
            pretrain_epochs: see above.
            warmup_epochs: see above.
            consistency_epochs: see above.
            epochs: over how many a guess's probability is the mean.
            sure: above which it is taken.
            neighbours: that vote on further complementary labels.
            share: of the classes that a set could take, how many it takes.
        """
        labels = as_columns(labels, labels.shape[-1])
        super().__init__(
            plnl.Plnl,
            {
                "pretrain_epochs": pretrain_epochs,
                "warmup_epochs": warmup_epochs,
                "consistency_epochs": consistency_epochs,
                "epochs": epochs,
                "sure": sure,
                "neighbours": neighbours,
                "share": share,
            },
        )
        rows = torch.arange(len(labels), device=labels.device)
        self.memory = plnl.Selection(rows, labels, self.term)
        self.register_buffer("labels", labels, persistent=False)

    def forward(
        self,
        first: Views,
        second: Views,
        indices: Tensor,
        *,
        epoch: float,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Returns the sum of both networks' losses, and notes their outputs.

        Args:
            first: logits of one network: [batch, views, classes], or a tensor a view, the least
                augmented first.
            second: those of the other.
            indices: the samples' rows of the labels that the loss was made with, [batch].
            epoch: now; a fraction of it counts.
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: an input is not what the loss expects; says what it found.
        """
        one, other = as_views(first, "logits"), as_views(second, "logits")
        if len(one) != len(other):
            raise LossError(f"logits are of {len(one)} and {len(other)} views; expected as many")
        features: dict[str, Views] = {"networks": [*one, *other]}
        targets = self.of_rows(indices, one[0])
        return self.evaluate(features, targets, indices=indices, epoch=epoch, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward
