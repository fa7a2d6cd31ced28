"""DeepSpeed's ZeRO: optimiser state, gradients and parameters are partitioned over processes.

Its features that would change the numbers are off: loss scaling, accumulation and schedules. Low
precision is autocast inside the model, so that parameters and optimiser state are float32 under
every strategy.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer

from heron.base.errors import TrainingError
from heron.distributed.collectives import rank, world_size
from heron.models.heterogeneous import Heterogeneous
from heron.training.optim import Lars
from heron.training.strategy import (
    State,
    Strategy,
    _cpu_copy,
    _entries_of,
    _full_shape,
    _step_count,
    set_rate,
)

STATE_KEYS = "momentum_buffer", "exp_avg", "exp_avg_sq"  # of optimisers, for each parameter


class Zero(Strategy):
    """A model whose training state DeepSpeed partitions; stage 0 partitions nothing."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: Heterogeneous,
        optimizer: Optimizer,
        rows: int,
        clip_norm: float | None = None,
    ) -> None:
        """Gives DeepSpeed the model, in its initial state or a checkpoint's.

        The accelerator is built from a DeepSpeed configuration, which needs `rows`, the most rows
        of a process in a step; the optimiser has no state yet.

        Raises:
            TrainingError: the optimiser does not work on partitions, or DeepSpeed's configuration
                would change the numbers, or DeepSpeed runs otherwise than configured.
        """
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        stage = int(settings["zero_optimization"]["stage"])
        if stage and isinstance(optimizer, Lars):
            raise TrainingError(
                "optim.kind is lars, which needs the norm of each whole parameter, but under ZeRO "
                f"{stage} the optimiser sees parts of one flat vector; use sgd, adam or adamw, or "
                "ZeRO 0 or DDP"
            )
        if model.precision == "fp16":
            raise TrainingError(
                "train.precision is fp16, which Heron does not support under DeepSpeed; use bf16, "
                "tf32 or fp32, or DDP or FSDP2"
            )
        _refuse_settings(settings)
        settings |= {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": clip_norm or 0.0,  # as `clip_grads_with_norm_` does it
            "steps_per_print": math.inf,
            "zero_force_ds_cpu_optimizer": False,
        }
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        engine, _ = accelerator.prepare(model, optimizer)  # needs contiguous weights
        super().__init__(model, engine, optimizer)
        self.stage, self._engine = stage, engine
        self._partitioned = engine.optimizer  # DeepSpeed's; at stage 0 the given optimiser
        actual_stage, processes = engine.zero_optimization_stage(), engine.dp_world_size
        if (actual_stage, processes) != (stage, world_size()):
            raise TrainingError(
                f"ZeRO {stage} on {world_size()} processes was requested, but DeepSpeed runs ZeRO "
                f"{actual_stage} on {processes}; check the DeepSpeed configuration"
            )
        if dtypes := {p.dtype for p in model.parameters()} - {torch.float32}:
            raise TrainingError(f"DeepSpeed must hold parameters in float32, got {dtypes}")

    def describe(self) -> str:
        """Returns the stage, and what is offloaded."""
        config = self._engine.config["zero_optimization"]
        offloaded = [
            f"{kind} on the {device}"
            for kind in ("optimizer", "param")
            if (device := (config.get(f"offload_{kind}") or {}).get("device", "none")) != "none"
        ]
        return ", ".join([f"DeepSpeed ZeRO {self.stage}", *offloaded])

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Sets whether the next backward is the step's last, which exchanges gradients."""
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, value: Tensor) -> None:
        """See `Strategy.backward`."""
        self._engine.backward(value * world_size())

    def gradient_norm(self) -> Tensor | float:
        """Computed from the partitions before the step: DeepSpeed has it only after."""
        if not self.stage:
            return super().gradient_norm()
        if self.stage < 3:
            norm = self._partitioned.scaled_global_norm()
            if isinstance(norm, Tensor):  # stays on the device, for which the host would wait
                return torch.where(norm < 0, math.nan, norm)
        else:
            norms = [float(norm) for norm in self._partitioned._get_norm_groups()]
            norm = -1.0 if min(norms) < 0 else math.hypot(*norms)
        return math.nan if norm < 0 else norm  # DeepSpeed returns -1 where it is not finite

    def step(self, rate: float, norm: Tensor | float) -> None:
        """See `Strategy.step`."""
        set_rate(self._partitioned, rate)
        self._engine.step()

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """See `Strategy.gathered_parameters`; stage 3 gathers the parameters."""
        if self.stage < 3:
            yield
            return
        from deepspeed import zero

        with zero.GatheredParameters(list(self.model.parameters())):
            yield

    def own_tensors(self) -> State:
        """See `Strategy.own_tensors`; TrainingError at stage 3: only `Kept` calls it."""
        if self.stage == 3:
            raise TrainingError(
                "train.ema and train.keep=best keep weights, but under ZeRO 3 a process does not "
                "hold all of its share between steps; use ZeRO 2, FSDP2 or DDP, or train.ema=null "
                "and train.keep=last"
            )
        return super().own_tensors()

    def model_state(self) -> State:
        """See `Strategy.model_state`; gathers one parameter at a time."""
        if self.stage < 3:
            return super().model_state()
        from deepspeed import zero

        state = {}
        parameters = dict(self.model.named_parameters())
        for name, value in self.model.state_dict().items():
            with zero.GatheredParameters([parameters[name]] if name in parameters else []):
                if rank() == 0:
                    state[name] = _cpu_copy(parameters.get(name, value))
        return state

    def optimizer_state(self, step: int) -> State:
        """See `Strategy.optimizer_state`; gathers one parameter at a time."""
        if not self.stage:
            return super().optimizer_state(step)
        from deepspeed.utils import safe_get_full_optimizer_state

        keys = {key for state in self._partitioned.optimizer.state.values() for key in state}
        state = self._scaler_state(step)
        for name, parameter in self.model.named_parameters():
            for key in STATE_KEYS:
                if key in keys and parameter.requires_grad:
                    value = safe_get_full_optimizer_state(parameter, key)
                    if rank() == 0:
                        state[f"{name}/{key}"] = _cpu_copy(value).view(_full_shape(parameter))
        return state

    def _load_optimizer(self, state: State, step: int) -> None:
        """Every process takes its partition."""
        if not self.stage:
            super()._load_optimizer(state, step)
            return
        from deepspeed import utils

        partitioned, keys = self._partitioned, {key.rpartition("/")[2] for key in state}
        flat = (
            partitioned.fp32_partitioned_groups_flat
            if self.stage == 3
            else partitioned.single_partition_of_fp32_groups
        )
        for tensor in flat:
            empty = {key: torch.zeros_like(tensor, requires_grad=False) for key in keys}
            count = _step_count(partitioned.optimizer, step)
            partitioned.optimizer.state[tensor] = empty | count
        if self.stage < 3:
            partitioned._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.model.named_parameters():
            for key, value in _entries_of(state, name).items():
                if self.stage < 3:
                    utils.safe_set_full_optimizer_state(parameter, value, key)
                    continue
                length = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
                padded = torch.zeros(length * world_size(), dtype=value.dtype)
                padded[: value.numel()] = value.flatten()
                local = padded[length * rank() : length * (rank() + 1)]
                utils.safe_set_local_optimizer_state(parameter, local, key)


def _refuse_settings(settings: dict[str, Any]) -> None:
    """Raises TrainingError for settings of DeepSpeed that would override the experiment's."""
    remedies = {
        "fp16": "train.precision sets the precision (fp16 only without DeepSpeed)",
        "bf16": "train.precision=bf16 computes in bfloat16 with parameters in float32",
        "optimizer": "optim sets it",
        "scheduler": "optim.schedule sets it",
        "gradient_clipping": "optim.clip_norm sets it",
    }
    for key, remedy in remedies.items():
        value = settings.get(key)
        enabled = value.get("enabled", True) if isinstance(value, dict) else value
        if enabled not in (None, False, "auto"):  # 0 is False
            raise TrainingError(
                f"the DeepSpeed configuration has '{key}': {value}, but {remedy}; remove it"
            )
