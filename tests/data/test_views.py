"""The model's inputs, from shards to the device: decoded small, brought to size, augmented."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heron.data.batches import Batch
from heron.data.dataset import open_reader
from heron.data.options import Data
from heron.data.pictures import fit
from heron.data.random_keys import rng_keys
from heron.data.reader import Reader
from heron.data.views import SALTS, Views
from heron.shards.build import build
from heron.sources import make_source


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("views") / "faces"
    build(make_source("faces", {"train": 12, "test": 0, "size": 96}), folder, progress=False)
    return folder


def views(folder: Path, *asked: dict[str, Any], **data: Any) -> tuple[Reader, Views]:
    config = Data.model_validate(
        {
            "path": str(folder),
            "batch": {"labelled": 1},
            "views": [{"stored": "image", **view} for view in asked],
            **data,
        }
    )
    reader = open_reader(config)
    return reader, Views(reader, config, torch.device("cpu"))


def inputs(reader: Reader, made: Views, train: bool = True, rows: int = 8) -> list[Tensor]:
    numbers = torch.arange(rows)
    stored = {"image": torch.from_numpy(reader.read("image", numbers.numpy()))}
    batch = Batch(stored, torch.empty(0), numbers, rng_keys(0, numbers * 0, numbers), [rows])
    return made(batch, train)


def test_an_augmentation_that_is_there_twice_draws_twice(faces: Path) -> None:
    flip = {"flip": {"probability": 0.5}}
    plain, once, twice = (
        inputs(*views(faces, {"augment": augment}))[0] for augment in ([], [flip], [flip, flip])
    )
    turned, both = ((x != plain).flatten(1).any(1) for x in (once, twice))
    assert turned.any() and both.any()  # the same draws would turn each picture back
    assert not torch.equal(turned, both)


def test_pictures_are_decoded_no_larger_than_the_views_need(faces: Path) -> None:
    small = {"size": 32, "augment": ["color"]}
    reader, made = views(faces, small, {"size": [24, 20]})
    assert reader.decoders["image"].shape == (48, 48, 3)
    assert made.shapes == [(32, 32, 3), (24, 20, 3)]
    assert [x.shape[1:] for x in inputs(reader, made)] == [(3, 32, 32), (3, 24, 20)]
    whole, _ = views(faces, small, draft=False)
    assert whole.decoders["image"].shape == (96, 96, 3)
    as_stored, _ = views(faces, small, {})
    assert as_stored.decoders["image"].shape == (96, 96, 3)


def test_evaluation_sees_the_whole_picture_at_its_size(faces: Path) -> None:
    reader, made = views(faces, {"size": 32, "augment": ["simclr"]}, {"size": 32})
    one, other = inputs(reader, made, train=False)
    assert torch.equal(one, other)
    stored = torch.from_numpy(reader.read("image", np.arange(8))).permute(0, 3, 1, 2).float() / 255
    torch.testing.assert_close(one, fit(stored, (32, 32)))
    assert not torch.allclose(inputs(reader, made)[0], one, atol=0.05)


@pytest.mark.parametrize("name", ["crop", "color", "flip", "blur"])
def test_every_augmentation_is_applied_with_numbers_of_its_view(faces: Path, name: str) -> None:
    reader, made = views(faces, {"size": 32}, *[{"size": 32, "augment": [name]}] * 2)
    plain, one, other = inputs(reader, made)
    changed = [not torch.allclose(a, b, atol=1e-3) for a, b in zip(one, plain, strict=True)]
    assert any(changed)
    assert not torch.equal(one, other)  # two views of a sample are two draws


def test_augmentations_of_a_view_draw_numbers_of_their_own() -> None:
    """With one salt, whether a picture is mirrored would tell how it is cropped."""
    assert len(set(SALTS.values())) == len(SALTS)
    assert max(SALTS.values()) < 10  # ten a view


def test_augmentation_is_a_function_of_epoch_and_row(faces: Path) -> None:
    reader, made = views(faces, {"size": 32, "augment": ["simclr"]})
    numbers = torch.arange(4)
    stored = {"image": torch.from_numpy(reader.read("image", numbers.numpy()))}

    def epoch(number: int) -> Tensor:
        drawn = rng_keys(0, torch.full_like(numbers, number), numbers)
        return made(Batch(stored, torch.empty(0), numbers, drawn, [4]), True)[0]

    assert torch.equal(epoch(3), epoch(3))
    assert not torch.allclose(epoch(3), epoch(4), atol=0.05)


def test_a_reader_keeps_few_shards_open(tmp_path: Path) -> None:
    build(
        make_source("faces", {"train": 12, "test": 0, "size": 32}),
        tmp_path / "faces",
        shard_rows=3,
        progress=False,
    )
    all_open, one_open = Reader(tmp_path / "faces"), Reader(tmp_path / "faces", max_open_shards=1)
    order = np.array([0, 11, 4, 7, 1, 9])
    assert np.array_equal(all_open.read("image", order), one_open.read("image", order))
    assert len(all_open._open_shards) == 4
    assert len(one_open._open_shards) == 1
