"""The cores and the memory that this process may use, and how it waits and frees."""

import ctypes
import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SPINS = "1000"  # of a thread that waits; libgomp's default is 300,000
SPIN_KEYS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # either is the user's choice
THREADS = "OMP_NUM_THREADS"
CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of versions 2 and 1: files of the limit and of the usage, and what of it is unused page cache.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_TRIM_THRESHOLD, _MMAP_MAX, _MXFAST = -1, -4, 1  # of glibc's mallopt
_NEVER = -1  # of the trim threshold, as man mallopt has it
_SETTINGS = "MALLOC_MMAP_", "MALLOC_TRIM_", "MALLOC_TOP_", "GLIBC_TUNABLES"
chosen_here: set[str] = set()  # the variables that `share_cores` set, and nobody else


def share_cores() -> None:
    """Lets other work have the cores that this process's threads would spin on while they wait.

    Where a thread has been put aside for another job, OpenMP's others wait for it at every barrier,
    by spinning, and take the time that it needs: two runs on the same cores were seven times
    slower than one. This bounds the spinning, and the number of threads by a container's quota,
    which OpenMP does not see. Variables that are set stay as they are.

    Each copy of libgomp (torch's, FAISS's, scikit-learn's) reads them once, as it is loaded. So
    the commands call this before they import torch, and the processes that they start inherit it;
    importing Heron as a library changes nothing.
    """
    if not any(key in os.environ for key in SPIN_KEYS):
        os.environ["GOMP_SPINCOUNT"] = SPINS
        chosen_here.add("GOMP_SPINCOUNT")
    if THREADS not in os.environ and cores() < len(os.sched_getaffinity(0)):
        os.environ[THREADS] = str(cores())
        chosen_here.add(THREADS)


def cores() -> int:
    """Returns how many cores this process may use: by its affinity and its cgroups' quotas."""
    return math.ceil(min([len(os.sched_getaffinity(0)), *map(_quota_of, cgroup_folders("cpu"))]))


def cores_per_process() -> int:
    """Returns the number of cores per process of this machine, at least one."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def cgroup_folders(controller: str) -> Iterator[Path]:
    """Yields the folders of the process's cgroups with a controller, and of those above them.

    Groups of cgroup v1 lie in a folder of the controller, those of v2 name none. A container often
    sees its own group as the root, whatever path is its own, so a folder may be missing.
    """
    for line in MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = CGROUPS / controller if controllers else CGROUPS
            group = Path(path.lstrip("/"))
            yield from (top / folder for folder in (group, *group.parents))


def _quota_of(folder: Path) -> float:
    """Returns the quota of one cgroup, in cores; infinity where it has none.

    `cpu.max` of v2 holds "QUOTA PERIOD" or "max PERIOD"; v1 has a file for each, -1 is no quota.
    """
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # there is none, or it is "max"
        return math.inf


def cgroup_free() -> list[int]:
    """Returns what each memory limit leaves free; bytes, unused page cache included."""
    free = [sys.maxsize]
    for folder in cgroup_folders("memory"):
        for limit, usage, cache in MEMORY_FILES:
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
