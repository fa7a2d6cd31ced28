"""Rows of an open shard, however they lie in it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heron.data.batches import Batch
from heron.data.dataset import open_reader
from heron.data.open_shards import OpenShard
from heron.data.options import Data
from heron.data.reader import Reader
from heron.data.views import Views
from heron.shards.build import build
from heron.shards.cache import LocalFile
from heron.sources import make_source
from heron.sources.foreign import index
from heron.sources.layout import Layout
from tests.shards.others import npy, write_tar

RANDOM = np.random.default_rng(0)


def built(folder: Path, shard_rows: int | None = None, **arrays: np.ndarray) -> Reader:
    np.savez(folder / "mine.npz", **arrays)  # type: ignore[arg-type]
    source = make_source("arrays", {"npz": folder / "mine.npz"})
    build(source, folder / "mine", shard_rows=shard_rows, progress=False)
    return Reader(folder / "mine")


@pytest.mark.parametrize("rows", [3, 256, 257, 700, 9000])
def test_blocks_of_any_number_of_rows(tmp_path: Path, rows: int) -> None:
    view = RANDOM.normal(size=(rows, 3)).astype("f4")
    reader = built(tmp_path, view=view, labels=np.arange(rows) % 3)
    order = RANDOM.permutation(rows)
    assert np.array_equal(reader.read("view", order), view[order])


def test_more_shards_than_may_be_open(tmp_path: Path) -> None:
    """Rows of shards that closed meanwhile are found again, and those of one batch all at once."""
    view = RANDOM.normal(size=(3000, 3)).astype("f4")
    many = built(tmp_path, 512, view=view, labels=np.arange(3000) % 3)
    assert len(many.shards) == 6
    reader = Reader(many.store, max_open_shards=2)
    for _ in range(3):
        order = RANDOM.permutation(3000)
        assert np.array_equal(reader.read("view", order), view[order])
        some = order[np.isin(order, many.shard_rows("all").rows_of(0))]
        assert np.array_equal(reader.read("view", some), view[some])


def test_raw_pictures_are_rows_of_blocks(tmp_path: Path) -> None:
    pictures = RANDOM.integers(0, 256, (300, 6, 5, 3)).astype(np.uint8)
    grey = RANDOM.integers(0, 256, (300, 4, 4)).astype(np.uint8)
    reader = built(tmp_path, image=pictures, grey=grey, labels=np.arange(300) % 3)
    order = RANDOM.permutation(300)
    assert np.array_equal(reader.read("image", order), pictures[order])
    assert np.array_equal(reader.read("grey", order), grey[order][..., None])


def test_vectors_in_tars_of_others_are_a_row_a_sample(tmp_path: Path) -> None:
    view = RANDOM.normal(size=(20, 7)).astype("f4")
    for shard in range(2):
        members = [
            (f"{row:03d}.{suffix}", data)
            for row in range(10 * shard, 10 * shard + 10)
            for suffix, data in (("npy", npy(view[row])), ("cls", str(row % 3).encode()))
        ]
        write_tar(tmp_path / f"part-{shard}.tar", members)
    index(tmp_path, Layout(vector=["npy"], label="cls"), progress=False)
    reader = Reader(tmp_path)
    order = RANDOM.permutation(20)
    assert np.array_equal(reader.read("vector", order), view[order])
    assert np.array_equal(reader.labels(order), order % 3)


def test_a_block_of_another_shape_is_named(tmp_path: Path) -> None:
    reader = built(tmp_path, view=np.ones((5, 3), "f4"), labels=np.arange(5) % 3)
    wide = reader.view("view").model_copy(update={"shape": (4,)})
    held = LocalFile(tmp_path / "mine" / reader.shards[0].file)
    (fault,) = OpenShard(held, "here", reader.indexes[0]).blocks(wide, 0).faults.values()
    assert re.search(r"here sample .*: view 'view' must be .*, got float32 \(5, 3\)", fault)


@pytest.mark.parametrize(("size", "augment"), [(2, []), ([3, 4], ["crop"]), (4, ["simclr"])])
def test_raw_pictures_are_made_smaller_on_the_device(
    tmp_path: Path, size: Any, augment: list[str]
) -> None:
    """Nothing is decoded, so there is no draft."""
    pictures = RANDOM.integers(0, 256, (30, 8, 8, 3)).astype(np.uint8)
    built(tmp_path, image=pictures, labels=np.arange(30) % 3)
    views = [{"stored": "image", "size": size, "augment": augment}]
    batch = {"labelled": 4}
    path = str(tmp_path / "mine")
    config = Data.model_validate({"path": path, "batch": batch, "views": views})
    reader = open_reader(config)
    rows = np.arange(5)
    assert np.array_equal(reader.read("image", rows), pictures[:5])
    made = Views(reader, config, torch.device("cpu"))
    stored = {"image": torch.from_numpy(reader.read("image", rows))}
    numbers = torch.from_numpy(rows)
    (x,) = made(Batch(stored, torch.empty(0), numbers, numbers, [5]), True)
    assert list(x.shape) == [5, 3, *(size if isinstance(size, list) else [size, size])]
