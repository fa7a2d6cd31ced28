"""Shards by the tasks of a Ray cluster of two nodes on this host: the bytes of processes here."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from heron.base.errors import ShardError, SourceError
from heron.base.workers import Processes
from heron.distributed.cluster import Tasks
from heron.shards.build import build
from heron.shards.source import Rows, Source
from heron.shards.verify import verify
from heron.sources import make_source
from heron.sources.foreign import index
from heron.sources.layout import Layout
from heron.sources.xrmb import Frames
from tests.launch import runs
from tests.shards.others import cats, write_wds
from tests.shards.test_build import contents
from tests.studies.nodes import SPINS, TOKEN, Losing, Nodes, joined
from tests.weekly import weekly

SHARDS = 6


class Fragile(Frames):
    """Frames that are slow, and end the process that reads them, where a file says so."""

    name: ClassVar[str] = "fragile"

    def read(self, split: str, start: int, stop: int) -> Rows:
        fatal = Path(f"die-{start}")
        if fatal.exists():
            if fatal.read_text() == "once":
                fatal.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1 if Path("slow").exists() else 0)
        return super().read(split, start, stop)


def source() -> Source:
    """Six shards of 256 rows and one of 100."""
    name = f"{Fragile.__module__}.{Fragile.__name__}"
    return make_source(name, {"train": SHARDS * 256, "test": 100})


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """The cluster, joined by this process."""
    with joined() as cluster:
        yield cluster


def test_threads_wait_on_every_node_as_they_do_here(nodes: Nodes) -> None:
    """The cluster began before this process chose, in an environment of its own."""
    found = [spins for _, spins in Tasks().map(os.getenv, ["GOMP_SPINCOUNT", "OMP_NUM_THREADS"])]
    assert sorted(map(str, found)) == ["1", SPINS]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What processes of this machine write."""
    out = tmp_path_factory.mktemp("local") / "out"
    build(source(), out, shard_rows=256, progress=False)
    return contents(out)


def node_of(item: int) -> str:
    import ray

    time.sleep(0.3)
    return str(ray.get_runtime_context().get_node_id())


def work(item: str) -> str:
    if item == "bug":
        raise KeyError(item)
    if item == "fault":
        raise SourceError("a.txt: wrong")
    time.sleep(600 if item == "sleep" else 0)
    return item.upper()


def test_every_item_once_on_both_nodes(nodes: Nodes) -> None:
    found = dict(Tasks().map(node_of, range(8)))
    assert sorted(found) == [*range(8)] and len({*found.values()}) == 2
    assert dict(Tasks(1).map(work, ["a", "b"])) == {"a": "A", "b": "B"}


class Heavy:
    """A function that writes a line whenever a process unpickles it, with its data."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__dict__ |= state
        with self.log.open("a") as stream:
            stream.write(f"{os.getpid()}\n")

    def __call__(self, item: int) -> int:
        return os.getpid()


def test_a_process_unpickles_the_function_once(nodes: Nodes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    used = {process for _, process in Tasks(1).map(Heavy(log), range(12))}
    lines = log.read_text().splitlines()
    assert {*map(int, lines)} == used and len(lines) == len(used)


@weekly("base/test_workers.py ends all of a process pool; a lost node and worker stay here")
def test_a_fault_ends_all(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="^a.txt: wrong$"):
        list(Tasks().map(work, ["sleep", "fault"]))
    with pytest.raises(KeyError) as raised:
        list(Tasks().map(work, ["sleep", "bug"]))
    assert "raise KeyError(item)" in raised.value.__notes__[0]
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rename(tmp_path / "away")
    monkeypatch.setattr(Path, "cwd", lambda: gone)  # what no node sees
    with pytest.raises(ShardError, match=r"gone: No such file .* a node of the cluster; start in"):
        list(Tasks().map(work, ["a"]))


def test_a_build_with_a_worker_that_is_killed(
    nodes: Nodes, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("die-512").write_text("once")
    build(source(), Path("out"), shard_rows=256, executor=Tasks(), progress=False)
    assert contents(tmp_path / "out") == local and not Path("die-512").exists()
    assert verify(tmp_path / "out", executor=Tasks()) == verify(tmp_path / "out")


@weekly("a worker that is killed once stays here")
def test_an_item_that_kills_every_worker_is_named(
    nodes: Nodes, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is finished is kept, and processes here go on with it."""
    monkeypatch.chdir(tmp_path)
    Path("die-512").write_text("always")
    with pytest.raises(
        ShardError, match=r"^train-000002.tar: the processes that worked on it were lost, 4 t"
    ):
        build(source(), Path("out"), shard_rows=256, executor=Tasks(1), progress=False)
    made = {path.name: path.stat().st_mtime_ns for path in Path("out").glob("*.tar")}
    assert sorted(made) == ["train-000000.tar", "train-000001.tar"]
    Path("die-512").unlink()
    build(source(), Path("out"), shard_rows=256, executor=Processes(2), progress=False)
    assert contents(tmp_path / "out") == local
    assert {name: (Path("out") / name).stat().st_mtime_ns for name in made} == made


def test_tars_of_others(nodes: Nodes, tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "cats", tmp_path / "there" / "cats"
    here.mkdir(parents=True)
    for split in ("train", "val"):
        write_wds(here / f"{split}-0.tar", cats(10 * len(split), 12))
    shutil.copytree(here, there)
    index(here, Layout.of({}), progress=False)
    index(there, Layout.of({}), executor=Tasks(), progress=False)
    assert contents(here) == contents(there) and len(contents(there)) == 5
    damaged = bytearray((here / "train-0.tar").read_bytes())
    damaged[5000] ^= 1
    (here / "train-0.tar").write_bytes(damaged)
    found = verify(here)
    assert verify(here, executor=Tasks()) == verify(here, executor=Processes(2)) == found
    assert "train-0.tar: altered" in found.faults[0] and len(found.faults) > 1


def test_a_node_that_is_lost(
    nodes: Nodes, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow").touch()
    build(source(), Path("out"), shard_rows=256, executor=Losing(nodes=nodes), progress=False)
    assert contents(tmp_path / "out") == local
    nodes.ask("add")


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    options = ["--out", "out", "--shard-rows", "256", "--train", str(SHARDS * 256), "--test", "100"]
    name = f"{Fragile.__module__}.{Fragile.__name__}"
    return subprocess.Popen(
        [sys.executable, "-m", "heron", "shards", "build", name, *options, *words],
        cwd=folder,
        env=runs.environment(PYTHONPATH=str(runs.ROOT), **TOKEN),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    "first", ["cluster", pytest.param("here", marks=weekly("the other way round is tested"))]
)
def test_a_killed_driver_and_another_executor(
    nodes: Nodes, local: dict[str, bytes], tmp_path: Path, first: str
) -> None:
    """The second goes on with what the first has finished, while its workers still write."""
    words = {"cluster": ["--address", nodes.address], "here": ["--workers", "2"]}
    (tmp_path / "slow").touch()
    driver = start(tmp_path, *words.pop(first))
    runs.await_that(
        "two shards",
        lambda: len([*tmp_path.glob("out/*.tar")]) >= 2,
        120,
        lambda: "",
        lambda: driver.poll() is None,
    )
    driver.kill()
    driver.communicate()
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("out/*.tar")}
    assert len(made) < SHARDS + 1 and not (tmp_path / "out" / "manifest.json").exists()
    (other,) = words.values()
    status, said = runs.finish(start(tmp_path, *other), 120)
    assert status == 0, said
    time.sleep(3)  # whatever the first left behind has ended
    assert {k: v for k, v in contents(tmp_path / "out").items() if k[0] != "."} == local
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == made[name] for name in made)
