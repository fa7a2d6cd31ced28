"""An index of the first numbers of vectors: what it finds, what it is asked, what it refuses."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.base.errors import RetrievalError
from heron.cli.retrieval import index as index_verb
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings, Layer
from heron.retrieval.index import Index
from heron.retrieval.index_files import rotation
from heron.retrieval.query import Retriever
from tests.retrieval.made import clustered, embeddings

N, DIM, VIEWS, WIDTH = 60, 12, 2, 4


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Embeddings:
    """Two views of each layer, of lengths that differ."""
    folder = tmp_path_factory.mktemp("prefix") / "e"
    layers: dict[Layer, NDArray[np.float32]] = {
        "hidden": clustered(N, DIM),
        "projection": clustered(N, DIM, seed=1),
    }
    return embeddings(folder, layers, np.ones((N, 1)), ["a"], views=VIEWS)


def by_hand(vectors: NDArray[np.float32], query: int, unit: bool) -> list[int]:
    """Numbers of all others by the cosine of prefixes, each view at length one if asked."""
    found = []
    for number in range(N):
        pair = []
        for row in (query, number):
            views = vectors[row].astype(np.float64).reshape(VIEWS, -1)[:, :WIDTH]
            if unit:
                views = np.stack([view / np.sqrt(view @ view) for view in views])
            pair.append(views.reshape(-1))
        a, b = pair
        found.append((float(a @ b) / np.sqrt((a @ a) * (b @ b)), number))
    return [number for _, number in sorted(found, reverse=True) if number != query]


@pytest.mark.parametrize(("layer", "unit"), [("hidden", False), ("projection", True)])
def test_the_nearest_are_those_of_the_prefix(
    layer: Layer, unit: bool, stored: Embeddings, tmp_path: Path
) -> None:
    index_verb(str(stored.folder), out=str(tmp_path / "i"), layer=layer, width=WIDTH, quiet=True)
    index = Index.open(tmp_path / "i")
    assert index.manifest.dim == WIDTH * VIEWS == index.faiss.d
    whole = stored.take(layer, np.arange(N))
    asked, alone = Retriever.open(tmp_path / "i"), Retriever(index, None, "they are gone")
    for number in (0, 17, N - 1):
        expected = by_hand(whole, number, unit)[:5]
        for retriever in (asked, alone):  # the whole vector is asked for, and the prefix
            hits = retriever.by_key(f"s{number:03d}", 5).hits
            assert [hit.number for hit in hits] == expected
    assert asked.embeddings is not None and asked.vector(0)[0].shape == (DIM,)
    means = [one.by_keys(["s000", "s017"], 9).hits for one in (asked, alone)]
    assert [hit.number for hit in means[0]] == [hit.number for hit in means[1]]
    for one, other in zip(*means, strict=True):
        assert abs(one.score - other.score) < 1e-6
    build_index(stored, tmp_path / "all", layer=layer, progress=False)
    everything = Index.open(tmp_path / "all")
    assert everything.manifest.prefix is None
    near = everything.search(whole[:1], 6).numbers[0, 1:].tolist()
    assert near != by_hand(whole, 0, unit)[:5]


def test_a_width_that_there_is_not(stored: Embeddings, tmp_path: Path) -> None:
    for width in (0, 7):
        message = rf"width must be 1 to 6, the width of a view in layer 'hidden', got {width}"
        with pytest.raises(RetrievalError, match=message):
            build_index(stored, tmp_path / "i", width=width, progress=False)
    build_index(stored, tmp_path / "j", width=3, progress=False)
    index = Index.open(tmp_path / "j")
    with pytest.raises(RetrievalError, match=r"queries must be \[queries, 6\], .*, got \[1, 5\]"):
        index.search(np.ones((1, 5), np.float32), 1)


def test_a_rotation_keeps_distances_and_is_that_of_its_seed() -> None:
    turned = rotation(16, 3).astype(np.float64)
    np.testing.assert_allclose(turned @ turned.T, np.eye(16), atol=1e-6)
    assert np.abs(turned - rotation(16, 4)).max() > 0.1
    rotation.cache_clear()
    np.testing.assert_array_equal(turned, rotation(16, 3))
