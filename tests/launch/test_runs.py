"""Runs as their folders tell of them: their states, what is damaged, filters, comparison."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from heron.api.job import main as pretrain_main
from heron.api.job import pretrain
from heron.base.errors import StudyError
from heron.cli.main import main
from heron.cli.runs import parse_conditions
from heron.studies.runs import find_runs, read_run
from tests import forked
from tests.experiments import frames
from tests.launch import runs


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and two runs of two steps, `a` and `b`, of two learning rates."""
    folder = tmp_path_factory.mktemp("runs")
    for name, lr in (("a", 0.01), ("b", 0.05)):
        pretrain(frames(folder, name, train={"steps": 2}, optim={"lr": lr}))
    return folder


def listed(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    assert main(["runs", *map(str, words), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def going(run: Path, before: int) -> bool:
    return runs.steps(run) > before + 2


def start(config: Path) -> forked.Command:
    words = ["--config", str(config), "run.resume=auto"]
    return forked.start(words, runs.ROOT, pretrain_main, runs.environment())


def test_living_stopped_and_dead(tmp_path: Path) -> None:
    """One run, as its lock, its checkpoints and its metrics tell of it from moment to moment."""
    length = {"steps": 10**6, "epochs": 10**6, "save_every_steps": 10**5}
    config, run = runs.experiment(tmp_path, "run", train=length), tmp_path / "run"
    for number, state in ((signal.SIGTERM, "stopped"), (signal.SIGKILL, "dead")):
        process, before = start(config), runs.steps(run)
        try:
            runs.await_that("steps", partial(going, run, before), 60, lambda: "none came")
            living = read_run(run)
        finally:
            process.send_signal(number)
            runs.finish(process, 60)
        assert living["state"] == "living" and living["steps"] == 10**6
        assert living["host"] and living["started"] and living["fingerprint"]
        left = read_run(run)
        assert left["state"] == state and left["step"] == runs.steps(run) >= living["step"]
        assert left["loss"] > 0


def test_ended(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a, b), result = listed(capsys, ended), json.loads((ended / "a" / "result.json").read_text())
    assert [Path(run["name"]).name for run in (a, b)] == ["a", "b"]
    assert a["state"] == b["state"] == "ended" and a["step"] == a["steps"] == 2
    for key in ("f1_weighted", "f1_macro", "auc_macro", "version", "fingerprint"):
        assert a[key] == result[key]
    assert a["seconds"] == result["train_seconds"]
    assert main(["runs", str(ended)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:6] == ["name", "state", "step", "steps", "loss", "f1_weighted"]
    assert len(table) == 3 and "ended" in table[1]
    for sort, heads in (("f1_macro", 12), ("optim.lr", 12), ("loss", 11)):
        assert main(["runs", str(ended), "--sort", sort]) == 0
        head = capsys.readouterr().out.splitlines()[0].split()
        assert sort in head and len(head) == len(set(head)) == heads


def test_filters_order_and_best(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names(*words: str) -> list[str]:
        return [Path(run["name"]).name for run in listed(capsys, ended, *words)]

    assert names("--where", "optim.lr>0.01 and state == 'ended'") == ["b"]
    assert names("--where", "optim.lr <= 0.01") == ["a"]
    assert names("--where", "state != ended") == names("--living") == []
    assert names("--where", "optim.lr > x") == []  # a number and a text
    assert names("--sort", "optim.lr") == ["a", "b"]
    runs_of = listed(capsys, ended)
    best = max(runs_of, key=lambda run: float(run["auc_macro"]))
    assert listed(capsys, ended, "--best", "auc_macro") == [best]
    least = min(runs_of, key=lambda run: float(run["loss"]))
    assert listed(capsys, ended, "--best", "loss") == [least]


def test_compared(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the keys in which they differ, and the scores."""
    assert main(["runs", "--compare", str(ended / "a"), str(ended / "b"), "--json"]) == 0
    by_run = json.loads(capsys.readouterr().out)
    a, b = (by_run[str(ended / name)] for name in "ab")
    assert {key for key in a if "." in key} == {"optim.lr"}
    assert (a["optim.lr"], b["optim.lr"]) == (0.01, 0.05) and "f1_weighted" in a
    assert main(["runs", "--compare", str(ended)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["optim.lr", "0.01", "0.05"]
    assert main(["runs", "--compare", str(ended / "a")]) == 2
    assert "--compare needs two or more runs, got 1" in capsys.readouterr().err
    for few in (["--where", "optim.lr>0.02"], ["--living"], ["--best", "f1_weighted"]):
        assert main(["runs", "--compare", str(ended), *few]) == 2
        assert "--compare needs two or more runs, got" in capsys.readouterr().err


DAMAGED = [
    ("result.json", b"{", "result.json: not JSON"),
    (
        "metrics.jsonl",
        b'{"step": "x"}\n',
        "metrics.jsonl has a damaged line near its end: step must be a valid integer",
    ),
    ("metrics.jsonl", b"\xff\xfe\0\n", "has a damaged line near its end: not JSON"),
    ("run.json", b'{"steps": 3, "started": "soon"}', "Invalid isoformat string: 'soon'"),
    (
        "run.json",
        b'{"steps": 3, "started": 5}',
        "run.json: started must be a valid string, got 5",
    ),
    ("run.json", b'{"steps": 3, "host": [1]}', "host"),
    ("run.json", b'{"steps": 3, "started": "9999-12-31T23:00-09:00"}', "date value out of range"),
    ("run.json", b"[]", "run.json: it must be a valid dictionary"),
]


@pytest.mark.parametrize(("file", "content", "message"), DAMAGED)
def test_a_damaged_run_is_a_line(
    ended: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: bytes,
    message: str,
) -> None:
    shutil.copytree(ended / "a", tmp_path / "a", symlinks=True)
    (tmp_path / "a" / file).write_bytes(content)
    (run,) = listed(capsys, tmp_path)
    assert run["state"] == "damaged" and message in run["fault"]
    assert len(run["fault"].splitlines()) == 1
    assert main(["runs", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.yaml", "run.json", "metrics.jsonl", ".lock"])
def test_what_waits_for_a_writer_is_not_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for file in {"config.yaml", "run.json"} - {name}:
        (tmp_path / file).write_text('{"steps": 1}')
    os.mkfifo(tmp_path / name)
    assert main(["runs", str(tmp_path), "--compare", str(tmp_path / ".")]) in (1, 2)
    (run,) = listed(capsys, tmp_path)
    assert run["state"] == "damaged"
    assert run["fault"] == f"{tmp_path / name} is not a file; remove it"


def test_scores_take_no_column_and_names_do_not_print_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score = "test/\x1b[2Jf1"
    row = {"step": 0, "loss": 1.0, "test/config": 4.0, "test/state": 5.0, score: 0.5}
    for name in ("a\x1b[2J", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f'{{"\\e[2J": {len(name)}, seed: 1}}')
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert [run["state"] for run in listed(capsys, tmp_path)] == ["dead", "dead"]
    for words in ([], ["--compare"], ["--sort", "\x1b[2Jf1"], ["--sort", "zzz"]):
        main(["runs", str(tmp_path), *words])
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err and said.out + said.err


def test_folders_that_are_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.yaml").write_text("a: 1")
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
    assert main(["runs", str(tmp_path / "none")]) == 1
    assert "none is not a folder; pass one that contains runs" in capsys.readouterr().err


def test_a_bad_configuration_hides_no_run(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        shutil.copytree(ended / name, tmp_path / name, symlinks=True)
    (tmp_path / "a" / "config.yaml").write_text("{")
    assert [run["state"] for run in listed(capsys, tmp_path)] == ["ended", "ended"]
    assert len(listed(capsys, tmp_path, "--where", "optim.lr == 0.05")) == 1


def test_only_the_end_of_long_metrics_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    rows = [json.dumps({"step": step, "loss": 1.0 / (step + 1)}) for step in range(20_000)]
    text = "\n".join(["no row at all", *rows, '{"step": 20000, "lo'])
    (tmp_path / "metrics.jsonl").write_text(text)
    run = read_run(tmp_path)
    assert run["state"] == "dead" and run["step"] == 20_000 and run["loss"] == 1 / 20_000


def test_links_and_checkpoints_are_not_followed(ended: Path) -> None:
    link = ended / "link"
    link.symlink_to(ended)
    try:
        assert [path.name for path in find_runs([ended])] == ["a", "b"]
    finally:
        link.unlink()


def test_a_run_may_have_the_name_of_a_tracker_s_folder(tmp_path: Path) -> None:
    for run in ("wandb-try", "mlflow/a", "mlflow/a/checkpoints/step-1"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "config.yaml").touch()
        (tmp_path / run / "metrics.jsonl").touch()
    found = [str(path.relative_to(tmp_path)) for path in find_runs([tmp_path])]
    assert found == ["mlflow/a", "wandb-try"]


@pytest.mark.parametrize("depth", [9, 200])
def test_runs_are_found_at_any_depth(tmp_path: Path, depth: int) -> None:
    """More than eight folders down they were left out, without a word."""
    deep = tmp_path.joinpath(*["d"] * depth)
    for run in (deep / "a", deep / "b", tmp_path / "e"):
        run.mkdir(parents=True)
        (run / "config.yaml").touch()
        (run / "metrics.jsonl").touch()
    assert find_runs([tmp_path]) == [deep / "a", deep / "b", tmp_path / "e"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a comparison; write KEY SIGN VALUE"),
        ("optim.lr", "'optim.lr' is not a comparison"),
        ("a == 'b", "is not a comparison"),
        ("a == 1 or b == 2", "only 'and' can follow a comparison, got 'or'"),
        ("a == 1 and", "'' is not a comparison"),
        ("__import__('os').system('true')", "is not a comparison"),
        ("a" * 3000, "must have at most 2,000 characters, got 3,000"),
    ],
)
def test_conditions_that_are_none(text: str, message: str) -> None:
    with pytest.raises(StudyError) as fault:
        parse_conditions(text)
    assert message in str(fault.value) and len(str(fault.value).splitlines()) == 1


def test_an_unknown_key_is_named(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(ended), "--sort", "optim.rl"]) == 1
    assert capsys.readouterr().err == "error: no run has 'optim.rl'; did you mean 'optim.lr'?\n"
