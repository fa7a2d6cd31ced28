"""Which samples are hard or false negatives of a query, by their labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base.errors import RetrievalError
from heron.negatives.neighbours import Question, find_neighbours
from heron.retrieval.build import build_index
from heron.retrieval.query import Retriever
from tests.retrieval import made


def of_labels(folder: Path, targets: Any, kind: str, **known: Any) -> Retriever:
    """An index of random vectors with these labels."""
    x = np.random.default_rng(2).normal(size=(len(targets), 4))
    y = np.array(targets)
    names = [f"class {i}" for i in range(y.shape[1])]
    found = made.embeddings(folder / "e", {"hidden": x}, y, names, kind, **known)
    build_index(found, folder / "i", kind="flat", progress=False)
    return Retriever.open(folder / "i")


def test_of_classes_any_other_is_hard(tmp_path: Path) -> None:
    numbers = np.array([0] * 30 + [1] * 3 + [2] * 3)
    found = of_labels(tmp_path, np.eye(3)[numbers], "multi_class")
    for key, number in (("s000", 0), ("s031", 1)):
        hard = found.by_key(key, 35, relation="hard")
        assert (hard.far, hard.allowed) == (1.0, int((numbers != number).sum()))
        assert {int(numbers[hit.number]) for hit in hard.hits} == {0, 1, 2} - {number}
        alike = found.by_key(key, 35, relation="false")
        assert alike.allowed == int((numbers == number).sum()) - 1
        assert {int(numbers[hit.number]) for hit in alike.hits} == {number}
    only = found.by_key("s000", 5, "'class 2'")
    assert sorted(hit.number for hit in only.hits) == [33, 34, 35]


def test_the_same_labels_are_never_hard(tmp_path: Path) -> None:
    found = of_labels(tmp_path, [[1, 0]] * 9 + [[1, 1]], "multi_label")
    hard = found.by_key("s000", 5, relation="hard")
    assert [hit.number for hit in hard.hits] == [9]
    assert hard.far == 0.5
    alone = found.by_key("s009", 5, relation="false")  # none has its labels, or close ones
    assert alone.instead and alone.close == 0 and alone.allowed == 9
    assert {hit.label_distance for hit in alone.hits} == {0.5} and len(alone.hits) == 5


def test_false_negatives_have_close_labels_as_the_report_has_them(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    y = draw.integers(0, 2, (150, 40))
    y[1], y[2] = y[0], y[0]
    y[2, :2] = 1 - y[2, :2]
    y[3] = 1 - y[0]
    found = of_labels(tmp_path, y, "multi_label")
    embeddings = found.embeddings
    assert embeddings is not None
    near = find_neighbours(embeddings, Question(k=5, anchors=0))
    apart = (y[:, None] != y).sum(2)[~np.eye(150, dtype=bool)]
    assert (
        found.samples.close_difference
        == near.close
        == max(n for n in range(41) if (apart <= n).mean() <= 0.01)
    )
    answer = found.by_key("s000", 9, relation="false")
    close = [i for i in range(1, 150) if (y[i] != y[0]).sum() <= near.close]
    assert sorted(hit.number for hit in answer.hits) == close and {1, 2} <= {*close}
    assert answer.close == pytest.approx(near.close / 40) and not answer.instead
    alone = found.by_key("s003", 9, relation="false")
    assert alone.instead and len(alone.hits) == 9 and alone.allowed == 149
    distances = sorted((y[i] != y[3]).mean() for i in range(150) if i != 3)[:9]
    assert [hit.label_distance for hit in alone.hits] == pytest.approx(distances)
    among = np.arange(150) < 50
    hard = found.by_key("s000", 49, relation="hard", among=among)
    assert hard.far is not None and hard.far * 40 > near.close
    assert all(hit.number < 50 for hit in hard.hits)


def test_where_all_labels_are_the_same_none_is_hard(tmp_path: Path) -> None:
    found = of_labels(tmp_path, [[1, 0]] * 5, "multi_label")
    with pytest.raises(RetrievalError, match=r"0 others have a label distance of 1 or more \(rel"):
        found.by_key("s000", 3, relation="hard")


def test_a_filter_that_the_query_alone_passes(tmp_path: Path) -> None:
    found = of_labels(tmp_path, np.eye(4), "multi_class")
    with pytest.raises(
        RetrievalError, match="no sample meets every condition for 's001': 0 others pass"
    ):
        found.by_key("s001", 2, "'class 1'")
    assert [hit.number for hit in found.by_key("s000", 2, "'class 1'").hits] == [1]
