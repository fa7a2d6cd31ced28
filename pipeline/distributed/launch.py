"""The processes that train together, as the launcher started them."""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from heron.pipeline.config.errors import TrainingError
from heron.pipeline.config.experiment import Config
from heron.pipeline.config.training import Precision
from heron.pipeline.data.workers import cores
from heron.pipeline.distributed import collectives
from heron.pipeline.distributed.agreement import agree, meeting, run_facts
from heron.pipeline.distributed.strategy import Strategy
from heron.pipeline.distributed.watchdog import leave
from heron.pipeline.models.allocator import keep_freed_memory
from heron.pipeline.models.heterogeneous import Heterogeneous

PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")  # one process, DDP, or FSDP2, which is ours


def settle(config: Config) -> Config:
    """Returns an experiment with the precision that `auto` stands for on this machine."""
    if config.train.precision != "auto":
        return config
    precision: Precision = "fp32"
    if torch.cuda.is_available():
        precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "tf32"
    return config.in_precision(precision)


def start_processes(config: Config, stop: Callable[[], object] = lambda: False) -> Accelerator:
    """Join the processes that the launcher started, and refuse a launch that lost some.

    `accelerate launch --num_processes 2` starts one process where there is no GPU, without a
    word; what betrays it is an address to meet at and no rank to meet as. `stop` says whether a
    signal has come: see `agree`.
    """
    environment = os.environ
    launched = "ACCELERATE_MIXED_PRECISION" in environment
    if launched and "MASTER_PORT" in environment and "RANK" not in environment:
        raise TrainingError(
            "the launcher was asked for several processes and started one; expected a rank for "
            "each; without GPUs use: accelerate launch --multi_gpu --num_processes 2 ... (or "
            "--config_file launch/accelerate/cpu.yaml)"
        )
    _refuse(config, environment)
    deepspeed = environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if _sharded(environment) and (version := environment.get("FSDP_VERSION", "1")) != "2":
        raise TrainingError(
            f"accelerate is configured with fsdp_version {version}; expected fsdp_version: 2"
        )
    gpu = torch.cuda.is_available()
    here, devices = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if gpu and here >= devices:
        raise TrainingError(
            f"process {here + 1} of this machine has no GPU of its own: there are {devices}; "
            "expected as many processes as GPUs; where a scheduler shows each process one GPU, "
            "have it show all (SLURM: --gpus-per-node instead of --gpus-per-task)"
        )
    torch.backends.cudnn.allow_tf32 = config.train.precision == "tf32"  # else float32 is float32
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(config.train.deterministic)
    torch.backends.cudnn.deterministic = config.train.deterministic
    # The watchdog ends a job that hangs; a collective waits as long as a process may work alone.
    backend = "gloo" if deepspeed and not gpu else None
    group = InitProcessGroupKwargs(backend=backend, timeout=timedelta(days=1))
    if deepspeed and not gpu:
        from deepspeed import ops

        # DeepSpeed would compile C++ for a minute, for a collective that inference alone uses.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    alone = environment.get("WORLD_SIZE", "1") == "1" and not deepspeed  # accelerate meets nobody
    # On CPUs `cpu=True` would silently make DDP of a DeepSpeed configuration.
    with nullcontext() if alone else meeting(config.train.timeout_s):
        accelerator = Accelerator(
            cpu=not gpu and not deepspeed, kwargs_handlers=[] if alone else [group]
        )
    kinds = ("DEEPSPEED",) if deepspeed else PLAIN
    if accelerator.distributed_type not in kinds:
        raise TrainingError(
            f"accelerate runs {accelerator.distributed_type}; this version trains with "
            f"{', '.join(kinds)}"
            + (", as its configuration asks" if deepspeed else " or a DeepSpeed configuration")
        )
    asked = int(environment.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != asked:
        raise TrainingError(
            f"{asked} processes were asked for and {accelerator.num_processes} train together; "
            "check distributed_type in the accelerate configuration"
        )
    agree(run_facts(config), config.train.timeout_s, stop)
    if accelerator.device.type == "cpu":
        torch.set_num_threads(config.train.cpu_threads or cores())
        keep_freed_memory()
    return accelerator


def prepare(
    accelerator: Accelerator, model: Heterogeneous, optimizer: Optimizer, rows: int
) -> Strategy:
    """The strategy that the launcher's configuration asks for.

    Args:
        accelerator: of `start_processes`.
        model: with the weights that training begins with.
        optimizer: of its parameters, with no state yet.
        rows: most rows of a process in a step.
    """
    if accelerator.distributed_type == "DEEPSPEED":
        from heron.pipeline.distributed.zero import Zero

        return Zero(accelerator, model, optimizer, rows)
    if _sharded(os.environ) and collectives.world_size() > 1:
        from heron.pipeline.distributed.fsdp import Fsdp

        return Fsdp(model, optimizer, accelerator.device)
    wrapped = accelerator.prepare(model)
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.broadcast_buffers = False  # they are the same on all processes anyway
    return Strategy(model, wrapped, optimizer)


def end(status: int) -> int:
    """Returns the exit status after all is written.

    Several processes leave out the interpreter's end: a thread of a process group can abort it,
    and a run that is done would count as failed.
    """
    several = collectives.world_size() > 1
    collectives.close()
    if several:
        leave(status)
    return status


def fail() -> int:
    """Returns the exit status after an error; others may not know of it, so none waits for them."""
    if collectives.world_size() > 1:
        leave(1)
    return 1


def _refuse(config: Config, environment: Mapping[str, str]) -> None:
    """Refuse what accelerate is configured to do behind the back of the experiment."""
    for name, only, remedy in (
        ("MIXED_PRECISION", "no", f"train.precision is {config.train.precision}, and decides"),
        ("GRADIENT_ACCUMULATION_STEPS", "1", "train.micro_batch keeps the exact gradient"),
    ):
        if (found := environment.get(f"ACCELERATE_{name}", only)) not in (only, ""):
            raise TrainingError(
                f"accelerate is configured with {name.lower()} = {found}; expected {only}: {remedy}"
            )


def _sharded(environment: Mapping[str, str]) -> bool:
    """Whether accelerate's configuration asks for FSDP; on CPUs it might give DDP."""
    return environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
