"""A map of an index: two coordinates of every sample, and regions named by their labels.

`heron index` draws it by PCA or UMAP (McInnes et al., 2018); the page of `heron serve` shows it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from heron.base.artefact import Record
from heron.base.atomic import atomic_write
from heron.base.errors import RetrievalError
from heron.base.extras import require
from heron.evaluation.knn import Numbers, Vectors
from heron.retrieval.index_plan import MapKind
from heron.retrieval.samples import REMEDY, Samples, map_array

MAP = "map.npy"  # float32 [N, 2], in the order of the samples
MAX_FITTED_VALUES = 2**22  # vectors x dimensions that the projection is fitted on
MIN_SAMPLES = 3  # samples that a map needs
MAX_REGIONS = 12  # named regions, at most
MIN_STANDARD_ERRORS = 4.0  # by which a label's share in a region must exceed its overall share


class Region(Record):
    """A part of the map, with the labels that are over-represented in it."""

    x: float
    y: float
    names: list[str]  # the most over-represented first


class MapRecord(Record):
    """How a map was drawn."""

    how: Annotated[str, Field(max_length=200)]  # the projection, in words
    regions: list[Region]


def draw_map(
    kind: MapKind,
    take: Callable[[Numbers], Vectors],  # returns the vectors of some samples, [numbers, dim]
    blocks: Iterator[tuple[int, Vectors]],  # all vectors, in blocks with the number of the first
    samples: Samples,
    path: Path,  # of the file to write, float32 [N, 2]
    seed: int,  # of the draw and the projection
) -> MapRecord | None:
    """Writes two coordinates of every sample; returns None if there are too few or `kind` is none.

    The projection is fitted on a random sample of the vectors. Raises a MissingPackage if UMAP is
    requested and not installed.
    """
    count = len(samples)
    if kind == "none" or count < MIN_SAMPLES:
        return None
    dim = take(np.arange(1)).shape[1]
    max_fitted = max(1_000, MAX_FITTED_VALUES // dim)
    fitted = np.arange(count)
    if count > max_fitted:
        fitted = np.sort(np.random.default_rng(seed).choice(count, max_fitted, replace=False))
    vectors = take(fitted)
    model, how = _projection(kind, vectors, seed)
    if len(fitted) < count:
        how += f", fitted on {len(fitted):,} samples"
    coordinates = np.zeros((count, 2), np.float32)
    for start, block in blocks:
        projected = model.transform(block)
        coordinates[start : start + len(block), : projected.shape[1]] = projected
    with atomic_write(path) as stream:
        np.save(stream, coordinates, allow_pickle=False)
    return MapRecord(how=how, regions=_regions(coordinates[fitted], samples, fitted, seed))


def _projection(kind: MapKind, vectors: Vectors, seed: int) -> tuple[Any, str]:
    """Returns a fitted projection to the plane, and its description."""
    if kind == "umap":
        neighbours = min(15, len(vectors) - 1)
        umap = require("umap", "a map by UMAP").UMAP(
            n_neighbors=neighbours, random_state=seed, n_jobs=1
        )
        return umap.fit(vectors), f"UMAP of {vectors.shape[1]} dimensions, {neighbours} neighbours"
    from sklearn.decomposition import PCA

    pca = PCA(min(2, vectors.shape[1]), random_state=seed).fit(vectors)
    share = float(np.nansum(pca.explained_variance_ratio_))
    return pca, f"PCA of {vectors.shape[1]} dimensions, {share:.0%} of the variance"


def _regions(coordinates: Vectors, samples: Samples, numbers: Numbers, seed: int) -> list[Region]:
    """Returns clusters of the map with their over-represented labels; none without labels."""
    labelled = samples.known[numbers]
    if not samples.names or labelled.sum() < 10 * MAX_REGIONS:
        return []
    from sklearn.cluster import KMeans

    coordinates, targets = coordinates[labelled], samples.targets[numbers[labelled]]
    kmeans = KMeans(MAX_REGIONS, n_init=3, random_state=seed).fit(coordinates)
    shares, regions = targets.mean(0), dict[str, tuple[float, Region]]()
    for number, (x, y) in enumerate(kmeans.cluster_centers_.tolist()):
        members = targets[kmeans.labels_ == number]
        error = np.sqrt(np.maximum(shares * (1 - shares), 1e-6) / max(1, len(members)))
        excess = (members.mean(0) - shares) / error if len(members) else np.zeros(len(shares))
        names = [
            samples.names[i]
            for i in np.argsort(-excess)[:2].tolist()
            if excess[i] >= MIN_STANDARD_ERRORS
        ]
        # Of several regions with the same leading label, only the most distinct is named.
        if names and excess.max() > regions.get(names[0], (0.0,))[0]:
            regions[names[0]] = float(excess.max()), Region(x=x, y=y, names=names)
    return [region for _, region in regions.values()]


GRID = 2**16 - 1  # the largest coordinate of the integer grid that the page draws
MAX_CORNERS = 100  # of an outline, at most


@dataclass(frozen=True)
class SampleMap:
    """The map of an open index, on a grid whose longer side is 0 to `GRID`."""

    how: str  # the projection, in words
    grid: NDArray[np.uint16]  # [N, 2]
    regions: list[Region]  # as in the manifest, with x and y on the grid

    @classmethod
    def open(cls, folder: Path, record: MapRecord | None, count: int) -> Self | None:
        """Reads the map in an index's folder, of `count` samples; None without a record of one.

        Raises a RetrievalError if its file is damaged.
        """
        if record is None:
            return None
        xy = map_array(folder / MAP, REMEDY)
        if xy.dtype.str != "<f4" or xy.shape != (count, 2) or not np.isfinite(xy).all():
            raise RetrievalError(
                f"{folder / MAP} must be finite <f4 ({count}, 2), got {xy.dtype.str} {xy.shape}; "
                f"{REMEDY}"
            )
        low, high = xy.min(0), xy.max(0)
        scale = GRID / max(float((high - low).max()), 1e-30)
        regions = [
            Region(x=(r.x - low[0]) * scale, y=(r.y - low[1]) * scale, names=r.names)
            for r in record.regions
        ]
        return cls(record.how, np.rint((xy - low) * scale).astype(np.uint16), regions)

    @cached_property
    def bytes(self) -> bytes:
        """The grid as little-endian numbers: x and y of each sample."""
        return self.grid.astype("<u2").tobytes()

    def inside(self, outline: str) -> NDArray[np.bool_]:
        """Returns which samples lie within an outline, bool [N], by the even-odd rule.

        `outline` has 3 to `CORNERS` corners, "x,y,x,y,...", from 0 to `GRID` + 1. A sample lies in
        the middle of its grid cell, and so never on an edge along the grid. Raises a RetrievalError
        if it is no outline.
        """
        words = outline.split(",")
        valid = all(word.isascii() and word.isdigit() and len(word) <= 5 for word in words)
        if not valid or len(words) % 2 or not 3 <= len(words) // 2 <= MAX_CORNERS:
            raise RetrievalError(
                f"an outline must have 3 to {MAX_CORNERS} corners, x,y,x,y, in whole numbers from "
                f"0 to {GRID + 1}, got {len(words)} numbers; draw it on the map"
            )
        from matplotlib.path import Path as Outline  # here: no other use of an index needs it

        corners = np.array(words, np.int64).reshape(-1, 2)
        # Most samples lie far from most outlines: test only those in the bounding box.
        in_box = ((self.grid >= corners.min(0)) & (self.grid < corners.max(0))).all(1)
        inside = np.zeros(len(self.grid), bool)
        inside[in_box] = Outline(corners).contains_points(self.grid[in_box] + 0.5)
        return inside
