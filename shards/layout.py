"""How the tars of others are laid out: which members are views, which labels, which tars splits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FilePath, ValidationError

from shards.annotation import JSONS, NUMBERS, TEXTS, Annotation
from shards.errors import ShardError, SourceError
from shards.manifest import Shard, in_words
from shards.sources.base import WHOLE

PICTURES = ("jpg", "jpeg", "jpe", "jfif", "png")
COMPRESSED = (".tgz", ".tbz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
WORDS = {
    **{word: "train" for word in ("train", "training")},
    **{word: "val" for word in ("val", "valid", "validation", "dev")},
    **{word: "test" for word in ("test", "testing")},
}


class Column(NamedTuple):
    """A view: its name, its kind, and the suffixes its member may have."""

    name: str
    kind: Literal["image", "vector"]
    suffixes: tuple[str, ...]


class Layout(BaseModel):
    """What to index of each sample: the fields are the options of `heron shards index`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: list[str] | None = Field(
        default=None,
        description="suffixes of pictures (JPEG or PNG), a view each: jpg, or left.jpg right.jpg; "
        "jpg,jpeg takes either",
    )
    vector: list[str] | None = Field(
        default=None, description="suffixes of float32 vectors, a view each: npy, or audio.npy"
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
    missing_label: Literal["error", "unlabelled"] = Field(
        default="error", description="what a sample is that has no label"
    )
    split: list[str] | None = Field(
        default=None,
        description="splits, as NAME=PATTERN: train='a-*.tar' (default: by the word train, val or "
        f"test in the name of each tar; where no name has one, all are one split, {WHOLE})",
    )
    prefix_keys: bool = Field(
        default=False,
        description="true begins every key with the name of its tar, for tars that share keys",
    )
    on_error: Literal["raise", "skip"] = Field(
        default="raise",
        description="skip leaves out samples that are damaged or incomplete, naming them",
    )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Layout:
        """Check options as the command line gives them; SourceError where one is wrong."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as fault:
            raise SourceError(f"{in_words(fault)}; see `heron shards index --help`") from None

    @cached_property
    def columns(self) -> list[Column]:
        """The views; SourceError where two would have the same name."""
        asked = [Column("image", "image", _suffixes(text, PICTURES)) for text in self.image or ()]
        asked += [
            Column("vector", "vector", _suffixes(text, ("npy",))) for text in self.vector or ()
        ]
        plain = [column.suffixes[0].replace(".", "_") for column in asked]
        names = [one.suffixes[0].rpartition(".")[0].replace(".", "_") or one.name for one in asked]
        if len(self.image or ()) == 1:
            names[0] = "image"
        if len(set(names)) < len(names):
            names = plain
        if len(set(names)) < len(names):
            raise SourceError(f"views are called {', '.join(names)}; expected each once")
        return [one._replace(name=name) for name, one in zip(names, asked, strict=True)]

    @cached_property
    def annotation(self) -> Annotation | None:
        """Where labels lie, if anywhere."""
        return None if self.label is None else Annotation(self.label)

    @property
    def names(self) -> list[str] | None:
        """The names of the classes, where they are given."""
        if self.label_names is None:
            return None
        try:
            names = [n.strip() for n in self.label_names.read_text(encoding="utf-8").splitlines()]
        except UnicodeDecodeError:
            raise SourceError(f"label_names: {self.label_names} is not UTF-8") from None
        for number, name in enumerate(names):
            if not name or name in names[:number]:
                raise SourceError(
                    f"label_names: line {number + 1} of {self.label_names} is {name!r}; expected "
                    "a name on every line, and each once"
                )
        return names

    def splits(self, folder: Path) -> dict[str, list[Path]]:
        """The tars of each split, in the order of their names.

        Raises:
            ShardError: there are no tars, or a name cannot stand in a manifest.
            SourceError: a tar is in no split, or in two; a split has no tar.
        """
        tars = _tars(folder)
        if self.split:
            patterns = [text.partition("=") for text in self.split]
            for text, (name, _, pattern) in zip(self.split, patterns, strict=True):
                if not name or not pattern:
                    raise SourceError(f"split: {text!r}; expected NAME=PATTERN: train='a-*.tar'")
                if not any(fnmatchcase(tar.name, pattern) for tar in tars):
                    raise SourceError(
                        f"split: no tar in {folder} is called {pattern!r}; found "
                        f"{_some([tar.name for tar in tars])}"
                    )
            found = {
                tar: {name for name, _, one in patterns if fnmatchcase(tar.name, one)}
                for tar in tars
            }
            order = list(dict.fromkeys(name for name, _, _ in patterns))
        else:
            found = {
                tar: {
                    WORDS[word] for word in re.findall("[a-z]+", tar.stem.lower()) if word in WORDS
                }
                for tar in tars
            }
            order = [*dict.fromkeys(WORDS.values())]
            if not any(found.values()):
                return {WHOLE: tars}
        for tar, names in found.items():
            if len(names) != 1:
                raise SourceError(
                    f"split: {tar.name} is of {' and '.join(sorted(names)) or 'no split'}; "
                    "expected one; say which with --split NAME=PATTERN, or move it away"
                )
        splits = {name: [tar for tar in tars if name in found[tar]] for name in order}
        return {name: tars for name, tars in splits.items() if tars}


def _suffixes(text: str, endings: tuple[str, ...]) -> tuple[str, ...]:
    suffixes = tuple(text.lower().split(","))
    for suffix in suffixes:
        plain = re.fullmatch(r"([a-z0-9_-]+\.)*([a-z0-9_-]+)", suffix)
        if plain is None or plain[2] not in endings:
            raise SourceError(
                f"no such view can be read from {suffix!r}; expected {', '.join(endings)}, or a "
                f"name before it, as in left.{endings[0]}"
            )
    return suffixes


def _tars(folder: Path) -> list[Path]:
    """The tars of a folder, sorted; ShardError where there are none, or some would be left out."""
    names = sorted(path.name for path in folder.iterdir())
    if packed := [name for name in names if name.lower().endswith(COMPRESSED)]:
        raise ShardError(
            f"{folder} holds {packed[0]}, which is compressed; expected plain tars, since nobody "
            "can seek in compressed ones; decompress it, or move it away"
        )
    tars = [folder / name for name in names if name.endswith(".tar") and not name.startswith(".")]
    if not tars:
        raise ShardError(
            f"{folder} holds no tar; found {_some(names) or 'nothing'}; give the folder in which "
            "the tars lie"
        )
    for tar in tars:
        blank = {"samples": 1, "bytes": 1, "sha256": "0" * 64, "index_sha256": "0" * 64}
        try:
            Shard.model_validate({"file": tar.name, **blank})
        except ValidationError:
            raise ShardError(
                f"{tar}: a manifest cannot name it; expected letters, digits, '-', '_' and single "
                "dots; rename it"
            ) from None
    return tars


def suggestion(folder: Path, first: Mapping[str, list[str]]) -> str:
    """What to say where no view is asked for: what the first sample has, and a command for it."""
    found = f"{folder}: no view is asked for; "
    for key, members in first.items():

        def ending(*known: str) -> list[str]:
            return [one for one in members if one.rpartition(".")[2] in known]  # noqa: B023

        found += f"sample {key} has {_some(members)}; "
        labels = ending(*NUMBERS) or ending(*TEXTS) or [f"{one}:FIELD" for one in ending(*JSONS)]
        if images := ending(*PICTURES):
            asked, labels = f"--image {' '.join(images)}", labels or ending("npy")
        elif vectors := ending("npy"):
            asked = f"--vector {' '.join(vectors)}"
        else:
            continue
        asked += "".join(f" --label {label}" for label in labels[:1])
        return f"{found}try `heron shards index {folder} {asked}`"
    return f"{found}expected a picture ({', '.join(PICTURES)}) or a vector (npy) in each sample"


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
