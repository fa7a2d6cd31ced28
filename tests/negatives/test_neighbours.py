"""Which pairs are near: neighbours against a loop, what is left out, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base.errors import RetrievalError
from heron.negatives.neighbours import NearPairs, Question, find_neighbours
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index, Neighbours
from tests.negatives.loops import NAMES, by_hand, distance, drawn
from tests.retrieval import made


def test_neighbours_are_the_nearest_others_with_labels(
    embeddings: Embeddings, found: NearPairs
) -> None:
    cosine, near = by_hand(embeddings)
    assert len(found.pairs.anchors) == 15 and 7 not in found.pairs.anchors
    assert found.ks == (1, 2, 3, 5, 10, 20) and found.numbers.shape == (15, 20)
    for row, i in enumerate(found.pairs.anchors.tolist()):
        assert found.numbers[row].tolist() == near(i, 20)
        for column, k in enumerate(found.numbers[row].tolist()):
            assert found.cosine[row, column] == pytest.approx(cosine[i, k], abs=1e-5)
            assert found.difference[row, column] / found.pairs.max_difference == pytest.approx(
                distance(embeddings, i, k)
            )


def test_an_index_gives_the_neighbours(embeddings: Embeddings, tmp_path: Path) -> None:
    build_index(embeddings, tmp_path / "flat", kind="flat", progress=False)
    index = Index.open(tmp_path / "flat")
    question = Question(k=3, anchors=15)
    exact, found = (find_neighbours(embeddings, question, i) for i in (None, index))
    assert (found.numbers == exact.numbers).all()
    np.testing.assert_allclose(found.cosine, exact.cosine, atol=1e-5)
    with pytest.raises(RetrievalError) as fault:
        find_neighbours(embeddings, Question("projection", 3), index)
    assert str(fault.value) == (
        "the index has the layer 'hidden', not 'projection'; pass --layer hidden, or remove "
        "--index to search exactly"
    )


def test_examples_name_no_sample_twice(found: NearPairs) -> None:
    chosen = found.examples("hard")
    numbers = [n for row, column in chosen
               for n in (found.pairs.anchors[row], found.numbers[row, column])]  # fmt: skip
    assert chosen and len(set(numbers)) == len(numbers)
    cosines = [found.cosine[row, column] for row, column in chosen]
    assert cosines == sorted(cosines, reverse=True)
    wanted = found.difference[:, :3] >= found.hard[:, None]
    assert cosines[0] == found.cosine[:, :3][wanted].max()


def test_an_index_that_gives_too_few(
    embeddings: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever k is, since rates are of up to 20 neighbours; without the index they are found."""
    build_index(embeddings, tmp_path / "flat", kind="flat", progress=False)
    index = Index.open(tmp_path / "flat")
    search = Index.search

    def few(*given: Any, **named: Any) -> Neighbours:
        found = search(*given, **named)
        found.numbers[:, 10:] = -1
        return found

    monkeypatch.setattr(Index, "search", few)
    question = Question(k=3, anchors=15)
    with pytest.raises(
        RetrievalError, match="found fewer than 20 neighbours of .*; remove --index"
    ):
        find_neighbours(embeddings, question, index)
    assert find_neighbours(embeddings, question).numbers.shape == (15, 20)


def test_questions_without_an_answer_are_refused(tmp_path: Path) -> None:
    e = drawn(tmp_path / "e")
    with pytest.raises(
        RetrievalError, match=r"--k must be 1 to 38, because 39 samples have labels, got 39"
    ):
        find_neighbours(e, Question(k=39))
    with pytest.raises(RetrievalError, match="--k must be 1 to 38, .*, got 0"):
        find_neighbours(e, Question(k=0))
    with pytest.raises(
        RetrievalError, match="anchors must be at least 1, or 0 for all samples, got -1"
    ):
        find_neighbours(e, Question(k=3, anchors=-1))
    x = np.ones((4, 3))
    none = made.embeddings(tmp_path / "n", {"hidden": x}, np.zeros((4, 0)), [], "none",
                           known=np.zeros(4, bool))  # fmt: skip
    with pytest.raises(
        RetrievalError, match="0 of 4 samples have labels, and false .* need at least two"
    ):
        find_neighbours(none, Question(k=1))
    one = made.embeddings(tmp_path / "o", {"hidden": x}, np.ones((4, 1)), ["a"], "multi_class")
    with pytest.raises(RetrievalError, match="all labelled samples in .* have the same labels"):
        find_neighbours(one, Question(k=1))
    with pytest.raises(RetrievalError, match="has no layer 'projection'"):
        find_neighbours(one, Question("projection", 1))
    x[2] = 0
    zero = made.embeddings(tmp_path / "z", {"hidden": x}, np.eye(4), NAMES[:4])
    with pytest.raises(RetrievalError) as fault:
        find_neighbours(zero, Question(k=1))
    assert str(fault.value) == (
        "the vectors of 1 samples are zero or not finite, so they have no direction, the first "
        "s002; embed them again, or exclude them"
    )
