"""The map of an index: near samples lie near, regions have their labels' names, outlines select."""

from pathlib import Path

import numpy as np
import pytest

from heron.base.errors import RetrievalError
from heron.retrieval.build import build_index
from heron.retrieval.index import Index
from heron.retrieval.map import GRID, MAP, SampleMap
from heron.retrieval.vectors import vectors_in_memory

N, CLASSES = 900, 3


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    draw, classes = np.random.default_rng(0), np.arange(N) % CLASSES
    vectors = np.eye(8)[classes] * 5 + 0.3 * draw.normal(size=(N, 8))
    folder = tmp_path_factory.mktemp("map") / "index"
    given = vectors_in_memory(vectors, classes, ["ant", "bee", "cow"])
    build_index(given, folder, kind="flat", metric="euclidean", progress=False)
    return Index.open(folder)


def test_it_is_pca_on_a_grid_with_named_regions(index: Index) -> None:
    assert index.manifest.map is not None
    found, flat = index.sample_map(), np.load(index.folder / MAP)
    assert found is not None and flat.dtype == np.float32 and flat.shape == (N, 2)
    vectors = index.vectors(np.arange(N)).astype(np.float64)
    centred = vectors - vectors.mean(0)
    _, singular, axes = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs(flat), np.abs(centred @ axes[:2].T), atol=1e-3)
    share = (singular[:2] ** 2).sum() / (singular**2).sum()
    assert found.how == f"PCA of 8 dimensions, {share:.0%} of the variance"
    assert found.grid.min() == 0 and found.grid.max() == GRID
    span = flat.max(0) - flat.min(0)  # one scale for both axes
    np.testing.assert_allclose(found.grid.max(0) / GRID, span / span.max(), atol=1e-4)
    assert np.frombuffer(found.bytes, "<u2").reshape(N, 2).tolist() == found.grid.tolist()
    assert {region.names[0] for region in found.regions} == {"ant", "bee", "cow"}
    for region in found.regions:  # it stands where the samples of its class do
        mine = found.grid[["ant", "bee", "cow"].index(region.names[0]) :: CLASSES].astype(float)
        assert np.hypot(*(mine.mean(0) - [region.x, region.y])) < 0.1 * GRID


def test_an_outline_selects_what_is_inside() -> None:
    grid = np.random.default_rng(0).integers(0, GRID + 1, (N, 2)).astype(np.uint16)
    found = SampleMap("drawn", grid, [])
    x, y = found.grid.astype(np.int64).T
    # A square with a notch: the even-odd rule counts edges to the right of a point.
    corners = "0,0,40000,0,40000,40000,20000,40000,20000,20000,0,20000"
    wanted = (x < 40_000) & ((y < 20_000) | (x >= 20_000) & (y < 40_000))
    assert 0 < wanted.sum() < N
    np.testing.assert_array_equal(found.inside(corners), wanted)
    assert found.inside("0,0,65536,0,65536,65536,0,65536").all()
    assert not found.inside("1,1,1,1,1,1").any()


@pytest.mark.parametrize(
    "outline",
    ["", "1,2,3,4", "1,2,3,4,5", "1,2,3,4,5,x", "1,2,3,4,5,-6", "1,2,3,4,5,600000", "1,2,3,4,5,6.5"]
    + ["1,2,3,4,5,٣", ",".join(["7"] * 202)],
)
def test_no_outline_is_refused(index: Index, outline: str) -> None:
    found = index.sample_map()
    with pytest.raises(RetrievalError, match="must have 3 to 100 corners"):
        assert found is not None and found.inside(outline)


def test_an_index_may_have_none(tmp_path: Path) -> None:
    given = vectors_in_memory(np.random.default_rng(0).normal(size=(40, 4)))
    build_index(given, tmp_path / "none", kind="flat", map="none", progress=False)
    assert Index.open(tmp_path / "none").sample_map() is None
    narrow = Index.build(np.arange(1.0, 9)[:, None], metric="euclidean", kind="flat")
    found = narrow.sample_map()  # one dimension: a line
    assert found is not None and set(found.grid[:, 1]) == {0} and found.regions == []


def test_a_changed_map_is_refused(tmp_path: Path) -> None:
    given = vectors_in_memory(np.random.default_rng(0).normal(size=(40, 4)))
    build_index(given, tmp_path / "index", kind="flat", progress=False)
    np.save(tmp_path / "index" / MAP, np.full((40, 2), np.nan, np.float32))
    with pytest.raises(RetrievalError, match=r"map\.npy"):
        Index.open(tmp_path / "index")
    with pytest.raises(RetrievalError, match="must be finite <f4"):
        Index.open(tmp_path / "index", verify=False).sample_map()
