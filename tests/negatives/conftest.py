"""What the tests of measures share: embeddings, their neighbours, and all that is measured."""

from typing import Any

import pytest

from heron.negatives.measure import measure_labels
from heron.negatives.neighbours import NearPairs, Question, find_neighbours
from heron.negatives.repulsion import (
    measure_repulsion,
)
from heron.retrieval.embeddings import Embeddings
from tests.negatives.loops import TEMPERATURES, drawn


@pytest.fixture(scope="module", params=["multi_label", "multi_class"])
def embeddings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return drawn(tmp_path_factory.mktemp("embeddings") / "e", request.param)


@pytest.fixture(scope="module")
def found(embeddings: Embeddings) -> NearPairs:
    return find_neighbours(embeddings, Question(k=3, anchors=15))


@pytest.fixture(scope="module")
def numbers(found: NearPairs) -> dict[str, Any]:
    return measure_labels(found) | measure_repulsion(found, TEMPERATURES)[0]
