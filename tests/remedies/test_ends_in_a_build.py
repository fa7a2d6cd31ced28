"""Whoever does what the errors of arrays say, one after the other, has a build at the end."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.shards.manifest import load_manifest
from tests.remedies.makers import CLASSES, RANDOM, X, arrays, call, mat

GREY = RANDOM.integers(0, 256, (40, 8, 8), np.uint8)
KERAS = {"x_train": GREY, "y_train": CLASSES, "x_test": GREY[:9], "y_test": CLASSES[:9]}
# The first option that an error proposes with its words.
PROPOSED = re.compile(
    r"(--labels-name|--channels|--samples|--label-kind) ([^ ;,]+)|(--ignore) ([^;\n]+)$"
)


def proposed(error: str) -> tuple[str, list[str]]:
    match = PROPOSED.search(error.strip())
    assert match, error
    one, word, several, words = match.groups()
    return (one, [word]) if one else (several, words.split())


@pytest.mark.parametrize(
    ("make", "steps", "splits"),
    [
        (arrays(**KERAS), 0, {"train": 40, "test": 9}),
        (arrays(**KERAS | {"y_test": CLASSES[:8]}), 2, {"all": 40}),
        (arrays(**KERAS | {"x_test": GREY[:9, :4]}), 2, {"all": 40}),
        (arrays(**KERAS, x_val=GREY[:4]), 1, {"train": 40, "test": 9}),
        (arrays(x_train=X, y_train=CLASSES, x_test=X[:9]), 2, {"all": 40}),
        (arrays("--labels-name", "y_train", **KERAS), 2, {"all": 40}),
        (arrays("--label-kind", "none", **KERAS), 1, {"train": 40, "test": 9}),
        (arrays(**KERAS, names=np.arange(5.0), other=np.arange(6.0)), 1, {"train": 40, "test": 9}),
        (arrays(x=X, z=X[:9], labels=CLASSES, w=X[:4]), 1, {"all": 40}),
        (arrays(x=X, kinds=CLASSES, age=CLASSES * 1.0), 2, {"all": 40}),
        (arrays(x=X, y=CLASSES, gnd=CLASSES, truth=CLASSES), 2, {"all": 40}),
        (arrays(x=np.zeros((40, 3, 5, 3), np.uint8), labels=CLASSES), 1, {"all": 40}),
        (arrays(x=X, labels=CLASSES, split=CLASSES), 1, {"all": 40}),
        (mat(X=X, S={"a": 1}, T={"b": 2}, Y=CLASSES), 2, {"all": 40}),
        (mat(X=X, Z=np.ones((40, 3, 4)), kinds=CLASSES), 2, {"all": 40}),
        (mat(X=X[:3], Y=CLASSES[:3]), 1, {"all": 3}),
    ],
)
def test_every_remedy(
    make: Any, steps: int, splits: dict[str, int], tmp_path: Path, capsys: Any
) -> None:
    words = [*make(tmp_path), "--out", tmp_path / "out", "--quiet"]
    for _ in range(steps):
        capsys.readouterr()
        assert call(words) == 1
        option, values = proposed(capsys.readouterr().err)
        words += [option, *values]
    assert call(words) == 0
    manifest = load_manifest(tmp_path / "out")
    assert {split: manifest.rows(split) for split in manifest.splits} == splits
