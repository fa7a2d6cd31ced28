"""The data sets of `benchmarks.data`: in our shards, and in the forms that others read."""

import tarfile
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import numpy as np
import simplejpeg

from heron.base.workers import Processes
from heron.data.reader import Reader
from heron.data.streams import Streams
from heron.experiment.config import parse_config
from heron.experiment.open_data import open_data
from heron.shards.build import build
from heron.shards.manifest import Labels, View
from heron.shards.source import Rows
from heron.shards.write_shard import npy
from heron.sources import make_source
from heron.sources.base import SyntheticSource

CLASSES = 10  # folders of pictures
TARS = 4  # of members a row, so that every worker has some


def build_pictures(folder: Path, count: int, celeba: Path | None, side: int, workers: int) -> None:
    """Pictures in shards: the first of CelebA, or faces that are drawn."""
    if celeba is None:
        source = make_source("faces", {"train": count, "test": 0, "size": side})
    else:
        lines = (celeba.parent / "list_attr_celeba.txt").read_text().splitlines()
        attribute_lines = lines[2 : 2 + count]
        folder.mkdir(parents=True)
        attributes = folder.with_name("attributes.txt")
        attributes.write_text(
            "\n".join([str(len(attribute_lines)), lines[1], *attribute_lines, ""])
        )
        options = {"images": celeba, "attributes": attributes, "missing": "leave_out"}
        source = make_source("celeba", options)
    build(
        source,
        folder,
        shard_rows=max(1, min(1000, count // 4)),
        executor=Processes(workers),
        progress=False,
    )


def build_vectors(folder: Path, count: int, workers: int) -> None:
    """Two views of 273 and 112 values in shards."""
    source = make_source("frames", {"train": count, "test": 0})
    build(source, folder, executor=Processes(workers), progress=False)


def build_tiles(folder: Path, count: int, workers: int) -> None:
    """Many small pictures in shards."""
    build(Tiles(seed=0, train=count, test=0), folder, executor=Processes(workers), progress=False)


class Tiles(SyntheticSource):
    """JPEGs of 32 x 32, each of an even colour of its own: quick to draw."""

    name: ClassVar[str] = "tiles"
    examples: ClassVar[str] = ""
    block_rows: ClassVar[int | None] = None

    @property
    def views(self) -> list[View]:
        return [View(name="image", kind="image", shape=(32, 32, 3), dtype="uint8")]

    @property
    def labels(self) -> Labels:
        return Labels(kind="multi_class", names=[str(number) for number in range(CLASSES)])

    def read(self, split: str, start: int, stop: int) -> Rows:
        numbers = np.arange(start, stop)
        colours = np.random.default_rng([self.seed, start]).integers(0, 256, (len(numbers), 3))
        pictures = [
            simplejpeg.encode_jpeg(np.full((32, 32, 3), colour, np.uint8)) for colour in colours
        ]
        keys = [f"{number:06d}" for number in numbers.tolist()]
        return Rows({"image": pictures}, numbers % CLASSES, keys)


def open_set(folder: Path, views: list[str], batch: int, size: int | None, workers: int) -> Streams:
    """The streams of a run whose every row is labelled."""
    split = Reader(folder).splits[0]
    return open_data(
        parse_config(
            {
                "run": {"dir": str(folder / "run")},
                "data": {
                    "path": str(folder),
                    "split": split,
                    "protocol": {"test": split},
                    "batch": {"labelled": batch},
                    "views": [{"stored": view, "size": size} for view in views],
                    "epoch": "labelled",
                    "workers": workers,
                },
                "objective": {"nt_xent": {}},
            }
        )
    )


def payloads(folder: Path) -> list[bytes]:
    """The bytes of every picture, in the order of the shards."""
    pictures = []
    for shard, index in zip((reader := Reader(folder)).shards, reader.indexes, strict=True):
        data = (folder / shard.file).read_bytes()
        extents = zip(index.offsets[:, 0].tolist(), index.lengths[:, 0].tolist(), strict=True)
        pictures += [data[offset : offset + length] for offset, length in extents]
    return pictures


def write_files(shards: Path, folder: Path) -> None:
    """A file a picture, in folders of classes."""
    for number, data in enumerate(payloads(shards)):
        path = folder / str(number % CLASSES) / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def write_arrays(shards: Path, folder: Path) -> None:
    """An .npy file a view."""
    folder.mkdir()
    reader = Reader(shards)
    rows = reader.split_rows(reader.splits[0])
    for view in reader.manifest.views:
        np.save(folder / f"{view.name}.npy", reader.read(view.name, rows))


def write_members(shards: Path, folder: Path, count: int) -> None:
    """Tars of a member for every view of every row, as WebDataset's own writer makes them."""
    folder.mkdir()
    reader = Reader(shards)
    rows = reader.split_rows(reader.splits[0])[:count]
    arrays = {f"{v.name}.npy": reader.read(v.name, rows) for v in reader.manifest.views}
    arrays["labels.npy"] = reader.labels(rows)
    for number, tar_rows in enumerate(np.array_split(np.arange(len(rows)), TARS)):
        with tarfile.open(folder / f"{number:06d}.tar", "w") as tar:
            for row in tar_rows.tolist():
                for suffix, array in arrays.items():
                    payload = npy(array[row])
                    info = tarfile.TarInfo(f"{row:06d}.{suffix}")
                    info.size = len(payload)
                    tar.addfile(info, BytesIO(payload))
