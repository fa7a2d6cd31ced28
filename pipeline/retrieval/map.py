"""A map of an index: two coordinates of every sample, and regions named by their labels.

`heron index` draws it by PCA, or by UMAP (McInnes et al., 2018) where that is asked for; the page
of `heron serve` shows it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.config.extras import require
from heron.pipeline.evaluation.knn import Numbers, Vectors
from heron.pipeline.retrieval.kinds import MapKind
from heron.pipeline.retrieval.samples import AGAIN, Samples, mapped_array
from heron.shards.artefact import Record

if TYPE_CHECKING:
    from heron.pipeline.retrieval.index import Index

MAP = "map.npy"  # float32 [N, 2], in the order of the samples
FITTED = 2**22  # numbers of the vectors that the projection is fitted on, at most
FEWEST = 3  # samples of a map
REGIONS = 12  # that are named, at most
SURE = 4.0  # standard errors by which a label's share in a region is above that of all
GRID = 2**16 - 1  # the largest coordinate on the grid, in which the page has the map
CORNERS = 100  # of an outline, at most


class Region(Record):
    """A part of the map, with the labels that are over-represented in it."""

    x: float
    y: float
    names: list[str]  # the most over-represented first


class MapRecord(Record):
    """How a map was drawn."""

    how: Annotated[str, Field(max_length=200)]  # in words
    regions: list[Region]


def draw_map(
    kind: MapKind,
    take: Callable[[Numbers], Vectors],  # returns the vectors of some samples, [numbers, dim]
    blocks: Iterator[tuple[int, Vectors]],  # all vectors, some at a time
    samples: Samples,
    path: Path,  # of the file to write, float32 [N, 2]
    seed: int,  # of the draw and the projection
) -> MapRecord | None:
    """Writes two coordinates of every sample; None where there are too few, or `kind` is none.

    The projection is fitted on a drawn sample of the vectors, and then applied to all.

    Raises:
        MissingPackage: UMAP is asked for and not installed.
    """
    count = len(samples)
    if kind == "none" or count < FEWEST:
        return None
    dim = take(np.arange(1)).shape[1]
    most = max(1_000, FITTED // dim)
    drawn = np.arange(count)
    if count > most:
        drawn = np.sort(np.random.default_rng(seed).choice(count, most, replace=False))
    vectors = take(drawn)
    model, how = _projection(kind, vectors, seed)
    if len(drawn) < count:
        how += f", fitted on {len(drawn):,} samples"
    found = np.zeros((count, 2), np.float32)
    for start, block in blocks:
        flat = model.transform(block)
        found[start : start + len(block), : flat.shape[1]] = flat
    np.save(path, found, allow_pickle=False)
    return MapRecord(how=how, regions=_regions(found[drawn], samples, drawn, seed))


def _projection(kind: MapKind, vectors: Vectors, seed: int) -> tuple[Any, str]:
    """Returns what projects vectors to the plane, and what it is in words."""
    if kind == "umap":
        near = min(15, len(vectors) - 1)
        umap = require("umap", "a map by UMAP").UMAP(n_neighbors=near, random_state=seed, n_jobs=1)
        return umap.fit(vectors), f"UMAP of {vectors.shape[1]} dimensions, {near} neighbours"
    from sklearn.decomposition import PCA

    pca = PCA(min(2, vectors.shape[1]), random_state=seed).fit(vectors)
    share = float(np.nansum(pca.explained_variance_ratio_))
    return pca, f"PCA of {vectors.shape[1]} dimensions, {share:.0%} of the variance"


def _regions(flat: Vectors, samples: Samples, numbers: Numbers, seed: int) -> list[Region]:
    """Returns clusters of the map with their over-represented labels; none without labels."""
    known = samples.known[numbers]
    if not samples.names or known.sum() < 10 * REGIONS:
        return []
    from sklearn.cluster import KMeans

    flat, targets = flat[known], samples.targets[numbers[known]]
    kmeans = KMeans(REGIONS, n_init=3, random_state=seed).fit(flat)
    share, regions = targets.mean(0), dict[str, tuple[float, Region]]()
    for number, (x, y) in enumerate(kmeans.cluster_centers_.tolist()):
        mine = targets[kmeans.labels_ == number]
        error = np.sqrt(np.maximum(share * (1 - share), 1e-6) / max(1, len(mine)))
        above = (mine.mean(0) - share) / error if len(mine) else np.zeros(len(share))
        names = [samples.names[i] for i in np.argsort(-above)[:2].tolist() if above[i] >= SURE]
        # Of the regions that one label leads, the one that it leads most has the name.
        if names and above.max() > regions.get(names[0], (0.0,))[0]:
            regions[names[0]] = float(above.max()), Region(x=x, y=y, names=names)
    return [region for _, region in regions.values()]


@dataclass(frozen=True)
class SampleMap:
    """The map of an open index, on a grid whose longer side is 0 to `GRID`."""

    how: str  # it was drawn, in words
    grid: NDArray[np.uint16]  # [N, 2]
    regions: list[Region]  # as in the manifest, with x and y on the grid

    @classmethod
    def of(cls, index: "Index") -> Self | None:
        """Reads the map of an index, or returns None where it has none.

        Raises:
            RetrievalError: the file is missing, or not what it should be.
        """
        record = index.manifest.map
        if record is None:
            return None
        flat = mapped_array(index.folder / MAP, AGAIN)
        if flat.dtype.str != "<f4" or flat.shape != (len(index), 2) or not np.isfinite(flat).all():
            raise RetrievalError(
                f"{index.folder / MAP} is {flat.dtype.str} {flat.shape}; expected finite <f4 "
                f"({len(index)}, 2); {AGAIN}"
            )
        low, high = flat.min(0), flat.max(0)
        scale = GRID / max(float((high - low).max()), 1e-30)
        regions = [
            Region(x=(r.x - low[0]) * scale, y=(r.y - low[1]) * scale, names=r.names)
            for r in record.regions
        ]
        return cls(record.how, np.rint((flat - low) * scale).astype(np.uint16), regions)

    @cached_property
    def bytes(self) -> bytes:
        """The grid as little-endian numbers: x and y of each sample."""
        return self.grid.astype("<u2").tobytes()

    def inside(self, outline: str) -> NDArray[np.bool_]:
        """Returns which samples lie within an outline, bool [N], by the even-odd rule.

        `outline` has 3 to `CORNERS` corners, "x,y,x,y,...", of 0 to `GRID` + 1; a sample is at the
        middle of its cell of the grid, and so never on an edge that follows it.

        Raises:
            RetrievalError: it is no outline.
        """
        words = outline.split(",")
        sound = all(word.isascii() and word.isdigit() and len(word) <= 5 for word in words)
        if not sound or len(words) % 2 or not 3 <= len(words) // 2 <= CORNERS:
            raise RetrievalError(
                f"an outline of {len(words)} numbers; expected 3 to {CORNERS} corners, x,y,x,y, "
                f"whole numbers of 0 to {GRID + 1}; draw it on the map"
            )
        from matplotlib.path import Path as Outline  # here: no other use of an index needs it

        corners = np.array(words, np.int64).reshape(-1, 2)
        # Most samples lie apart from most outlines: only those near one meet its corners.
        near = ((self.grid >= corners.min(0)) & (self.grid < corners.max(0))).all(1)
        found = np.zeros(len(self.grid), bool)
        found[near] = Outline(corners).contains_points(self.grid[near] + 0.5)
        return found
