"""CelebA: its pictures in their zip or folder, its attributes and its partition."""

from __future__ import annotations

import logging
import os
import re
import zipfile
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.shards.errors import DOWNLOAD, SourceError
from heron.shards.manifest import InputFile, Labels, View
from heron.shards.picture import read_header
from heron.shards.sources.base import WHOLE, FileOrFolder, Rows, Source, file_record
from heron.shards.sources.folder import folder_record
from heron.shards.sources.zips import HTML, ZIP, is_html, list_zip, open_zip, read_zip

SPLITS = {"0": "train", "1": "val", "2": "test"}
ALIGNED = "img_align_celeba"  # the folder of pictures, in the publisher's zip and unpacked
PICTURE = re.compile(r"([A-Za-z0-9_-]{1,64})\.jpg")  # whose stem is a key
BITS = {"-1": 0, "1": 1}
END = b"\xff\xd9"  # of a JPEG


class CelebA(Source):
    """CelebA: the aligned pictures, in their zip or unpacked, with their attributes.

    With a partition the splits are train, val and test; without one, or merged, all is one split,
    `all`. Rows are in the order of the attribute file. All files must name the same pictures,
    unless `--missing leave_out` asks for those alone that all of them name. Hidden files and
    __MACOSX are ignored.
    """

    name: ClassVar[str] = "celeba"
    examples: ClassVar[str] = (
        "heron shards build celeba --images img_align_celeba.zip "
        "--attributes list_attr_celeba.txt --partition list_eval_partition.txt --out data/celeba"
    )
    block_rows: ClassVar[int | None] = None

    images: FileOrFolder = Field(description=f"{ALIGNED}.zip as it is, or the folder {ALIGNED}")
    attributes: FilePath = Field(description="list_attr_celeba.txt, or a zip of it")
    partition: FilePath | None = Field(
        None, description="list_eval_partition.txt (default: one split, `all`)"
    )
    merge: bool = Field(False, description="true: one split `all`, whatever the partition says")
    missing: Literal["error", "leave_out"] = Field(
        "error",
        description="what to do with a picture that one file names and another lacks; leave_out: "
        "leave it out, and say of how many this was done",
    )

    @property
    def views(self) -> list[View]:
        """One picture, of the size of the first: 218 x 178."""
        return [View(name="image", kind="image", shape=(*self._size, 3), dtype="uint8")]

    @property
    def labels(self) -> Labels:
        """The attributes that the second line of their file names."""
        return Labels(kind="multi_label", names=self._table.attributes)

    @cached_property
    def splits(self) -> dict[str, int]:
        """The splits that have rows; a warning says what is left out (workers never ask this)."""
        splits = {split: len(rows) for split, rows in self._rows.items()}
        if self._gaps:
            logging.getLogger(__name__).warning(
                "%s: left out what the files do not share; %s rows remain: %s",
                self.name,
                f"{sum(splits.values()):,}",
                "; ".join(self._gaps),
            )
        return splits

    @property
    def files(self) -> list[Path]:
        """The pictures (a zip or a folder), the attributes, and the partition where given."""
        return [self.images, self.attributes, *([self.partition] if self.partition else [])]

    def input_files(self) -> list[InputFile]:
        """Returns a record for each file; a folder has one for all of its pictures."""
        if self.images.is_file():
            return super().input_files()
        pictures = folder_record(self._pictures.path, list(self._pictures.paths))
        return [pictures, *map(file_record, self.files[1:])]

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns pictures of a split, their bytes as they are."""
        rows = self._rows[split][start:stop]
        names = [self._table.files[row] for row in rows]
        images = [self._picture(name) for name in names]
        return Rows(
            {"image": images}, self._table.labels[rows], [n.removesuffix(".jpg") for n in names]
        )

    def _picture(self, name: str) -> bytes:
        data, first = self._pictures.read(name), self._table.files[self._first]
        if (size := self._size_of(name, data)) != self._size:
            raise SourceError(
                f"{self._pictures.path.name}: {name} is {_times(size)} pixels; expected "
                f"{_times(self._size)}, as {first} is: the aligned pictures are all of one size; "
                f"give {ALIGNED}, not the pictures in the wild"
            )
        return data

    def _size_of(self, name: str, data: bytes) -> tuple[int, int]:
        """Height and width of a picture in pixels, from its header."""
        try:
            header = read_header(data, "JPEG")
            if END not in data:
                raise ValueError("is cut short; expected a whole JPEG")
        except ValueError as fault:
            raise SourceError(f"{self._pictures.path.name}: {name} {fault}; {DOWNLOAD}") from None
        return header.height, header.width

    @cached_property
    def _first(self) -> int:
        """The first row of the first split."""
        return int(next(iter(self._rows.values()))[0])

    @cached_property
    def _size(self) -> tuple[int, int]:
        name = self._table.files[self._first]
        return self._size_of(name, self._pictures.read(name))

    @cached_property
    def _rows(self) -> dict[str, NDArray[np.int64]]:
        """The rows of the attribute file that each split has."""
        if self._gaps and self.missing == "error":
            raise SourceError(
                f"{'; '.join(self._gaps)}; expected files that name the same pictures; give what "
                "is missing, or build those that all files name with --missing leave_out"
            )
        files, pictures, parts = self._table.files, self._pictures.paths, self._parts
        kept = np.array([f in pictures and (parts is None or f in parts) for f in files])
        if not kept.any():
            raise SourceError(
                f"no picture is in all of {', '.join(path.name for path in self.files)}; expected "
                "some; give the files of one data set"
            )
        if self.merge or parts is None:
            return {WHOLE: np.flatnonzero(kept)}
        split_of = np.array([parts.get(file, "") for file in files])
        rows = {split: np.flatnonzero(kept & (split_of == split)) for split in SPLITS.values()}
        return {name: found for name, found in rows.items() if len(found)}

    @cached_property
    def _gaps(self) -> list[str]:
        """What one file names and another lacks, in words."""
        listed: _Named = self.attributes.name, dict.fromkeys(self._table.files)
        others: list[_Named] = [(self._pictures.path.name, self._pictures.paths)]
        if self.partition and self._parts is not None:
            others.append((self.partition.name, self._parts))
        pairs = [pair for other in others for pair in ((listed, other), (other, listed))]
        return [gap for one, other in pairs if (gap := _gap(one, other))]

    @cached_property
    def _table(self) -> _Attributes:
        return read_attributes(self.attributes)

    @cached_property
    def _parts(self) -> dict[str, str] | None:
        return None if self.partition is None else read_partition(self.partition)

    @cached_property
    def _pictures(self) -> _Pictures:
        return open_pictures(self.images)


_Named = tuple[str, Collection[str]]  # a file and the pictures that it names
_Line = tuple[int, list[str]]  # its number in the file, from 1 on, and its words


class _Attributes(NamedTuple):
    """The attribute file: uint8 [files, attributes], 1 where an attribute holds."""

    attributes: list[str]
    files: list[str]
    labels: NDArray[np.uint8]


class _Pictures(NamedTuple):
    """Where each picture lies: in the archive, or, where there is none, in the folder."""

    path: Path
    paths: dict[str, str]  # file name -> its path in the archive or folder
    archive: zipfile.ZipFile | None

    def read(self, name: str) -> bytes:
        """Returns the bytes of a picture."""
        if self.archive is None:
            return (self.path / self.paths[name]).read_bytes()
        return read_zip(self.archive, self.path, self.paths[name])


def read_attributes(path: Path) -> _Attributes:
    """Reads list_attr_celeba.txt: a count, the names, and FILE with -1 or 1 for each name."""
    where, lines = _read_lines(path)
    first, head = next(lines, (1, []))
    if len(head) != 1 or not head[0].isdecimal():
        raise SourceError(
            f"{where}, line {first}: found {_short(' '.join(head))}; expected the count of "
            "pictures alone; give list_attr_celeba.txt as its publisher hands it out"
        )
    names = next(lines, (2, []))[1]
    files: list[str] = []
    bits = bytearray()
    for number, file, values in _check_pictures(where, lines):
        if len(values) != len(names):
            raise SourceError(
                f"{where}, line {number}: {len(values)} values; expected {len(names)}, one for "
                f"each attribute; {DOWNLOAD}"
            )
        for name, value in zip(names, values, strict=True):
            if value not in BITS:
                raise SourceError(
                    f"{where}, line {number}, attribute {name!r}: found {_short(value)}; expected "
                    f"-1 or 1; {DOWNLOAD}"
                )
        files.append(file)
        bits.extend(BITS[value] for value in values)
    if len(files) != int(head[0]):
        raise SourceError(
            f"{where}: {len(files):,} rows; expected {int(head[0]):,}, the count in line {first}; "
            f"{DOWNLOAD}"
        )
    if not files or not names:
        raise SourceError(
            f"{where}: {len(names)} attributes of {len(files)} pictures; expected some; {DOWNLOAD}"
        )
    labels = np.frombuffer(bytes(bits), np.uint8).reshape(len(files), len(names))
    return _Attributes(names, files, labels)


def read_partition(path: Path) -> dict[str, str]:
    """Reads the split of each picture from list_eval_partition.txt: FILE and 0, 1 or 2."""
    where, lines = _read_lines(path)
    parts: dict[str, str] = {}
    for number, file, values in _check_pictures(where, lines):
        if len(values) != 1 or values[0] not in SPLITS:
            raise SourceError(
                f"{where}, line {number}: found {_short(' '.join(values))} for {file}; expected "
                f"0 (train), 1 (val) or 2 (test); {DOWNLOAD}"
            )
        parts[file] = SPLITS[values[0]]
    return parts


def open_pictures(path: Path) -> _Pictures:
    """Lists the pictures of a zip or a folder by their file names."""
    if path.is_dir():
        path = path.resolve()
        path = path / ALIGNED if (path / ALIGNED).is_dir() else path
        archive = None
        members = sorted(name for name in os.listdir(path) if not name.startswith("."))
    else:
        archive = open_zip(path, f"{ALIGNED}.zip, or a folder of the pictures")
        members = list_zip(archive, path)
    paths: dict[str, str] = {}
    for member in members:
        name = member.rpartition("/")[2]
        if not PICTURE.fullmatch(name):
            raise SourceError(
                f"{path.name}: {_short(member)} is no picture; expected NAME.jpg, its name of "
                "letters, digits, '-' and '_'; give the file of another release, or move it away"
            )
        if name in paths:
            raise SourceError(
                f"{path.name}: {name} comes twice, as {paths[name]} and as {member}; expected a "
                "name for each picture; remove one of them"
            )
        paths[name] = member
    return _Pictures(path, paths, archive)


def _read_lines(path: Path) -> tuple[str, Iterator[_Line]]:
    """Returns what to call a list, and its lines that are not blank; a zip of it is read as is."""
    data, where = path.read_bytes(), path.name
    if data.startswith(ZIP):
        with open_zip(path, "a zip of one list") as archive:
            lists = [name for name in list_zip(archive, path) if name.lower().endswith(".txt")]
            if len(lists) != 1:
                raise SourceError(
                    f"{path.name}: holds {len(lists)} .txt files; expected one; unpack the list "
                    "and give its .txt"
                )
            data, where = read_zip(archive, path, lists[0]), f"{where}/{lists[0]}"
    if is_html(data):
        raise SourceError(f"{where}: {HTML}; expected a list of pictures; {DOWNLOAD}")
    lines = data.decode("utf-8-sig", errors="replace").split("\n")
    return where, ((n, line.split()) for n, line in enumerate(lines, 1) if line.strip())


def _check_pictures(where: str, lines: Iterator[_Line]) -> Iterator[tuple[int, str, list[str]]]:
    """Gives the number of each line, the picture that it begins with, and its other words."""
    seen: dict[str, int] = {}
    for number, (file, *values) in lines:
        if not PICTURE.fullmatch(file):
            raise SourceError(
                f"{where}, line {number}: {_short(file)} cannot name a picture; expected NAME.jpg, "
                f"its name of letters, digits, '-' and '_'; {DOWNLOAD}"
            )
        if file in seen:
            raise SourceError(
                f"{where}, line {number}: {file} is in line {seen[file]} too; expected it once; "
                f"{DOWNLOAD}"
            )
        seen[file] = number
        yield number, file, values


def _gap(one: _Named, other: _Named) -> str | None:
    """Says how much of what one file names the other lacks, if anything."""
    lacking = [name for name in one[1] if name not in other[1]]
    if not lacking:
        return None
    count = f"{len(lacking):,} of the {len(one[1]):,} pictures of {one[0]}"
    return f"{other[0]} lacks {count} ({lacking[0]} first)"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def _times(size: tuple[int, int]) -> str:
    return f"{size[1]} × {size[0]}"  # width first, as the publisher says
