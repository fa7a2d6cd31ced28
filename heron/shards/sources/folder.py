"""Folders of pictures: the folders that a picture is in are its label."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import DirectoryPath, Field

from heron.shards.errors import SourceError
from heron.shards.manifest import InputFile, Labels, Name
from heron.shards.picture import Header, Kind, read_complete_header, read_header_of, shape_of
from heron.shards.sources.base import (
    SINGLE_SPLIT,
    Column,
    FileSource,
    Loaded,
    read_each,
    split_ranges,
)

KINDS: dict[str, Kind] = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}
SPLITS = ("train", "val", "test")  # first-level folders of these names are splits
MAX_KEY_CHARS = (
    64  # characters of a path in a key; a tar name has 100, the member's suffix included
)


class Folder(FileSource):
    """JPEG or PNG files in folders of classes: SPLIT/CLASS/NAME.jpg, or CLASS/NAME.jpg.

    With one level of folders, each is a class. With more, labels are a hierarchy with a column for
    each level, in which a class is named by its whole path, such as animal/cat. Rows are in the
    order of the sorted paths. Hidden files and folders (.NAME) are ignored; any other file that is
    not a .jpg, .jpeg or .png is an error, as are JPEG and PNG files together and an empty folder.
    """

    name: ClassVar[str] = "folder"
    examples: ClassVar[str] = "heron shards build folder --folder cifar10 --out data/cifar10"
    block_rows: ClassVar[int | None] = None

    folder: DirectoryPath = Field(description="the folder")
    split_names: list[Name] | None = Field(
        None,
        min_length=1,
        description="first-level folders that are splits; others are not read (default: train, "
        "val and test where there is a train; else all is one split, `all`, and classes begin at "
        "the first level: say so with `all` where train is a class)",
    )

    @property
    def dataset(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    def input_files(self) -> list[InputFile]:
        """Returns one record for the folder."""
        return [folder_record(self.folder, list(self._pictures[0]))]

    def load(self) -> Loaded:
        """Lists the pictures and reads the header of every one.

        Channels are those of decoded pictures: 3, since grey, CMYK and palettes decode to RGB too.
        """
        pictures, splits = self._pictures
        paths = list(pictures)
        shape = shape_of({read_header(self.folder, path, _kind(path)) for path in paths})
        columns = list(zip(*pictures.values(), strict=True))  # of each level of classes
        levels = [sorted(set(column)) for column in columns]
        numbers = [{name: number for number, name in enumerate(level)} for level in levels]
        pairs = zip(numbers, columns, strict=True)
        targets = np.array([[number[name] for name in column] for number, column in pairs]).T
        if len(levels) == 1:
            labels, targets = Labels(kind="multi_class", names=levels[0]), targets[:, 0]
        else:
            labels = Labels(kind="hierarchical", names=levels[-1], levels=levels)

        def read(row: int) -> bytes:
            return read_picture(self.folder, paths[row], _kind(paths[row]))

        member = "png" if _kind(paths[0]) == "PNG" else None
        column = Column((len(paths), *shape), read_each(read), member)
        return Loaded({"image": column}, targets, labels, splits, list(make_keys(paths).values()))

    @cached_property
    def _pictures(self) -> tuple[dict[str, tuple[str, ...]], dict[str, range]]:
        """The classes of each picture by its path, coarse to fine, and the rows of each split."""
        pictures: dict[str, tuple[str, ...]] = {}
        counts = {}
        for split, top in self._split_folders().items():
            before = len(pictures)
            for path in _walk(self.folder, top):
                pictures[path] = classes = _classes(path, top)
                first, depth = next((p, len(c)) for p, c in pictures.items())
                fault = None
                if not classes:
                    fault = (
                        f"{path} lies in no folder of a class; expected {top}CLASS/NAME.jpg; move "
                        "it into one"
                    )
                elif len(classes) != depth:
                    fault = (
                        f"{first} lies {depth} folders of classes deep and {path} {len(classes)}; "
                        "expected the same depth everywhere; move one of them, or see "
                        "--split-names"
                    )
                elif _kind(path) != _kind(first):
                    fault = (
                        f"{first} is a {_kind(first)} and {path} a {_kind(path)}; expected one "
                        "kind everywhere; move one of them away, or convert it"
                    )
                if fault:
                    raise SourceError(f"{self.dataset}: {fault}")
            counts[split] = len(pictures) - before
        return pictures, split_ranges(counts, merge=False)

    def _split_folders(self) -> dict[str, str]:
        """Returns the folder of each split: `train/` for train; "" without splits."""
        entries = _visible(self.folder, "")
        folders = [entry.name for entry in entries if entry.is_dir()]
        if self.split_names == [SINGLE_SPLIT] and SINGLE_SPLIT not in folders:
            return {SINGLE_SPLIT: ""}
        if self.split_names is not None:
            for name in self.split_names:
                if name not in folders:
                    raise SourceError(
                        f"{self.dataset}: no folder {name!r} for a split; it has "
                        f"{', '.join(folders) or 'none'}; see --split-names"
                    )
            return {name: f"{name}/" for name in self.split_names}
        if "train" not in folders:
            return {SINGLE_SPLIT: ""}
        for entry in entries:
            if entry.name not in SPLITS:
                raise SourceError(
                    f"{self.dataset}: {entry.name} lies beside the split train; expected "
                    f"{', '.join(SPLITS)} alone; name the splits with --split-names, or say "
                    f"--split-names {SINGLE_SPLIT} where train is a class"
                )
        return {name: f"{name}/" for name in SPLITS if name in folders}


def folder_record(folder: Path, paths: list[str]) -> InputFile:
    """Returns one record for the files of a folder: their total bytes, and a checksum.

    The checksum is the sha256 of each path, a zero byte and the file's sha256, in path order.
    """
    total, digest = 0, hashlib.sha256()
    for path in sorted(paths):
        data = (folder / path).read_bytes()
        total += len(data)
        digest.update(os.fsencode(path) + b"\0" + hashlib.sha256(data).digest())
    return InputFile(name=folder.resolve().name, bytes=total, sha256=digest.hexdigest())


def make_keys(paths: list[str]) -> dict[str, str]:
    """Returns a key for each path, of letters, digits, '-' and '_' alone: `train-cat-0001`.

    It ends with a hash of the path where two paths would have the same key, or where it is cut.
    """
    plain = {
        p: re.sub(r"[^A-Za-z0-9_-]", "_", p.rpartition(".")[0].replace("/", "-")) for p in paths
    }
    counts = Counter(plain.values())
    return {
        path: key
        if counts[key] == 1 and len(key) <= MAX_KEY_CHARS
        else f"{key[:MAX_KEY_CHARS]}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
        for path, key in plain.items()
    }


def _classes(path: str, top: str) -> tuple[str, ...]:
    folders = path.removeprefix(top).split("/")[:-1]
    return tuple("/".join(folders[:depth]) for depth in range(1, len(folders) + 1))


def _walk(folder: Path, top: str) -> Iterator[str]:
    """Yields the paths of all pictures below `top`, which ends with a slash, sorted by name."""
    entries = _visible(folder, top)
    if not entries:
        raise SourceError(
            f"{folder.resolve().name}: the folder {top or '.'} is empty; expected pictures, or "
            "folders of them; remove it"
        )
    for entry in entries:
        path = f"{top}{entry.name}"
        if entry.is_dir():
            yield from _walk(folder, f"{path}/")
        elif entry.is_file() and entry.name.lower().endswith(tuple(KINDS)):
            yield path
        else:
            raise SourceError(
                f"{folder.resolve().name}: {path} is no picture; expected .jpg, .jpeg or .png "
                "files and folders of them; move it away, or convert it"
            )


def _visible(folder: Path, top: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder / top) as entries:
        return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)


def _kind(path: str) -> Kind:
    """Returns the format that the suffix of a file says; `read_header` checks it."""
    return KINDS[path[path.rindex(".") :].lower()]


def read_header(folder: Path, path: str, kind: Kind | None = None) -> Header:
    """Returns the header of a picture; SourceError if it is damaged or not of this kind."""
    with _picture_errors(folder, path):
        return read_header_of(folder / path, kind)


def read_picture(folder: Path, path: str, kind: Kind | None = None) -> bytes:
    """Returns the bytes of a picture; SourceError if it is damaged or not of this kind."""
    data = (folder / path).read_bytes()
    with _picture_errors(folder, path):
        read_complete_header(data, kind)
    return data


@contextmanager
def _picture_errors(folder: Path, path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as fault:
        raise SourceError(
            f"{folder.resolve().name}: {path} {fault}; move it away, or convert it"
        ) from None
