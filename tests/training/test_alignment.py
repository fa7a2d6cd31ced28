"""What a first experiment crops and flips by: where pictures are aligned, and mirrors alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from heron.cli.init import experiment, read_facts
from heron.shards.build import build
from heron.sources import make_source
from heron.training.alignment import measure

ROWS, SIDE = 240, 24
DRAW = np.random.default_rng(0)


def blobs(x: Any, y: Any, brightness: Any = 1.0) -> Any:
    """A bright disc a picture, around x, y, on noise."""
    at = np.arange(SIDE)
    distance = (at - np.reshape(x, (-1, 1, 1))) ** 2 + (
        at[:, None] - np.reshape(y, (-1, 1, 1))
    ) ** 2
    pictures = np.reshape(brightness, (-1, 1, 1)) * np.exp(-distance / 18)
    return pictures + 0.1 * DRAW.normal(size=pictures.shape)


def anywhere() -> tuple[Any, Any]:
    """A bright or a dark disc at any place: nothing is aligned, and mirrors are like pictures."""
    y = np.arange(ROWS) % 2
    x, down = DRAW.uniform(-6, SIDE + 6, (2, ROWS))
    return blobs(x, down) + y[:, None, None] / 2, y


def middle() -> tuple[Any, Any]:
    """A small or a large disc in the middle."""
    y = np.arange(ROWS) % 2
    x, down = DRAW.normal(11.5, 1.0, (2, ROWS))
    return blobs(x, down, 1 + y), y


def corner() -> tuple[Any, Any]:
    """A disc in the upper left: a mirror image is told at once."""
    y = np.arange(ROWS) % 2
    x, down = DRAW.normal(7, 1.0, (2, ROWS))
    return blobs(x, down, 1 + y), y


def sides() -> tuple[Any, Any]:
    """A disc on the left or on the right, which is its class: mirrors are alike, and all wrong."""
    y = np.arange(ROWS) % 2
    return blobs(np.where(y, 16.0, 7.0) + DRAW.normal(size=ROWS), DRAW.normal(11.5, 1, ROWS)), y


CASES = {anywhere: (False, True), middle: (True, True), corner: (True, False), sides: (True, False)}


@pytest.mark.parametrize("made", CASES, ids=lambda made: made.__name__)
@pytest.mark.parametrize("exclusive", [True, False])
def test_what_pictures_allow(made: Any, exclusive: bool) -> None:
    pictures, classes = made()
    x = pictures[:, None].astype(np.float32)
    y = np.eye(2, dtype=np.float32)[classes]
    if not exclusive:
        y[::7, 0] = np.nan  # unknown
    found = measure(x, x[:80], y[:80], exclusive)
    assert (found.aligned, found.flips) == CASES[made], found


def test_the_share_is_that_of_the_mean_picture() -> None:
    """One picture over and over has all variance in the mean; noise has none, few rows or many."""
    labels = np.zeros((0, 2), np.float32)
    same = np.tile(DRAW.normal(size=(1, 3, 8, 8)), (50, 1, 1, 1)).astype(np.float32)
    assert measure(same, same[:0], labels, True).share == pytest.approx(1, abs=1e-5)
    for rows in (4, 400):
        noise = DRAW.normal(size=(rows, 3, 8, 8)).astype(np.float32)
        assert measure(noise, noise[:0], labels, True).share == pytest.approx(0, abs=0.03)
    half = same[:1] + np.sqrt(same.var()) * DRAW.normal(size=(4000, 3, 8, 8))
    assert measure(half.astype(np.float32), same[:0], labels, True).share == pytest.approx(
        0.5, abs=0.03
    )


def test_too_few_rows_say_nothing_about_mirrors() -> None:
    pictures, classes = middle()
    x, y = pictures[:, None].astype(np.float32), np.eye(2, dtype=np.float32)[classes]
    assert measure(x, x[:40], y[:40], True).flips
    assert not measure(x, x[:19], y[:19], True).flips
    assert not measure(x[:99], x[:40], y[:40], True).flips


def test_labels_that_cannot_be_told_allow_no_mirrors() -> None:
    """They allowed any: of labels that no pixel tells, nothing can be lost."""
    pictures, _ = anywhere()
    x, many = pictures[:, None].astype(np.float32), list[float]()
    for seed in range(10):
        y = np.eye(2, dtype=np.float32)[np.random.default_rng(seed).integers(0, 2, 80)]
        many.append(measure(x, x[:80], y, True).flips)
    assert sum(many) <= 1
    same = np.tile(np.array([[1, 0]], np.float32), (80, 1))
    assert not measure(x, x[:80], same, True).flips
    alone = np.eye(80, dtype=np.float32)  # a class a row: no warning
    assert not measure(x, x[:80], alone, True).flips


@pytest.mark.parametrize("rows", [9, 10])
def test_fewer_than_ten_pictures_say_nothing(rows: int, tmp_path: Path) -> None:
    image = DRAW.integers(0, 256, (rows, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "made.npz", image=image, labels=np.arange(rows) % 2)
    build(make_source("arrays", {"npz": tmp_path / "made.npz"}), tmp_path / "data", progress=False)
    facts = read_facts(str(tmp_path / "data"))
    assert (facts.alignment is None) == (rows == 9)
    assert "one view, seen twice: augmentation makes the pair" in experiment("x", facts, "mine")


@pytest.mark.parametrize("made", CASES, ids=lambda made: made.__name__)
def test_init_writes_it(made: Any, tmp_path: Path) -> None:
    pictures, classes = made()
    image = (np.clip(pictures / 2.5, 0, 1) * 255).astype(np.uint8)
    np.savez(tmp_path / "made.npz", image=image, labels=classes)
    build(make_source("arrays", {"npz": tmp_path / "made.npz"}), tmp_path / "data", progress=False)
    facts = read_facts(str(tmp_path / "data"), 60)
    text = experiment(str(tmp_path / "data"), facts, "mine")
    aligned, flips = CASES[made]
    views = yaml.safe_load(text)["data"]["views"]
    crop = {"area": [0.7 if aligned else 0.4, 1.0], "flip": 0.5 if flips else 0.0}
    assert [view["augment"][0] for view in views] == [{"crop": crop}] * 2
    assert ("aligned pictures, so crops of 70 %" in text) == aligned
    assert ("without mirror images" in text) == (not flips)
