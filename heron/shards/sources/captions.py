"""Pictures and captions: NAME.jpg beside NAME.txt, or a CSV of files and captions."""

import csv
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import DirectoryPath, Field, FilePath

from heron.shards.errors import SourceError, short_repr
from heron.shards.manifest import InputFile, Labels
from heron.shards.picture import shape_of
from heron.shards.sources.base import (
    SINGLE_SPLIT,
    Column,
    FileSource,
    Loaded,
    file_record,
    read_each,
)
from heron.shards.sources.folder import KINDS, folder_record, make_keys, read_header, read_picture

CAPTION = ".txt"


class Captions(FileSource):
    """Pictures and captions: a folder of NAME.jpg and NAME.txt, or a CSV that names the pictures.

    Each line of the CSV is a picture of the folder and its caption; a line of column names may come
    first. A picture may have several captions, which are a row each. Rows are in the order of the
    names, or of the lines. JPEG and PNG may be mixed. Hidden files are ignored; others are errors.
    """

    name: ClassVar[str] = "captions"
    examples: ClassVar[str] = "heron shards build captions --folder birds --out data/birds"
    block_rows: ClassVar[int | None] = None

    folder: DirectoryPath = Field(description="the folder of the pictures")
    csv: FilePath | None = Field(
        None, description="a CSV of file,caption (default: NAME.txt beside each NAME.jpg)"
    )

    @property
    def dataset(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    def input_files(self) -> list[InputFile]:
        """Returns one record for the folder, and one for the CSV."""
        texts = [] if self.csv else [text for _, text in self._pairs]
        paths = [*dict.fromkeys(path for path, _ in self._rows), *texts]
        return [folder_record(self.folder, paths), *([file_record(self.csv)] if self.csv else [])]

    def load(self) -> Loaded:
        """Reads every caption, and the header of every picture."""
        paths = [path for path, _ in self._rows]
        headers = {read_header(self.folder, path) for path in dict.fromkeys(paths)}
        member = "png" if {header.kind for header in headers} == {"PNG"} else None
        count = len(paths)
        key_of = make_keys(paths)
        keys = [key_of[path] for path in paths]
        if len(set(keys)) < count:  # some picture has several captions
            keys = [f"{key}-{row}" for row, key in enumerate(keys)]
        return Loaded(
            views={
                "image": Column(
                    (count, *shape_of(headers)),
                    read_each(lambda row: read_picture(self.folder, paths[row])),
                    member,
                ),
                "caption": Column((count, -1), read_each(lambda row: self._rows[row][1].encode())),
            },
            targets=np.full(count, -1),
            labels=Labels(kind="none", names=[]),
            splits={SINGLE_SPLIT: range(count)},
            keys=keys,
        )

    @cached_property
    def _rows(self) -> list[tuple[str, str]]:
        """The picture and the caption of each row."""
        if self.csv:
            rows = self._read_csv(self.csv)
        else:
            rows = [(path, _read_text(self.folder / text)) for path, text in self._pairs]
        for path, caption in rows:
            if not caption.strip():
                raise SourceError(
                    f"{self.dataset}: {path} has an empty caption; expected a text; write one, or "
                    "move the picture away"
                )
        return rows

    @cached_property
    def _pairs(self) -> list[tuple[str, str]]:
        """The paths of each picture and of the text beside it."""
        paths = sorted(p for p in self.folder.rglob("*") if p.is_file())
        names = [str(p.relative_to(self.folder)) for p in paths]
        names = [n for n in names if not any(part.startswith(".") for part in n.split("/"))]
        stems: dict[str, list[str]] = {}
        for name in names:
            stems.setdefault(name.rpartition(".")[0], []).append(name)
        for files in stems.values():
            files.sort(key=_is_text)
            suffixes = [Path(name).suffix.lower() for name in files]
            if len(files) != 2 or suffixes[1] != CAPTION or suffixes[0] not in KINDS:
                raise SourceError(
                    f"{self.dataset}: {' and '.join(files)}; expected a picture (.jpg, .jpeg or "
                    ".png) and a .txt of each name; complete the pair, or move it away"
                )
        if not stems:
            raise SourceError(f"{self.dataset}: no pictures; expected NAME.jpg and NAME.txt")
        return [(picture, text) for picture, text in stems.values()]

    def _read_csv(self, path: Path) -> list[tuple[str, str]]:
        try:
            with path.open(encoding="utf-8-sig", newline="") as stream:
                lines = [row for row in csv.reader(stream, strict=True) if row]
        except (csv.Error, UnicodeDecodeError) as fault:
            raise SourceError(
                f"{path.name}: cannot be read ({fault}); expected a CSV file in UTF-8"
            ) from None
        top = self.folder.resolve()
        first = lines[0][0] if lines else ""
        if Path(first).suffix.lower() not in KINDS and not (top / first).is_file():
            lines = lines[1:]  # the names of the columns
        for number, row in enumerate(lines, 1):
            if len(row) != 2 or not (picture := (top / row[0]).resolve()).is_file():
                raise SourceError(
                    f"{path.name}, row {number}: found {short_repr(row)}; expected a picture that "
                    f"lies in {self.dataset}, and its caption"
                )
            if not picture.is_relative_to(top):
                raise SourceError(
                    f"{path.name}, row {number}: {short_repr(row[0])} leads out of {self.dataset}; "
                    "expected a picture in it"
                )
        if not lines:
            raise SourceError(f"{path.name}: no rows; expected file,caption in each line")
        return [(row[0], row[1]) for row in lines]


def _is_text(name: str) -> bool:
    return name.lower().endswith(CAPTION)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise SourceError(f"{path.name}: not UTF-8; expected a caption; save it again so") from None
