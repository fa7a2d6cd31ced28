"""PyTorch's FSDP2: parameters, gradients and optimiser state are sharded over processes.

Each encoder, and the rest of the model, is gathered for its forward and backward
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

from heron.base.errors import TrainingError
from heron.distributed.collectives import (
    background_group,
    gather_on_main,
    rank,
    sum_over_processes,
    world_size,
)
from heron.models.heterogeneous import Heterogeneous
from heron.training.optim import Lars
from heron.training.strategy import State, Strategy, _cpu_copy


class Fsdp(Strategy):
    """A model that is sharded in place, which keeps its modules and the names of parameters."""

    def __init__(
        self,
        model: Heterogeneous,
        optimizer: Optimizer,
        device: torch.device,
        clip_norm: float | None = None,
    ) -> None:
        """Shards the model, and gives the optimiser, which has no state yet, the shards.

        The model is in its initial state or a checkpoint's. Raises TrainingError if the optimiser
        does not work on shards, or the model is compiled.
        """
        if isinstance(optimizer, Lars):
            raise TrainingError(
                "optim.kind is lars, which needs the norm of each whole parameter, but under FSDP2 "
                "the optimiser sees only parts; use sgd, adam or adamw, or DDP"
            )
        if model.compiled:
            raise TrainingError(
                "train.compile is true, but FSDP2 gathers parameters between the layers; set it to "
                "false, or use DDP"
            )
        super().__init__(model, model, optimizer, clip_norm)
        names = {parameter: name for name, parameter in model.named_parameters()}
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # or refused
        self._mesh = init_device_mesh(device.type, (world_size(),))
        for encoder in model.encoders:
            fully_shard(encoder, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
        shards = dict(model.named_parameters())
        self._background = background_group()
        self._rows = {name: len(shard) for name, shard in shards.items()}  # of the whole parameter
        for group in optimizer.param_groups:
            group["params"] = [shards[names[parameter]] for parameter in group["params"]]

    def describe(self) -> str:
        """Returns the strategy in a few words."""
        return "FSDP2"

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Sets whether the next backward is the step's last, which exchanges gradients."""
        for module in self._sharded_modules():
            module.set_requires_gradient_sync(last)
        return nullcontext()

    def gradient_norm(self) -> float:
        """See `Strategy.gradient_norm`; every process has a shard of the gradient."""
        self._reshard()
        self._scaler.unscale_(self.optimizer)
        grads = (p.grad for p in self.model.parameters())
        squares = [_local_shard(grad).square().sum() for grad in grads if grad is not None]
        return float(sum_over_processes(torch.stack(squares).sum()).sqrt())

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """See `Strategy.gathered_parameters`."""
        for module in self._sharded_modules():
            module.unshard()
        yield
        self._reshard()

    def own_tensors(self) -> State:
        """See `Strategy.own_tensors`."""
        self._reshard()
        return {name: _local_shard(value) for name, value in self.model.state_dict().items()}

    def own_part(self, name: str, full: Tensor) -> Tensor:
        """See `Strategy.own_part`."""
        parameter = dict(self.model.named_parameters()).get(name)
        if parameter is None:  # a buffer, whole everywhere
            return super().own_part(name, full)
        return self._like(parameter, full).to_local()

    def copies(self, state: State) -> State:
        """See `Strategy.copies`; every process copies its shards."""
        return {name: _cpu_copy(_local_shard(value)) for name, value in state.items()}

    def in_full(self, state: State) -> State:
        """See `Strategy.in_full`; sends one tensor at a time to rank 0."""
        full = {}
        for name, value in state.items():
            rows = self._rows.get(name.partition("/")[0])  # None: a buffer, whole everywhere
            whole = value if rows is None else gather_on_main(value, rows, self._background)
            if rank() == 0:
                full[name] = whole
        return full

    def _like(self, parameter: Tensor, full: Tensor) -> DTensor:
        assert isinstance(parameter, DTensor)
        return distribute_tensor(full.to(parameter), self._mesh, parameter.placements)

    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _reshard(self) -> None:
        """Frees gathered parameters: after a forward without backward the root still has them."""
        for module in self._sharded_modules():
            module.reshard()


def _local_shard(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
