"""CelebA: pictures in a zip or folder, attributes, captions made of them, and the partition."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.base.errors import DOWNLOAD_AGAIN, SourceError, format_shape, list_faults, short_repr
from heron.shards.manifest import InputFile, Labels
from heron.shards.picture import read_complete_header
from heron.shards.source import file_record
from heron.sources.base import (
    SINGLE_SPLIT,
    Column,
    FileOrFolder,
    FileSource,
    Loaded,
    OnError,
    read_each,
)
from heron.sources.folder import folder_record
from heron.sources.zips import HTML, ZIP, Tree, is_html, list_zip, open_zip, read_zip

SPLITS = {"0": "train", "1": "val", "2": "test"}
ALIGNED = "img_align_celeba"  # the folder of pictures, in the publisher's zip and unpacked
PICTURE = re.compile(r"([A-Za-z0-9_-]{1,64})\.jpg")  # its stem is the key of a row
BITS = ("-1", "1")
NAME_FORM = "NAME.jpg, its name of letters, digits, '-' and '_'"
MAX_FEATURES = 9  # that a caption mentions
WORDS = Path(__file__).with_name("words.yaml")


class CelebA(FileSource):
    """CelebA: the aligned pictures, in their zip or unpacked, with their attributes.

    With a partition the splits are train, val and test; without one, or with `--merge`, all rows
    are one split, `all`. Rows are in the order of the attribute file. All files must name the same
    pictures, unless `--missing leave_out` is given. Hidden files and __MACOSX are ignored.
    """

    left_out: ClassVar[tuple[str, ...]] = ("captions", "on_error")
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
        "leave it out, and report how many",
    )
    captions: bool = Field(
        False, description="true: a second view `caption`, a sentence of some of the attributes"
    )
    on_error: OnError = "raise"

    def input_files(self) -> list[InputFile]:
        """Returns a record for each file, and one for all pictures of a folder."""
        if self.images.is_file():
            return super().input_files()
        pictures = folder_record(self._tree.path, list(self._members.values()))
        return [pictures, *map(file_record, self.files[1:])]

    def load(self) -> Loaded:
        """Reads the lists, and compares the pictures that they name with those that exist."""
        attributes = _read_list(self.attributes, BITS, counted=True)
        partition = self.partition and _read_list(self.partition, tuple(SPLITS))
        files = list(attributes.rows)
        listings: list[tuple[str, Mapping[str, object]]] = [
            (self._tree.path.name, self._members),
            *([(self.partition.name, partition.rows)] if self.partition and partition else []),
        ]
        gaps = _gaps((self.attributes.name, attributes.rows), listings)
        if gaps and self.missing == "error":
            raise SourceError(
                f"{gaps}; the files must name the same pictures: add what is missing, or build "
                "only those that all files name with --missing leave_out"
            )
        bad = self.skipped
        shared = np.array(
            [all(f in names for _, names in listings) and f not in bad for f in files]
        )
        if not shared.any():
            raise SourceError(
                f"no picture is in all of {', '.join(path.name for path in self.files)}; pass the "
                "files of one data set"
            )
        splits = {SINGLE_SPLIT: np.flatnonzero(shared)}
        if partition and not self.merge:
            numbers = dict(zip(partition.rows, partition.values[:, 0].tolist(), strict=True))
            number_of = np.array([numbers.get(file, -1) for file in files])
            rows = [np.flatnonzero(shared & (number_of == n)) for n in range(len(SPLITS))]
            splits = {s: r for s, r in zip(SPLITS.values(), rows, strict=True) if len(r)}
        first = files[next(iter(splits.values()))[0]]
        _, size = self._read(first)

        def read(row: int) -> bytes:
            data, actual = self._read(files[row])
            if actual != size:
                raise SourceError(
                    f"{self._tree.path.name}: {files[row]} is {format_shape(actual[::-1])} "
                    f"pixels, but {first} is {format_shape(size[::-1])}, and the aligned pictures "
                    f"are all of one size; pass {ALIGNED}, not the pictures in the wild, or leave "
                    "out what is bad with --on-error skip"
                )
            return data

        left_out = f"left out what the files do not share; {shared.sum():,} rows remain: {gaps}"

        def caption(row: int) -> bytes:
            values = zip(attributes.columns, attributes.values[row], strict=True)
            names = {name for name, value in values if value}
            return describe_face(names, np.random.default_rng([self.seed, row])).encode()

        texts = {"caption": Column((len(files), -1), read_each(caption))} if self.captions else {}
        return Loaded(
            views={"image": Column((len(files), *size, 3), read_each(read)), **texts},
            targets=attributes.values,
            labels=Labels(kind="multi_label", names=attributes.columns),
            splits=splits,
            keys=[file.removesuffix(".jpg") for file in files],
            warning=left_out if gaps else "",
        )

    @property
    def skipped(self) -> Mapping[str, str]:
        """What is bad of the pictures."""
        return self.checked if self.on_error == "skip" else {}

    @cached_property
    def checked(self) -> dict[str, str]:
        """What is wrong with each picture that is damaged, or not of the size of most."""
        sizes, faults = dict[str, tuple[int, int]](), dict(self._surveyed[1])
        for name in self._members:
            try:
                sizes[name] = self._read(name)[1]
            except SourceError as fault:
                faults[name] = str(fault)
        usual = Counter(sizes.values()).most_common(1)
        for name, size in sizes.items():
            if size != usual[0][0]:
                expected = format_shape(usual[0][0][::-1])
                faults[name] = f"must be {expected}, got {format_shape(size[::-1])} pixels"
        return faults

    def _read(self, name: str) -> tuple[bytes, tuple[int, int]]:
        """Returns the bytes of a picture, and its height and width by its header."""
        data = self._tree.read(self._members[name])
        try:
            header = read_complete_header(data)
        except ValueError as fault:
            raise SourceError(
                f"{self._tree.path.name}: {name} {fault}; {DOWNLOAD_AGAIN}, or leave it out with "
                "--on-error skip"
            ) from None
        return data, (header.height, header.width)

    @cached_property
    def _tree(self) -> Tree:
        path = self.images.resolve() if self.images.is_dir() else self.images
        inner = path / ALIGNED
        return Tree(
            inner if inner.is_dir() else path, f"{ALIGNED}.zip, or a folder of the pictures"
        )

    @property
    def _members(self) -> dict[str, str]:
        return self._surveyed[0]

    @cached_property
    def _surveyed(self) -> tuple[dict[str, str], dict[str, str]]:
        """The path of each picture by its name, and what is wrong with other files."""
        members, strays = dict[str, str](), dict[str, str]()
        for member in self._tree.paths:
            name = member.rpartition("/")[2]
            if not PICTURE.fullmatch(name):
                strays[short_repr(member)] = f"is not a picture named {NAME_FORM}"
                continue
            if name in members:
                raise SourceError(
                    f"{self._tree.path.name}: {name} occurs twice, as {member} and as "
                    f"{members[name]}; remove one of them"
                )
            members[name] = member
        if strays and self.on_error == "raise":
            raise SourceError(
                f"{self._tree.path.name}: {list_faults(strays)}; pass the file of another release, "
                "move it away, or leave out what is bad with --on-error skip"
            )
        return members, strays


class _List(NamedTuple):
    """A list of pictures: the line number of each, and the indices of its words [rows, columns]."""

    columns: list[str]
    rows: dict[str, int]
    values: NDArray[np.uint8]


def _gaps(
    reference: tuple[str, Mapping[str, object]], listings: list[tuple[str, Mapping[str, object]]]
) -> str:
    """Returns which pictures one file names and another lacks; "" if none."""
    gaps = []
    for listing in listings:
        for (name, pictures), (other, present) in ((reference, listing), (listing, reference)):
            if lacking := [picture for picture in pictures if picture not in present]:
                count = f"{len(lacking):,} of the {len(pictures):,} pictures of {name}"
                gaps.append(f"{other} lacks {count} ({lacking[0]} first)")
    return "; ".join(gaps)


def _read_list(path: Path, words: tuple[str, ...], counted: bool = False) -> _List:
    """Reads a picture from each line: its file name, and one of the `words` for each column.

    A `counted` list, as list_attr_celeba.txt, begins with a line of the count and one of names.
    """
    where, lines = _read_lines(path)
    columns, count, first = ["split"], None, 1
    if counted:
        first, head = next(lines, (1, []))
        if len(head) != 1 or not re.fullmatch("[0-9]{1,9}", head[0]):
            raise SourceError(
                f"{where}, line {first} must be the number of pictures alone, got "
                f"{short_repr(' '.join(head))}; pass {path.name} as its publisher distributes it"
            )
        count, columns = int(head[0]), next(lines, (2, []))[1]
    numbers = {word: number for number, word in enumerate(words)}
    rows: dict[str, int] = {}
    values = bytearray()
    for number, (file, *cells) in lines:
        fault = ""
        if not PICTURE.fullmatch(file):
            fault = f"{short_repr(file)} cannot name a picture, which is {NAME_FORM}"
        elif file in rows:
            fault = f"{file} is also in line {rows[file]}"
        elif len(cells) != len(columns) or not numbers.keys() >= {*cells}:
            found = short_repr(" ".join(cells))
            fault = f"{file} must have {len(columns)} values of {' or '.join(words)}, got {found}"
        if fault:
            raise SourceError(f"{where}, line {number}: {fault}; {DOWNLOAD_AGAIN}")
        rows[file] = number
        values.extend(numbers[cell] for cell in cells)
    count = len(rows) if count is None else count
    if not rows or not columns or len(rows) != count:
        raise SourceError(
            f"{where}: {len(columns)} attributes of {len(rows):,} pictures, and line {first} "
            f"counts {count:,}; {DOWNLOAD_AGAIN}"
        )
    return _List(columns, rows, np.frombuffer(values, np.uint8).reshape(len(rows), -1))


def _read_lines(path: Path) -> tuple[str, Iterator[tuple[int, list[str]]]]:
    """Returns a list's name, and number and words of each line not blank; it may be in a zip."""
    data, where = path.read_bytes(), path.name
    if data.startswith(ZIP):
        with open_zip(path, "a zip of one list") as archive:
            lists = [name for name in list_zip(archive, path) if name.lower().endswith(".txt")]
            if len(lists) != 1:
                raise SourceError(
                    f"{path.name} has {len(lists)} .txt files instead of one; unpack it and pass "
                    "its .txt"
                )
            data, where = read_zip(archive, path, lists[0]), f"{where}/{lists[0]}"
    if is_html(data):
        raise SourceError(f"{where} is {HTML}, not a list of pictures; {DOWNLOAD_AGAIN}")
    lines = data.decode("utf-8-sig", errors="replace").split("\n")
    return where, ((n, line.split()) for n, line in enumerate(lines, 1) if line.strip())


def describe_face(names: Set[str], draw: np.random.Generator) -> str:
    """Returns a random caption of a face with these attributes; it names `MAX_FEATURES` at most."""
    words, male, young = _words(), "Male" in names, "Young" in names
    who = ("man" if young else "older man") if male else ("woman" if young else "older woman")
    start = ("a picture of {}", "{}", "the face of {}")[draw.integers(3)]
    article = "an" if who.startswith("o") else "a"
    smiling = "Smiling" in names and draw.random() < 0.9
    if smiling and draw.random() < 0.5:
        article, who, smiling = "a", f"smiling {who}", False
    kinds = words["cut"], words["hair"]
    hair = " ".join(word for kind in kinds for name, word in kind.items() if name in names)
    features = [f"{hair} hair"] if hair else ["no hair"] if "Bald" in names else []
    features += [_choose(two, draw) for name, two in words["has"].items() if name in names]
    features += ["a beard"] if male and "No_Beard" not in names else []
    worn = [_choose(two, draw) for name, two in words["wears"].items() if name in names]
    chosen = set(draw.permutation(len(features) + len(worn))[:MAX_FEATURES].tolist())
    features = [word for i, word in enumerate(features) if i in chosen]
    worn = [word for i, word in enumerate(worn, len(features)) if i in chosen]
    phrases = [f"with {_join(features, draw)}"] if features else []
    phrases += [f"wearing {_join(worn, draw)}"] if worn else []
    phrases += [("smiling", "with a smile")[draw.integers(2)]] if smiling else []
    return " ".join(
        [start.format(f"{article} {who}"), *(phrases[i] for i in draw.permutation(len(phrases)))]
    )


@cache
def _words() -> dict[str, dict[str, Any]]:
    """Returns the words for each attribute: for hair one, for what a face has or wears two."""
    return dict(yaml.safe_load(WORDS.read_text()))


def _choose(words: list[str], draw: np.random.Generator) -> str:
    return words[draw.integers(2)]


def _join(words: list[str], draw: np.random.Generator) -> str:
    *others, last = (words[i] for i in draw.permutation(len(words)))
    return f"{', '.join(others)} and {last}" if others else last
