"""The cores that this process may use, and how its threads wait for each other on them."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

SPINS = "1000"  # of a thread that waits; libgomp's default is 300,000
SPIN_KEYS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # either is the user's choice
THREADS = "OMP_NUM_THREADS"
CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
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
