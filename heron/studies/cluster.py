"""Ray's cluster: started here or joined, and whether a study fits into it."""

import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from heron.config.errors import TrainingError
from heron.config.extras import require
from heron.studies.study import Study
from heron.studies.trials import Trial

Node = Mapping[str, float]  # a node's resources: CPU, GPU
CONNECT_TIMEOUT_S = 10.0  # to connect to a cluster's head


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connects to the Ray cluster at an address, or starts one here and ends it on leaving.

    Raises a TrainingError if neither succeeds, and a MissingPackage if Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # keep studies private
    os.environ.setdefault("RAY_worker_niceness", "0")  # the default of 15 would distort timings
    if not address:  # a local cluster listens on the loopback address only
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # and is closed to other users
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # Ray's would be readable in ~/.ray
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = require("ray", "a study")
    options: dict[str, object] = {} if address else {"include_dashboard": False}
    try:
        if address and address != "auto":  # Ray itself would try for two minutes
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:  # Ray raises no narrower one where its node starts too slowly
        reason = str(error).strip().split("\n")[0]  # Ray's own texts run over a page
        raise TrainingError(
            f"no Ray cluster answers at {address} ({reason}); expected HOST:PORT of "
            "`RAY_AUTH_MODE=token ray start --head`, and its token here; without --address one is "
            "begun here"
            if address
            else f"Ray did not begin here ({reason}); expected it within 30 s: is the machine "
            "busy, or its memory or /tmp full? Run again, or join one with --address"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def nodes() -> list[Node]:
    """Returns the resources of every living node of the cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def resources_per_worker(study: Study) -> dict[str, int]:
    """Returns the resources that a worker requests."""
    return {"CPU": study.cpus_per_worker} | ({"GPU": 1} if study.gpus else {})


def trials_at_once(study: Study, trials: Sequence[Trial], nodes: Sequence[Node]) -> int:
    """Returns how many trials run at once: as many of the largest as the nodes hold, or fewer.

    Raises a TrainingError with requested and available resources if a trial would wait forever.
    """
    needs, largest = resources_per_worker(study), max(trials, key=lambda trial: trial.workers)
    room = sum(min(int(node.get(kind, 0) // n) for kind, n in needs.items()) for node in nodes)
    if largest.workers > room:
        requested = [_amount(n * largest.workers, kind) for kind, n in needs.items()]
        available = [_amount(int(sum(node.get(kind, 0) for node in nodes)), kind) for kind in needs]
        raise TrainingError(
            f"trial {largest.name} asks for {_amount(largest.workers, 'worker')}, "
            f"{' and '.join(requested)}; the cluster has {' and '.join(available)} on "
            f"{_amount(len(nodes), 'node')}, room for {room}; expected no more than there is: vary "
            "fewer workers, run the small version with --small, or join a larger cluster with "
            "--address"
        )
    return min(room // largest.workers, study.concurrent or room)


def _amount(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
