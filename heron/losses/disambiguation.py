"""Losses that learn over epochs which of the candidate classes of a sample is its own.

Their memory is equal on all processes and part of `state_dict`. Each call in training mode updates
it. They always compare the rows of all processes.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heron.losses.inputs import LossError, RowCounts, Views, as_columns, as_views, is_whole, shown
from heron.losses.loss import Loss, options_of
from heron.losses.momentum import CallerKeyQueue, MomentumLoss, one_view
from heron.objectives import pico, plnl
from heron.objectives.complementary import checked_logits


class _OfTrainingSet(Loss):
    """A loss built with the complementary labels of the whole training set."""

    labels: Tensor

    def labels_of(self, indices: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices as int64, and the labels at them; refuses those out of range."""
        if logits.shape[1] != self.labels.shape[1]:
            raise LossError(
                f"logits are of {logits.shape[1]} classes; expected {self.labels.shape[1]}, as the "
                "labels that the loss was made with"
            )
        if not is_whole(indices) or indices.dim() != 1:
            raise LossError(
                f"indices are {shown(indices)}; expected the samples' rows of the labels that the "
                "loss was made with, whole numbers [batch]"
            )
        if ((indices < 0) | (indices >= len(self.labels))).any():
            raise LossError(
                f"indices are {int(indices.min())} to {int(indices.max())}; expected rows of the "
                f"labels that the loss was made with, 0 to {len(self.labels) - 1}"
            )
        indices = indices.long()  # uint8 would be a mask
        return indices, self.labels[indices]


def _complementary(labels: Tensor) -> Tensor:
    """Returns complementary labels of the whole training set as columns; refuses invalid ones."""
    columns = as_columns(labels, None)
    try:
        return checked_logits(columns, columns)
    except ValueError as fault:
        raise LossError(str(fault)) from None


class _PicoKeys(CallerKeyQueue, pico.PicoQueue):
    """A key queue with PiCO's prototypes and pseudo-targets."""

    def __init__(self, size: int, dim: int, labels: Tensor, gamma: float) -> None:
        super().__init__(size, dim, labels.shape[1])
        rows = torch.arange(len(labels), device=labels.device)
        self.disambiguation = pico.Disambiguation(rows, labels, dim, gamma)


class Pico(MomentumLoss, _OfTrainingSet):
    r"""PiCO (Wang et al. 2022, Eq. 1 to 6) for complementary labels: L_cls + `contrast` L_cont.

    .. math:: L_{cls} = -\sum_j s_j \log p_j, \qquad
              L_{cont} = \frac{-1}{|P(i)|} \sum_{p \in P(i)}
                         \log \frac{f_{ip}}{\sum_{a \in A(i)} f_{ia}}

    with pseudo-targets s, which move towards the candidate class of the nearest prototype, and P(i)
    the keys of the class predicted for i. For `warmup_epochs` pseudo-targets stay as they are, and
    P(i) is the sample's own key.
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
        """Starts with an empty queue, zero prototypes and uniform pseudo-targets.

        Args:
            dim: width of the projections.
            labels: complementary labels of the whole training set, 0 or 1, [samples, classes].
            tau: temperature, at least 0.003.
            contrast: weight of L_cont.
            gamma: decay of a prototype at each sample.
            phi_start: decay of a pseudo-target at each step, at first.
            phi_end: the same decay from `phi_epochs` on; linear in between.
            phi_epochs: epochs from `phi_start` to `phi_end`.
            warmup_epochs: epochs of the warm-up described above.
            queue: size of the queue, at least the batch of all processes.
        """
        labels = _complementary(labels)
        memory = _PicoKeys(queue, dim, labels, gamma)
        super().__init__(pico.Pico, options_of(pico.Pico, locals()), memory=memory)
        self.register_buffer("labels", labels, persistent=False)

    def forward(
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
        features = one_view(queries, keys, logits)
        indices, targets = self.labels_of(indices, logits)
        return self.evaluate(features, targets, indices=indices, epoch=epoch, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class Plnl(_OfTrainingSet):
    r"""PLNL (Li, Li and Jia 2025, as in the authors' code): two networks select labels.

    For each network

    .. math:: -\frac1n \sum_i \sum_{k \in \bar Y_i} \log(1 - p_{ik})
        + \frac{1}{m K} \sum_{i : y_i} \sum_k \mathrm{BCE}(\sigma(f_{ik}), [k = y_i])
        + \frac wn \sum_i \sum_{v > 1} \mathrm{KL}(q_i \,\|\, p^v_i)

    For `pretrain_epochs` the loss is the first sum alone; then w rises over `consistency_epochs`.
    From `warmup_epochs` after that, each network's labels :math:`y_i` are guessed, and its sets
    :math:`\bar Y_i` enlarged, at the ends of epochs from the networks' outputs for every sample.
    """

    term: plnl.Plnl
    memory: plnl.PlnlMemory

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
        """Starts from the given labels.

        Args:
            labels: complementary labels of the whole training set, 0 or 1, [samples, classes].
            pretrain_epochs: epochs of the first sum alone.
            warmup_epochs: further epochs before labels are guessed.
            consistency_epochs: epochs over which w rises.
            epochs: number of epochs over which a guess's probability is averaged.
            sure: the probability above which a guess is accepted.
            neighbours: number of neighbours that vote on further complementary labels.
            share: the fraction of the remaining classes that the set of a confident row gains.
        """
        labels = _complementary(labels)
        super().__init__(plnl.Plnl, options_of(plnl.Plnl, locals()))
        rows = torch.arange(len(labels), device=labels.device)
        self.memory = plnl.PlnlMemory(rows, labels, self.term)
        self.register_buffer("labels", labels, persistent=False)

    def forward(
        self,
        first: Views,
        second: Views,
        indices: Tensor,
        *,
        epoch: float,
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the sum of both networks' losses, and records their outputs.

        Args:
            first: logits of one network, [batch, views, classes] or a tensor for each view, the
                least augmented view first.
            second: logits of the other network.
            indices: the samples' rows in the labels that the loss was built with, [batch].
            epoch: the current epoch, which may be fractional.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        a, b = as_views(first, "logits"), as_views(second, "logits")
        if len(a) != len(b):
            raise LossError(f"logits are of {len(a)} and {len(b)} views; expected as many")
        features: dict[str, Views] = {"networks": [*a, *b]}
        indices, targets = self.labels_of(indices, a[0])
        return self.evaluate(features, targets, indices=indices, epoch=epoch, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward
