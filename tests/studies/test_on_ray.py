"""Studies on a real Ray cluster: two nodes of one CPU each, on this host."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from heron.experiment.config import dump_config
from heron.studies import drive
from heron.studies.ledger import Ledger
from heron.studies.study import load_study
from heron.studies.trials import plan
from heron.training.tracking import read_lines
from tests.experiments import frames
from tests.launch import runs
from tests.studies.nodes import TOKEN, running
from tests.weekly import weekly

WHOLE = weekly("minutes each")
LENGTH = 500  # steps: an interruption takes seconds to come through
LONG = {"train": {"steps": LENGTH, "epochs": 99, "save_every_steps": 5, "timeout_s": 120}}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes."""
    with running() as nodes:
        yield nodes.address


def write(folder: Path, changes: dict[str, Any] | None = None, **study: Any) -> Path:
    """A study of the tests' experiment, which has a few hundred frames."""
    config = frames(folder, "run", **{"optim": {"kind": "sgd"}, **(changes or {})})
    (folder / "base.yaml").write_text(dump_config(config))
    tree = {
        "title": "A study",
        "base": str(folder / "base.yaml"),
        "measure": {"x": "workers", "y": ["samples_per_s"], "score": "f1_weighted"},
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(tree | study, sort_keys=False))
    return path


def start(path: Path, *words: str) -> subprocess.Popen[str]:
    out = ["--out", str(path.parent / "out")]
    return subprocess.Popen(
        [sys.executable, "-m", "heron", "study", str(path), *out, *words],
        cwd=runs.ROOT,
        env=runs.environment(PYTHONPATH=str(runs.ROOT), **TOKEN),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rows(path: Path) -> dict[str, dict[str, Any]]:
    found = read_lines(path.parent / "out" / "trials.jsonl")
    by_name = {row["trial"]: row for row in found}
    assert len(by_name) == len(found)  # none twice
    return by_name


def workers_of(run: Path) -> dict[str, int]:
    """Process of each worker of a run, by rank: whoever writes its log."""
    found = {}
    for process in (name for name in os.listdir("/proc") if name.isdecimal()):
        try:
            links = os.listdir(f"/proc/{process}/fd")
            targets = [os.readlink(f"/proc/{process}/fd/{link}") for link in links]
        except OSError:  # gone meanwhile
            continue
        for target in targets:
            if target.startswith(f"{run}/log-"):
                found[target.removeprefix(f"{run}/log-").removesuffix(".txt")] = int(process)
    return found


def drivers_of(study: subprocess.Popen[str]) -> set[int]:
    """Processes that drive the trials of a study which has begun its own Ray."""
    found = set()
    for process in (name for name in os.listdir("/proc") if name.isdecimal()):
        try:
            named = Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::ImplicitFunc")
            if named and parent(parent(int(process))) == study.pid:  # through the raylet
                found.add(int(process))
        except OSError:  # gone meanwhile
            continue
    return found


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def await_lines(journal: Path, count: int, study: subprocess.Popen[str]) -> None:
    runs.await_that(
        f"{count} lines",
        lambda: len(read_lines(journal)) >= count,
        200,
        lambda: "the study ended" if study.poll() is not None else "it still runs",
        lambda: study.poll() is None,
    )


def await_step(run: Path, step: int, study: subprocess.Popen[str]) -> None:
    runs.await_that(
        f"{run} at step {step}",
        lambda: runs.steps(run) > step,
        200,
        lambda: "the study ended" if study.poll() is not None else "it still runs",
        lambda: study.poll() is None,
    )


def test_a_study_here(tmp_path: Path) -> None:
    """Two trials, of which one cannot be run; what has ended is not run again."""
    cases = [{"strategy": "ddp", "optim.kind": "sgd"}, {"strategy": "zero1", "optim.kind": "lars"}]
    path = write(tmp_path, {"train": {"steps": 8}}, cases=cases, workers=1)
    status, said = runs.finish(start(path), 300)
    assert status == 1, said
    assert "failed: 001; --retry-failed runs them again" in said
    assert "Last result" not in said, "Tune prints beside what the study says"
    found = rows(path)
    assert found["000"]["status"] == "done" and found["000"]["result"]["steps"] == 8
    assert found["000"]["result"]["strategy"] == "one process"
    assert found["001"]["status"] == "failed" and found["001"]["result"] is None
    assert "TrainingError: optim.kind is lars, which needs the norm" in found["001"]["error"]
    assert not (tmp_path / "out" / "ray").exists()
    status, said = runs.finish(start(path), 100)
    assert (status, rows(path)) == (1, found), said


@WHOLE
def test_killed_interrupted_and_failing_trials(tmp_path: Path, address: str) -> None:
    """Two workers, one on each node. Trials 000 and 001 are the same run.

    000 loses a worker and is retried from its checkpoint, and the study is interrupted in it and
    goes on; it ends with the bits of 001, which nothing happens to. 002 cannot be run.
    """
    cases = [
        {"train.keep_checkpoints": 2, "strategy": "ddp", "optim.kind": "sgd"},
        {"train.keep_checkpoints": 3, "strategy": "ddp", "optim.kind": "sgd"},
        {"train.keep_checkpoints": 2, "strategy": "zero1", "optim.kind": "lars"},
    ]
    path = write(tmp_path, LONG, cases=cases, workers=2)
    run, words = tmp_path / "out" / "trials" / "000", ("--address", address)
    study = start(path, *words)
    await_step(run, 10, study)
    workers = workers_of(run)
    assert sorted(workers) == ["0", "1"]
    os.kill(workers["1"], signal.SIGKILL)
    time.sleep(1)
    before = runs.saved_step(run)
    assert before >= 5
    runs.await_that(
        "two workers again",
        lambda: len(set(workers_of(run).values()) - set(workers.values())) == 2,
        100,
        str,
    )
    await_step(run, before + 10, study)
    study.send_signal(signal.SIGINT)
    status, said = runs.finish(study, 60)
    assert status == 130, said
    assert "0 of 3 trials have ended; run the same command to continue" in said
    runs.await_that("its workers are gone", lambda: not workers_of(run), 30, str)
    assert runs.saved_step(run) < LENGTH

    status, said = runs.finish(start(path, *words), 400)
    assert status == 1, said
    assert "failed: 002; --retry-failed runs them again" in said
    found = rows(path)
    assert [found[name]["status"] for name in ("000", "001", "002")] == ["done", "done", "failed"]
    runs.assert_same_weights(run, run.with_name("001"))
    runs.assert_resumed(run, LENGTH)
    assert found["000"]["result"]["strategy"] == "DDP"
    assert found["000"]["result"]["world_size"] == 2
    assert found["000"]["measured"]["counted_steps"] == LENGTH - 3
    assert "TrainingError: optim.kind is lars, which needs the norm" in found["002"]["error"]
    assert found["002"]["result"] is None
    tries = (run.with_name("002") / "log-0.txt").read_text()
    assert tries.count("global batch") == 0 and not (tmp_path / "out" / "ray").exists()
    status, said = runs.finish(start(path, *words), 60)
    assert (status, rows(path)) == (1, found), said  # nothing runs twice


@WHOLE
def test_a_trial_whose_driver_dies_goes_on(tmp_path: Path) -> None:
    """Another process drives it on from its checkpoint; nothing is made twice."""
    path = write(tmp_path, LONG | {"train": LONG["train"] | {"steps": 150}}, vary={"seed": [3]})
    run, study = tmp_path / "out" / "trials" / "000", start(path)
    await_step(run, 10, study)
    (driver,) = drivers_of(study)
    os.kill(driver, signal.SIGKILL)
    status, said = runs.finish(study, 300)
    assert status == 0 and "000 was lost and is restarted" in said, said
    assert rows(path)["000"]["status"] == "done"
    runs.assert_resumed(run, 150)


@WHOLE
def test_what_the_cluster_can_never_hold_is_refused(tmp_path: Path, address: str) -> None:
    path = write(tmp_path, vary={"workers": [1, 3]})
    status, said = runs.finish(start(path, "--address", address), 60)
    assert status == 1
    assert "error: trial 001 asks for 3 workers, 3 CPUs; the cluster has 2 CPUs on 2 nodes" in said
    assert not (tmp_path / "out").exists()


@WHOLE
def test_data_that_cannot_be_made(tmp_path: Path, address: str) -> None:
    """What the study says of its data is said, before any trial."""
    cases = [{"data.path": str(tmp_path / "x"), "data.build": {"source": "idx", "folder": "none"}}]
    path = write(tmp_path, cases=cases, data="put the four files into none")
    status, said = runs.finish(start(path, "--address", address), 60)
    assert status == 1 and "error: idx: folder: " in said, said
    assert "; put the four files into none" in said
    path = write(tmp_path, cases=[cases[0] | {"data.build": None}], data="see the base")
    assert not (tmp_path / "out" / "study.yaml").exists()  # nothing ran: another may take the place
    status, said = runs.finish(start(path, "--address", address), 60)
    assert status == 1 and f"error: {tmp_path}/x has no shards" in said, said


def test_a_trial_that_ends_without_a_result_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Told(NamedTuple):
        config: dict[str, Any]
        last_result: dict[str, Any]

        def __str__(self) -> str:
            return str(self.config["trial"])

    study = load_study(write(tmp_path, vary={"workers": [1]}))
    (trial,), ledger = plan(study, tmp_path / "out"), Ledger(study, tmp_path / "out")
    ledger.begin()
    told = Told({"trial": trial.name, **trial.values}, {})
    drive.callback({trial.name: trial}, ledger).on_trial_complete(trial=told)
    assert ledger.rows[trial.name]["status"] == "failed"
    said = f"{trial.name} failed: it ended without a result; see {trial.run}/log-0.txt\n"
    assert capsys.readouterr().out == said


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, vary={"workers": [1]})
    status, said = runs.finish(start(path, "--address", "127.0.0.1:1"), 120)
    assert status == 1
    assert "error: no Ray cluster answers at 127.0.0.1:1" in said


@WHOLE
def test_strategies_and_workers_here(tmp_path: Path) -> None:
    """Without an address; each row's command makes the weights of its trial, bit for bit."""
    strategies = ["ddp", "zero2", "fsdp"]
    path = write(
        tmp_path, {"data": {"workers": 1}}, vary={"workers": [1, 2], "strategy": strategies}
    )
    status, said = runs.finish(start(path), 550)
    assert status == 0, said
    found = rows(path)
    assert len(found) == 6
    for row in found.values():
        world, strategy = row["values"]["workers"], row["values"]["strategy"]
        kind = {"ddp": "DDP", "zero2": "DeepSpeed ZeRO 2", "fsdp": "FSDP2"}[strategy]
        expected = "one process" if world == 1 and strategy != "zero2" else kind
        assert (row["result"]["world_size"], row["result"]["strategy"]) == (world, expected)
    for name in ("000", "004", "005"):  # one process, and ZeRO 2 and FSDP2 on two
        words = shlex.split(found[name]["command"])
        begun = words.index("accelerate")
        asked = dict(word.split("=") for word in words[1:begun])  # after `env`
        again = subprocess.run(
            [sys.executable, "-m", "accelerate.commands.launch", *words[begun + 2 :]],
            cwd=runs.ROOT,
            env=runs.environment(PYTHONPATH=str(runs.ROOT), **asked),
            capture_output=True,
            text=True,
        )
        assert again.returncode == 0, again.stderr[-2000:]
        runs.assert_same_weights(
            tmp_path / "out" / "again" / name, tmp_path / "out" / "trials" / name
        )


@WHOLE
def test_asha_stops_early_and_goes_on(tmp_path: Path) -> None:
    """A trial that is stopped has a whole run of fewer steps; its past is told when it goes on."""
    search = {
        "sampler": "random",
        "scheduler": "asha",
        "trials": 4,
        "steps": 16,
        "grace_steps": 4,
        "factor": 2,
    }
    path = write(
        tmp_path,
        {"train": {"steps": None, "epochs": 4}},
        vary={"optim.lr": {"low": 1e-4, "high": 0.3, "log": True}},
        search=search,
        concurrent=1,
    )
    study = start(path)
    runs.await_that("two rows", lambda: len(rows(path)) > 1, 300, str, lambda: study.poll() is None)
    study.send_signal(signal.SIGINT)
    assert runs.finish(study, 60)[0] == 130
    first = rows(path)
    status, said = runs.finish(start(path), 550)
    assert status == 0, said
    found = rows(path)
    assert len(found) == 4 and found.items() >= first.items()
    for name, row in found.items():
        rungs = read_lines(tmp_path / "out" / row["run"] / "rungs.jsonl")
        steps = [rung["step"] for rung in rungs]
        assert steps == [4, 8, 16][: len(steps)]
        assert row["result"]["steps"] == steps[-1] == runs.saved_step(tmp_path / "out" / row["run"])
        assert row["status"] == ("done" if steps[-1] == 16 else "stopped"), name
    assert {row["status"] for row in found.values()} == {"done", "stopped"}


@WHOLE
def test_trials_that_fail_before_a_rung(tmp_path: Path) -> None:
    """They have no score for a scheduler to compare, and the study goes on."""
    path = write(
        tmp_path,
        {"train": {"steps": None, "epochs": 4}},
        vary={"optim.lr": [0.1, 0.2]},
        set={"optim.kind": "lars"},
        strategy="zero1",
        search={"scheduler": "asha", "steps": 16, "grace_steps": 4},
        concurrent=1,
    )
    status, said = runs.finish(start(path), 300)
    assert status == 1 and "failed: 000, 001" in said, said
    assert {row["status"] for row in rows(path).values()} == {"failed"}


@WHOLE
def test_a_population_interrupted_and_failing(tmp_path: Path) -> None:
    """Interrupted between two rungs it ends as one that is not; one that fails is not waited for.

    A trial of each fails: its folder cannot be written to.
    """
    found = {}
    for name in ("straight", "interrupted"):
        folder = tmp_path / name
        (folder / "out" / "trials").mkdir(parents=True)
        (folder / "out" / "trials" / "002").touch()
        path = write(
            folder,
            {"train": {"steps": None, "epochs": 9, "save_every_steps": 20}},
            vary={"optim.lr": {"low": 1e-5, "high": 0.3, "log": True}},
            search={
                "sampler": "random",
                "scheduler": "pbt",
                "trials": 3,
                "steps": 80,
                "every_steps": 40,
                "seed": 1,
            },
            retries=0,
        )
        if name == "interrupted":
            study = start(path)
            await_step(folder / "out" / "trials" / "000", 50, study)
            study.send_signal(signal.SIGTERM)
            status, said = runs.finish(study, 30)
            assert status == 130 and "1 of 3 trials have ended" in said, said  # 002 has failed
        status, said = runs.finish(start(path), 550)
        assert status == 1 and "failed: 002" in said, said
        found[name] = {trial: row for trial, row in rows(path).items() if trial != "002"}
        assert [row["status"] for row in found[name].values()] == ["done"] * 2
        assert all(row["result"]["steps"] == 80 for row in found[name].values())
    assert any(row["lineage"] for row in found["straight"].values())
    for trial, row in found["straight"].items():
        other = found["interrupted"][trial]
        assert (row["lineage"], row["values"]) == (other["lineage"], other["values"])
        folders = [tmp_path / name / "out" / row["run"] for name in found]
        runs.assert_same_weights(*folders)
        made = yaml.safe_load((folders[0] / "checkpoints/latest/config.yaml").read_text())
        assert made["optim"]["lr"] == row["values"]["optim.lr"]


@WHOLE
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "more", [{}, {"scheduler": "asha", "steps": 8, "grace_steps": 2, "factor": 2}], ids=["", "asha"]
)
def test_optuna_whose_driver_is_killed(tmp_path: Path, more: dict[str, Any]) -> None:
    """With a trial at a time, the study that is run again is the one that nothing happened to."""
    found, journals = {}, []
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
        path = write(
            tmp_path / name,
            {"train": {"steps": None if more else 8, "epochs": 9}},
            vary={"optim.lr": {"low": 1e-4, "high": 0.3, "log": True}},
            search={"sampler": "optuna", "trials": 4, "startup_trials": 2, "seed": 1} | more,
            concurrent=1,
        )
        if name == "killed":
            study, journal = start(path), tmp_path / name / "out" / "suggestions.jsonl"
            await_lines(journal, 3, study)  # of which the last is suggested
            study.kill()
            study.communicate()
            assert len(rows(path)) < 3
        status, said = runs.finish(start(path), 550)
        assert status == 0, said
        found[name] = rows(path)
        journals.append(read_lines(tmp_path / name / "out" / "suggestions.jsonl"))
    assert journals[0] == journals[1] and len(journals[0]) == 4
    values = [line["values"]["optim.lr"] for line in journals[0]]
    assert len({*values}) == 4
    for trial, row in found["straight"].items():
        other = found["killed"][trial]
        assert (row["status"], row["values"]) == (other["status"], other["values"])
        runs.assert_same_weights(*(tmp_path / name / "out" / row["run"] for name in found))
