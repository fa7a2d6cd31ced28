"""The scripts of pipeline/ and shards/ are the verbs of `heron`, and `python -m heron` is too."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from heron.cli.main import main

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for room in ("pipeline", "shards") for path in (ROOT / room).glob("*.py"))


def test_each_room_has_its_scripts() -> None:
    assert [f"{path.parent.name}/{path.stem}" for path in SCRIPTS] == [
        *(f"pipeline/{name}" for name in ("embed", "index", "negatives", "pretrain", "query")),
        *("pipeline/serve", "shards/build", "shards/index", "shards/show", "shards/verify"),
    ]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_script_is_its_verb(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    text = capsys.readouterr().out
    assert not ended.value.code
    if path.stem == "pretrain":  # the job that `heron pretrain` starts
        assert "--config" in text and "overrides" in text
        return
    with pytest.raises(SystemExit):
        main([*(["shards"] if path.parent.name == "shards" else []), path.stem, "--help"])
    assert text == capsys.readouterr().out


def test_a_script_and_the_module_are_programs(tmp_path: Path) -> None:
    words = ["faces", "--train", "8", "--test", "4", "--size", "32", "--out", "faces", "--quiet"]
    for command in ([str(ROOT / "shards" / "build.py"), *words], ["-m", "heron", "--version"]):
        subprocess.run([sys.executable, *command], cwd=tmp_path, check=True)
    assert (tmp_path / "faces" / "manifest.json").exists()
