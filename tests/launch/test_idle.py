"""A command that has nothing to do writes nothing: what it would find anew stays as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from heron.api.job import pretrain
from heron.base.artefact import sha256
from heron.base.shipped import CONFIGS
from heron.cli.main import main
from heron.experiment.config import dump_config
from heron.studies.ledger import Ledger
from heron.studies.study import load_study
from heron.studies.trials import plan
from tests import ranks
from tests.experiments import frames
from tests.shards.others import cats, write_wds

ASKED: dict[str, Any] = {
    "evaluate": {"seeds": 2, "baselines": "plain"},
    "tracking": ["tensorboard"],
}


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """The sha256 of each file, locks too, and when it was written."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {
        str(path.relative_to(folder)): (sha256(path), path.stat().st_mtime_ns) for path in files
    }


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`contrast` became `no pairs`, and the memory null, as no step was taken."""
    first = pretrain(frames(tmp_path, **ASKED))
    before = contents(tmp_path / "run")
    assert {"result.json", "report.html", "metrics.jsonl", "run.json"} <= before.keys()
    assert any(name.startswith("tensorboard/") for name in before) and "no pairs" not in str(first)
    capsys.readouterr()
    again = pretrain(frames(tmp_path, run={"resume": "auto"}, **ASKED))
    assert "run has ended at step 5; nothing to do\n" in capsys.readouterr().out
    assert contents(tmp_path / "run") == before
    assert again == json.loads((tmp_path / "run/result.json").read_text())
    assert again["contrast"] == first["contrast"] and again["peak_memory_bytes"]
    more = pretrain(frames(tmp_path, run={"resume": "auto"}, train={"steps": 7}, **ASKED))
    assert more["steps"] == 7 and (tmp_path / "run/result.json").stat().st_mtime_ns not in {
        written for _, written in before.values()
    }


def test_another_evaluation_keeps_the_facts_of_the_steps(tmp_path: Path) -> None:
    first = pretrain(frames(tmp_path))
    again = pretrain(frames(tmp_path, run={"resume": "auto"}, evaluate={"seeds": 2}))
    written = json.loads((tmp_path / "run/result.json").read_text())
    for name in ("contrast", "peak_memory_bytes", "train_seconds", "f1_weighted"):
        assert again[name] == written[name] == first[name]
    assert (tmp_path / "run/seed-4/result.json").exists()


@pytest.mark.parametrize("lost", ["result.json", "report.html"])
def test_what_is_missing_is_written(lost: str, tmp_path: Path) -> None:
    first = pretrain(frames(tmp_path))
    (tmp_path / "run" / lost).unlink()
    again = pretrain(frames(tmp_path, run={"resume": "auto"}))
    assert (tmp_path / "run" / lost).exists() and again["f1_weighted"] == first["f1_weighted"]
    assert again["contrast"] is None  # no step was taken, and nothing says how they were


def twice(folder: str) -> dict[str, Any]:
    return pretrain(frames(Path(folder), run={"resume": "auto"}))


def test_every_process_is_told(tmp_path: Path) -> None:
    ranks.run(2, twice, str(tmp_path))
    before = contents(tmp_path / "run")
    one, two = ranks.run(2, twice, str(tmp_path))
    assert one == two and contents(tmp_path / "run") == before


def test_data_embeddings_and_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = frames(Path(), train={"steps": 3}, data={"epoch": "labelled"})
    Path("mine.yaml").write_text(dump_config(config))
    Path("tars").mkdir()
    write_wds(Path("tars/a.tar"), cats(0, 6))
    assert run("pretrain", "mine.yaml") == 0
    search = ["mine.yaml", "--methods", "dnn", "--trials", 2]
    for words, out, again in (
        (["shards", "build", "frames", "--train", 300, "--out", "f"], "f", []),
        (["shards", "index", "tars", "--image", "jpg"], "tars", []),
        (["embed", "run", "--out", "e"], "e", ["embed", tmp_path / "run", "--out", "./e"]),
        (["compare", *search, "--folds", 2, "--out", "c"], "c", []),
        (["tune", *search, "--out", "t"], "t", []),
    ):
        assert run(*words) == 0
        before = {name: bytes_ for name, (bytes_, _) in contents(Path(out)).items()}
        assert run(*(again or words)) == 0
        after = {name: bytes_ for name, (bytes_, _) in contents(Path(out)).items()}
        assert after == before, words


def test_a_study_and_its_report(tmp_path: Path) -> None:
    """All its trials have rows, so Ray is not even begun."""
    tree: dict[str, Any] = {"title": "A study", "base": str(CONFIGS / "frames.yaml")}
    tree |= {"vary": {"optim.lr": [0.1]}, "measure": {"x": "optim.lr", "y": ["accuracy"]}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(tree))
    spec, out = load_study(tmp_path / "s.yaml", False, []), tmp_path / "s"
    (ledger := Ledger(spec, out)).begin()
    (trial,) = plan(spec, out)
    trial.run.mkdir(parents=True)
    (trial.run / "result.json").write_text(json.dumps({"accuracy": 0.5, "steps": 9}))
    ledger.append(trial, "done")
    assert run("report", out) == 0
    before = {name: bytes_ for name, (bytes_, _) in contents(out).items()}
    assert run("study", tmp_path / "s.yaml", "--out", out) == 0
    assert run("report", out) == 0
    assert {name: bytes_ for name, (bytes_, _) in contents(out).items()} == before
