"""Momentum encoders that compute keys, queues of keys, and losses of them (MoCo, MulCo)."""

import copy
from abc import abstractmethod
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import one_hot

from heron.base.errors import ConfigError
from heron.base.sections import Natural
from heron.losses.batch import GlobalBatch
from heron.losses.classification import checked_logits
from heron.losses.inputs import LossError, RowCounts, Views, as_columns, as_rows, expect_width
from heron.losses.loss import Loss
from heron.losses.run import Memory, RunSpec, StepEnd, TermSetting
from heron.losses.terms import COMPLEMENTARY_LABELS, Needs
from heron.models.heterogeneous import AUTOCAST, Heterogeneous

VIEW = 1  # keys are made of the second view
Decay = Annotated[float, Field(ge=0, le=1)]


class KeyQueue(Memory):
    """A queue of earlier keys with their posteriors; it starts empty, so no negative is made up."""

    keys: Tensor
    posteriors: Tensor
    filled: Tensor
    position: Tensor
    _count: int | None = 0  # `filled` on the host; None: not yet read after a load

    def __init__(self, size: int, width: int, classes: int) -> None:
        """Allocates `size` keys of `width` numbers, each with a posterior of `classes` numbers."""
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, width))
        self.register_buffer("posteriors", torch.zeros(size, classes))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    @abstractmethod
    def embed(self, batch: GlobalBatch) -> Float[Tensor, "rows dim"]:
        """Returns the keys of this process's labelled rows, without gradient."""

    @abstractmethod
    def offer(
        self, keys: Float[Tensor, "rows dim"], posteriors: Float[Tensor, "rows classes"]
    ) -> None:
        """Offers the keys of the whole batch, in its order, to be enqueued after the step."""

    def queue(self) -> tuple[Float[Tensor, "filled dim"], Float[Tensor, "filled classes"]]:
        """Returns the keys in the queue, and their posteriors."""
        if self._count is None:
            self._count = int(self.filled)
        return self.keys[: self._count], self.posteriors[: self._count]

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._count = None

    @torch.no_grad()
    def enqueue(
        self, keys: Float[Tensor, "rows dim"], posteriors: Float[Tensor, "rows classes"]
    ) -> None:
        """Enqueues the keys of a whole batch, in its order; they replace the oldest ones."""
        size, count = len(self.keys), len(keys)
        positions = (self.position + torch.arange(count, device=keys.device)) % size
        self.keys[positions] = keys.to(self.keys)
        self.posteriors[positions] = posteriors.to(self.posteriors)
        self.position.copy_((self.position + count) % size)
        self.filled.add_(count).clamp_(max=size)
        if self._count is not None:
            self._count = min(self._count + count, size)


class MomentumQueue(KeyQueue):
    """A momentum encoder, its projector, and a `KeyQueue` (He et al. 2020; MulCo, Algorithm 1)."""

    encoder: nn.Module
    projector: nn.Module

    def __init__(self, model: Heterogeneous, size: int, classes: int, momentum: float) -> None:
        """Copies the encoder and the projector of the view that keys are computed from.

        `model` is in its initial state, unwrapped; the copies follow it with decay `momentum` per
        step. The queue holds `size` keys with posteriors over `classes`.
        """
        encoder, projector = model.branch(VIEW)
        width = next(p.shape[0] for p in reversed(list(projector.parameters())))
        super().__init__(size, width, classes)
        self.width = width
        self.momentum, self.precision = momentum, model.precision
        self._model = (model,)  # in a tuple, so that it is not registered as a submodule
        self.encoder, self.projector = copy.deepcopy(encoder), copy.deepcopy(projector)
        self.requires_grad_(False)
        self.keys = self.keys.to(next(projector.parameters()))
        self._offered: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def embed(self, batch: GlobalBatch) -> Float[Tensor, "rows dim"]:
        """Returns the keys of this process's labelled rows."""
        count = batch.labelled.stop - batch.labelled.start
        x, rng_keys = batch.inputs[VIEW][:count], batch.rng_keys[:count]
        x = x.double() if self.precision == "fp64" else x
        half = AUTOCAST.get(self.precision)
        with torch.autocast(x.device.type, half, half is not None, cache_enabled=False):
            projected: Tensor = self.projector(self.encoder(x, rng_keys + VIEW))
        return projected.float() if half else projected

    def offer(
        self, keys: Float[Tensor, "rows dim"], posteriors: Float[Tensor, "rows classes"]
    ) -> None:
        """Stores the keys that `update` will enqueue."""
        self._offered = keys, posteriors

    def update(self, step: StepEnd) -> list[str]:
        """Follows the model, and enqueues the offered keys."""
        with step.gathered_parameters():
            encoder, projector = self._model[0].branch(VIEW)
            move_towards(self.encoder, encoder, self.momentum)
            move_towards(self.projector, projector, self.momentum)
        if self._offered is not None:
            self.enqueue(*self._offered)
            self._offered = None
        return []


@torch.no_grad()
def move_towards(slow: nn.Module, fast: nn.Module, momentum: float) -> None:
    """Moves every parameter of `slow` towards that of `fast`, by 1 - momentum."""
    for own, target in zip(slow.parameters(), fast.parameters(), strict=True):
        own.lerp_(target.detach(), 1 - momentum)


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
            raise LossError(f"MomentumEncoder: momentum must be 0 to 1, e.g. 0.999, got {momentum}")
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


class MomentumLoss(Loss):
    """A loss of queries against keys of a momentum encoder, with a queue of earlier keys.

    In a run the encoder is a slow copy of the model's; a loop has a `MomentumEncoder`. The queue is
    equal on all processes and part of `state_dict`. Each call in training mode updates it. The rows
    of all processes are always compared.
    """

    needs = Needs(own=("logits", "projections"), labels=COMPLEMENTARY_LABELS, views=2)
    truncated = ()  # keys are computed and enqueued once, at full width
    label_columns: ClassVar[int] = 1  # kept of each key, in multiples of the number of classes
    by_epoch: ClassVar[bool] = False  # whether a loop must say which epoch it is

    def __init__(
        self, dim: int | None, classes: int | None, *, queue: Natural, momentum: Decay
    ) -> None:
        """Takes the options, and builds an empty queue for projections of `dim` numbers.

        `dim` and `classes` are None in a run. `queue` is the number of keys, `momentum` the decay
        of a run's slow encoder.
        """
        super().__init__()
        self.queue, self.momentum, self.classes = queue, momentum, classes
        if dim is not None:
            for name, value in {"dim": dim, "classes": classes}.items():
                if type(value) is not int or value < 1:
                    raise LossError(f"{name} must be a whole number of at least 1, got {value!r}")
            assert classes is not None
            self.memory = CallerKeyQueue(queue, dim, self.label_columns * classes)

    def refuse(self, name: str, setting: TermSetting) -> None:
        """Raises ConfigError if the encoder is not shared, or the queue shorter than a batch."""
        model, labelled = setting.model, setting.labelled
        if not (model.shared_encoder and model.shared_projector):
            raise ConfigError(
                f"objective.{name} compares a sample with another view of it by a slow copy of "
                "the same encoder; set model.shared_encoder and model.shared_projector to true"
            )
        if self.queue < labelled:
            raise ConfigError(
                f"objective.{name}.queue must be at least {labelled}, or the {labelled} labelled "
                f"rows of a batch would push each other out, got {self.queue}"
            )

    def build_memory(self, run: RunSpec) -> MomentumQueue:
        """Returns a slow copy of the run's model with a queue of keys."""
        return MomentumQueue(run.model, self.queue, self.label_columns * run.labels, self.momentum)

    def loop_share(self, batch: GlobalBatch) -> Tensor:
        """Returns this process's share of the loss, and in training enqueues the batch's keys."""
        size, width = self.memory.keys.shape
        if batch.num_labelled > size:
            raise LossError(
                f"queue must be at least {batch.num_labelled}, or the {batch.num_labelled} rows of "
                f"all processes would push each other out, got {size}"
            )
        expect_width("keys", batch.own["keys"][0], width)
        loss = super().loop_share(batch)
        if self.training:
            offered = self.memory.offered
            del self.memory.offered
            for name, x in zip(("keys", "logits"), offered, strict=True):
                if not x.isfinite().all():  # in the queue they would spoil many steps
                    row = int((~x.isfinite()).any(1).nonzero()[0])
                    raise LossError(
                        f"{name} of row {row} of all processes must be finite, because the queue "
                        "stores them; remove such rows"
                    )
            self.memory.enqueue(*offered)
        return loss

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        logits: Tensor,
        labels: Tensor,
        *,
        epoch: float | None = None,
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the loss over the samples of all processes, and enqueues their keys.

        Args:
            queries: projections of this process's samples, [batch, dim].
            keys: projections of another view by a `MomentumEncoder`, [batch, dim].
            logits: logits of the classifier, [batch, classes].
            labels: complementary labels, columns [batch, classes] or class numbers [batch].
            epoch: the current epoch, which may be fractional; needed by `Comco`.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows, or epoch is missing.
        """
        if epoch is None and self.by_epoch:
            raise LossError("epoch is missing, but the loss depends on it; pass epoch=0.0 at first")
        targets, epoch = self.targets(logits, labels), epoch or 0.0
        return self.evaluate_queries(queries, keys, logits, targets, epoch=epoch, sizes=sizes)

    def evaluate_queries(
        self, queries: Tensor, keys: Tensor, logits: Tensor, targets: Tensor, **more: Any
    ) -> Tensor:
        """Returns the loss of one view's projections, the other's keys, and logits."""
        inputs = {"queries": queries, "keys": keys, "logits": logits}
        features: dict[str, Views] = {name: as_rows(x, name) for name, x in inputs.items()}
        expect_width("queries", queries, keys.shape[1])
        features["projections"] = features.pop("queries")
        return self.evaluate(features, targets, **more)

    def targets(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns complementary labels as columns; refuses logits or labels of other classes."""
        if self.memory is None:
            raise LossError(f"it has no queue; build it with {type(self).__name__}(dim, ...)")
        if logits.shape[1] != self.classes:
            raise LossError(
                f"logits must have {self.classes} classes (classes=), got {logits.shape[1]}"
            )
        columns = as_columns(labels, self.classes)
        checked_logits(logits, columns)
        return columns


def one_hot_like(classes: Tensor, like: Tensor) -> Tensor:
    """Returns class numbers as 0/1 columns, of the number and dtype of the columns of `like`."""
    return one_hot(classes, like.shape[1]).to(like)
