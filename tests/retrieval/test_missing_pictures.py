"""Samples that lack the picture which others have: shown without one, on sheets and pages."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.data.reader import Reader
from heron.evaluation.evaluator import Predictions
from heron.negatives.neighbours import Question
from heron.negatives.report import report
from heron.report.run_report import nearest_rows
from heron.retrieval.build import build_index
from heron.retrieval.embedding_model import read_samples
from heron.retrieval.embeddings import Embeddings, Layer
from heron.retrieval.query import Retriever
from heron.retrieval.sheet import draw_answer
from heron.serve.admission import Limits
from heron.serve.routes import about
from heron.shards.build import build
from heron.sources import make_source
from tests.retrieval import made

ROWS = 84
LACK = np.arange(ROWS) % 60 % 6 == 1  # of 60 rows to train on and 24 to test on


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Embeddings:
    folder = tmp_path_factory.mktemp("mixed")
    build(make_source("tests.mixed.Mixed", {"missing": True}), folder / "data", progress=False)
    s = read_samples(Reader(folder / "data"), np.arange(ROWS))
    hidden: dict[Layer, NDArray[np.float32]] = {"hidden": made.clustered(ROWS, 8)}
    keys = [s.key(number) for number in range(ROWS)]
    where = str(folder / "data")
    given = s.targets, s.names, s.kind, keys
    return made.embeddings(folder / "embeddings", hidden, *given, data=where)


@pytest.fixture(scope="module")
def found(stored: Embeddings, tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    folder = tmp_path_factory.mktemp("index") / "index"
    build_index(stored, folder, kind="flat", progress=False)
    return Retriever.open(folder)


def test_a_sample_without_a_picture_is_shown_without_one(found: Retriever) -> None:
    there = [found.picture(number) is not None for number in range(ROWS)]
    assert there == (~LACK).tolist()
    answer = found.by_key(found.samples.key(1), 30)
    assert LACK[[hit.number for hit in answer.hits]].any()
    assert draw_answer(found, answer).width > 100  # the places of some are empty


def test_the_page_has_pictures_though_the_first_sample_has_none(
    found: Retriever, stored: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = read_samples(Reader(stored.manifest.data), np.roll(np.arange(ROWS), -1))
    monkeypatch.setattr(found.index, "samples", turned)
    assert found.picture(0) is None and about(found, Limits(), None)["pictures"]


def test_reports_leave_the_place_empty(stored: Embeddings, tmp_path: Path) -> None:
    report(stored, Question(k=20), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert '<img alt="train' in text
    reader = Reader(stored.manifest.data)
    named = [f'<img alt="{key}"' for key in reader.sample_keys(np.flatnonzero(LACK))]
    assert not any(name in text for name in named)
    rows, y = np.arange(ROWS), np.asarray(stored.samples.targets, np.float32)
    embedding = Predictions(None, made.clustered(ROWS, 8), y, rows)
    lines = nearest_rows(embedding, reader)
    keys = reader.sample_keys(rows)
    lacking = {key for n, key in enumerate(keys) if LACK[n]}
    assert {(not row["picture"], row["key"] in lacking) for line in lines for row in line} == {
        (True, True),
        (False, False),
    }
