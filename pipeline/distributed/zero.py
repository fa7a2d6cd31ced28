"""DeepSpeed's ZeRO: optimiser state, gradients and parameters in parts, one a process.

What of it would change the numbers is closed here: clipping, loss scaling, accumulation and
DeepSpeed's own schedules stay off; low precision is autocast inside the model, so that parameters
and optimiser state are float32 under every strategy.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer

from heron.pipeline.config.errors import TrainingError
from heron.pipeline.distributed.collectives import rank, world_size
from heron.pipeline.distributed.strategy import (
    State,
    Strategy,
    _copy,
    _count,
    _of,
    _shape,
    set_rate,
)
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.training.optim import Lars

KEPT = "momentum_buffer", "exp_avg", "exp_avg_sq"  # what optimisers keep of a parameter


class Zero(Strategy):
    """A model whose training state DeepSpeed partitions; stage 0 partitions nothing."""

    def __init__(
        self, accelerator: Accelerator, model: Heterogeneous, optimizer: Optimizer, rows: int
    ) -> None:
        """Give the model to DeepSpeed.

        Args:
            accelerator: as a DeepSpeed configuration made it.
            model: in its initial state, or in that of a checkpoint.
            optimizer: of its parameters, with no state yet.
            rows: most rows of a process in a step, which DeepSpeed wants to know.

        Raises:
            TrainingError: the optimiser does not work in parts, or DeepSpeed's configuration asks
                for something that would change the numbers, or that DeepSpeed did not do.
        """
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        stage = int(settings["zero_optimization"]["stage"])
        if stage and isinstance(optimizer, Lars):
            raise TrainingError(
                f"optim.kind is lars, whose step depends on each parameter's length, and under "
                f"ZeRO {stage} the optimiser sees parts of one long vector; expected sgd, adam or "
                "adamw, or ZeRO 0 or DDP"
            )
        _refuse(settings)
        settings |= {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "steps_per_print": math.inf,
            "zero_force_ds_cpu_optimizer": False,
        }
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        engine, _ = accelerator.prepare(model, optimizer)  # which takes weights as bytes in a row
        super().__init__(model, engine, optimizer)
        self.stage, self._engine = stage, engine
        self._parts = engine.optimizer  # DeepSpeed's; at stage 0 the optimiser as it was
        found = engine.zero_optimization_stage(), engine.dp_world_size
        if found != (stage, world_size()):
            raise TrainingError(
                f"ZeRO {stage} over {world_size()} processes was asked for; DeepSpeed runs ZeRO "
                f"{found[0]} over {found[1]}"
            )
        others = {p.dtype for p in model.parameters()} - {torch.float32}
        if others:
            raise TrainingError(f"DeepSpeed holds parameters in {others}; expected float32")

    def describe(self) -> str:
        """The stage, and what is offloaded."""
        config = self._engine.config["zero_optimization"]
        away = [
            f"{part} on the {where}"
            for part in ("optimizer", "param")
            if (where := (config.get(f"offload_{part}") or {}).get("device", "none")) != "none"
        ]
        return ", ".join([f"DeepSpeed ZeRO {self.stage}", *away])

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Say whether the backward to come is the step's last."""
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, value: Tensor) -> None:
        """See `Strategy.backward`."""
        self._engine.backward(value * world_size())

    def gradient_norm(self) -> Tensor | float:
        """From the parts, before the step: DeepSpeed tells it after."""
        if not self.stage:
            return super().gradient_norm()
        if self.stage < 3:
            norm = float(self._parts.scaled_global_norm())
        else:
            norms = [float(norm) for norm in self._parts._get_norm_groups()]
            norm = -1.0 if min(norms) < 0 else math.hypot(*norms)
        return math.nan if norm < 0 else norm  # -1 stands for what is not finite

    def step(self, rate: float) -> None:
        """See `Strategy.step`."""
        set_rate(self._parts, rate)
        self._engine.step()

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """See `Strategy.gathered_parameters`; under stage 3 the parameters are gathered."""
        if self.stage < 3:
            yield
            return
        from deepspeed import zero

        with zero.GatheredParameters(list(self.model.parameters())):
            yield

    def model_state(self) -> State:
        """See `Strategy.model_state`; gathered a parameter at a time."""
        if self.stage < 3:
            return super().model_state()
        from deepspeed import zero

        state = {}
        parameters = dict(self.model.named_parameters())
        for name, value in self.model.state_dict().items():
            with zero.GatheredParameters([parameters[name]] if name in parameters else []):
                if rank() == 0:
                    state[name] = _copy(parameters.get(name, value))
        return state

    def optimizer_state(self) -> State:
        """See `Strategy.optimizer_state`; gathered a parameter at a time."""
        if not self.stage:
            return super().optimizer_state()
        from deepspeed.utils import safe_get_full_optimizer_state

        held = {key for state in self._parts.optimizer.state.values() for key in state}
        state = {}
        for name, parameter in self.model.named_parameters():
            for key in KEPT:
                if key in held and parameter.requires_grad:
                    found = safe_get_full_optimizer_state(parameter, key)
                    if rank() == 0:
                        state[f"{name}/{key}"] = _copy(found).view(_shape(parameter))
        return state

    def load_optimizer(self, state: State, step: int) -> None:
        """See `Strategy.load_optimizer`: every process takes its part."""
        if not self.stage:
            super().load_optimizer(state, step)
            return
        from deepspeed import utils

        parts, keys = self._parts, {key.rpartition("/")[2] for key in state}
        flat = (
            parts.fp32_partitioned_groups_flat
            if self.stage == 3
            else parts.single_partition_of_fp32_groups
        )
        for tensor in flat:
            empty = {key: torch.zeros_like(tensor, requires_grad=False) for key in keys}
            parts.optimizer.state[tensor] = empty | _count(parts.optimizer, step)
        if self.stage < 3:
            parts._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.model.named_parameters():
            for key, value in _of(state, name).items():
                if self.stage < 3:
                    utils.safe_set_full_optimizer_state(parameter, value, key)
                    continue
                own = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
                padded = torch.zeros(own * world_size(), dtype=value.dtype)
                padded[: value.numel()] = value.flatten()
                part = padded[own * rank() : own * (rank() + 1)]
                utils.safe_set_local_optimizer_state(parameter, part, key)


def _refuse(settings: dict[str, Any]) -> None:
    """Refuse what would change the numbers behind the back of the experiment."""
    remedies = {
        "fp16": "train.precision says what is computed in",
        "bf16": "train.precision=bf16 computes in bfloat16 and keeps parameters in float32",
        "optimizer": "optim says which",
        "scheduler": "optim.schedule says which",
    }
    for key, remedy in remedies.items():
        found = settings.get(key)
        on = found.get("enabled", True) if isinstance(found, dict) else found
        if on not in (None, False, "auto"):
            raise TrainingError(
                f"the DeepSpeed configuration has '{key}': {found}; {remedy}; take it out"
            )
    clipping = settings.get("gradient_clipping", "auto")
    if clipping not in ("auto", 0, 0.0, None):
        raise TrainingError(
            f"the DeepSpeed configuration has 'gradient_clipping': {clipping}; gradients are not "
            "clipped; take it out"
        )
