"""Jobs of a sweep: in order here, at once on a Ray cluster of two nodes, with the same bytes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import yaml

from heron.base.errors import TrainingError
from heron.base.workers import Item, Result
from heron.cli.main import main
from heron.data.dataset import build_data
from heron.experiment.config import dump_config
from heron.studies.engine import Batch, Job, executor, run_jobs
from tests.experiments import frames
from tests.launch import runs
from tests.studies.nodes import TOKEN, Nodes, running
from tests.weekly import weekly


class Backwards:
    """An executor that does the newest work first."""

    def map(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Generator[tuple[Item, Result], None, None]:
        waiting = list(iter(items))
        while waiting:
            item = waiting.pop()
            yield item, function(item)
            waiting += iter(items)


def grow(name: str, made: list[str]) -> Job[list[str]]:
    """Two at once, then as many one by one as the first two say."""
    found = yield Batch({f"{name}{n}": partial(note, f"{name}{n}", made) for n in range(2)})
    for _ in range(len(found)):
        found += yield Batch({f"{name}x": partial(note, f"{name}x{len(found)}", made)})
    yield Batch({})
    return [str(one) for one in found]


def note(name: str, made: list[str]) -> str:
    made.append(name)
    return name.upper()


def test_jobs_go_one_after_the_other_here_and_any_way_elsewhere() -> None:
    here, there = list[str](), list[str]()
    ended = list[int]()
    expected = [["A0", "A1", "AX2", "AX3"], ["B0", "B1", "BX2", "BX3"]]
    assert run_jobs([grow("a", here), grow("b", here)], ended=ended.append) == expected
    assert [name.upper() for name in here] == sum(expected, []) and ended == [0, 1]
    assert run_jobs([grow("a", there), grow("b", there)], Backwards()) == expected
    assert there == ["b1", "b0", "bx2", "bx3", "a1", "a0", "ax2", "ax3"]


def test_what_arrives_is_told_and_an_error_ends_all() -> None:
    told = list[tuple[str, str]]()

    def fails() -> None:
        raise TrainingError("no")

    def job(calls: dict[str, Callable[[], object]]) -> Job[None]:
        yield Batch(calls, lambda name, result: told.append((name, str(result))))

    with pytest.raises(TrainingError, match="^no$"):
        run_jobs([job({"a": partial(str, 1), "b": fails, "c": partial(str, 3)})])
    assert told == [("a", "1")]
    assert run_jobs([]) == []


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with running() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    train = {"steps": 120, "epochs": 99, "save_every_steps": 5, "timeout_s": 120}
    config = frames(folder, train=train, data={"epoch": "labelled"})
    build_data(config.data, progress=False)
    (folder / "mine.yaml").write_text(dump_config(config))
    return folder / "mine.yaml"


def start(experiment: Path, out: Path, *words: str) -> "subprocess.Popen[str]":
    options = ["--methods", "dnn", "own", "--baselines", "logistic", "--folds", "2"]
    command = ["compare", "--config", str(experiment), *options, "--trials", "2", "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-m", "heron", *command, *words],
        cwd=runs.ROOT,
        env=runs.environment(PYTHONPATH=str(runs.ROOT), **TOKEN),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@weekly("studies/test_on_ray.py kills trials and drivers; a search here on Ray stays")
def test_a_comparison_on_a_cluster_is_that_of_one_process(
    nodes: Nodes, experiment: Path, tmp_path: Path
) -> None:
    """Though a worker is killed within a run, and then the driver, which is run again."""
    here, there = tmp_path / "here", tmp_path / "there"
    serial = start(experiment, here)
    driver = start(experiment, there, "--address", nodes.address)
    log = there / "fold-0" / "dnn" / "log.txt"
    first = there / "fold-0" / "dnn" / "000"
    runs.await_that("a run", lambda: runs.steps(first) > 7, 300, str, lambda: driver.poll() is None)
    victims = [process for process in writers(log) if process != driver.pid]
    assert victims
    os.kill(victims[0], signal.SIGKILL)
    runs.await_that(
        "two results",
        lambda: len([*there.glob("fold-*/*/*/result.json")]) >= 2,
        300,
        str,
        lambda: driver.poll() is None,
    )
    driver.kill()
    driver.communicate()
    before = {path: path.stat().st_mtime_ns for path in there.glob("fold-*/*/*/result.json")}
    status, said = runs.finish(start(experiment, there, "--address", nodes.address), 500)
    assert status == 0 and "fold-1/own 001 (optim.lr=" in said, said
    status, said = runs.finish(serial, 500)
    assert status == 0, said
    for name in ("compare.md", "compare.json"):
        assert (there / name).read_bytes() == (here / name).read_bytes()
    saved = sorted(path.relative_to(here) for path in (here / "results").iterdir())
    assert len(saved) == 6
    for path in saved:
        assert (there / path).read_bytes() == (here / path).read_bytes()
    assert all(path.stat().st_mtime_ns == was for path, was in before.items())


def writers(log: Path) -> list[int]:
    """Processes that write a log."""
    found = []
    for process in (name for name in os.listdir("/proc") if name.isdecimal()):
        try:
            links = os.listdir(f"/proc/{process}/fd")
            if str(log) in {os.readlink(f"/proc/{process}/fd/{link}") for link in links}:
                found.append(int(process))
        except OSError:  # gone meanwhile
            continue
    return found


def test_a_task_that_no_node_can_hold(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(TrainingError, match="needs 9 CPUs .* the largest node has 1; set train.cpu"),
        executor(nodes.address, None, 9),
    ):
        pass


def test_tasks_have_one_thread_unless_the_experiment_says(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heron.cli.compare import with_threads

    tree = yaml.safe_load(experiment.read_text())
    assert with_threads(experiment, ["seed=1"], "auto", None) == ["seed=1"]
    tree["train"]["cpu_threads"] = None
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    one = ["seed=1", "train.cpu_threads=1"]
    assert with_threads(tmp_path / "mine.yaml", ["seed=1"], None, 2) == one
    assert with_threads(tmp_path / "mine.yaml", ["seed=1"], None, 1) == ["seed=1"]


def test_tables_and_searches_here_on_ray(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--at-once 2` begins a Ray of this machine: the rows of a search by optuna are the same."""
    words = ["tune", str(experiment), "train.steps=3", "--methods", "dnn", "--sampler", "optuna"]
    words += ["--trials", "5"]
    assert main([*words, "--out", str(tmp_path / "here")]) == 0
    assert main([*words, "--at-once", "2", "--out", str(tmp_path / "there")]) == 0
    here, there = ((tmp_path / name / "dnn.json").read_text() for name in ("here", "there"))
    assert here == there
    runs.assert_same_weights(*(tmp_path / name / "dnn" / best(here) for name in ("here", "there")))


def best(text: str) -> str:
    trials = yaml.safe_load(text)["trials"]
    return f"{max(trials, key=lambda trial: float(trial['validation']))['trial']:03}"
