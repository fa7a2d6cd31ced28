"""Embedding in tasks, of processes here and of a Ray cluster: the bytes of `embed`."""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from heron.base.errors import RetrievalError, ShardError
from heron.base.workers import Item, Processes, Result
from heron.cli.main import main
from heron.distributed.cluster import Tasks, has_gpus
from heron.retrieval import embed_tasks
from heron.retrieval.build import build_index
from heron.retrieval.embed import embed
from heron.retrieval.embed_tasks import embed_on
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index_plan import RequestedKind
from heron.retrieval.some_views import EmbeddingsOfViews
from tests.retrieval.test_embed import ROWS, SMALL, files
from tests.retrieval.test_embed import run as run  # a fixture
from tests.retrieval.test_embed import whole as whole
from tests.studies.nodes import Losing, Nodes, joined, running
from tests.weekly import weekly


@pytest.fixture  # a cluster that has lost a node may take the next one for it
def nodes() -> Iterator[Nodes]:
    """A cluster of two nodes of one CPU each."""
    with joined() as cluster:
        yield cluster


def killed(
    function: Callable[[Any], Any], folder: Path, often: int, killing: Any, item: Any
) -> Any:
    """An item whose process is killed in its midst the first times."""
    tries = len([*folder.glob("try-*")])
    if item == killing and tries < often:
        (folder / f"try-{tries}").touch()
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(0.005)
        function(item)
        time.sleep(60)
    return function(item)


@dataclass(frozen=True)
class Killing(Tasks):
    """Tasks one of which ends its process some times."""

    folder: Path = Path()
    often: int = 1
    item: Any = 2  # a part's number

    def map(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Generator[tuple[Item, Result], None, None]:
        ending = partial(killed, function, self.folder, self.often, self.item)
        yield from super().map(ending, items)


def test_processes_of_this_machine(run: Path, whole: Embeddings, tmp_path: Path) -> None:
    embed_on(Processes(2), run, tmp_path / "out", SMALL, progress=False)
    assert files(tmp_path / "out") == files(whole.folder)


@weekly("shards/test_on_cluster.py loses both of the same executor")
def test_a_cluster_that_loses_a_worker_and_a_node(
    nodes: Nodes, run: Path, whole: Embeddings, tmp_path: Path
) -> None:
    assert not has_gpus()
    embed_on(Killing(folder=tmp_path), run, tmp_path / "one", SMALL, progress=False)
    assert files(tmp_path / "one") == files(whole.folder) and (tmp_path / "try-0").exists()
    found = embed_on(Losing(nodes=nodes), run, tmp_path / "two", SMALL, progress=False)
    assert len(found) == ROWS and files(tmp_path / "two") == files(whole.folder)


@weekly("shards/test_on_cluster.py goes on with another executor")
def test_either_goes_on_where_the_other_stopped(
    nodes: Nodes, run: Path, whole: Embeddings, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ShardError, match=r"^part 2: the processes that worked on it were lost, 4"):
        embed_on(Killing(1, folder=tmp_path, often=9), run, out, SMALL, progress=False)
    finished = sorted(path.name for path in (out / "parts").glob("*.json"))
    # The third part may have been whole just before its process was killed.
    assert finished[:2] == ["00000.json", "00001.json"] and finished[2:] in ([], ["00002.json"])
    times = {path: path.stat().st_mtime_ns for path in (out / "hidden").glob("0*")}
    embed(run, out, SMALL, progress=False)
    assert files(out) == files(whole.folder)
    assert all(times[path] == path.stat().st_mtime_ns for path in sorted(times)[:2])
    (out / "manifest.json").unlink()
    (out / "parts" / "00004.json").unlink()
    embed_on(Tasks(), run, out, SMALL, progress=False)
    assert files(out) == files(whole.folder)


def test_what_tasks_refuse(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = embed_tasks._Job(str(run), str(tmp_path / "out"), SMALL, ())
    _, plan = job.open()
    with pytest.raises(
        RetrievalError, match="a task would embed something different: batch is 32, not 7; if"
    ):
        replace(job, plan=plan | {"batch": 7})(0)
    monkeypatch.setattr(embed_tasks, "world_size", lambda: 2)
    with pytest.raises(
        RetrievalError, match=r"^2 processes were started, but embedding in tasks needs only one"
    ):
        embed_on(Processes(2), run, tmp_path / "out", SMALL)


FEW: dict[str, Any] = {"queries": 20, "k": 5, "map": "none", "progress": False}


@pytest.mark.parametrize("kind", ["ivf", "sq8", "rabitq"])
def test_an_index_by_processes_is_that_of_one(
    kind: RequestedKind, tmp_path: Path, run: Path
) -> None:
    small = replace(SMALL, part_rows=100)
    whole = embed(run, tmp_path / "e", small, progress=False)
    options: dict[str, Any] = {
        "kind": kind,
        "queries": 20,
        "k": 5,
        "map": "none",
        "progress": False,
    }
    build_index(whole, tmp_path / "one", **options)
    build_index(whole, tmp_path / "many", executor=Processes(2), **options)
    assert files(tmp_path / "many")["index.faiss"] == files(tmp_path / "one")["index.faiss"]


def test_an_index_of_some_views_is_assigned_by_processes(whole: Embeddings, tmp_path: Path) -> None:
    some = EmbeddingsOfViews(whole, whole.views[:1])
    options = FEW | {"kind": "ivf"}
    build_index(some, tmp_path / "one", **options)
    build_index(some, tmp_path / "many", executor=Processes(2), **options)
    assert files(tmp_path / "many")["index.faiss"] == files(tmp_path / "one")["index.faiss"]


@weekly("shards/test_on_cluster.py loses workers of the same executor")
def test_an_index_on_a_cluster_that_loses_a_worker(
    nodes: Nodes, whole: Embeddings, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "kind": "ivf",
        "queries": 20,
        "k": 5,
        "map": "none",
        "progress": False,
    }
    build_index(whole, tmp_path / "one", **options)
    build_index(whole, tmp_path / "two", executor=Killing(folder=tmp_path), **options)
    assert [*tmp_path.glob("try-*")]
    assert files(tmp_path / "two")["index.faiss"] == files(tmp_path / "one")["index.faiss"]


def test_the_verb_index_on_a_cluster(whole: Embeddings, tmp_path: Path) -> None:
    words = ["index", str(whole.folder), "--kind", "ivf", "--queries", "20", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    with running() as cluster:
        assert main([*words, "--out", str(tmp_path / "two"), "--address", cluster.address]) == 0
    assert files(tmp_path / "two")["index.faiss"] == files(tmp_path / "one")["index.faiss"]
