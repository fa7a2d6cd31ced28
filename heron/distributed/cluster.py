"""A Ray cluster: started here or joined, and an executor that spreads work over it."""

import os
import secrets
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from heron.base.cores import SPIN_KEYS, THREADS, chosen_here
from heron.base.errors import ShardError, TrainingError
from heron.base.extras import require
from heron.base.workers import Item, Result, outcome

Node = Mapping[str, float]  # a node's resources: CPU, GPU
CONNECT_TIMEOUT_S = 10.0  # to connect to a cluster's head
RETRIES = 3  # of a task whose process or node is lost
AHEAD = 1000  # tasks that Ray knows of: enough for any cluster to be busy, or to grow


@contextmanager
def connected(address: str | None, what: str = "a study") -> Iterator[None]:
    """Connects to the Ray cluster at an address, or starts one here and ends it on leaving.

    Raises a TrainingError if neither succeeds, and a MissingPackage, which says that `what` needs
    it, if Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # keep studies private
    os.environ.setdefault("RAY_worker_niceness", "0")  # the default of 15 would distort timings
    if not address:  # a local cluster listens on the loopback address only
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # and is closed to other users
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # Ray's would be readable in ~/.ray
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = require("ray", what)
    # Elsewhere, too, threads wait as they do here; how many a task has, Ray says (see `cores`).
    waits = {key: os.environ[key] for key in SPIN_KEYS if key in os.environ}
    there, here = {"runtime_env": {"env_vars": waits}}, {"include_dashboard": False}
    options: dict[str, Any] = dict(there if address else here)
    if THREADS in chosen_here:
        os.environ.pop(THREADS, None)
    try:
        if address and address != "auto":  # Ray itself would try for two minutes
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:  # Ray raises no narrower one where its node starts too slowly
        reason = str(error).strip().split("\n")[0]  # Ray's own texts run over a page
        raise TrainingError(
            f"no Ray cluster answers at {address} ({reason}); start one with "
            "`RAY_AUTH_MODE=token ray start --head`, and pass its HOST:PORT, with its token here; "
            "or remove --address to use this machine"
            if address
            else f"Ray did not start here within 30 s ({reason}): is the machine busy, or its "
            "memory or /tmp full? Run again, or join a cluster with --address"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def nodes() -> list[Node]:
    """Returns the resources of every living node of the cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def has_gpus() -> bool:
    """Returns whether a node of the cluster has a GPU."""
    return any(node.get("GPU", 0) >= 1 for node in nodes())


@dataclass(frozen=True)
class Tasks:
    """An executor (see `heron.base.workers`) of tasks on the connected cluster.

    A task whose process or node is lost is done again, elsewhere if need be. The nodes have Heron
    installed, and see the working directory at the same path.

    Attributes:
        at_once: the most tasks at a time; None: as many as the cluster has CPUs for.
        gpus: of each task.
        cpus: of each task.
    """

    at_once: int | None = None
    gpus: int = 0
    cpus: int = 1

    def map(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Generator[tuple[Item, Result], None, None]:
        """Calls a function on items in tasks: see `heron.base.workers.Executor`."""
        import ray

        run = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=RETRIES)(_run)
        held, root = ray.put(function), Path.cwd()  # sent to each node once, not with each item
        pending, busy = iter(items), dict[Any, Item]()
        room = self.at_once or AHEAD
        try:
            while True:
                for item in islice(pending, room - len(busy)):
                    busy[run.remote([held], item, root)] = item
                if not busy:
                    return
                ray.wait([*busy])
                ready, _ = ray.wait([*busy], num_returns=len(busy), timeout=0)
                for task in ready:
                    item = busy.pop(task)
                    try:
                        result, fault = ray.get(task)
                    except ray.exceptions.RayError as error:
                        raise _lost(item, error) from None
                    if fault is not None:
                        raise fault
                    yield item, result
        finally:
            for task in busy:
                ray.cancel(task, force=True)


_held: dict[str, Any] = {}  # the function that this process calls, by Ray's number


def _run(held: list[Any], item: Item, root: Path) -> tuple[Any, Exception | None]:
    """Returns what `outcome` does, in the driver's working directory: the work of a task."""
    try:
        os.chdir(root)  # where relative paths start
    except OSError as error:
        return None, ShardError(
            f"{root}: {error.strerror} on {socket.gethostname()}, a node of the cluster; start in "
            "a folder that all nodes see under the same path"
        )
    (reference,) = held  # in a list, or Ray would unpickle the function, with its data, every time
    if reference.hex() not in _held:
        import ray

        _held.clear()
        _held[reference.hex()] = ray.get(reference)
    return outcome(_held[reference.hex()], item)


def _lost(item: object, error: Exception) -> ShardError:
    """Returns the error of an item whose process Ray could not keep alive."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-1] if type(error).__name__.startswith("RayTaskError") else lines[0]
    return ShardError(
        f"{item}: the processes that worked on it were lost, {RETRIES + 1} times ({reason}); check "
        "the item, or, where memory is short, run the same command again, with fewer --workers "
        "or --at-once"
    )
