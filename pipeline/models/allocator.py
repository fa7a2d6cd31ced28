"""What C's allocator does with the memory that tensors on a CPU have freed."""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt
_NEVER = -1  # of the trim threshold, as man mallopt has it
_SETTINGS = "MALLOC_MMAP_", "MALLOC_TRIM_", "MALLOC_TOP_", "GLIBC_TUNABLES"


def keep_freed_memory() -> bool:
    """Has the process keep what its tensors free, for those that come; returns whether it does.

    glibc hands every block above 32 MB back to the kernel as soon as it is free, and the kernel
    clears its pages one by one when the next step asks for as much: of a small convolutional
    network that is most of a step. The process then holds its peak of memory until
    `release_freed_memory`.

    It does nothing without glibc, and where the environment says when malloc gives memory back.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(_SETTINGS) for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))


def release_freed_memory() -> None:
    """Gives the kernel what is free, where `keep_freed_memory` kept it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
