"""What errors of publishers' data sets propose: XRMB, CelebA, the MNIST family."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.remedies.makers import Case
from tests.sources import test_celeba, test_idx
from tests.sources.matlab_files import write_xrmb

X1 = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
NUMBERED = (np.arange(60) % 4).astype(float)[:, None]


def xrmb(*words: Any, labels: Any = NUMBERED) -> Callable[[Path], Any]:
    def make(folder: Path) -> Sequence[Any]:
        first, second = {"X1": X1}, {"X2": X1[:, :4], "trainLabel": labels}
        paths = write_xrmb(folder, (first, second))
        one, two = paths["single1"], paths["single2"]
        return ["shards", "build", "xrmb", "--single1", one, "--single2", two, *words]

    return make


def celeba(folder: Path) -> Sequence[Any]:
    test_celeba.celeba(folder, {test_celeba.LISTED: test_celeba.FEWER})
    words = ["--images", folder / test_celeba.ZIPPED, "--attributes", folder / test_celeba.LISTED]
    return ["shards", "build", "celeba", *words, "--partition", folder / test_celeba.PARTED]


def family(folder: Path) -> Sequence[Any]:
    test_idx.family(folder)
    (folder / "empty").mkdir()
    return ["shards", "build", "idx", "--folder", "OUT/empty"]


def damaged(name: str, data: bytes) -> Callable[[Path], Any]:
    def make(folder: Path) -> Sequence[Any]:
        test_celeba.celeba(folder, test_celeba.with_picture(name, data))
        words = ["--images", folder / test_celeba.ZIPPED]
        return ["shards", "build", "celeba", *words, "--attributes", folder / test_celeba.LISTED]

    return make


PUBLISHED = [
    Case(
        "; use a --classes of at most ",
        xrmb("--classes", 9),
        ["--classes", 4],
        ["--classes", "9"],
    ),
    Case(
        " begins with ",
        xrmb("--classes", 1, labels=NUMBERED + 2),
        ["--classes", 4],
        ["--classes", "1"],
    ),
    Case(
        "lower --per-class, or leave",
        xrmb("--per-class", 16),
        ["--per-class", 15],
        ["--per-class", "16"],
    ),
    Case("those that all files name with --missing leave_out", celeba, ["--missing", "leave_out"]),
    Case(
        "download it, or use another --folder",
        family,
        ["--folder", "OUT"],
        ["--folder", "OUT/empty"],
    ),
    Case(
        ", or leave it out with --on-error skip",
        damaged(test_celeba.THIRD, test_celeba.jpeg(0)[:-2]),
        ["--on-error", "skip"],
    ),
    Case(
        "the pictures in the wild, or leave out what is bad with --on-error skip",
        damaged(test_celeba.THIRD, test_celeba.jpeg(0, (8, 9))),
        ["--on-error", "skip"],
    ),
    Case(
        "move it away, or leave out what is bad with --on-error skip",
        damaged("read me.txt", b""),
        ["--on-error", "skip"],
    ),
]
