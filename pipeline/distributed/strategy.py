"""How parameters and optimiser state lie on the processes, and how a step moves them.

What the processes exchange of the data is in `collectives`; this is about the weights.
A strategy takes the gradient of a value that is a process's share of the global loss, and leaves
the gradient of the whole on the parameters, whatever the number of processes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from heron.pipeline.distributed.collectives import rank, world_size
from heron.pipeline.models.heterogeneous import Features, Heterogeneous
from heron.pipeline.training.optim import set_rate

State = dict[str, Tensor]


class Strategy:
    """One process, or DistributedDataParallel: every process holds all parameters.

    Attributes:
        model: what is trained, unwrapped.
        parameters: how many numbers that is.
    """

    def __init__(self, model: Heterogeneous, wrapped: nn.Module, optimizer: Optimizer) -> None:
        """Train a model through its wrapper, which may be the model itself."""
        self.model, self.optimizer = model, optimizer
        self.parameters = sum(_shape(p).numel() for p in model.parameters())
        self._wrapped = wrapped

    def __call__(
        self,
        inputs: Sequence[Tensor],
        keys: Tensor,
        parts: Sequence[int],
        targets: Tensor,
        present: Tensor | None = None,
    ) -> Features:
        """The features of some rows: see `Heterogeneous.forward`."""
        features: Features = self._wrapped(inputs, keys, parts, targets, present)
        return features

    def describe(self) -> str:
        """What runs, in a few words."""
        return "DDP" if isinstance(self._wrapped, DistributedDataParallel) else "one process"

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a part of a step; gradients are exchanged in the last."""
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        return self._wrapped.no_sync()

    def backward(self, value: Tensor) -> None:
        """Add the gradient of a value that is this process's share of a sum over processes.

        The means over processes that strategies take are undone: the gradient is of the sum.
        """
        (value * world_size()).backward()  # type: ignore[no-untyped-call]

    def gradient_norm(self) -> Tensor | float:
        """Length of the gradient over all parameters; not finite if one of them is not."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def step(self, rate: float) -> None:
        """Move the parameters at a learning rate, and clear the gradient."""
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """While it is open, every process can read all of `model`; every process must open it."""
        yield

    def model_state(self) -> State:
        """Parameters and buffers in full by name, on rank 0; every process must call it."""
        return {
            name: _copy(value) for name, value in self.model.state_dict().items() if rank() == 0
        }

    def optimizer_state(self) -> State:
        """What the optimiser keeps of each parameter, in full, as NAME/KEY, on rank 0; no counts.

        It is the same for any strategy and number of processes. Every process must call it.
        """
        state = self.optimizer.state
        return {
            f"{name}/{key}": _copy(value)
            for name, parameter in self.model.named_parameters()
            for key, value in state.get(parameter, {}).items()
            if key != "step" and value is not None and rank() == 0
        }

    def load_optimizer(self, state: State, step: int) -> None:
        """Take up what `optimizer_state` gave, after so many steps; every process must call it."""
        for name, parameter in self.model.named_parameters():
            found = _of(state, name)
            if found:
                self.optimizer.state[parameter] = {
                    key: value.clone().to(parameter) for key, value in found.items()
                } | _count(self.optimizer, step)


def _shape(parameter: Tensor) -> torch.Size:
    """Of the whole parameter, also where this process has a part of it (ZeRO 3)."""
    found: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return found


def _copy(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu").copy_(value.detach())


def _of(state: State, name: str) -> State:
    """The entries of one parameter, by key."""
    return {
        key.rpartition("/")[2]: value
        for key, value in state.items()
        if key.rpartition("/")[0] == name
    }


def _count(optimizer: Optimizer, step: int) -> dict[str, Tensor]:
    """Adam's count of steps; every parameter takes part in every step."""
    adam = isinstance(optimizer, torch.optim.Adam)  # AdamW too
    return {"step": torch.tensor(float(step))} if adam else {}
