"""Folders of pictures: the folders that a picture is in are its label."""

import hashlib
import os
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from heron.base.errors import SourceError, list_faults
from heron.shards.manifest import InputFile, Labels, Name
from heron.shards.picture import ANY_SUFFIX, SUFFIXES, Checked, check_pictures
from heron.shards.source import file_record
from heron.sources.base import (
    SINGLE_SPLIT,
    Column,
    FileOrFolder,
    FileSource,
    Loaded,
    OnError,
    read_each,
    split_ranges,
)
from heron.sources.zips import Tree

ENDINGS = tuple(f".{suffix}" for suffix in SUFFIXES)
NO_PICTURE = f"is not a picture; the folder may have {ANY_SUFFIX} files and folders of them"
SPLITS = ("train", "val", "test")  # first-level folders of these names are splits
MAX_KEY_CHARS = 64  # of a path in a key; a tar name has 100, the member's suffix included


class PictureSource(FileSource):
    """Base class of sources of encoded pictures: all are checked once, before workers start.

    A subclass defines `payloads`, and leaves the rows of `skipped` out.
    """

    left_out: ClassVar[tuple[str, ...]] = ("on_error",)
    remedy: ClassVar[str] = "move it away, convert it"

    on_error: OnError = "raise"

    @property
    def picture_views(self) -> list[str]:
        """The names of the views of pictures."""
        return ["image"]

    @abstractmethod
    def payloads(self, view: str) -> Iterator[tuple[str, Any]]:
        """Yields the name and the bytes of every picture of a view."""

    @property
    def strays(self) -> Mapping[str, str]:
        """What is no picture and in no row, by name, and what is wrong with it."""
        return {}

    @cached_property
    def checked(self) -> tuple[dict[str, Checked], dict[str, str]]:
        """What pictures of each view are, and all that is bad; raises SourceError, or keeps it."""
        checked = {view: check_pictures(self.payloads(view)) for view in self.picture_views}
        faults = dict(self.strays)
        for found in checked.values():
            faults |= found.faults
        if faults and self.on_error == "raise":
            raise SourceError(
                f"{self.dataset}: {list_faults(faults)}; {self.remedy}, or leave out what is bad "
                "with `--on-error skip`"
            )
        return checked, faults

    @property
    def skipped(self) -> Mapping[str, str]:
        """What is bad."""
        return self.checked[1]


class Folder(PictureSource):
    """Pictures in folders of classes, or in a zip of them: SPLIT/CLASS/NAME.jpg, CLASS/NAME.jpg.

    With one level of folders, each is a class. With more, labels are a hierarchy with a column for
    each level, in which a class is named by its whole path, such as animal/cat. Without folders of
    classes there are no labels. Rows are in the order of the sorted paths. JPEG, PNG, WebP, GIF
    (its first picture), TIFF and BMP may be mixed. Hidden files and folders (.NAME) are ignored;
    any other file is an error, as is an empty folder.
    """

    name: ClassVar[str] = "folder"
    examples: ClassVar[str] = "heron shards build folder --folder cifar10 --out data/cifar10"
    block_rows: ClassVar[int | None] = None
    named_by: ClassVar[str] = "folder"

    folder: FileOrFolder = Field(description="the folder, or a zip of it")
    split_names: list[Name] | None = Field(
        None,
        min_length=1,
        description="first-level folders that are splits; others are not read (default: train, "
        "val and test if there is a train; else all is one split, `all`, and classes begin at "
        "the first level: write `all` if train is a class)",
    )

    def input_files(self) -> list[InputFile]:
        """Returns one record for the folder."""
        if self.folder.is_file():
            return [file_record(self.folder)]
        return [folder_record(self.folder, [p for paths in self._listed.values() for p in paths])]

    def load(self) -> Loaded:
        """Lists the pictures.

        Channels are those of decoded pictures: 3, since grey, CMYK and palettes decode to RGB too.
        """
        bad, top_of = self.skipped, self._split_folders
        listed = {split: [p for p in ps if p not in bad] for split, ps in self._listed.items()}
        splits = split_ranges({s: len(paths) for s, paths in listed.items() if paths}, merge=False)
        pictures = {p: _classes(p, top_of[split]) for split, ps in listed.items() for p in ps}
        if not (paths := list(pictures)):
            raise SourceError(
                f"{self.dataset}: no picture is left ({list_faults(bad, 1)}); {self.remedy}"
            )
        columns = list(zip(*pictures.values(), strict=True))  # of each level of classes
        levels, warning = [sorted(set(column)) for column in columns], ""
        numbers = [{name: number for number, name in enumerate(level)} for level in levels]
        pairs = zip(numbers, columns, strict=True)
        targets = np.array([[number[name] for name in column] for number, column in pairs]).T
        if not levels:
            labels, targets = Labels(kind="none", names=[]), np.full(len(paths), -1)
            warning = f"{self.dataset}: the pictures are not in folders of classes: no labels"
        elif len(levels) == 1:
            labels, targets = Labels(kind="multi_class", names=levels[0]), targets[:, 0]
        else:
            labels = Labels(kind="hierarchical", names=levels[-1], levels=levels)
        read = read_each(lambda row: self._tree.read(paths[row]))
        found = self.checked[0]["image"]
        column = Column((len(paths), *found.shape), read, found.member)
        keys = list(make_keys(paths).values())
        return Loaded({"image": column}, targets, labels, splits, keys, warning=warning)

    def payloads(self, view: str) -> Iterator[tuple[str, bytes]]:
        """Reads every picture."""
        for paths in self._listed.values():
            for path in paths:
                yield path, self._tree.read(path)

    @property
    def strays(self) -> dict[str, str]:
        """What is no picture by its name, and what lies where nothing is expected."""
        return self._surveyed[1]

    @cached_property
    def _tree(self) -> Tree:
        return Tree(self.folder)

    @property
    def _listed(self) -> dict[str, list[str]]:
        return self._surveyed[0]

    @cached_property
    def _surveyed(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        """The paths of the pictures of each split, and all that is wrong with the folder."""
        tops = self._split_folders
        if not self._tree.paths:
            raise SourceError(
                f"{self.dataset}: the folder . is empty; it needs pictures, or folders of them"
            )
        entries = dict.fromkeys(path.partition("/")[0] for path in self._tree.paths)
        faults = {
            entry: (
                f"is beside the split train, where only {', '.join(SPLITS)} can be (name the "
                f"splits with --split-names, or use --split-names {SINGLE_SPLIT} if train is a "
                "class)"
            )
            for entry in entries
            if self.split_names is None and "train" in tops and entry not in SPLITS
        }
        inside = tuple(tops.values())
        for name in self._tree.empty:
            if name.startswith(inside):
                faults[f"the folder {name}"] = "is empty; it needs pictures, or folders of them"
        paths = [path for path in self._tree.paths if path.startswith(inside)]
        faults |= {path: NO_PICTURE for path in paths if not _is_picture(path)}
        listed = {
            s: [p for p in paths if p.startswith(t) and _is_picture(p)] for s, t in tops.items()
        }
        depths = {p: len(_classes(p, tops[split])) for split, ps in listed.items() for p in ps}
        counts = Counter(filter(None, depths.values()))
        usual = counts.most_common(1)[0][0] if counts else 0
        for split, pictures in listed.items():
            for path in pictures:
                if depths[path] and depths[path] != usual:
                    faults[path] = (
                        f"is {depths[path]} folders of classes deep, but most are {usual} (see "
                        "--split-names)"
                    )
                elif depths[path] != usual:
                    expected = f"{tops[split]}CLASS/NAME.jpg"
                    faults[path] = f"is not in the folder of a class; it must be {expected}"
        return {s: [p for p in ps if depths[p] == usual] for s, ps in listed.items()}, faults

    @cached_property
    def _split_folders(self) -> dict[str, str]:
        """The folder of each split: `train/` for train; "" without splits."""
        folders = list(dict.fromkeys(p.partition("/")[0] for p in self._tree.paths if "/" in p))
        if self.split_names == [SINGLE_SPLIT] and SINGLE_SPLIT not in folders:
            return {SINGLE_SPLIT: ""}
        if self.split_names is not None:
            for name in self.split_names:
                if name not in folders:
                    raise SourceError(
                        f"{self.dataset} has no folder {name!r} for a split, only "
                        f"{', '.join(folders) or 'none'}; see --split-names"
                    )
            return {name: f"{name}/" for name in self.split_names}
        if "train" not in folders:
            return {SINGLE_SPLIT: ""}
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


def path_faults(top: Path, paths: Iterable[str]) -> dict[str, str]:
    """Returns what is wrong with paths in a folder: they lead out of it, or to no file."""
    root, faults = top.resolve(), dict[str, str]()
    for path in paths:
        if not (root / path).resolve().is_relative_to(root):
            faults[path] = f"is outside {root.name}"
        elif not (root / path).is_file():
            faults[path] = f"is no file in {root.name}"
    return faults


def picture_column(top: Path, paths: Sequence[str], found: Checked) -> Column:
    """Returns the column of pictures that are files in a folder, a path for each row."""
    read = read_each(lambda row: (top / paths[row]).read_bytes())
    return Column((len(paths), *found.shape), read, found.member)


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


def _is_picture(path: str) -> bool:
    return path.lower().endswith(ENDINGS)
