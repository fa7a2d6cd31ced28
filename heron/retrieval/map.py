"""A map of an index: two coordinates of every sample, and regions named by their labels.

`heron index` draws it by PCA or UMAP (McInnes et al., 2018); the page of `heron serve` shows it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from heron.config.extras import require
from heron.evaluation.knn import Numbers, Vectors
from heron.retrieval.kinds import MapKind
from heron.retrieval.samples import Samples
from heron.shards.artefact import Record

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
    np.save(path, coordinates, allow_pickle=False)
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
