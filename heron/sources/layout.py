"""How foreign tars are laid out: which members are views and labels, and which tars are splits."""

import json
import logging
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase, translate
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, FilePath, ValidationError

from heron.base.artefact import describe_errors
from heron.base.errors import CONTROL, ShardError, SourceError, first_few, short_repr
from heron.shards.annotation import JSONS, NUMBERS, TEXTS, Annotation
from heron.shards.manifest import TAR_NAME
from heron.shards.picture import ANY_SUFFIX, SUFFIXES
from heron.sources.base import SINGLE_SPLIT
from heron.sources.labels import CAPTIONS, LABEL_NAMES
from heron.sources.text import SPLIT_PATTERNS, split_lines

ANY_TEXT = ("txt", "text", "caption")  # endings of texts
SUFFIX = r"([a-z0-9_-]+\.)*([a-z0-9_-]+)"  # of members
MAX_MEMBERS = 64  # of a sample, when what they are is found out
COMPRESSED = (".tgz", ".tbz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


class StoredColumn(NamedTuple):
    """A view: its name, its kind, and the suffixes that its member may have."""

    name: str
    kind: Literal["image", "vector", "text"]
    suffixes: tuple[str, ...]
    field: str | None = None  # of a JSON object, if it holds the text


class Layout(BaseModel):
    """What to index of each sample. The fields are the options of `heron shards index`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: list[str] | None = Field(
        default=None,
        description="suffixes of pictures, a view each: jpg, png, or left.jpg right.jpg; "
        "jpg,jpeg takes either",
    )
    vector: list[str] | None = Field(
        default=None, description="suffixes of float32 vectors, a view each: npy, or audio.npy"
    )
    text: list[str] | None = Field(
        default=None,
        description="members with texts in UTF-8, a view each: txt, or caption.txt; json:FIELD is "
        "a string of a JSON object",
    )
    label: str | None = Field(
        default=None,
        description="member with the label: cls (a class number), txt (a class name), json:FIELD "
        "(one of these, a list of 0 and 1, or a list of names), npy (a class number, or 0 and 1); "
        "a name may come before it, as in kind.txt (default: no labels)",
    )
    label_names: FilePath | None = Field(
        default=None, description="file of the names of the classes, a line each, in their order"
    )
    minus_one: Literal["unlabelled", "no"] = Field(
        default="unlabelled",
        description="what a label of -1 means: no label, or, beside 1, the other class, and in a "
        "vector a label that does not apply",
    )
    missing_label: Literal["error", "unlabelled"] = Field(
        default="error", description="what a sample without a label is"
    )
    split: list[str] | None = Field(
        default=None,
        description="splits, as NAME=PATTERN: train='a-*.tar' (default: by the word train, val "
        f"or test in the name of each tar; if no name has one, all are one split, {SINGLE_SPLIT})",
    )
    prefix_keys: bool = Field(
        default=False,
        description="true puts the name of its tar before every key, for tars that share keys",
    )
    on_error: Literal["raise", "skip"] = Field(
        default="raise",
        description="skip leaves out samples that are damaged or incomplete, naming them",
    )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Returns the layout that command-line options describe; SourceError where one is wrong."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as fault:
            raise SourceError(
                f"{describe_errors(fault)}; see `heron shards index --help`"
            ) from None

    @cached_property
    def columns(self) -> list[StoredColumn]:
        """The views; SourceError where two would share a name."""
        images, vectors = self.image or [], self.vector or []
        columns = [StoredColumn("image", "image", _suffixes(text, SUFFIXES)) for text in images]
        columns += [StoredColumn("vector", "vector", _suffixes(text, ("npy",))) for text in vectors]
        columns += map(_parse_text, self.text or [])
        full_names = [column.field or column.suffixes[0].replace(".", "_") for column in columns]
        # A view is named by what precedes its suffix (left.jpg: left), or else by its kind.
        names = [
            column.field
            or (full_name.rpartition("_")[0] if "." in column.suffixes[0] else column.name)
            for full_name, column in zip(full_names, columns, strict=True)
        ]
        if len(images) == 1:
            names[0] = "image"
        if len(set(names)) < len(names):
            names = full_names
        if len(set(names)) < len(names):
            raise SourceError(f"view names must be unique, got {', '.join(names)}")
        return [column._replace(name=name) for name, column in zip(names, columns, strict=True)]

    @cached_property
    def annotation(self) -> Annotation | None:
        """Where the labels are, or None."""
        return None if self.label is None else Annotation(self.label, self.minus_one)

    @property
    def names(self) -> list[str] | None:
        """The names of the classes, or None where no file lists them."""
        if self.label_names is None:
            return None
        try:
            lines = split_lines(self.label_names.read_bytes().decode())
        except UnicodeDecodeError:
            raise SourceError(f"label_names: {self.label_names} is not UTF-8") from None
        names = [line.strip() for line in lines]
        seen = set[str]()
        for number, name in enumerate(names, 1):
            if not name or name in seen or CONTROL.search(name):
                raise SourceError(
                    f"label_names: line {number} of {self.label_names} is {name!r}; every line "
                    "must have a unique name without control characters"
                )
            seen.add(name)
        return names

    def splits(self, folder: Path) -> dict[str, list[Path]]:
        """Returns the tars of each split, in the order of their names.

        Raises ShardError where there are no tars or a name is invalid, and SourceError where a tar
        is not in exactly one split, or a split has no tar.
        """
        tars = _find_tars(folder)
        patterns = (
            [_parse_split(text, tars) for text in self.split] if self.split else SPLIT_PATTERNS
        )
        splits: dict[str, list[Path]] = {split: [] for split, _ in patterns}
        strays = []
        for tar in tars:
            matching = {split for split, pattern in patterns if re.fullmatch(pattern, tar.name)}
            if len(matching) == 1:
                splits[matching.pop()].append(tar)
            else:
                strays.append(f"{tar.name} is in {' and '.join(sorted(matching)) or 'no split'}")
        if len(strays) == len(tars) and not self.split and all("no split" in x for x in strays):
            return {SINGLE_SPLIT: tars}
        if strays:
            raise SourceError(
                f"split: {strays[0]}, but must be in one; name the split with --split "
                "NAME=PATTERN, or move the tar away"
            )
        return {split: matching for split, matching in splits.items() if matching}


def _parse_split(text: str, tars: list[Path]) -> tuple[str, str]:
    """Parses a value of --split into a split and the regular expression of its tars."""
    split, _, pattern = text.partition("=")
    if not split or not pattern:
        raise SourceError(f"split must be NAME=PATTERN, such as train='a-*.tar', got {text!r}")
    names = [tar.name for tar in tars]
    if not any(fnmatchcase(name, pattern) for name in names):
        raise SourceError(
            f"split: no tar in {tars[0].parent} matches {pattern!r}; it has {first_few(names)}"
        )
    return split, translate(pattern)


def _parse_text(text: str) -> StoredColumn:
    member, _, field = text.partition(":")
    if field and member.lower().rpartition(".")[2] in JSONS:
        return StoredColumn("text", "text", (member.lower(),), field)
    return StoredColumn("text", "text", _suffixes(text, ANY_TEXT))


def _suffixes(text: str, endings: tuple[str, ...]) -> tuple[str, ...]:
    suffixes = tuple(text.lower().split(","))
    for suffix in suffixes:
        match = re.fullmatch(SUFFIX, suffix)
        if match is None or match[2] not in endings:
            raise SourceError(
                f"no such view can be read from {suffix!r}; use {', '.join(endings)}, or a name "
                f"before it, as in left.{endings[0]}"
            )
    return suffixes


def _find_tars(folder: Path) -> list[Path]:
    """Returns the tars of a folder, sorted; ShardError where there are none or one is unusable."""
    names = sorted(path.name for path in folder.iterdir())
    if compressed := [name for name in names if name.lower().endswith(COMPRESSED)]:
        raise ShardError(
            f"{folder} has {compressed[0]}, which is compressed, and compressed tars cannot be "
            "read at random; decompress it, or move it away"
        )
    tars = [name for name in names if name.endswith(".tar") and not name.startswith(".")]
    if not tars:
        raise ShardError(
            f"{folder} has no tar, but {first_few(names) or 'no file'}; pass the folder of tars"
        )
    if invalid := [name for name in tars if not re.fullmatch(TAR_NAME, name)]:
        raise ShardError(
            f"{folder / invalid[0]}: a manifest cannot name it; rename it to letters, digits, "
            "'-', '_', parentheses, and single dots and spaces between them"
        )
    return [folder / name for name in tars]


def complete(
    layout: Layout,
    folder: Path,
    samples: Mapping[str, Collection[str]],
    read: Callable[[str, str], bytes],
) -> Layout:
    """Returns the layout with the views, and the label, of tars in which none is asked for.

    Raises SourceError where there is no view, or several readings: it names one that works.

    Args:
        layout: what was asked for.
        folder: of the tars.
        samples: the suffixes of each sample's members.
        read: returns the bytes of a member, by its key and its suffix.
    """
    groups: dict[str, list[str]] = {}  # pictures that differ in their ending are one view
    members = sorted({suffix for sample in samples.values() for suffix in sample})
    if dotted := [x for x in members if not re.fullmatch(SUFFIX, x)] or members[MAX_MEMBERS:]:
        raise SourceError(
            f"{folder}: a sample has the member {short_repr(dotted[0])}, which must be only an "
            "ending, such as jpg: a key ends at the first dot of a file's name: rename the "
            "files, and pack them again"
        )
    for suffix in members:
        prefix, _, ending = suffix.rpartition(".")
        groups.setdefault(prefix if ending in SUFFIXES else f"/{suffix}", []).append(suffix)
    images = [",".join(some) for prefix, some in groups.items() if not prefix.startswith("/")]
    columns = _Columns(samples, read)
    texts = [x for x in members if x.rpartition(".")[2] in ANY_TEXT and columns.is_text(x)]
    texts = texts or [x for x in columns.fields if x.partition(":")[2].lower() in CAPTIONS]
    labels = _label_candidates(members, columns, bool(texts)) if layout.label is None else []
    arrays = [x for x in members if x.rpartition(".")[2] == "npy"]
    vectors = [x for x in arrays if x not in labels]
    if not (images or texts or vectors):
        vectors, labels = arrays, []
    found: dict[str, list[str]] = {"image": images, "vector": vectors, "text": texts}
    found = {kind: some for kind, some in found.items() if some}
    if not found:
        has = "".join(
            f"sample {key} has {first_few(list(x))}; " for key, x in [*samples.items()][:1]
        )
        raise SourceError(
            f"{folder}: no view was chosen, and none was found; {has}each sample needs a picture "
            f"({ANY_SUFFIX}), a text (txt) or a vector (npy)"
        )
    both = [x for x in images if any(len({*x.split(",")} & {*s}) > 1 for s in samples.values())]
    if both:
        found["image"] = [x.partition(",")[0] if x in both else x for x in images]
    words = [f"--{kind} {' '.join(map(shlex.quote, some))}" for kind, some in found.items()]
    words += [f"--label {shlex.quote(label)}" for label in labels[:1]]
    if both or len(labels) > 1:
        several = "several pictures of a sample" if both else f"{' and '.join(labels[:8])}"
        raise SourceError(
            f"{folder}: no view was chosen, and {several} may be the "
            f"{'view' if both else 'label'}; choose one: try `heron shards index "
            f"{shlex.quote(str(folder))} {' '.join(words)}`"
        )
    logging.getLogger("heron").warning("%s: read as %s", folder, " ".join(words))
    return Layout(**layout.model_dump() | found | ({"label": labels[0]} if labels else {}))


class _Columns:
    """What the members of a tar hold, as far as it tells views from labels."""

    def __init__(
        self, samples: Mapping[str, Collection[str]], read: Callable[[str, str], bytes]
    ) -> None:
        self.samples, self.read = samples, read
        self._values: dict[str, list[tuple[int | str, ...]]] = {}

    def values(self, member: str) -> list[tuple[int | str, ...]]:
        """Returns the labels that a member or a field has, where one can be read."""
        if (found := self._values.get(member)) is None:
            annotation, found = Annotation(member), []
            for key, sample in self.samples.items():
                if annotation.suffix in sample:
                    with suppress(ValueError):
                        label = annotation.read(self.read(key, annotation.suffix))
                        found.append(tuple(label.values))
            self._values[member] = found
        return found

    def is_text(self, member: str) -> bool:
        """Returns whether a text differs in most samples, as captions do and classes do not."""
        values = self.values(member) if member.rpartition(".")[2] in TEXTS else []
        return not values or 2 * len(set(values)) > len(values)

    def may_be_label(self, member: str) -> bool:
        """Returns whether most samples have a label there, and some the same one."""
        values = self.values(member)
        return 2 * len(values) > len(self.samples) and 2 * len(set(values)) <= len(values)

    @cached_property
    def fields(self) -> list[str]:
        """The fields of the members of JSON, as MEMBER:FIELD."""
        names = dict[str, None]()
        for key, sample in self.samples.items():
            for member in sample:
                if member.rpartition(".")[2] in JSONS:
                    with suppress(ValueError, RecursionError):
                        value = json.loads(self.read(key, member))
                        fields = value if isinstance(value, dict) else {}
                        names |= {f"{member}:{name}": None for name in fields if name}
        return [*names]


def _label_candidates(members: list[str], columns: _Columns, has_text: bool) -> list[str]:
    """Returns the members and fields that may be the label: those of the surest kind alone."""
    ending = {x: x.rpartition(".")[2] for x in members}
    numbers = [x for x in members if ending[x] in NUMBERS]
    sure = [x for x in numbers if ending[x] in ("cls", "class")]
    texts = [x for x in members if ending[x] in TEXTS and not columns.is_text(x)]
    named = [x for x in columns.fields if x.partition(":")[2].lower() in LABEL_NAMES]
    named = [x for x in named if columns.values(x)]
    arrays = [x for x in members if ending[x] == "npy" and columns.values(x)]
    fields = [x for x in columns.fields if columns.may_be_label(x)]
    fields = [x for x in fields if len(set(columns.values(x))) > 1 and not has_text]
    return next(filter(None, (sure, numbers, texts, named, arrays, fields)), [])
