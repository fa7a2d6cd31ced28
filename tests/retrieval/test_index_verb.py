"""What `heron index` says of the index that it made."""

import re
from pathlib import Path

import numpy as np
import pytest

from heron.cli.arguments import Verb, parse
from heron.cli.retrieval import index
from heron.retrieval.index import Index
from tests.retrieval import made


def heron_index(*words: str) -> None:
    parse("heron index", Verb(index), words)()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    vectors = np.random.default_rng(0).normal(size=(900, 8))
    made.embeddings(tmp_path / "e", {"hidden": vectors}, np.ones((900, 1)), ["a"])
    return str(tmp_path / "e")


def test_an_index_and_its_recall(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "index")
    words = ["--memory", "2GB", "--k", "4", "--kind", "ivf", "--queries", "50"]
    heron_index(folder, "--out", out, *words)
    told, bars = capsys.readouterr()
    assert told.startswith(f"{out}: ivf of 900 vectors of 8 dimensions, cosine of layer 'hidden'\n")
    assert "budget 2 GB" in told and "mapped" not in told
    assert re.search(r"recall@4: (0\.9\d+|1\.0+) of 50 held-out queries, target 0.95, nprobe", told)
    assert "assign" in bars and "900" in bars
    assert Index.open(out).manifest.plan.memory_bytes == 2 * 10**9


def test_a_target_out_of_reach_is_said(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "index")
    heron_index(folder, "--out", out, "--kind", "ivfpq", "--recall", "1", "--quiet")
    told, bars = capsys.readouterr()
    assert "the index does not reach the target; raise --memory" in told
    assert bars == ""


def test_the_only_layer_needs_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = np.random.default_rng(0).normal(size=(90, 8))
    made.embeddings(tmp_path / "e", {"projection": vectors}, np.ones((90, 1)), ["a"])
    heron_index(str(tmp_path / "e"), "--out", str(tmp_path / "index"), "--quiet")
    assert "cosine of layer 'projection'" in capsys.readouterr().out


def test_a_size_that_is_none(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        heron_index(folder, "--out", "x", "--memory", "much")
    assert "argument --memory: 'much' is not a size; use a number" in capsys.readouterr().err
