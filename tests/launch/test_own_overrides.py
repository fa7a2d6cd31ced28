"""A method of a comparison with overrides of its own: with some samples, and without them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from heron.data.protocol import assign
from heron.data.reader import Reader
from heron.experiment.config import load_config
from heron.studies.quick import as_file
from tests.launch.test_compare import experiment, run

__all__ = ["experiment"]  # a fixture


def test_with_samples_and_without_them(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A method with an override of its own is another row, on the same test rows."""
    reader = Reader(load_config(experiment).data.path)
    labelled = assign(reader, "train", load_config(experiment).data.protocol).labelled
    path = tmp_path / "Left" / "out.csv"
    path.parent.mkdir()
    path.write_text("\n".join(["key", *reader.sample_keys(labelled[:9]), ""]))
    without = f"own+data.protocol.leave_out={path}"
    words = ["--methods", "own", without, "--trials", 1, "--folds", 2, "--out", tmp_path / "out"]
    assert run("compare", experiment, *words, "--baselines", "logistic") == 0
    told = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert {"own", without} <= told["rows"].keys()
    left = [config_of(tmp_path / "out" / "fold-1", name) for name in ("own", "Left")]
    assert [c["data"]["protocol"].get("leave_out") for c in left] == [None, str(path)]
    assert "own+data.protocol.leave_out" in capsys.readouterr().out
    assert (
        run("tune", experiment, "--methods", without, "--trials", 1, "--out", tmp_path / "t") == 0
    )
    assert "leave_out" in next((tmp_path / "t").glob("*.yaml")).read_text()
    path.write_text("\n".join(["key", *reader.sample_keys(labelled[:12]), ""]))
    assert run("compare", experiment, *words, "--baselines", "logistic") == 1
    assert "has results of another experiment" in " ".join(capsys.readouterr().err.split())
    for own, told in (
        ("own+optim.speed=1", "unknown key"),
        ("own+data.protocol.seed=7", "methods are judged by the same rows"),
        (f"own+data.path={tmp_path}", "methods are judged by the same rows"),
    ):
        assert run("compare", experiment, "--methods", own, "--folds", 1) == 1
        assert told in " ".join(capsys.readouterr().err.split())
    long = f"own+data.protocol.leave_out={'x' * 300}"
    assert len(as_file(long)) < 100 and as_file("own+a=q/l") != as_file("own+a=q-l")


def config_of(folder: Path, part: str) -> dict[str, Any]:
    """The configuration of a run of `own`, or of the other method."""
    own = [path for path in folder.iterdir() if (path.name == "own") == (part == "own")]
    found = next(own[0].rglob("config.yaml"))
    return dict(yaml.safe_load(found.read_text()))
