"""Data sources: a publisher's files, or synthetic rows, in; the rows of a data set out.

One file a format, one class `Source` each. `shards.build` packs the rows into a folder of shards.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from heron.base.dotted import load_class, suggest
from heron.base.errors import SourceError, explain
from heron.shards.manifest import FOREIGN_SOURCE
from heron.shards.source import Rows, Source
from heron.sources.arrays import Arrays
from heron.sources.captions import Captions
from heron.sources.celeba import CelebA
from heron.sources.cifar import Cifar
from heron.sources.faces import Faces
from heron.sources.folder import Folder
from heron.sources.idx import Idx
from heron.sources.mat import Mat
from heron.sources.mulan import Mulan
from heron.sources.parquet import Parquet
from heron.sources.table import Table
from heron.sources.tu import Tu
from heron.sources.xrmb import Frames, Xrmb

__all__ = ["SOURCES", "Rows", "Source", "find", "make"]

SOURCES: dict[str, type[Source]] = {
    "mulan": Mulan,
    "arrays": Arrays,
    "mat": Mat,
    "parquet": Parquet,
    "table": Table,
    "idx": Idx,
    "folder": Folder,
    "captions": Captions,
    "xrmb": Xrmb,
    "celeba": CelebA,
    "cifar": Cifar,
    "faces": Faces,
    "frames": Frames,
    "tu": Tu,
}
BASE = f"{Source.__module__}.{Source.__qualname__}"  # the base class that messages name


def make_source(name: str, options: Mapping[str, Any]) -> Source:
    """Returns a source from its name and its options, as YAML or the command line gives them."""
    source = find_source(name)
    known_options = list(source.model_fields)
    for option in options:
        if option not in known_options:
            raise SourceError(f"{name} has no option {option!r}; {suggest(option, known_options)}")
    try:
        return source.model_validate(dict(options))
    except ValidationError as faults:
        fault = faults.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "options"
        raise SourceError(
            f"{name}: {explain(fault, where)}; see `heron shards build {name} --help`"
        ) from None


def find_source(name: str) -> type[Source]:
    """Returns the class of a source: one of SOURCES, or your own by its dotted path.

    Raises SourceError where there is no such class, or it is not a complete source.
    """
    if name in SOURCES:
        return SOURCES[name]
    if "." not in name:
        raise SourceError(f"unknown source {name!r}; {suggest(name, list(SOURCES))}")
    try:
        source = load_class(name, Source)  # type: ignore[type-abstract]  # abstract ones are refused below
    except ValueError as fault:
        raise SourceError(str(fault)) from fault
    if missing := sorted(source.__abstractmethods__):
        raise SourceError(f"{name} must define {', '.join(missing)}, which {BASE} leaves open")
    # The manifest records the name; two sources of one name would take each other's folders.
    title = getattr(source, "name", None)
    if not isinstance(title, str) or not title or title in (*SOURCES, FOREIGN_SOURCE):
        raise SourceError(
            f"{name} has the name {title!r}, like a source of heron; define another, e.g. `name: "
            f'ClassVar[str] = "{source.__name__.lower()}"` in the class'
        )
    return source
