"""How many processes read beside each training process."""

import os

import torch

from heron.pipeline.config.augmentations import Blur, Color, Crop, Flip
from heron.pipeline.config.data import Data

MOST = 16  # of a training process, where their number is chosen for it


def cores() -> int:
    """Returns the cores that each process of this machine has to itself, one at least."""
    all_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (all_cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def readers(data: Data) -> int:
    """Returns `data.workers`; for `auto`, of pictures, as many as have a core to decode on.

    Beside a GPU these are all cores but one, beside a CPU, which computes on them too, a quarter.
    What is no picture is copied, not decoded.
    """
    if data.workers != "auto":
        return data.workers
    of_pictures = Crop, Color, Flip, Blur
    decoded = any(
        view.size is not None or any(isinstance(one.options, of_pictures) for one in view.augment)
        for view in data.views
    )
    if not torch.cuda.is_available():
        return min(MOST, cores() // 4) if decoded else 0
    return min(MOST, max(1, cores() - 1)) if decoded else 1
