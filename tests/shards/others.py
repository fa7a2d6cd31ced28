"""Tars as others write them, for the tests of indexing and of what others can read."""

import tarfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from heron.base.workers import Processes
from heron.shards.index import ShardIndex
from heron.shards.manifest import load_manifest
from heron.sources.foreign import Outcome, index
from heron.sources.layout import Layout

Files = Sequence[tuple[str, bytes]]


def pixels(number: int, height: int = 8, width: int = 8) -> Any:
    picture = np.full((height, width, 3), 40 * (number % 6), np.uint8)
    picture[: height // 2] = 200
    return picture


def jpeg(number: int, height: int = 8, width: int = 8) -> bytes:
    data: bytes = simplejpeg.encode_jpeg(pixels(number, height, width))
    return data


def png(picture: Any) -> bytes:
    stream = BytesIO()
    Image.fromarray(pixels(picture) if isinstance(picture, int) else picture).save(stream, "PNG")
    return stream.getvalue()


def npy(values: Any, dtype: str | None = None) -> bytes:
    stream = BytesIO()
    np.save(stream, np.array(values, dtype))
    return stream.getvalue()


def info(name: str, payload: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A header with some of its fields, and the payload."""
    header = tarfile.TarInfo(name)
    header.size = len(payload)
    for key, value in fields.items():
        setattr(header, key, value)
    return header, payload


def write_tar(
    path: Path,
    files: Sequence[tuple[str | tarfile.TarInfo, bytes]],
    form: int = tarfile.DEFAULT_FORMAT,
) -> Path:
    """A tar by Python's own writer."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, payload in files:
            header = info(name, payload)[0] if isinstance(name, str) else name
            tar.addfile(header, BytesIO(payload))
    return path


def write_wds(path: Path, samples: Sequence[Mapping[str, Any]], **options: Any) -> Path:
    """A tar by WebDataset's writer."""
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(path), **options) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return path


def cats(first: int, count: int) -> list[dict[str, Any]]:
    """Pictures of three classes, as WebDataset's tutorials write them."""
    return [
        {"__key__": f"{n:06d}", "jpg": jpeg(n), "cls": n % 3} for n in range(first, first + count)
    ]


def run(folder: Path, workers: int = 1, overwrite: bool = False, **options: Any) -> Outcome:
    """Index a folder, with options as on the command line."""
    layout = Layout.of(options)
    return index(folder, layout, executor=Processes(workers), progress=False, overwrite=overwrite)


def labels(folder: Path) -> list[Any]:
    """The labels of all rows, in their order."""
    shards = [s for shards in load_manifest(folder).splits.values() for s in shards]
    found: list[Any] = [
        row for s in shards for row in ShardIndex.read(folder / s.index_file).labels.tolist()
    ]
    return found
