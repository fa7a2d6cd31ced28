"""Sources of data, each reading files as their publisher hands them out, or drawing them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from heron.shards.errors import SourceError
from heron.shards.manifest import FOREIGN
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

__all__ = ["SOURCES", "Rows", "Source", "find", "make"]

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
BASE = f"{Source.__module__}.{Source.__qualname__}"  # what sources are derived from


def make(name: str, options: Mapping[str, Any]) -> Source:
    """Makes a source from its name and options, as YAML or the command line gives them."""
    source = find(name)
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


def find(name: str) -> type[Source]:
    """Returns the class of a source: one of SOURCES, or a class of yours by its dotted path.

    Raises:
        SourceError: there is no such source, or it is no source.
    """
    if name in SOURCES:
        return SOURCES[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise SourceError(f"unknown source {name!r}; {_instead(name, list(SOURCES))}")
    try:
        found = importlib.import_module(module)
    except Exception as fault:  # it is code of others, which may do anything
        raise SourceError(
            f"{name}: module {module!r} cannot be imported ({type(fault).__name__}: {fault}); "
            "expected the module of a source; install its package, or put the folder it lies in on "
            "PYTHONPATH"
        ) from fault
    if not hasattr(found, attribute):
        sources = [key for key, value in vars(found).items() if _is_source(value)]
        raise SourceError(
            f"{name}: module {module!r} has no {attribute!r}; expected a subclass of {BASE}; "
            + (_instead(attribute, sources) if sources else "the module has none")
        )
    _check(name, getattr(found, attribute))
    source: type[Source] = getattr(found, attribute)
    return source


def _check(path: str, found: object) -> None:
    """Checks that what lies at a dotted path can be a source."""
    if not _is_source(found):
        what = f"the class {found.__name__}" if inspect.isclass(found) else repr(found)
        raise SourceError(
            f"{path}: found {what:.80}; expected a subclass of {BASE}; derive it from that class"
        )
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        raise SourceError(
            f"{path}: does not define {', '.join(lacking)}; expected all that {BASE} leaves open; "
            "define what is missing"
        )
    # The manifest records the name: with another source's, its folders would pass for this one's.
    title = getattr(found, "name", None)
    if not isinstance(title, str) or not title or title in (*SOURCES, FOREIGN):
        raise SourceError(
            f"{path}: its name is {title!r}; expected one that no source of heron has; define e.g. "
            f'`name: ClassVar[str] = "{path.rpartition(".")[2].lower()}"` in the class'
        )


def _is_source(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Source) and value is not Source


def _instead(wrong: str, known: list[str]) -> str:
    near = get_close_matches(wrong, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
