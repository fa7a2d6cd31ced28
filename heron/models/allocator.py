"""Whether C's allocator keeps the memory that CPU tensors have freed."""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt
_NEVER = -1  # of the trim threshold, as man mallopt has it
_SETTINGS = "MALLOC_MMAP_", "MALLOC_TRIM_", "MALLOC_TOP_", "GLIBC_TUNABLES"


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory for later tensors; returns whether it does.

    By default glibc returns freed blocks above 32 MB to the kernel, which clears their pages at the
    next step: most of a step of a small convolutional network. With this the process holds its peak
    memory until `release_freed_memory`. It does nothing without glibc, or where the environment
    configures malloc.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(_SETTINGS) for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))


def release_freed_memory() -> None:
    """Returns the memory that `keep_freed_memory` kept to the kernel."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
