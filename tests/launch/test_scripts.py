"""The scripts of pipeline/ and shards/ are the verbs of `heron`, and `python -m heron` is too."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for room in ("pipeline", "shards") for path in (ROOT / room).glob("*.py"))


def run(*words: object, cwd: Path) -> str:
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout


def test_each_room_has_its_scripts() -> None:
    assert [f"{path.parent.name}/{path.stem}" for path in SCRIPTS] == [
        *(f"pipeline/{name}" for name in ("embed", "index", "negatives", "pretrain", "query")),
        *("pipeline/serve", "shards/build", "shards/index", "shards/show", "shards/verify"),
    ]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_script_is_its_verb(path: Path, tmp_path: Path) -> None:
    verb = [*(["shards"] if path.parent.name == "shards" else []), path.stem]
    text = run(path, "--help", cwd=tmp_path)
    if path.stem == "pretrain":  # the job that `heron pretrain` starts
        assert "--config" in text and "overrides" in text
    else:
        assert text == run("-m", "heron", *verb, "--help", cwd=tmp_path)


def test_a_data_set_by_scripts(tmp_path: Path) -> None:
    words = ["faces", "--train", 8, "--test", 4, "--size", 32, "--out", "faces", "--quiet"]
    run(ROOT / "shards" / "build.py", *words, cwd=tmp_path)
    assert "train" in run(ROOT / "shards" / "show.py", "faces", cwd=tmp_path)
    assert "12 rows" in run(ROOT / "shards" / "verify.py", "faces", cwd=tmp_path)
