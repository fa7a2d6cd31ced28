"""Whether the fused path runs: the environment's HERON_FUSED, and what the device offers."""

import functools
import importlib.util
import os
from typing import Any

import torch

from heron.pipeline.config.errors import TrainingError

SWITCH = "HERON_FUSED"
SHARED_KIB = 227  # what a program may have on Hopper, for which the tiles are cut


def enabled(device: torch.device) -> bool:
    """Whether terms on a device are to take the fused path.

    ``HERON_FUSED`` is read at every call: ``auto`` (the default: wherever it can run), ``never``,
    or ``always`` (for runs that would rather stop than be slow).

    Args:
        device: where the vectors are.

    Raises:
        ValueError: the switch has another value.
        TrainingError: ``always``, and the fused path cannot run there.
    """
    choice = os.environ.get(SWITCH, "auto")
    if choice not in ("auto", "never", "always"):
        raise ValueError(f"{SWITCH} is {choice!r}; expected auto, never or always")
    if choice == "always":
        require(device, f"{SWITCH} is always")
    return choice != "never" and missing(device) is None


def available(device: torch.device) -> bool:
    """Whether the fused path can run on a device, whatever the switch says."""
    return missing(device) is None


def require(device: torch.device, who: str) -> None:
    """Stop, with the reason and the remedy, where the fused path cannot run.

    Args:
        device: where the vectors are.
        who: what asks for it, for the message.

    Raises:
        TrainingError: it cannot.
    """
    lack = missing(device)
    if lack is not None:
        raise TrainingError(
            f"{who}, but the fused path cannot run on {device}: {lack}; expected Triton and a GPU "
            f"with {SHARED_KIB} KiB of shared memory (H100, H200, ...); set {SWITCH}=auto to do "
            "without"
        )


def missing(device: torch.device) -> str | None:
    """What the fused path lacks on a device, in words; None if nothing."""
    if not _installed():
        return "triton is not installed"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"it is no CUDA device but {device.type}"
    properties: Any = torch.cuda.get_device_properties(device)  # whose stubs lack the next name
    memory = properties.shared_memory_per_block_optin >> 10
    if memory < SHARED_KIB:
        return f"its shared memory is {memory} KiB"
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU, slowly: a means of the tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
