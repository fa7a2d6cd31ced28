"""Pictures and captions: NAME.jpg beside NAME.txt, or a CSV of files and captions."""

import csv
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import DirectoryPath, Field, FilePath

from heron.base.errors import SourceError, list_faults, short_repr
from heron.shards.manifest import InputFile, Labels
from heron.shards.picture import ANY_SUFFIX, SUFFIXES
from heron.shards.source import file_record
from heron.sources.base import SINGLE_SPLIT, Column, Loaded, read_each
from heron.sources.folder import PictureSource, folder_record, make_keys, picture_column
from heron.sources.zips import Tree

CAPTION = "txt"


class Captions(PictureSource):
    """Pictures and captions: a folder of NAME.jpg and NAME.txt, or a CSV that names the pictures.

    Each line of the CSV is a picture of the folder and its caption; a line of column names may come
    first. A picture may have several captions, which are a row each. Rows are in the order of the
    names, or of the lines. Hidden files are ignored; others are errors.
    """

    name: ClassVar[str] = "captions"
    examples: ClassVar[str] = "heron shards build captions --folder birds --out data/birds"
    block_rows: ClassVar[int | None] = None
    named_by: ClassVar[str] = "folder"

    folder: DirectoryPath = Field(description="the folder of the pictures")
    csv: FilePath | None = Field(
        None, description="a CSV of file,caption (default: NAME.txt beside each NAME.jpg)"
    )

    def input_files(self) -> list[InputFile]:
        """Returns one record for the folder, and one for the CSV."""
        texts = [] if self.csv else [text for _, text in self._paired]
        paths = [*dict.fromkeys(path for path, _ in self._rows), *texts]
        return [folder_record(self.folder, paths), *([file_record(self.csv)] if self.csv else [])]

    def load(self) -> Loaded:
        """Reads every caption, and checks every picture."""
        rows = [row for row in self._rows if row[0] not in self.skipped]
        if not rows:
            raise SourceError(
                f"{self.dataset}: no picture with a caption is left "
                f"({list_faults(self.skipped, 1)}); {self.remedy}"
            )
        paths = [path for path, _ in rows]
        count = len(paths)
        key_of = make_keys(paths)
        keys = [key_of[path] for path in paths]
        if len(set(keys)) < count:  # some picture has several captions
            keys = [f"{key}-{row}" for row, key in enumerate(keys)]
        return Loaded(
            views={
                "image": picture_column(self.folder, paths, self.checked[0]["image"]),
                "caption": Column((count, -1), read_each(lambda row: rows[row][1].encode())),
            },
            targets=np.full(count, -1),
            labels=Labels(kind="none", names=[]),
            splits={SINGLE_SPLIT: range(count)},
            keys=keys,
        )

    def payloads(self, view: str) -> Iterator[tuple[str, bytes]]:
        """Reads every picture once."""
        for path in dict.fromkeys(path for path, _ in self._rows):
            yield path, (self.folder / path).read_bytes()

    @property
    def strays(self) -> dict[str, str]:
        """The files without a partner, and the pictures without a caption."""
        empty = "has an empty caption"
        faults = {path: empty for path, caption in self._rows if not caption.strip()}
        return self._faults | faults

    @cached_property
    def _faults(self) -> dict[str, str]:
        """What is wrong with files and lines, by name; filled as they are read."""
        return {}

    @cached_property
    def _rows(self) -> list[tuple[str, str]]:
        """The picture and the caption of each row."""
        if self.csv:
            return self._read_csv(self.csv)
        rows = []
        for path, text in self._paired:
            try:
                caption = (self.folder / text).read_bytes().decode("utf-8-sig").strip()
                rows.append((path, caption))
            except UnicodeDecodeError:
                self._faults[text] = "is not UTF-8"
        return rows

    @cached_property
    def _paired(self) -> list[tuple[str, str]]:
        """The paths of each picture and of the text beside it."""
        tree, stems = Tree(self.folder), dict[str, list[str]]()
        for name in tree.paths:
            stems.setdefault(name.rpartition(".")[0], []).append(name)
        pairs = []
        for files in stems.values():
            files.sort(key=_is_text)
            suffixes = [name.rpartition(".")[2].lower() for name in files]
            if len(files) == 2 and suffixes[0] in SUFFIXES and suffixes[1] == CAPTION:
                pairs.append((files[0], files[1]))
            else:
                expected = f"every name needs a picture ({ANY_SUFFIX}) and a .txt"
                self._faults[" and ".join(files)] = f"is not a pair; {expected}"
        if not stems:
            raise SourceError(f"{self.dataset} has no pictures; it needs NAME.jpg and NAME.txt")
        return pairs

    def _read_csv(self, path: Path) -> list[tuple[str, str]]:
        try:
            with path.open(encoding="utf-8-sig", newline="") as stream:
                lines = [row for row in csv.reader(stream, strict=True) if row]
        except (csv.Error, UnicodeDecodeError) as fault:
            raise SourceError(
                f"cannot read {path.name} ({fault}), which must be a CSV file in UTF-8"
            ) from None
        top, rows = self.folder.resolve(), []
        first = lines[0][0] if lines else ""
        if Path(first).suffix.lower()[1:] not in SUFFIXES and not (top / first).is_file():
            lines = lines[1:]  # the names of the columns
        for number, row in enumerate(lines, 1):
            where, picture = f"{path.name}, row {number}:", top / row[0]
            if len(row) != 2 or not picture.is_file():
                wanted = f"must be a picture in {self.dataset}, and its caption"
                self._faults[where] = f"{wanted}, got {short_repr(row)}"
            elif not picture.resolve().is_relative_to(top):
                self._faults[where] = f"{short_repr(row[0])} is outside {self.dataset}"
            else:
                rows.append((row[0], row[1]))
        if not lines:
            raise SourceError(f"{path.name} has no rows; write file,caption on each line")
        return rows


def _is_text(name: str) -> bool:
    return name.lower().endswith(f".{CAPTION}")
