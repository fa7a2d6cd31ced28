"""Loaders of pictures and of vectors: the bare loops, ours, a folder of files, and webdataset.

Each yields, without end, the number of rows of one batch after another, decoded in memory.
"""

import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.race import PREFETCH
from benchmarks.sets import open_set
from heron.data.batches import batches
from heron.data.reader import Reader
from heron.data.streams import ShardBatches
from heron.experiment.config import parse_config
from heron.experiment.open_data import open_data, open_process_batches

FOREVER = 1 << 40
SHUFFLE = 1000  # samples that webdataset shuffles within, as in its documents


def bare_pictures(
    folder: Path, batch: int, size: int | None, share: tuple[int, int]
) -> Iterator[int]:
    """Reads bytes at known offsets and decodes them into one array, again and again.

    The rows are those of our first epoch, in its order; process i of n takes every n-th batch.
    """
    streams = open_set(folder, ["image"], batch, size, 0)
    reader, stream = streams.reader, streams.labelled
    assert stream is not None
    files = [os.open(folder / shard.file, os.O_RDONLY) for shard in reader.shards]
    steps = []
    for t in range(stream.steps_per_epoch)[share[0] :: share[1]]:
        rows = stream.batch_rows(t)
        shards = np.searchsorted(reader.starts, rows, side="right") - 1
        samples = (rows - reader.starts[shards]).tolist()
        indexes = [reader.indexes[shard] for shard in shards]
        steps.append(
            [
                (files[shard], int(index.lengths[sample, 0]), int(index.offsets[sample, 0]))
                for shard, index, sample in zip(shards.tolist(), indexes, samples, strict=True)
            ]
        )
    shape = reader.decoders["image"].shape
    height, width = shape[:2] if shape != reader.view("image").shape else (0, 0)
    out = np.empty((batch, *shape), np.uint8)
    while True:
        for step in steps:
            for row, (file, length, offset) in zip(out, step, strict=True):
                data = os.pread(file, length, offset)
                simplejpeg.decode_jpeg(data, min_height=height, min_width=width, buffer=row)
            yield batch


def bare_vectors(shards: Path, folder: Path, batch: int, share: tuple[int, int]) -> Iterator[int]:
    """Indexes one mapped .npy file per view by the rows of our first epoch, in its order."""
    names = [path.stem for path in sorted(folder.glob("*.npy"))]
    stream = open_set(shards, names, batch, None, 0).labelled
    assert stream is not None
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in names]
    steps = [stream.batch_rows(t) for t in range(stream.steps_per_epoch)[share[0] :: share[1]]]
    while True:
        for rows in steps:
            arrays_of_batch = [array[rows] for array in arrays]
            yield len(arrays_of_batch[0])


def ours(
    folder: Path, views: list[str], batch: int, size: int | None, workers: int
) -> Iterator[int]:
    """The batches of a run: stored views, labels, row numbers and keys."""
    streams = open_set(folder, views, batch, size, workers)
    for batch_ in batches(ShardBatches(streams, 0, 0, 1), 0, FOREVER, workers):
        yield len(batch_.indices)


class Files(Dataset[tuple[NDArray[np.uint8], int]]):
    """Does what torchvision's ImageFolder does with its default loader."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[NDArray[np.uint8], int]:
        path = self.paths[row]
        with path.open("rb") as stream:
            return np.asarray(Image.open(stream).convert("RGB")), int(path.parent.name)


def stacked(samples: list[tuple[NDArray[Any], int]]) -> tuple[Tensor, Tensor]:
    """A batch of samples of an array and a label."""
    arrays, labels = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(arrays)), torch.tensor(labels)


def files(folder: Path, batch: int, workers: int) -> Iterator[int]:
    """Pillow on files, in a DataLoader that shuffles."""
    return dataloader_batches(Files(folder), batch, workers, shuffle=True, collate_fn=stacked)


def endless(folder: Path, batch: int, workers: int) -> Iterator[int]:
    """The batches of a run on our shards as tars without an index: `data.webdataset`."""
    tars = [str(path) for path in sorted(folder.glob("*.tar"))]
    split = Reader(folder).splits[0]
    config = parse_config(
        {
            "run": {"dir": str(folder / "run")},
            "data": {
                "path": str(folder),
                "split": split,
                "protocol": {"test": split},
                "webdataset": {"labelled": tars, "samples_per_epoch": FOREVER, "shuffle": SHUFFLE},
                "batch": {"labelled": batch},
                "views": [{"stored": "image"}],
                "workers": workers,
            },
            "objective": {"bce": {}},
        }
    )
    source = open_process_batches(open_data(config), config, 0, 1, 0)
    for batch_ in batches(source, 0, FOREVER, workers):
        yield len(batch_.indices)


def decoded(sample: dict[str, Any]) -> tuple[NDArray[np.uint8], Any]:
    """Picture and label of a sample of webdataset."""
    return simplejpeg.decode_jpeg(sample["jpg"]), np.load(BytesIO(sample["labels.npy"]))[0]


def joined(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A batch of pictures and labels."""
    pictures, labels = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(pictures)), torch.from_numpy(np.stack(labels))


def bare_web(folder: Path, batch: int, workers: int) -> Iterator[int]:
    """Webdataset's own loop with our decoder, into batches in memory."""
    import webdataset

    tars = [str(path) for path in sorted(folder.glob("*.tar"))]
    samples = webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(SHUFFLE).map(decoded)
    dataset = samples.batched(batch, collation_fn=joined, partial=False).repeat()
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=workers, **ahead(workers))
    for pictures in loader:
        yield len(pictures[0])


def dataloader_batches(dataset: Any, batch: int, workers: int, **options: Any) -> Iterator[int]:
    """Yields the batch sizes of endless epochs in PyTorch's DataLoader."""
    loader: DataLoader[Any] = DataLoader(
        dataset, batch, num_workers=workers, drop_last=True, **options, **ahead(workers)
    )
    while True:
        for columns in loader:
            yield len(next(iter(columns.values())) if isinstance(columns, dict) else columns[0])


def ahead(workers: int) -> dict[str, Any]:
    """Options of every loader's workers: they persist between epochs and read ahead."""
    return {"prefetch_factor": PREFETCH, "persistent_workers": True} if workers else {}


def web_pictures(folder: Path, batch: int, workers: int) -> Iterator[int]:
    """Webdataset on our shards, decoding with Pillow."""
    return web(folder, "rgb8", ["jpg", "labels.npy"], batch, workers)


def web_vectors(folder: Path, batch: int, workers: int) -> Iterator[int]:
    """Webdataset on tars of a member for every view of every row."""
    suffixes = ["view1.npy", "view2.npy", "labels.npy"]
    return web(folder, None, suffixes, batch, workers)


def web(
    folder: Path, decoder: str | None, suffixes: list[str], batch: int, workers: int
) -> Iterator[int]:
    """The pipeline of webdataset's documents."""
    import webdataset  # in the extra `dev`

    tars = [str(path) for path in sorted(folder.glob("*.tar"))]
    samples = webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(SHUFFLE)
    samples = samples.decode(decoder) if decoder else samples.decode()
    dataset = samples.to_tuple(*suffixes).batched(batch, partial=False).repeat()
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=workers, **ahead(workers))
    for columns in loader:
        yield len(columns[0])
