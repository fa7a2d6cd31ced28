"""Samples that are there twice or belong together, and samples like no other.

Copies and outliers are read off the distances of a sample to its nearest others.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from heron.audit.labels import Labels, Near
from heron.base.decisions import read_columns
from heron.base.errors import RetrievalError
from heron.retrieval.embeddings import Embeddings

Groups = NDArray[np.int64]  # a number for each sample, [samples]

CHANCE = 1e-4  # of a sample to have a neighbour that is taken for a copy
MOST = 0.6  # of a copy's distance to that of the furthest neighbours, whatever the dimension
LEAST = 6e-4  # distance of vectors that are equal but for rounding, at most
FAR = 5.0  # standard deviations, by the median's, that an outlier lies above the others


@dataclass(frozen=True)
class Copies:
    """Groups of samples that are equal, or nearly.

    Attributes:
        group: the group of each sample, [rows]; one that has no copy is a group of its own.
        nearest: distance of each sample to its nearest other, [rows].
        equal: whether a sample's vector points where another's does, but for rounding, [rows].
    """

    group: NDArray[np.int64]
    nearest: NDArray[np.float32]
    equal: NDArray[np.bool_]

    def members(self) -> Iterator[NDArray[np.int64]]:
        """Yields the samples of each group of two or more, in order."""
        order = np.argsort(self.group, kind="stable")
        ends = np.flatnonzero(np.diff(self.group[order])) + 1
        yield from (rows for rows in np.split(order, ends) if len(rows) > 1)


def find_copies(near: Near) -> Copies:
    """Finds samples that are nearer to each other than samples that lie there by chance.

    i and j are copies if their distance is at most r times the mean distance of i and of j to the
    furthest of their nearest others (k of them), with r^m = 1e-4 / (k - 1): among k samples spread
    evenly in m dimensions, one in 10,000 has another as near. m is the dimension of the samples, by
    the distances of their neighbours (Levina and Bickel 2004, Eq. 8); distances are Euclidean,
    between vectors of length one.
    """
    distance = np.sqrt(np.maximum(2 - 2 * near.cosine.astype(np.float64), 0))
    k = distance.shape[1]
    away = np.maximum(distance, LEAST)
    logarithm = np.log(away[:, -1:] / away[:, :-1]).mean(1)
    dimension = 1 / max(float(np.median(logarithm)), 1e-3)
    ratio = min(MOST, (CHANCE / (k - 1)) ** (1 / dimension))
    rows = np.repeat(np.arange(len(distance)), k)
    theirs, apart = near.numbers.reshape(-1), distance.reshape(-1)
    far = (distance[rows, -1] + distance[theirs, -1]) / 2
    equal = (apart <= LEAST) & ((far <= LEAST) | (far > 10 * LEAST))  # or all are nearly equal
    copy = (apart <= ratio * far) & (far > 10 * LEAST) | equal
    group = linked(rows[copy], theirs[copy], len(distance))
    nearest = distance[:, 0].astype(np.float32)
    return Copies(group, nearest, nearest <= LEAST)


def other_labels(rows: NDArray[np.int64], y: Labels) -> bool:
    """Returns whether labels that are known of two of the samples differ."""
    values = y[rows]
    unknown = np.isnan(values)
    highest, lowest = (np.where(unknown, blank, values) for blank in (-np.inf, np.inf))
    return bool((highest.max(0) > lowest.min(0)).any())


def outliers(near: Near) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns the samples that lie far from all others, furthest first, and how far, [rows].

    The logarithm of a sample's mean distance to its nearest others, in standard deviations from the
    median over all samples (by the median absolute deviation); those above 5 are outliers.
    """
    distance = np.maximum(1 - near.cosine.astype(np.float64), LEAST**2).mean(1)
    logarithm = np.log(distance)
    middle = np.median(logarithm)
    spread = 1.4826 * np.median(np.abs(logarithm - middle))
    score = (logarithm - middle) / (spread or 1.0)
    found = np.flatnonzero(score > FAR)
    return found[np.argsort(-score[found], kind="stable")], score.astype(np.float32)


def read_groups(path: Path, embeddings: Embeddings) -> Groups:
    """Reads a CSV file with the columns key and group; returns each sample's group, [samples].

    Raises a RetrievalError if there is no such file, or it names a sample twice or leaves one out.
    """
    columns = read_columns(path, ["key", "group"], "--groups", RetrievalError)
    group = dict(zip(columns["key"], columns["group"], strict=True))
    if len(group) < len(columns["key"]):
        key = Counter(columns["key"]).most_common(1)[0][0]
        raise RetrievalError(f"--groups {path} names '{key}' twice; remove one of the two lines")
    samples = embeddings.samples
    keys = [key.decode() for key in samples.keys.tolist()]
    if absent := [key for key in keys if not group.get(key)]:
        raise RetrievalError(
            f"--groups {path} has no group of {len(absent):,} samples, the first '{absent[0]}'; "
            "add a line for each"
        )
    return np.asarray(pd.factorize(pd.Series([group[key] for key in keys]))[0], np.int64)


def linked(first: NDArray[np.int64], second: NDArray[np.int64], count: int) -> Groups:
    """Returns groups of `count` samples that hold both ends of each link."""
    links = coo_array((np.ones(len(first), bool), (first, second)), (count, count))
    return np.asarray(connected_components(links, directed=False)[1], np.int64)


def joined(first: Groups, second: Groups) -> Groups:
    """Returns groups that hold whole groups of both."""
    beyond = int(first.max()) + 1  # numbers that the second's groups begin at
    _, second = np.unique(second, return_inverse=True)
    return linked(first, second + beyond, beyond + int(second.max()) + 1)[first]
