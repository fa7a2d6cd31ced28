"""The command line: `heron shards build | verify | show`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shards.build import build
from shards.errors import ShardError, SourceError
from shards.show import contact_sheet, show
from shards.sources import SOURCES, make
from shards.verify import verify

EXPECTED = (ShardError, SourceError, FileNotFoundError, PermissionError)


class Verb(NamedTuple):
    """A verb of the command line: what it says of itself, its arguments, and what it does."""

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _add_build(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_subparsers(dest="source", metavar="SOURCE", required=True)
    for name, source in SOURCES.items():
        summary = (source.__doc__ or name).strip()
        one = sources.add_parser(
            name,
            help=summary.splitlines()[0],
            description=summary,
            epilog=f"example:\n  {source.examples}",
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
    names = SOURCES[arguments.source].model_fields
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


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of shards")


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


VERBS: dict[str, dict[str, Verb]] = {
    "shards": {
        "build": Verb("write a source as shards, or go on with a build", _add_build, _build),
        "verify": Verb("check every checksum, count, key and shape", _add_folder, _verify),
        "show": Verb("show what is inside", _add_show, _show),
    },
}
EXAMPLES = """examples:
  heron shards build faces --out data/faces --workers 2
  heron shards build mulan --arff scene-train.arff scene-test.arff --xml scene.xml --out data/scene
  heron shards verify data/faces
  heron shards show data/faces --sheet faces.png
"""


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    top = argparse.ArgumentParser(
        prog="heron",
        description="Contrastive pretraining for data with several views and several labels.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups = top.add_subparsers(dest="group", metavar="GROUP", required=True)
    for group, verbs in VERBS.items():
        one = groups.add_parser(group, help=f"{', '.join(verbs)} data sets on disk")
        table = one.add_subparsers(dest="verb", metavar="VERB", required=True)
        for name, verb in verbs.items():
            leaf = table.add_parser(
                name,
                help=verb.help,
                description=f"{verb.help[0].upper()}{verb.help[1:]}.",
                epilog="\n".join(["examples:", *_examples(group, name)]),
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            verb.add(leaf)
            leaf.set_defaults(run=verb.run)
    return top


def _examples(group: str, verb: str) -> list[str]:
    return [line for line in EXAMPLES.splitlines() if f" {group} {verb} " in line]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; what can be expected to go wrong is a line on stderr and status 1."""
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except EXPECTED as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
