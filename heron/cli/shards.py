"""`heron shards build | index | verify | show | protocol | amend`."""

import math
import sys
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

from heron.base.artefact import INT64_MAX
from heron.base.errors import SourceError
from heron.base.sections import Natural
from heron.base.terminal import counted
from heron.cli.arguments import (
    Address,
    Group,
    Location,
    Overwrite,
    Quiet,
    UsageError,
    Verb,
    executor,
)
from heron.shards import build, show, verify
from heron.sources import SOURCES, find_source, foreign, make_source
from heron.sources.layout import Layout

Workers = Annotated[Natural | None, "processes here (default: 1), or tasks of the cluster at once"]
Undecided = Literal["skip", "wrong", "unknown", "drop"]
Folder = Annotated[Location, "folder of shards, or s3://bucket/folder"]


def build_from(name: str) -> Verb:
    """Returns the verb that builds from a source: one of Heron's, or a class by dotted path.

    Raises SourceError if there is none, or one of its options is one of `heron shards build` too.
    """
    source = find_source(name)
    if taken := source.model_fields.keys() & {"help", *signature(build_shards).parameters}:
        raise SourceError(
            f"{name}: `heron shards build` already has an option named "
            f"{' and '.join(sorted(taken))}; rename it"
        )
    return Verb(partial(build_shards, name), source, f"{source.__doc__ or name}\n{source.examples}")


class Sources(dict[str, Verb]):
    """The verbs that build from a source; that of a dotted path is created on access."""

    __missing__ = staticmethod(build_from)


def build_shards(
    source: str,
    *,
    out: Annotated[Location, "folder to write, or s3://bucket/folder"],
    workers: Workers = None,
    address: Address = None,
    shard_rows: Annotated[int | None, "rows per shard"] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Writes a source as shards, or continues an unfinished build."""
    made = make_source(source, options)
    with executor(workers, address) as spread:
        build.build(
            made,
            out,
            shard_rows=shard_rows,
            executor=spread,
            progress=not quiet,
            overwrite=overwrite,
            wait=False,
        )


def index_tars(
    folder: Annotated[Path, "folder of WebDataset tars"],
    *,
    workers: Workers = None,
    address: Address = None,
    overwrite: Annotated[bool, "index tars again that already are"] = False,
    quiet: Quiet = False,
    **layout: Any,
) -> None:
    """Indexes WebDataset tars in place.

    heron shards index data/cats --image jpg --label cls --workers 2
    """
    read_as = Layout.of(layout)
    with executor(workers, address) as spread:
        outcome = foreign.index(
            folder, read_as, executor=spread, progress=not quiet, overwrite=overwrite
        )
    print(outcome)


def verify_shards(
    folder: Folder,
    *,
    decode: Annotated[bool, "also decode the pictures"] = False,
    workers: Workers = None,
    address: Address = None,
) -> int:
    """Checks every checksum, count, key and shape.

    heron shards verify data/faces
    """
    with executor(workers, address) as spread:
        report = verify.verify(folder, decode, spread)
    print(report, file=sys.stdout if report.ok else sys.stderr)
    return 0 if report.ok else 1


def show_shards(
    folder: Folder,
    *,
    sheet: Annotated[Path | None, "file to draw a contact sheet to"] = None,
    split: Annotated[str | None, "split of the contact sheet (default: the first)"] = None,
    count: Annotated[int, "pictures on it"] = 48,
    captions: Annotated[bool, "write keys under the pictures"] = False,
) -> None:
    """Shows what is in a data set.

    heron shards show data/faces --sheet faces.png
    """
    print(show.show(folder))
    if sheet:
        show.contact_sheet(folder, sheet, split, count, captions)
        print(f"contact sheet: {sheet}")


def amend_shards(
    data: Folder,
    *,
    decisions: Annotated[Path, "CSV file with what was decided: decisions.csv or labels.csv"],
    out: Annotated[Location, "folder to write, or s3://bucket/folder"],
    undecided: Annotated[Undecided, "what to do where the file has no decision"] = "skip",
    first: Annotated[Natural | None, "lines that --undecided is of (default: all)"] = None,
    workers: Workers = None,
    address: Address = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Writes a data set again with labels corrected or removed, or samples left out.

    heron shards amend data/faces --decisions reports/audit/decisions.csv --out data/faces-2
    """
    from heron.data.amend import Amended

    if "://" not in out and Path(out).resolve() == Path(data).resolve():
        raise UsageError("--out is the data set itself, which is left as it is; pass a new folder")
    options = {"data": data, "decisions": decisions, "undecided": undecided, "first": first}
    source = Amended.model_validate(options)
    source.reader.verify_payloads()
    counts, size = source.amendment.counts, source.reader.manifest.built_from.shard_rows
    with executor(workers, address) as spread:
        build.build(
            source,
            out,
            shard_rows=size or None,  # 0: tars of others
            executor=spread,
            progress=not quiet,
            overwrite=overwrite,
            wait=False,
        )
    changed, dropped = counted(counts["changed"], "label"), counted(counts["left_out"], "sample")
    print(f"{changed} changed, {counts['removed']:,} removed, {dropped} left out")


def write_protocol(
    config: Annotated[Location, "experiment: a file, or a shipped name"],
    folder: Annotated[Path, "new folder for the roles"],
    *overrides: Annotated[str, "key=value, such as data.path=data/faces"],
) -> None:
    """Decides once which rows are labelled, unlabelled, for testing and for validation.

    This needs the labels of all rows in memory; training with data.roles=FOLDER does not.

    heron shards protocol scene data/scene-roles
    """
    from heron.base.shipped import find_config
    from heron.data import open_shards
    from heron.data.dataset import load_or_assign_roles, open_reader
    from heron.data.protocol import write_roles
    from heron.experiment.config import load_config

    data = load_config(find_config(config), list(overrides)).data
    data = data.model_copy(update={"roles": None})
    open_shards.MAX_REQUEST_BYTES = INT64_MAX  # no limit: the amount is printed
    reader = open_reader(data)
    rows, labels = int(reader.starts[-1]), reader.manifest.labels
    row_bytes = labels.dtype.itemsize * math.prod(labels.row_shape) + 16
    gib = rows * row_bytes / 2**30
    print(f"{rows:,} rows of {reader.store}: needs about {gib:.1f} GiB of memory or more")
    written = write_roles(reader, load_or_assign_roles(reader, data), data, folder)
    print(f"{folder}: {written.fingerprint}; train with data.roles={folder}")


SHARDS = Group(
    "Builds, indexes, verifies and shows data sets on disk.",
    {
        "build": Group(
            "Writes a source as shards, or continues an unfinished build.\n\nThe source is one of "
            "these, or your own class as PACKAGE.MODULE.CLASS.",
            Sources({name: build_from(name) for name in SOURCES}),
            "source",
        ),
        "index": Verb(index_tars, Layout),
        "verify": Verb(verify_shards),
        "show": Verb(show_shards),
        "protocol": Verb(write_protocol),
        "amend": Verb(amend_shards),
    },
)
