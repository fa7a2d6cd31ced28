"""The report on negatives by other processes and by a Ray cluster: the bytes of one process."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base.workers import ALONE, Executor, Processes
from heron.cli.main import main
from heron.distributed.cluster import connected
from heron.evaluation import negatives
from heron.evaluation.negatives import LabelPairs
from heron.negatives import neighbours
from heron.negatives.neighbours import Question
from heron.negatives.report import report
from heron.retrieval import exact
from heron.retrieval.embeddings import Embeddings, ViewRecord
from heron.retrieval.exact import Block
from heron.retrieval.some_views import EmbeddingsOfViews
from tests.negatives.loops import drawn
from tests.retrieval.test_embed_tasks import Killing
from tests.studies.nodes import running
from tests.weekly import weekly

FILES = "negatives.json", "pairs.parquet", "report.html"
QUESTION = Question(k=3, anchors=0)


@pytest.fixture
def embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embeddings:
    """Of which 700 anchors are measured in four blocks, and searched for in two."""
    monkeypatch.setattr(negatives, "BLOCK_PAIRS", 200 * 700)
    monkeypatch.setattr(exact, "SEARCHED", 512)
    return drawn(tmp_path / "e", rows=701)


def written(embeddings: Embeddings, out: Path, executor: Executor = ALONE) -> dict[str, bytes]:
    report(embeddings, QUESTION, out, executor=executor)
    return {name: (out / name).read_bytes() for name in FILES}


@dataclass
class Noting:
    """Processes that note what they were given."""

    items: list[Any]

    def map(self, function: Any, items: Any) -> Iterator[Any]:
        self.items += items
        yield from Processes(2).map(function, items)


def test_processes(embeddings: Embeddings, tmp_path: Path) -> None:
    noting = Noting([])
    expected = written(embeddings, tmp_path / "one")
    assert written(embeddings, tmp_path / "many", noting) == expected  # type: ignore[arg-type]
    blocks = [Block(0, 200), Block(200, 400), Block(400, 600), Block(600, 700)]
    assert noting.items == [*blocks, Block(0, 512), Block(512, 700), *blocks, *blocks]
    assert str(blocks[1]) == "samples 200 to 399"


def test_blocks_of_anchors_find_what_all_find(
    embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = neighbours.find_neighbours(embeddings, QUESTION)
    monkeypatch.setattr(exact, "SEARCHED", 1000)
    whole = neighbours.find_neighbours(embeddings, QUESTION)
    np.testing.assert_array_equal(blocks.numbers, whole.numbers)
    np.testing.assert_allclose(blocks.cosine, whole.cosine, rtol=1e-6)


def test_labels_of_the_others_are_taken_once_for_all_blocks(
    embeddings: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: Any = LabelPairs._other_targets
    taken, take = list[int](), labels.func

    def noting(pairs: LabelPairs) -> Any:
        taken.append(len(pairs.others))
        return take(pairs)

    monkeypatch.setattr(labels, "func", noting)
    written(embeddings, tmp_path / "one")
    assert taken == [700] * 4  # what is close, the counts, the cosines and the sums


def test_all_vectors_are_read_once_for_the_anchors_that_are_drawn_by_default() -> None:
    """For each block they are read, and divided by their lengths, again."""
    assert Question().anchors <= exact.SEARCHED


def test_some_of_the_views(embeddings: Embeddings, tmp_path: Path) -> None:
    views = [ViewRecord(stored=name, width=3) for name in ("left", "right")]
    manifest = embeddings.manifest.model_copy(update={"views": views})
    manifest.write(embeddings.folder / "manifest.json")
    some = EmbeddingsOfViews(Embeddings.open(embeddings.folder), ["left"])
    expected = written(some, tmp_path / "one")
    assert written(some, tmp_path / "many", Processes(2)) == expected
    assert expected != written(embeddings, tmp_path / "all")


def test_another_process_opens_the_embeddings(embeddings: Embeddings) -> None:
    sent = pickle.dumps(embeddings)
    assert len(sent) < 1000 and len(pickle.loads(sent)) == 701


@weekly("shards/test_on_cluster.py loses workers of the same executor")
def test_a_cluster_that_loses_a_worker(
    embeddings: Embeddings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["negatives", str(embeddings.folder), "--k", "3", "--anchors", "0", "--out"]
    assert main([*words, str(tmp_path / "one")]) == 0
    said = capsys.readouterr().out
    with running() as cluster:
        assert main([*words, str(tmp_path / "two"), "--address", cluster.address]) == 0
        assert capsys.readouterr().out == said.replace("/one", "/two")
        with connected(cluster.address):
            killing = replace(Killing(folder=tmp_path), item=Block(200, 400))
            three = written(embeddings, tmp_path / "three", killing)
    assert (tmp_path / "try-0").exists()
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        assert (tmp_path / "one" / name).read_bytes() == three[name]
