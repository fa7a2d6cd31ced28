"""The number of loader workers of each training process."""

import os

import torch

from heron.config.augmentations import Blur, Color, Crop, Flip
from heron.config.data import Data

MAX_WORKERS = 16  # of a training process, under `auto`


def cores_per_process() -> int:
    """Returns the number of cores per process of this machine, at least one."""
    all_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (all_cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def worker_count(data: Data) -> int:
    """Returns `data.workers`; `auto` gives pictures one worker per core available for decoding.

    With a GPU these are all cores but one; on a CPU, whose cores also train, a quarter of them; 16
    at most. Other data is copied, not decoded: 1 worker with a GPU, else 0.
    """
    if data.workers != "auto":
        return data.workers
    of_pictures = Crop, Color, Flip, Blur
    decodes = any(
        view.size is not None or any(isinstance(x.options, of_pictures) for x in view.augment)
        for view in data.views
    )
    if not torch.cuda.is_available():
        return min(MAX_WORKERS, cores_per_process() // 4) if decodes else 0
    return min(MAX_WORKERS, max(1, cores_per_process() - 1)) if decodes else 1
