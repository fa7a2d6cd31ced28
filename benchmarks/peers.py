"""Loaders of others, each on the same rows in its own format.

    pip install mosaicml-streaming litdata

Both are imported where they are used: neither is needed to run the benchmark.
"""

import importlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from benchmarks.loaders import ahead, dataloader_batches
from benchmarks.sets import CLASSES, payloads
from heron.data.reader import Reader

CHUNK_BYTES = 1 << 26  # both packages' default, and their documents'
VIEWS = ("view1", "view2")


class Samples:
    """The first rows of a set as dictionaries; pickled, it is opened anew."""

    def __init__(self, shards: Path, count: int) -> None:
        self.shards, self.count = shards, count
        self.pictures: list[bytes] = []
        self.arrays: dict[str, NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"shards": self.shards, "count": self.count, "pictures": [], "arrays": {}}

    def __call__(self, row: int) -> dict[str, Any]:
        if not self.pictures and not self.arrays:
            self._open()
        if self.pictures:
            return {"image": self.pictures[row], "label": row % CLASSES}
        return {name: array[row] for name, array in self.arrays.items()} | {"label": row}

    def _open(self) -> None:
        reader = Reader(self.shards)
        if reader.manifest.block_rows is None:
            self.pictures = payloads(self.shards)
        else:
            rows = np.arange(self.count)
            self.arrays = {name: reader.read(name, rows) for name in VIEWS}


def write_streaming(samples: Samples, folder: Path) -> None:
    """MDS shards: pictures in its encoding `jpeg`, vectors as arrays of a known shape."""
    streaming = importlib.import_module("streaming")
    first = samples(0)
    columns = {"image": "jpeg", "label": "int"}
    if "image" not in first:
        columns = {view: f"ndarray:float32:{len(first[view])}" for view in VIEWS} | {"label": "int"}
    scratch = folder.with_suffix(".jpg")  # bytes are kept as they are when they come from a file
    with streaming.MDSWriter(out=str(folder), columns=columns) as writer:
        for row in range(samples.count):
            sample = samples(row)
            if "image" in sample:
                scratch.write_bytes(sample["image"])
                sample["image"] = Image.open(scratch)
            writer.write(sample)


def write_litdata(samples: Samples, folder: Path) -> None:
    """Chunks: pictures as their bytes, vectors as arrays."""
    litdata = importlib.import_module("litdata")
    litdata.optimize(
        samples,
        list(range(samples.count)),
        output_dir=str(folder),
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,
        verbose=False,
    )


def streaming(folder: Path, batch: int, workers: int) -> Iterator[int]:
    """A StreamingDataset that shuffles, in a DataLoader."""
    package = importlib.import_module("streaming")
    link = folder.with_name(f"{folder.name}-{workers}")  # it refuses a folder that another reads
    link.symlink_to(folder)
    dataset = package.StreamingDataset(local=str(link), shuffle=True, batch_size=batch)
    return dataloader_batches(dataset, batch, workers, collate_fn=collated)


def litdata(folder: Path, batch: int, workers: int) -> Iterator[int]:
    """A StreamingDataset that shuffles, in the package's own loader."""
    package = importlib.import_module("litdata")
    dataset = package.StreamingDataset(
        str(folder), cache_dir=str(folder.with_name(f"{folder.name}-cache")), shuffle=True
    )
    loader = package.StreamingDataLoader(
        dataset,
        batch_size=batch,
        num_workers=workers,
        drop_last=True,
        collate_fn=collated,
        **ahead(workers),
    )
    while True:
        for columns in loader:
            yield len(columns["label"])


def collated(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch; pictures are decoded with Pillow."""
    columns = {name: [_array(sample[name]) for sample in samples] for name in samples[0]}
    return {name: torch.from_numpy(np.stack(column)) for name, column in columns.items()}


def _array(value: Any) -> NDArray[Any]:
    if isinstance(value, bytes):
        value = Image.open(BytesIO(value))
    return np.asarray(value.convert("RGB") if isinstance(value, Image.Image) else value)
