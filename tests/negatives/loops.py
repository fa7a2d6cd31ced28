"""Random vectors with labels, and loops over them that the measures are compared with."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.negatives.repulsion import (
    Temperatures,
)
from heron.retrieval.embeddings import Embeddings
from tests.retrieval import made

NAMES = ["calm", "keen", "old", "tall", "wise"]
TAU, GAMMA = 0.7, 0.4
TEMPERATURES = Temperatures(TAU, GAMMA)


def unit(vectors: NDArray[Any]) -> NDArray[np.float64]:
    found = vectors.astype(np.float64)
    return np.asarray(found / np.linalg.norm(found, axis=-1, keepdims=True))


def drawn(folder: Path, kind: str = "multi_label", rows: int = 40) -> Embeddings:
    """Random vectors in which labels show a little; sample 7 has none."""
    random = np.random.default_rng(0)
    targets = (random.random((rows, 5)) < 0.4).astype(np.uint8)
    if kind != "multi_label":
        targets = np.eye(5, dtype=np.uint8)[random.integers(0, 5, rows)]
    hidden = random.normal(size=(rows, 6)) + targets @ random.normal(size=(5, 6))
    z, h = random.normal(size=(2, rows, 2, 4))
    known = np.arange(rows) != 7
    vectors: dict[Any, NDArray[Any]] = {"hidden": hidden}
    vectors |= {"projection": unit(z).reshape(rows, 8), "weight": unit(abs(h)).reshape(rows, 8)}
    return made.embeddings(folder, vectors, targets, NAMES, kind, known=known, views=2)


@cache
def distance(e: Embeddings, i: int, k: int) -> float:
    a, b = (e.samples.label_names(n) for n in (i, k))
    if e.samples.exclusive:
        return float(a != b)
    return sum((name in a) != (name in b) for name in NAMES) / 5


def others(e: Embeddings, i: int) -> list[int]:
    return [k for k in range(len(e)) if k not in (i, 7)]


def by_hand(e: Embeddings, layer: Any = "hidden") -> tuple[NDArray[np.float64], Callable[..., Any]]:
    """Cosines of all, and the nearest of a sample."""
    x = unit(e.take(layer, np.arange(len(e))))
    cosine = x @ x.T
    return cosine, lambda i, k: sorted(others(e, i), key=lambda j: -cosine[i, j])[:k]
