"""Ray's cluster: begun here or joined, and whether it can ever hold what a study asks for."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from heron.launch.studies.study import Study
from heron.launch.studies.trials import Trial
from heron.pipeline.config.errors import TrainingError

Node = Mapping[str, float]  # a node's resources: CPU, GPU
REACH_S = 10.0  # to connect to a cluster's head


@contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Lets this process drive a Ray cluster while it is open.

    Args:
        address: of a cluster that runs, as `ray start` prints it; None: one is begun on this
            machine, and ended.

    Raises:
        TrainingError: nothing answers there, or Ray does not begin here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a study is nobody else's business
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: what is timed would wait
    import ray

    if address and address != "auto":
        _reach(address)
    begun: dict[str, object] = {} if address else {"include_dashboard": False}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **begun)
    except Exception as error:  # Ray raises no narrower one where its node starts too slowly
        if address is None:
            raise TrainingError(
                f"Ray did not begin here ({_first(error)}); expected it within 30 s: is the "
                "machine busy, or its memory or /tmp full? Run again, or join one with --address"
            ) from None
        raise _unanswered(address, error) from None
    try:
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Refuses an address where nothing listens; Ray itself would try for two minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, ValueError) as error:
        raise _unanswered(address, error) from None


def _unanswered(address: str, error: Exception) -> TrainingError:
    return TrainingError(
        f"no Ray cluster answers at {address} ({_first(error)}); expected HOST:PORT of `ray "
        "start --head`; without --address one is begun here"
    )


def nodes() -> list[Node]:
    """Returns the resources of every living node of the cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def per_worker(study: Study) -> dict[str, int]:
    """Returns the resources that a worker asks for."""
    return {"CPU": study.cpus_per_worker} | ({"GPU": 1} if study.gpus else {})


def capacity(study: Study, nodes: Sequence[Node]) -> int:
    """Returns how many workers the nodes hold at once; a worker lies on one node."""
    asked = per_worker(study)
    return sum(min(int(node.get(k, 0) // n) for k, n in asked.items()) for node in nodes)


def refuse_unmet(study: Study, trials: Sequence[Trial], nodes: Sequence[Node]) -> None:
    """Refuses a study with a trial that would wait for ever.

    Args:
        study: says what a worker needs.
        trials: says how many workers there are.
        nodes: their resources.

    Raises:
        TrainingError: names the trial, what it asks for, what there is, and the remedy.
    """
    largest, held = max(trials, key=lambda trial: trial.workers), capacity(study, nodes)
    if largest.workers <= held:
        return
    kinds = per_worker(study)
    asked = [_amount(n * largest.workers, kind) for kind, n in kinds.items()]
    there = [_amount(int(sum(node.get(kind, 0) for node in nodes)), kind) for kind in kinds]
    raise TrainingError(
        f"trial {largest.name} asks for {_amount(largest.workers, 'worker')}, "
        f"{' and '.join(asked)}; the cluster has {' and '.join(there)} on "
        f"{_amount(len(nodes), 'node')}, room for {held}; expected no more than there is: vary "
        "fewer workers, run the small version with --small, or join a larger cluster with --address"
    )


def at_once(study: Study, trials: Sequence[Trial], nodes: Sequence[Node]) -> int:
    """Returns how many trials run at once: what the nodes hold of the largest, or fewer."""
    fit = max(1, capacity(study, nodes) // max(trial.workers for trial in trials))
    return min(fit, study.concurrent or fit)


def _amount(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _first(error: BaseException) -> str:
    """Returns the first line of an error's text; Ray's run over a page."""
    return str(error).strip().split("\n")[0]
