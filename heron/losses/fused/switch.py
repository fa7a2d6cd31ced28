"""Whether the fused path runs, by the environment variable HERON_FUSED and the device."""

import functools
import importlib.util
import os
from typing import Any

import torch

from heron.base.errors import TrainingError

SWITCH = "HERON_FUSED"
SHARED_KIB = 227  # of a program on Hopper, for which the tiles are chosen


def enabled(device: torch.device) -> bool:
    """Whether terms on a device take the fused path.

    ``HERON_FUSED`` is read at every call: ``auto`` (the default: wherever it can run), ``never``,
    or ``always`` (to stop rather than be slow). Raises ValueError for another value, and
    TrainingError for ``always`` on a device where the fused path cannot run.
    """
    choice = os.environ.get(SWITCH, "auto")
    if choice not in ("auto", "never", "always"):
        raise ValueError(f"{SWITCH} must be auto, never or always, got {choice!r}")
    if choice == "always":
        require(device, f"{SWITCH} is always")
    return choice != "never" and missing_requirement(device) is None


def available(device: torch.device) -> bool:
    """Whether the fused path can run on a device, whatever the switch says."""
    return missing_requirement(device) is None


def require(device: torch.device, who: str) -> None:
    """Raises TrainingError, with reason and remedy, on a device that cannot run the fused path.

    `who` is what requires it, for the message.
    """
    reason = missing_requirement(device)
    if reason is not None:
        raise TrainingError(
            f"{who}, but the fused path cannot run on {device}: {reason}; it needs Triton and a "
            f"GPU with {SHARED_KIB} KiB of shared memory (H100, H200, ...); set {SWITCH}=auto to "
            "do without"
        )


def missing_requirement(device: torch.device) -> str | None:
    """Returns why the fused path cannot run on a device; None if it can."""
    if not _installed():
        return "triton is not installed"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"it is a {device.type} device, not CUDA"
    properties: Any = torch.cuda.get_device_properties(device)  # the stubs lack the next attribute
    memory = properties.shared_memory_per_block_optin >> 10
    if memory < SHARED_KIB:
        return f"its shared memory is only {memory} KiB"
    return None


def interpreted() -> bool:
    """Whether Triton's slow interpreter replaces a GPU, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
