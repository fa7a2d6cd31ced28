"""Ray's cluster: begun here or joined, and whether it can ever hold what a study asks for."""

import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from heron.launch.studies.study import Study
from heron.launch.studies.trials import Trial
from heron.pipeline.config.errors import TrainingError
from heron.pipeline.config.extras import require

Node = Mapping[str, float]  # a node's resources: CPU, GPU
REACH_S = 10.0  # to connect to a cluster's head


@contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Lets this process drive the Ray cluster at an address, or one that is begun here and ended.

    Raises a TrainingError where nothing answers there, or Ray does not begin here, and a
    MissingPackage where it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a study is nobody else's business
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: what is timed would wait
    if not address:  # a Ray of this machine's own listens on no other address than its loopback's
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # nor is it for others on this machine
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # Ray's own would lie in ~/.ray for all to read
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = require("ray", "a study")
    begun: dict[str, object] = {} if address else {"include_dashboard": False}
    try:
        if address and address != "auto":  # Ray itself would try for two minutes
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **begun)
    except Exception as error:  # Ray raises no narrower one where its node starts too slowly
        first = str(error).strip().split("\n")[0]  # Ray's own texts run over a page
        raise TrainingError(
            f"no Ray cluster answers at {address} ({first}); expected HOST:PORT of "
            "`RAY_AUTH_MODE=token ray start --head`, and its token here; without --address one is "
            "begun here"
            if address
            else f"Ray did not begin here ({first}); expected it within 30 s: is the machine busy, "
            "or its memory or /tmp full? Run again, or join one with --address"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def nodes() -> list[Node]:
    """Returns the resources of every living node of the cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def per_worker(study: Study) -> dict[str, int]:
    """Returns the resources that a worker asks for."""
    return {"CPU": study.cpus_per_worker} | ({"GPU": 1} if study.gpus else {})


def trials_at_once(study: Study, trials: Sequence[Trial], nodes: Sequence[Node]) -> int:
    """Returns how many trials run at once: what the nodes hold of the largest, or fewer.

    Raises a TrainingError where one would wait for ever: it names what is asked for and there is.
    """
    asked, largest = per_worker(study), max(trials, key=lambda trial: trial.workers)
    held = sum(min(int(node.get(kind, 0) // n) for kind, n in asked.items()) for node in nodes)
    if largest.workers > held:
        wanted = [_amount(n * largest.workers, kind) for kind, n in asked.items()]
        there = [_amount(int(sum(node.get(kind, 0) for node in nodes)), kind) for kind in asked]
        raise TrainingError(
            f"trial {largest.name} asks for {_amount(largest.workers, 'worker')}, "
            f"{' and '.join(wanted)}; the cluster has {' and '.join(there)} on "
            f"{_amount(len(nodes), 'node')}, room for {held}; expected no more than there is: vary "
            "fewer workers, run the small version with --small, or join a larger cluster with "
            "--address"
        )
    return min(held // largest.workers, study.concurrent or held)


def _amount(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
