"""PyTorch's FSDP2: parameters, gradients and optimiser state in parts, one a process.

Each encoder, and what is left, is gathered when its forward or backward comes
(`torch.distributed.fsdp.fully_shard`). All is float32, as under every strategy.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from heron.pipeline.config.errors import TrainingError
from heron.pipeline.distributed.collectives import rank, sum_over_processes, world_size
from heron.pipeline.distributed.strategy import State, Strategy, _copy, _count, _of
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.training.optim import Lars


class Fsdp(Strategy):
    """A model that is sharded in place: its modules and the names of its parameters stay."""

    def __init__(self, model: Heterogeneous, optimizer: Optimizer, device: torch.device) -> None:
        """Shards the model, and has the optimiser hold the parts.

        Args:
            model: in its initial state, or in that of a checkpoint.
            optimizer: of its parameters, with no state yet.
            device: of this process.

        Raises:
            TrainingError: the optimiser does not work in parts, or the model is compiled.
        """
        if isinstance(optimizer, Lars):
            raise TrainingError(
                "optim.kind is lars, whose step depends on each parameter's length, and under "
                "FSDP2 the optimiser sees parts; expected sgd, adam or adamw, or DDP"
            )
        if model.compiled:
            raise TrainingError(
                "train.compile is true, and FSDP2 gathers parameters between the layers; expected "
                "false, or DDP"
            )
        super().__init__(model, model, optimizer)
        whole = {parameter: name for name, parameter in model.named_parameters()}
        self._mesh = init_device_mesh(device.type, (world_size(),))
        for encoder in model.encoders:
            fully_shard(encoder, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
        parts = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [parts[whole[parameter]] for parameter in group["params"]]

    def describe(self) -> str:
        """What runs, in a few words."""
        return "FSDP2"

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Say whether the backward to come is the step's last."""
        for module in self._sharded():
            module.set_requires_gradient_sync(last)
        return nullcontext()

    def gradient_norm(self) -> float:
        """See `Strategy.gradient_norm`; every process has its part."""
        self._reshard()
        found = (p.grad for p in self.model.parameters())
        squares = [_part(grad).square().sum() for grad in found if grad is not None]
        return float(sum_over_processes(torch.stack(squares).sum()).sqrt())

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """See `Strategy.gathered_parameters`."""
        for module in self._sharded():
            module.unshard()
        yield
        self._reshard()

    def model_state(self) -> State:
        """See `Strategy.model_state`; gathered a parameter at a time."""
        self._reshard()
        return _whole(dict(self.model.state_dict()))

    def optimizer_state(self) -> State:
        """See `Strategy.optimizer_state`; gathered a parameter at a time."""
        self._reshard()
        return _whole(
            {
                f"{name}/{key}": value
                for name, parameter in self.model.named_parameters()
                for key, value in self.optimizer.state.get(parameter, {}).items()
                if key != "step" and value is not None
            }
        )

    def load_optimizer(self, state: State, step: int) -> None:
        """See `Strategy.load_optimizer`: every process takes its part."""
        for name, parameter in self.model.named_parameters():
            if found := _of(state, name):
                assert isinstance(parameter, DTensor)
                self.optimizer.state[parameter] = {
                    key: distribute_tensor(
                        value.to(parameter.device), self._mesh, parameter.placements
                    )
                    for key, value in found.items()
                } | _count(self.optimizer, step)

    def _sharded(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _reshard(self) -> None:
        """Leaves the parts as parameters: after a forward without backward the root is whole."""
        for module in self._sharded():
            module.reshard()


def _part(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _whole(state: State) -> State:
    """Returns copies of whole tensors, on rank 0; every process must call it."""
    found = {}
    for name, value in state.items():
        gathered = value.full_tensor() if isinstance(value, DTensor) else value
        if rank() == 0:
            found[name] = _copy(gathered)
    return found
