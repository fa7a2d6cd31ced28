"""Two hosts started by hand: two network namespaces of this machine, joined by a cable."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch import runs

SCRIPT = "launch/hosts/pretrain.sh"
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces; nothing but the cable leads from one to the other."""

    names: tuple[str, str]

    def start(self, host: int, config: Path) -> subprocess.Popen[str]:
        """The script, as on one of two hosts."""
        environment = runs.environment(
            HOSTS=" ".join(ADDRESSES), HOST=str(host), PROCESSES="1", PORT="29517"
        )
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], SCRIPT, "--config", str(config)],
            cwd=runs.ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def cable(self, state: str) -> None:
        """Plug it in (`up`) or pull it out (`down`), at both ends."""
        for host in self.names:
            ip("-n", host, "link", "set", "cable", state)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    hosts = Hosts((f"heron-{os.getpid()}-a", f"heron-{os.getpid()}-b"))
    try:
        for host in hosts.names:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        one, other = hosts.names
        ip(*f"link add cable netns {one} type veth peer name cable netns {other}".split())
        for host, address in zip(hosts.names, ADDRESSES, strict=True):
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
        hosts.cable("up")
        yield hosts
    finally:
        for host in hosts.names:
            for process in _inside(host):
                os.kill(process, 9)
            subprocess.run(["ip", "netns", "delete", host], capture_output=True)


def _inside(host: str) -> list[int]:
    shown = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
    return [int(word) for word in shown.stdout.split()]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and iproute2 (apt-get install iproute2) for network namespaces")
    with ExitStack() as stack:
        try:
            entered = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"network namespaces are refused here: {error}")
        yield entered


@pytest.mark.parametrize("host", ["2", "-1", "beta", "01", "1.5", "a[0]"])
def test_a_host_without_a_place(host: str) -> None:
    """Such as its name, which many shells have in HOST: it was told as an unbound variable."""
    environment = runs.environment(HOSTS="alpha beta", HOST=host, PROCESSES="1")
    done = subprocess.run(
        [SCRIPT], cwd=runs.ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    expected = "expected 0 to 1, its place in HOSTS: alpha beta\n"
    assert done.stderr == f"error: HOST is {host}; {expected}"


def test_a_cut_link_ends_both_hosts_and_a_restart_ends_with_the_same_weights(
    hosts: Hosts, straight: Path
) -> None:
    config = runs.experiment(straight, "hosts", train=runs.LENGTH)
    run = straight / "hosts"
    last = runs.steps(straight / "straight")

    both = [hosts.start(host, config) for host in (0, 1)]
    cut = last // 3  # after an epoch, so that there is a checkpoint
    await_step(cut, run, both)
    hosts.cable("down")
    pulled = time.monotonic()
    ended = [runs.finish(process, 60) for process in both]
    took = time.monotonic() - pulled
    for (status, output), peer in zip(ended, (1, 0), strict=True):
        assert status == runs.BROKEN, output[-3000:]
        assert f"rank {peer} on " in output, output[-3000:]
        assert ADDRESSES[peer] in output, output[-3000:]
    assert took < runs.LENGTH["timeout_s"] + 15
    assert 0 < runs.saved_step(run) < last

    hosts.cable("up")
    both = [hosts.start(host, config) for host in (0, 1)]
    for status, output in [runs.finish(process, 120) for process in both]:
        assert status == 0, output[-3000:]
    runs.assert_resumed(run, last)
    runs.assert_same_weights(run, straight / "straight")


def await_step(step: int, run: Path, both: list[subprocess.Popen[str]]) -> None:
    def going() -> bool:
        return all(process.poll() is None for process in both)

    there = f"step {step}"
    runs.await_that(there, lambda: runs.steps(run) >= step, 180, lambda: told(both), going)


def told(processes: list[subprocess.Popen[str]]) -> str:
    """End processes that did not come as far as they should; what they said."""
    for process in processes:
        process.terminate()
    return "\n".join(process.communicate(timeout=30)[0] for process in processes)


def test_a_signal_on_one_host_saves_and_ends_both(hosts: Hosts, straight: Path) -> None:
    length = runs.LENGTH | {"save_every_epochs": None}
    config = runs.experiment(straight, "signalled", train=length)
    both = [hosts.start(host, config) for host in (0, 1)]
    run = straight / "signalled"
    await_step(5, run, both)
    both[1].terminate()
    for status, output in [runs.finish(process, 60) for process in both]:
        assert status == runs.SAVED, output[-3000:]
    assert 5 <= runs.saved_step(run) < runs.steps(straight / "straight")
