"""Losses that find out, over epochs, what complementary labels leave open.

They move on in training mode (`train()`), once a call, and always compare rows of all processes,
which hold the same memory; `state_dict` has it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heron.losses.inputs import LossError, RowCounts, Views, as_columns, as_views, is_whole, shown
from heron.losses.loss import Loss, options_of
from heron.losses.momentum import CallerKeyQueue, MomentumLoss, one_view
from heron.pipeline.objectives import pico, plnl
from heron.pipeline.objectives.complementary import checked


class _OfRows(Loss):
    """A loss that knows the complementary labels of the whole training set."""

    labels: Tensor

    def of_rows(self, indices: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns some rows as int64, and their labels; refuses numbers that are no rows."""
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
    """Returns the labels of the whole training set as columns, and refuses what are none."""
    columns = as_columns(labels, None)
    try:
        return checked(columns, columns)
    except ValueError as fault:
        raise LossError(str(fault)) from None


class _PicoKeys(CallerKeyQueue, pico.PicoQueue):
    """The same with what PiCO's labels are taken for."""

    def __init__(self, size: int, dim: int, labels: Tensor, gamma: float) -> None:
        super().__init__(size, dim, labels.shape[1])
        rows = torch.arange(len(labels), device=labels.device)
        self.disambiguation = pico.Disambiguation(rows, labels, dim, gamma)


class Pico(MomentumLoss, _OfRows):
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
        features = one_view(queries, keys, logits)
        indices, targets = self.of_rows(indices, logits)
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
        indices, targets = self.of_rows(indices, one[0])
        return self.evaluate(features, targets, indices=indices, epoch=epoch, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward
