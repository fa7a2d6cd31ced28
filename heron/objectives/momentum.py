"""The momentum encoder that computes keys, and the queue of keys (MoCo, MulCo)."""

import copy
from abc import abstractmethod
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import one_hot

from heron.config.errors import ConfigError
from heron.config.sections import Natural
from heron.config.terms import COMPLEMENTARY_LABELS, Needs
from heron.models.heterogeneous import Heterogeneous
from heron.objectives.batch import GlobalBatch
from heron.objectives.term import Memory, RunSpec, StepEnd, Term, TermSetting

VIEW = 1  # keys are made of the second view


class KeyQueue(Memory):
    """A queue of earlier keys with their posteriors; it starts empty, so no negative is made up."""

    keys: Tensor
    posteriors: Tensor
    filled: Tensor
    position: Tensor

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
        filled = int(self.filled)
        return self.keys[:filled], self.posteriors[:filled]

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
        with torch.autocast(
            x.device.type, torch.bfloat16, self.precision == "bf16", cache_enabled=False
        ):
            projected: Tensor = self.projector(self.encoder(x, rng_keys + VIEW))
        return projected.float() if self.precision == "bf16" else projected

    def offer(
        self, keys: Float[Tensor, "rows dim"], posteriors: Float[Tensor, "rows classes"]
    ) -> None:
        """Stores the keys that `update` will enqueue."""
        self._offered = keys, posteriors

    def update(self, step: StepEnd) -> list[str]:
        """Follows the model, and enqueues the offered keys."""
        with step.gathered_parameters():
            self.ema_update()
        if self._offered is not None:
            self.enqueue(*self._offered)
            self._offered = None
        return []

    @torch.no_grad()
    def ema_update(self) -> None:
        """Moves every parameter towards the model's, by 1 - momentum."""
        pairs = zip((self.encoder, self.projector), self._model[0].branch(VIEW), strict=True)
        for slow, fast in pairs:
            move_towards(slow, fast, self.momentum)


@torch.no_grad()
def move_towards(slow: nn.Module, fast: nn.Module, momentum: float) -> None:
    """Moves every parameter of `slow` towards that of `fast`, by 1 - momentum."""
    for own, target in zip(slow.parameters(), fast.parameters(), strict=True):
        own.lerp_(target.detach(), 1 - momentum)


class MomentumTerm(Term):
    """A term with a momentum encoder.

    Attributes:
        queue: number of earlier samples' keys that are kept.
        momentum: of the key encoder, whose weights move by 1 - momentum a step.
    """

    queue: Natural = 8192
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.999

    needs: ClassVar[Needs] = Needs(
        own=("logits", "projections"), labels=COMPLEMENTARY_LABELS, views=2
    )
    nested: ClassVar[
        tuple[str, ...] | None
    ] = ()  # keys are computed and enqueued once, at full width

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
                f"objective.{name}.queue is {self.queue}, smaller than the {labelled} labelled "
                "rows of a batch, which would push each other out; expected at least "
                f"{labelled}"
            )

    def memory(self, run: RunSpec) -> MomentumQueue:
        """Returns a queue of keys with class probabilities."""
        return MomentumQueue(run.model, self.queue, run.labels, self.momentum)


def one_hot_like(classes: Tensor, like: Tensor) -> Tensor:
    """Returns class numbers as 0/1 columns, of the number and dtype of the columns of `like`."""
    return one_hot(classes, like.shape[1]).to(like)
