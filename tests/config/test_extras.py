"""Without an extra, Heron imports and trains; a verb that needs it says in a line how to get it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # Python then finds no such package
from heron.launch.cli import main
sys.exit(main(sys.argv[2:]))
"""


def run(without: str, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-c", WITHOUT, without, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("without", "words", "told"),
    [
        (
            "faiss",
            ("index", "none", "--out", "x"),
            "error: a search for neighbours needs the package faiss, which is not installed; "
            "expected an extra: pip install 'heron-pretrain[cpu]', or 'heron-pretrain[gpu]' for "
            "CUDA\n",
        ),
        ("faiss", ("query", "none", "--key", "x"), "the package faiss"),
        ("faiss", ("negatives", "none", "--out", "x"), "the package faiss"),
        ("faiss", ("serve", "none"), "the package faiss"),
        (
            "fastapi",
            ("serve", "none"),
            "error: the web page needs the package fastapi, which is not installed; expected an "
            "extra: pip install 'heron-pretrain[serve]'\n",
        ),
    ],
)
def test_a_verb_names_the_extra(without: str, words: tuple[str, ...], told: str) -> None:
    status, error = run(without, *words)
    assert status == 1 and error.count("\n") == 1
    assert told in error


@pytest.mark.parametrize(
    ("asked", "told"), [("negatives.mine=4", "negatives.mine"), ("evaluate.knn=5", "evaluate.knn")]
)
def test_training_that_needs_faiss_is_refused_before_the_first_step(
    tmp_path: Path, asked: str, told: str
) -> None:
    data = ["data.build.train=60", "data.build.test=20", f"data.path={tmp_path / 'data'}"]
    small = [*data, "data.protocol.labelled=40", f"run.dir={tmp_path / 'run'}", "train.steps=1"]
    small += ["evaluate.baselines=false", "data.batch.labelled=16", "data.batch.unlabelled=16"]
    status, error = run("faiss", "pretrain", "faces", *small, asked)
    assert status == 1
    assert f"{told} needs the package faiss" in error
    assert "Traceback" not in error and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_study_without_ray(tmp_path: Path) -> None:
    study = ["study", "negatives", "--small", "--out", str(tmp_path / "study")]
    assert run("ray,faiss", *study, "--dry-run") == (0, "")
    data = ["data.path=" + str(tmp_path)]
    status, error = run("ray", *study, *data)
    assert status == 1
    assert "a study needs the package ray" in error
