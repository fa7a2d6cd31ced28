"""MATLAB files as MATLAB and others write them, with bounded memory; XRMB's, of any size.

python -m tests.sources.matlab_files --rows 1429236 --out /tmp/xrmb --format v5 v5-compressed v7.3
"""

import argparse
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.sources import make_source
from heron.sources.xrmb import PARTS, VIEWS

FILES = ["XRMBf2KALDI_window7_single1.mat", "XRMBf2KALDI_window7_single2.mat"]
FORMATS = ["v5", "v5-compressed", "v7.3"]
SHARES = {"train": 1429236, "tune": 85297, "test": 111314}  # rows as published
KINDS = {"f8": 6, "f4": 7, "i1": 8, "u1": 9, "i2": 10, "u2": 11, "i4": 12, "u4": 13, "i8": 14}
STORED = {"i1": 1, "u1": 2, "i2": 3, "u2": 4, "i4": 5, "u4": 6, "f4": 7, "f8": 9, "i8": 12}
COLUMNS = 16  # written at a time

Array = NDArray[Any]


def v5_header(order: str = "<") -> bytes:
    text = b"MATLAB 5.0 MAT-file, Platform: PCWIN64, Created on: Mon Jun 01 10:00:00 2015"
    return text.ljust(116) + bytes(8) + struct.pack(f"{order}HH", 0x0100, 0x4D49)


def v5_matrix(
    name: str, array: Array, order: str = "<", kind: int | None = None, flags: int = 0
) -> Iterator[bytes]:
    """An element: its head, and its columns. `kind` is that of the class, if not the dtype's."""
    stored = array.dtype.str[1:]
    dims = struct.pack(f"{order}{array.ndim}i", *array.shape)
    head = struct.pack(f"{order}IIII", 6, 8, flags << 8 | (kind or KINDS[stored]), 0)
    head += struct.pack(f"{order}II", 5, len(dims)) + _padded(dims)
    letters = name.encode()
    if len(letters) <= 4:  # within the tag
        head += struct.pack(f"{order}I", len(letters) << 16 | 1) + letters.ljust(4, b"\0")
    else:
        head += struct.pack(f"{order}II", 1, len(letters)) + _padded(letters)
    if 0 < array.nbytes <= 4:
        head += struct.pack(f"{order}I", array.nbytes << 16 | STORED[stored])
        padding = -array.nbytes % 4
    else:
        head += struct.pack(f"{order}II", STORED[stored], array.nbytes)
        padding = -array.nbytes % 8
    yield struct.pack(f"{order}II", 14, len(head) + array.nbytes + padding) + head
    flat = array.reshape((len(array), math.prod(array.shape[1:])), order="F")
    for at in range(0, flat.shape[1], COLUMNS):
        yield flat[:, at : at + COLUMNS].astype(order + stored).tobytes("F")
    yield bytes(padding)


def write_v5(
    path: Path, variables: Mapping[str, Array], compressed: bool = False, order: str = "<"
) -> None:
    elements = (v5_matrix(name, array, order) for name, array in variables.items())
    write_elements(path, elements, compressed, order)


def write_elements(
    path: Path, elements: Iterator[Iterator[bytes]], compressed: bool = False, order: str = "<"
) -> None:
    with path.open("wb") as stream:
        stream.write(v5_header(order))
        for element in elements:
            if not compressed:
                stream.writelines(element)
                continue
            start, zipped = stream.tell(), zlib.compressobj(1)
            stream.write(bytes(8))
            stream.writelines(zipped.compress(piece) for piece in element)
            stream.write(zipped.flush())
            end = stream.tell()
            stream.seek(start)
            stream.write(struct.pack(f"{order}II", 15, end - start - 8))
            stream.seek(end)


def write_v73(
    path: Path,
    variables: Mapping[str, Array],
    chunks: tuple[int, int] | None = (COLUMNS, 4096),
    **options: Any,
) -> None:
    """Axes in reverse, gzipped chunks (None: one stretch), and MATLAB's own 512 bytes in front."""
    import h5py

    with h5py.File(path, "w", userblock_size=512) as file:
        for name, array in variables.items():
            rows, columns = array.shape
            if chunks is not None:
                sides = min(chunks[0], columns), min(chunks[1], rows)
                options |= {"chunks": sides, "compression": "gzip", "compression_opts": 3}
            data = file.create_dataset(name, (columns, rows), array.dtype, **options)
            kind = {"f4": "single", "f8": "double"}.get(array.dtype.str[1:], array.dtype.name)
            data.attrs["MATLAB_class"] = np.bytes_(kind)
            for at in range(0, columns, COLUMNS):
                data[at : at + COLUMNS] = array[:, at : at + COLUMNS].T
    with path.open("r+b") as stream:
        stream.write(b"MATLAB 7.3 MAT-file, Platform: PCWIN64".ljust(124) + b"\x00\x02IM")


WRITERS: dict[str, Callable[[Path, Mapping[str, Array]], None]] = {
    "v5": write_v5,
    "v5-compressed": lambda path, variables: write_v5(path, variables, compressed=True),
    "v7.3": write_v73,
}


def write_xrmb(
    folder: Path, variables: tuple[Mapping[str, Array], Mapping[str, Array]], form: str = "v5"
) -> dict[str, Path]:
    """XRMB's two files; the options of the source that reads them."""
    paths = [folder / name for name in FILES]
    for path, arrays in zip(paths, variables, strict=True):
        WRITERS[form](path, arrays)
    return {"single1": paths[0], "single2": paths[1]}


def draw(folder: Path, rows: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """The variables of both files, rows of `frames`, as arrays mapped from files in a folder."""
    counts = {part: -(-rows * share // SHARES["train"]) for part, share in SHARES.items()}
    more = {"test": counts["tune"] + counts["test"], "classes": 40}
    source = make_source("frames", {"train": counts["train"], **more})
    files: tuple[dict[str, Array], dict[str, Array]] = ({}, {})
    for part, count in counts.items():
        split = "train" if part == "train" else "test"
        skip = counts["tune"] if part == "test" else 0
        for at, view in enumerate(source.views):
            shape = (count, view.shape[0])
            name = PARTS[part][at]
            files[at][name] = np.memmap(folder / name, np.float32, "w+", 0, shape, "F")
        labels = files[1][PARTS[part].labels] = np.zeros((count, 1))
        for start in range(0, count, 4096):
            stop = min(start + 4096, count)
            drawn = source.read(split, skip + start, skip + stop)
            labels[start:stop, 0] = drawn.labels
            for at, name in enumerate(VIEWS):
                files[at][PARTS[part][at]][start:stop] = drawn.views[name]
    return files


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=SHARES["train"], help="rows of train")
    parser.add_argument("--out", type=Path, required=True, help="each format is a folder in it")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=["v5"])
    arguments = parser.parse_args()
    (rows := arguments.out / "rows").mkdir(parents=True, exist_ok=True)
    variables = draw(rows, arguments.rows)
    for form in arguments.format:
        (folder := arguments.out / form).mkdir(exist_ok=True)
        write_xrmb(folder, variables, form)
    for path in rows.iterdir():
        path.unlink()
    rows.rmdir()


if __name__ == "__main__":
    main()
