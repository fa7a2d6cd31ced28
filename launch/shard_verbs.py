"""`heron shards build | index | verify | show`."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from heron.launch.verb import Verb
from heron.shards.build import build
from heron.shards.errors import SourceError
from heron.shards.foreign import index
from heron.shards.layout import Layout
from heron.shards.show import contact_sheet, show
from heron.shards.sources import SOURCES, Source, find, make
from heron.shards.verify import verify


def _add_build(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_subparsers(
        action=_Sources,
        dest="source",
        metavar="SOURCE",
        required=True,
        description="one of these, or a class of yours as PACKAGE.MODULE.CLASS",
    )
    for name, source in SOURCES.items():
        _add_source(sources, name, source)


class _Sources(argparse._SubParsersAction):  # type: ignore[type-arg]  # no generic when run
    """The parsers of the sources; that of a dotted path is made when it is called for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.choices: Any = None  # a dotted path is none of them; a wrong name is found below

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if "." in values[0] and values[0] not in self._name_parser_map:
            try:
                _add_source(self, values[0], find(values[0]))
            except SourceError as fault:
                raise argparse.ArgumentError(self, str(fault)) from None
        super().__call__(parser, namespace, values, option_string)


def _add_source(
    sources: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    source: type[Source],
) -> None:
    summary = inspect.cleandoc(source.__doc__ or name)
    one = sources.add_parser(
        name,
        help=summary.splitlines()[0],
        description=summary,
        epilog=f"example:\n  {source.examples}" if source.examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("--out", type=Path, required=True, help="folder to write")
    for option, field in source.model_fields.items():
        _add_option(one, option, field)
    one.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    one.add_argument("--shard-rows", type=int, help="rows of a shard")
    one.add_argument("--overwrite", action="store_true", help="start again, not resume")
    one.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    """An option of a source as an argument: its texts go to `make`, which checks them."""
    about = field.description or ""
    if not field.is_required() and field.default not in (None, PydanticUndefined):
        about += f" (default: {field.default})"
    several = any(get_origin(kind) is list for kind in _kinds(field.annotation))
    values = [v for k in _kinds(field.annotation) if get_origin(k) is Literal for v in get_args(k)]
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        dest=name,
        nargs="+" if several else None,
        choices=values or None,
        required=field.is_required(),
        default=argparse.SUPPRESS,
        metavar=None if values else name.upper(),
        help=about.replace("%", "%%"),
    )


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The members of `X | None`, or the type alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _build(arguments: argparse.Namespace) -> int:
    names = find(arguments.source).model_fields
    options = {name: value for name, value in vars(arguments).items() if name in names}
    build(
        make(arguments.source, options),
        arguments.out,
        shard_rows=arguments.shard_rows,
        workers=arguments.workers,
        progress=not arguments.quiet,
        overwrite=arguments.overwrite,
    )
    return 0


def _add_index(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of WebDataset tars")
    for option, field in Layout.model_fields.items():
        _add_option(parser, option, field)
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--overwrite", action="store_true", help="index again what was indexed")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _index(arguments: argparse.Namespace) -> int:
    given = vars(arguments)
    outcome = index(
        arguments.folder,
        Layout.of({name: given[name] for name in Layout.model_fields if name in given}),
        workers=arguments.workers,
        progress=not arguments.quiet,
        overwrite=arguments.overwrite,
    )
    print(outcome)
    return 0


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR|URL", help="folder of shards, or s3://bucket/folder")


def _verify(arguments: argparse.Namespace) -> int:
    report = verify(arguments.folder)
    print(report, file=sys.stdout if report.ok else sys.stderr)
    return 0 if report.ok else 1


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("--sheet", type=Path, metavar="FILE.png", help="draw a contact sheet")
    parser.add_argument("--split", help="split of the contact sheet (default: the first)")
    parser.add_argument("--count", type=int, default=48, help="pictures on it (default: 48)")
    parser.add_argument("--captions", action="store_true", help="write keys under the pictures")


def _show(arguments: argparse.Namespace) -> int:
    print(show(arguments.folder))
    if arguments.sheet:
        contact_sheet(
            arguments.folder,
            arguments.sheet,
            arguments.split,
            arguments.count,
            arguments.captions,
        )
        print(f"contact sheet: {arguments.sheet}")
    return 0


SHARD_VERBS = {
    "build": Verb("write a source as shards, or go on with a build", _add_build, _build),
    "index": Verb("index WebDataset tars of others where they lie", _add_index, _index),
    "verify": Verb("check every checksum, count, key and shape", _add_folder, _verify),
    "show": Verb("show what is inside", _add_show, _show),
}
