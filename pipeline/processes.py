"""The processes that train together, as the launcher started them."""

import os

import torch
from accelerate import Accelerator

from pipeline.config import Config
from pipeline.errors import TrainingError

PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")  # one process, or DistributedDataParallel


def start_processes(config: Config) -> Accelerator:
    """Join the processes that the launcher started, and refuse a launch that lost some.

    `accelerate launch --num_processes 2` starts one process where there is no GPU, without a
    word; what betrays it is an address to meet at and no rank to meet as.
    """
    environment = os.environ
    launched = "ACCELERATE_MIXED_PRECISION" in environment
    if launched and "MASTER_PORT" in environment and "RANK" not in environment:
        raise TrainingError(
            "the launcher was asked for several processes and started one; expected a rank for "
            "each; without GPUs use: accelerate launch --multi_gpu --num_processes 2 ... (or "
            "--config_file launch/accelerate/cpu.yaml)"
        )
    for name, only in (("MIXED_PRECISION", "no"), ("GRADIENT_ACCUMULATION_STEPS", "1")):
        if (found := environment.get(f"ACCELERATE_{name}", only)) != only:
            raise TrainingError(
                f"accelerate is configured with {name.lower()} = {found}; this version trains "
                f"with {only} only; change the accelerate configuration"
            )
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    if accelerator.distributed_type not in PLAIN:
        raise TrainingError(
            f"accelerate is configured with {accelerator.distributed_type}; this version trains "
            f"with {', '.join(PLAIN)}"
        )
    asked = int(environment.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != asked:
        raise TrainingError(
            f"{asked} processes were asked for and {accelerator.num_processes} train together; "
            "check distributed_type in the accelerate configuration"
        )
    if accelerator.device.type == "cpu":
        here = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(config.train.cpu_threads or max(1, (cores or 1) // here))
    return accelerator
