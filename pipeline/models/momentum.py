"""The slow copy of an encoder that makes keys, and the queue that keeps them (MoCo, MulCo)."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heron.pipeline.models.disambiguation import Disambiguation
from heron.pipeline.models.heterogeneous import Heterogeneous


class Momentum(nn.Module):
    """A momentum encoder with its projector, and a queue of earlier keys with their posteriors.

    He et al. 2020 (MoCo); MulCo, Algorithm 1. The queue is empty at first and holds what was put
    there, so that no made-up key is ever a negative. Every process holds the same.

    Attributes:
        view: number of the view that keys are made of.
        disambiguation: PiCO's memory, where it is trained; part of the state.
    """

    disambiguation: Disambiguation | None

    encoder: nn.Module
    projector: nn.Module
    keys: Tensor
    posteriors: Tensor
    filled: Tensor
    position: Tensor

    def __init__(
        self, model: Heterogeneous, view: int, size: int, classes: int, momentum: float
    ) -> None:
        """Copy the view's encoder and projector.

        Args:
            model: what is followed, in its initial state, unwrapped.
            view: which view's.
            size: keys that the queue holds.
            classes: width of a posterior.
            momentum: share of the copy that a step keeps.
        """
        super().__init__()
        self.view, self.momentum, self.precision = view, momentum, model.precision
        encoder, projector = model.branch(view)
        self.encoder = copy.deepcopy(encoder)
        self.projector = copy.deepcopy(projector)
        self.requires_grad_(False)
        self.disambiguation = None
        self.width = width = next(p.shape[0] for p in reversed(list(projector.parameters())))
        self.register_buffer("keys", next(projector.parameters()).new_zeros(size, width))
        self.register_buffer("posteriors", torch.zeros(size, classes))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def disambiguate(self, rows: Tensor, ybar: Tensor, gamma: float) -> None:
        """Keep prototypes and pseudo-targets of labelled rows: see `Disambiguation`."""
        self.disambiguation = Disambiguation(rows, ybar, self.width, gamma)

    @torch.no_grad()
    def embed(self, x: Tensor, keys: Tensor) -> Float[Tensor, "rows dim"]:
        """Keys of some rows of the view; `keys` are those of the rows' random numbers."""
        x = x.double() if self.precision == "fp64" else x
        with torch.autocast(
            x.device.type, torch.bfloat16, self.precision == "bf16", cache_enabled=False
        ):
            projected: Tensor = self.projector(self.encoder(x, keys + self.view))
        return projected.float() if self.precision == "bf16" else projected

    @torch.no_grad()
    def follow(self, model: Heterogeneous) -> None:
        """Move every parameter towards the model's by 1 - momentum."""
        encoder, projector = model.branch(self.view)
        for mine, theirs in ((self.encoder, encoder), (self.projector, projector)):
            for slow, fast in zip(mine.parameters(), theirs.parameters(), strict=True):
                slow.lerp_(fast.detach(), 1 - self.momentum)

    @torch.no_grad()
    def enqueue(
        self, keys: Float[Tensor, "rows dim"], posteriors: Float[Tensor, "rows classes"]
    ) -> None:
        """Put the keys of a whole batch in, in its order; the oldest give way."""
        size, count = len(self.keys), len(keys)
        place = (self.position + torch.arange(count, device=keys.device)) % size
        self.keys[place] = keys.to(self.keys)
        self.posteriors[place] = posteriors.to(self.posteriors)
        self.position.copy_((self.position + count) % size)
        self.filled.add_(count).clamp_(max=size)

    def queue(self) -> tuple[Float[Tensor, "filled dim"], Float[Tensor, "filled classes"]]:
        """The keys that were put in, and their posteriors."""
        filled = int(self.filled)
        return self.keys[:filled], self.posteriors[:filled]
