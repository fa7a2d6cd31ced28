"""A Ray cluster of several nodes on this host, of one CPU each, until its input ends.

    python -m tests.studies.nodes 2

Its first line is its address. A line `lose` of its input kills a node, `add` begins one.
"""

import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from heron.base.workers import Item, Result
from heron.distributed.cluster import Tasks, connected
from tests.launch import runs

SPINS = "777"  # of the threads that this process chooses
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@dataclass
class Nodes:
    """A cluster that runs in another process."""

    process: "subprocess.Popen[str]"
    address: str

    def ask(self, word: str) -> None:
        """Have it lose or add a node."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == word


@contextmanager
def running(count: int = 2) -> Iterator[Nodes]:
    """A cluster of some nodes, which let in whoever has the token."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.studies.nodes", str(count)],
        cwd=runs.ROOT,
        env=runs.environment(PYTHONPATH=str(runs.ROOT), RAY_USAGE_STATS_ENABLED="0", **TOKEN),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        found = process.stdout.readline().strip()
        assert found, "the cluster did not start"
        yield Nodes(process, found)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def joined() -> Iterator[Nodes]:
    """A cluster of two nodes, which this process has joined."""
    with pytest.MonkeyPatch.context() as patch, running() as cluster:
        for name, value in TOKEN.items():
            patch.setenv(name, value)
        patch.setenv("GOMP_SPINCOUNT", SPINS)
        with connected(cluster.address, "the tests"):
            yield cluster


@dataclass(frozen=True)
class Losing(Tasks):
    """Tasks on a cluster that loses a node when the first is done."""

    nodes: Nodes | None = None

    def map(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Generator[tuple[Item, Result], None, None]:
        for number, pair in enumerate(super().map(function, items)):
            if number == 0 and self.nodes is not None:
                self.nodes.ask("lose")
            yield pair


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    others = [cluster.add_node(num_cpus=1) for _ in range(int(sys.argv[1]) - 1)]
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:  # Ray's own processes end with this one
        if line.strip() == "lose":
            cluster.remove_node(others.pop(), allow_graceful=False)
        else:
            others.append(cluster.add_node(num_cpus=1))
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
