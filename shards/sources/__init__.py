"""Sources of data, each reading files as their publisher hands them out, or drawing them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from heron.shards.errors import SourceError
from heron.shards.sources.arrays import Arrays
from heron.shards.sources.base import Rows, Source
from heron.shards.sources.celeba import CelebA
from heron.shards.sources.cifar import Cifar
from heron.shards.sources.faces import Faces
from heron.shards.sources.folder import Folder
from heron.shards.sources.frames import Frames
from heron.shards.sources.idx import Idx
from heron.shards.sources.mulan import Mulan
from heron.shards.sources.table import Table
from heron.shards.sources.xrmb import Xrmb

__all__ = ["SOURCES", "Rows", "Source", "make"]

SOURCES: dict[str, type[Source]] = {
    "mulan": Mulan,
    "arrays": Arrays,
    "table": Table,
    "idx": Idx,
    "folder": Folder,
    "xrmb": Xrmb,
    "celeba": CelebA,
    "cifar": Cifar,
    "faces": Faces,
    "frames": Frames,
}


def make(name: str, options: Mapping[str, Any]) -> Source:
    """Make a source from its name and options, as YAML or the command line gives them."""
    if name not in SOURCES:
        raise SourceError(f"unknown source {name!r}; {_instead(name, list(SOURCES))}")
    source = SOURCES[name]
    known = list(source.model_fields)
    for option in options:
        if option not in known:
            raise SourceError(f"{name} has no option {option!r}; {_instead(option, known)}")
    try:
        return source.model_validate(dict(options))
    except ValidationError as faults:
        fault = faults.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "options"
        found = "" if fault["type"] == "missing" else f" (found {fault['input']!r})"
        raise SourceError(
            f"{name}: {where}: {fault['msg'].removeprefix('Value error, ')}{found}; "
            f"see `heron shards build {name} --help`"
        ) from None


def _instead(wrong: str, known: list[str]) -> str:
    near = get_close_matches(wrong, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
