"""The host's memory: what limits leave free, and whether malloc keeps what tensors have freed."""

import ctypes
import os
import platform
import sys
from contextlib import suppress

from heron.base.cores import cgroup_folders

# Of versions 2 and 1: files of the limit and of the usage, and what of it is unused page cache.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_TRIM_THRESHOLD, _MMAP_MAX, _MXFAST = -1, -4, 1  # of glibc's mallopt
_NEVER = -1  # of the trim threshold, as man mallopt has it
_SETTINGS = "MALLOC_MMAP_", "MALLOC_TRIM_", "MALLOC_TOP_", "GLIBC_TUNABLES"


def cgroup_free() -> list[int]:
    """Returns what each memory limit leaves free; bytes, unused page cache included."""
    free = [sys.maxsize]
    for folder in cgroup_folders("memory"):
        for limit, usage, cache in FILES:
            with suppress(OSError, ValueError):  # a root has no such file; "max" is no number
                used, cached = int((folder / usage).read_text()), 0
                with suppress(OSError, ValueError, KeyError):
                    lines = (folder / "memory.stat").read_text().splitlines()
                    cached = int(dict(line.split(maxsplit=1) for line in lines)[cache])
                free.append(max(0, int((folder / limit).read_text()) - used + cached))
    return free


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
    mallopt(_MXFAST, 0)
    _fill_cache_of_small_blocks()
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))


def _fill_cache_of_small_blocks() -> None:
    """Fills glibc's cache of this thread, of seven freed blocks of each small size.

    Else the pieces that alignment cuts off a tensor's block are cached when it is freed, so that it
    is too short for the next one: eight tensors in turn took up to eight times the memory of one.
    """
    malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    for size in range(24, 1032, 16):
        for block in [malloc(size) for _ in range(7)]:
            free(block)


def release_freed_memory() -> None:
    """Returns the memory that `keep_freed_memory` kept to the kernel."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
