"""Joins the processes that a launcher started, and sets up their training strategy."""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from heron.base.cores import cores_per_process, keep_freed_memory
from heron.base.errors import TrainingError
from heron.distributed import collectives
from heron.distributed.agreement import agree, rendezvous
from heron.distributed.watchdog import leave
from heron.experiment.config import Config, run_facts
from heron.losses import fused
from heron.losses.products import RunPrecision, set_run_precision
from heron.models.heterogeneous import Heterogeneous
from heron.models.options import Precision
from heron.training.strategy import Strategy

PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")  # one process, DDP, or FSDP2: see `prepare`


def resolve_precision(config: Config) -> Config:
    """Returns the experiment, its precision `auto` replaced by the best of this machine."""
    if config.train.precision != "auto":
        return config
    precision: Precision = "fp32"
    if torch.cuda.is_available():
        precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "tf32"
    return config.in_precision(precision)


def start_processes(config: Config, stop: Callable[[], object] = lambda: False) -> Accelerator:
    """Joins the processes that the launcher started, and refuses a launch that started too few.

    Without a GPU `accelerate launch --num_processes 2` silently starts one process; it is
    recognised by a rendezvous address without a rank. See `agree` for `stop`.
    """
    environment = os.environ
    launched = "ACCELERATE_MIXED_PRECISION" in environment
    if launched and "MASTER_PORT" in environment and "RANK" not in environment:
        raise TrainingError(
            "several processes were requested, but the launcher started one, without a rank; on "
            "a machine without GPUs, use: accelerate launch --multi_gpu --num_processes 2 ... (or "
            "--config_file launch/accelerate/cpu.yaml)"
        )
    _refuse_accelerate_options(config, environment)
    deepspeed = environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if _uses_fsdp(environment) and (version := environment.get("FSDP_VERSION", "1")) != "2":
        raise TrainingError(
            f"the Accelerate configuration must have fsdp_version: 2, got {version}"
        )
    gpu = torch.cuda.is_available()
    local_rank, devices = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if gpu and local_rank >= devices:
        raise TrainingError(
            f"process {local_rank + 1} of this machine has no GPU, because there are only "
            f"{devices}; start at most one process per GPU. If a scheduler shows each process one "
            "GPU, make it show all of them (SLURM: --gpus-per-node instead of --gpus-per-task)"
        )
    torch.backends.cudnn.allow_tf32 = config.train.precision == "tf32"  # else float32 is float32
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(config.train.deterministic)
    torch.backends.cudnn.deterministic = config.train.deterministic
    backend = "gloo" if deepspeed and not gpu else None
    group = InitProcessGroupKwargs(backend=backend, timeout=collectives.LONGEST)
    if deepspeed and not gpu:
        from deepspeed import ops

        # DeepSpeed would compile C++ for a minute, for a collective that only inference uses.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    alone = environment.get("WORLD_SIZE", "1") == "1" and not deepspeed  # without a process group
    # On CPUs `cpu=True` would silently turn a DeepSpeed configuration into DDP.
    with nullcontext() if alone else rendezvous(config.train.timeout_s):
        accelerator = Accelerator(
            cpu=not gpu and not deepspeed, kwargs_handlers=[] if alone else [group]
        )
    kinds = ("DEEPSPEED",) if deepspeed else PLAIN
    if accelerator.distributed_type not in kinds:
        raise TrainingError(
            f"Accelerate runs {accelerator.distributed_type}, but this configuration needs "
            f"{', '.join(kinds)}" + ("" if deepspeed else " or a DeepSpeed configuration")
        )
    world = int(environment.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world:
        raise TrainingError(
            f"{world} processes were requested, but {accelerator.num_processes} train together; "
            "check distributed_type in the Accelerate configuration"
        )
    agree(run_facts(config), config.train.timeout_s, stop)
    if accelerator.device.type == "cpu":
        torch.set_num_threads(config.train.cpu_threads or cores_per_process())
        keep_freed_memory()
    return accelerator


def prepare_products(device: torch.device, precision: RunPrecision) -> None:
    """Sets the precision of a run's contrastive terms; tries their kernels before the first step.

    A kernel that is wrong on any process is used on none.
    """
    set_run_precision(precision)
    if not fused.enabled(device):
        return
    chosen = fused.choose_precision(None)
    own = fused.check_all(device)
    for of_process in collectives.gather_objects(own):
        for kernel, reason in of_process.items():
            if kernel not in own:
                fused.distrust(kernel, device, chosen, f"on another process: {reason}")


def prepare(
    accelerator: Accelerator,
    model: Heterogeneous,
    optimizer: Optimizer,
    rows: int,
    clip_norm: float | None,
) -> Strategy:
    """Returns the strategy of the launcher's configuration.

    The model has the weights that training begins with, and the optimiser no state yet; `rows` are
    the most rows of a process in a step, `clip_norm` the largest norm of a gradient.
    """
    if accelerator.distributed_type == "DEEPSPEED":
        from heron.training.zero import Zero

        return Zero(accelerator, model, optimizer, rows, clip_norm)
    if _uses_fsdp(os.environ) and collectives.world_size() > 1:
        from heron.training.fsdp import Fsdp

        return Fsdp(model, optimizer, accelerator.device, clip_norm)
    wrapped = accelerator.prepare(model)
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.broadcast_buffers = False  # they are equal on all processes anyway
    return Strategy(model, wrapped, optimizer, clip_norm)


def end(status: int) -> int:
    """Closes the process group and returns the exit status.

    One of several processes exits without finalising the interpreter: a thread of a process group
    can abort that, and a finished run would count as failed.
    """
    distributed = collectives.world_size() > 1
    collectives.close()
    if distributed:
        leave(status)
    return status


def fail() -> int:
    """Returns the exit status after an error, without waiting for processes that did not fail."""
    if collectives.world_size() > 1:
        leave(1)
    return 1


def _refuse_accelerate_options(config: Config, environment: Mapping[str, str]) -> None:
    """Raises TrainingError for options of accelerate that would override the experiment's."""
    for name, expected, remedy in (
        ("MIXED_PRECISION", "no", f"train.precision, {config.train.precision}, sets it"),
        ("GRADIENT_ACCUMULATION_STEPS", "1", "use train.micro_batch, whose gradient is exact"),
    ):
        if (value := environment.get(f"ACCELERATE_{name}", expected)) not in (expected, ""):
            raise TrainingError(
                f"{name.lower()} must be {expected} in the Accelerate configuration, got {value}; "
                f"{remedy}"
            )


def _uses_fsdp(environment: Mapping[str, str]) -> bool:
    """Returns whether accelerate is configured for FSDP; on CPUs its own type might be DDP."""
    return environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
