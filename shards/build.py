"""Build a folder of shards: in parallel, resumable, the same bytes whoever wrote which shard."""

import fcntl
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from heron.shards.artefact import MANIFEST, parse_json
from heron.shards.atomic import atomic_write, save_json
from heron.shards.errors import ShardError, SourceError
from heron.shards.index import BLOCK, ShardIndex, map_arrays
from heron.shards.manifest import (
    LABELS,
    PRESENT,
    SCHEMA_VERSION,
    BuiltFrom,
    Manifest,
    Shard,
    View,
    index_name,
    load_manifest,
    member_names,
)
from heron.shards.moments import Moments
from heron.shards.sources.base import Rows, Source, is_there
from heron.shards.terminal import Bar
from heron.shards.texts import TOKENIZER, write_tokenizers
from heron.shards.workers import in_parallel

JOURNAL = "build.json"  # what an unfinished build is building; the manifest replaces it
IMAGES_AT_ONCE = 64  # read this many images at a time, whatever the length of a shard
ELSEWHERE = "choose another --out, or --overwrite to start again"


def build(
    source: Source,
    out: Path | str,
    *,
    shard_rows: int | None = None,
    workers: int = 1,
    progress: bool = True,
    overwrite: bool = False,
) -> Manifest:
    """Writes a source as shards under `out`, or goes on where an interrupted build stopped.

    A finished shard is never written twice, and a finished build is left alone. `shard_rows`
    defaults to 1,000 images or 8,192 vectors. Raises ShardError where `out` holds another build
    or the disk is full, SourceError where the publisher's files are wrong.
    """
    out = Path(out)
    if shard_rows is None:
        shard_rows = 1000 if source.block_rows is None else 32 * source.block_rows
    plan = list(_plan(source, shard_rows))
    draft = _draft(source, shard_rows)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ShardError(
            f"{out}: a file lies there; expected a folder, new or old; choose another --out"
        ) from None
    with _only_builder(out):
        if overwrite:
            _clear(out)
        if (done := _finished(out, draft.built_from, source)) is not None:
            if progress:
                print(f"{out} is complete: {_counts(done)}; nothing to do")
            return done
        save_json(out / JOURNAL, draft.built_from.model_dump(mode="json"))
        _write_all(source, out, plan, workers, progress)
        tars = [p.file for p in plan if p.split == "train" or "train" not in draft.splits]
        if any(view.kind == "text" for view in draft.views):
            read = {out / tar: ShardIndex.read(out / index_name(tar)) for tar in tars}
            write_tokenizers(out, draft.views, read)
        manifest = _manifest(draft, out, plan).write(out / MANIFEST)
        (out / JOURNAL).unlink()
        if progress:
            print(f"{out}: {_counts(manifest)}")
        return manifest


class _Rows(NamedTuple):
    """Rows [start, stop) of a split, which make one shard."""

    file: str
    split: str
    start: int
    stop: int

    def __str__(self) -> str:
        return self.file


def _plan(source: Source, shard_rows: int) -> Iterator[_Rows]:
    block = source.block_rows or 1
    if shard_rows < 1 or shard_rows % block:
        raise ShardError(
            f"shard_rows is {shard_rows}; expected a positive multiple of block_rows = {block}; "
            f"try {max(1, round(shard_rows / block)) * block}"
        )
    for split, rows in source.splits.items():
        for number, start in enumerate(range(0, rows, shard_rows)):
            file = f"{split}-{number:06d}.tar"
            yield _Rows(file, split, start, min(start + shard_rows, rows))


def _draft(source: Source, shard_rows: int) -> Manifest:
    """Returns the manifest but for what is measured; SourceError where it could not be one."""
    try:
        return Manifest(
            dataset=source.dataset,
            schema_version=SCHEMA_VERSION,
            views=source.views,
            labels=source.labels,
            block_rows=source.block_rows,
            splits=dict.fromkeys(source.splits, []),
            built_from=BuiltFrom(
                source=source.name,
                version=source.version,
                options=source.options(),
                files=source.input_files(),
                shard_rows=shard_rows,
            ),
            seed=source.seed,
        )
    except ValidationError as fault:
        raise source.invalid(fault) from None


@contextmanager
def _only_builder(out: Path) -> Iterator[None]:
    """Lets one process build in a folder; others wait, and then find the build complete."""
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{out}: waiting for another build to finish")
            fcntl.flock(folder, fcntl.LOCK_EX)
        _drop_parts(out)  # of a build that was killed
        try:
            yield
        finally:
            _drop_parts(out)  # of workers that were ended
    finally:
        os.close(folder)


def _drop_parts(out: Path) -> None:
    for part in out.glob(".*.part"):
        part.unlink()


def _clear(out: Path) -> None:
    """Removes what a build made; what is left of it meanwhile still looks like a build of ours."""
    if not any((out / name).exists() for name in (MANIFEST, JOURNAL)):
        return  # tars here are not ours
    with suppress(ShardError):  # a manifest that cannot be read is one to start again from
        if load_manifest(out).foreign:
            raise SourceError(
                f"{out} holds tars of others, indexed where they lie; a build would remove them; "
                "choose another --out"
            )
    with suppress(FileNotFoundError):
        (out / MANIFEST).replace(out / JOURNAL)
    number = "[0-9]" * 6
    for pattern in (f"*-{number}.tar", f"*-{number}.index.npz", f"*{TOKENIZER}", JOURNAL):
        for path in out.glob(pattern):
            path.unlink()


def _finished(out: Path, built_from: BuiltFrom, source: Source) -> Manifest | None:
    """Returns the manifest where this build is complete; ShardError where another lies here.

    An option that is not in a manifest came later, and has its default there.
    """
    wanted = built_from.model_dump(mode="json")
    manifest = load_manifest(out) if (out / MANIFEST).exists() else None
    if manifest is not None:
        found = manifest.built_from.model_dump(mode="json")
    elif (out / JOURNAL).exists():
        try:
            found = parse_json((out / JOURNAL).read_bytes())
        except ValueError as fault:
            raise ShardError(f"{out / JOURNAL}: {fault}; {ELSEWHERE}") from None
    elif strays := sorted(out.glob("*.tar")):
        raise ShardError(
            f"{out} holds {strays[0].name} but neither {MANIFEST} nor {JOURNAL}; expected an empty "
            "folder or a build of ours; choose another --out, or empty it"
        )
    else:
        return None
    options = found.get("options")
    if found.get("source") == source.name and isinstance(options, dict):
        later = {k: field.default for k, field in type(source).model_fields.items()}
        found["options"] = {k: later[k] for k in wanted["options"] if k in later} | options
    if found != wanted:
        raise ShardError(f"{out} holds another build: {_difference(found, wanted)}; {ELSEWHERE}")
    return manifest


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Names the first thing in which two builds differ."""
    both = ((name, found.get(name, "unset"), wanted.get(name, "unset")) for name in wanted | found)
    name, old, new = next((name, old, new) for name, old, new in both if old != new)
    if name == "files":
        return "the bytes of its input files were others"
    if name == "version":
        return f"version {old} of the source {wanted['source']!r} made its rows, not version {new}"
    if name == "options" and isinstance(old, dict):
        return _difference(old, new)
    return f"its {name} is {old!r}, this one's {new!r}"


def _counts(manifest: Manifest) -> str:
    parts = (
        f"{split} {manifest.rows(split):,} rows in {len(shards)} shards"
        for split, shards in manifest.splits.items()
    )
    return ", ".join(parts)


def _write_all(source: Source, out: Path, plan: list[_Rows], workers: int, progress: bool) -> None:
    """Writes the shards that are not there yet."""
    done = {p.name for p in out.iterdir()}  # a tar gets its name after its index has
    missing = [part for part in plan if not {part.file, index_name(part.file)} <= done]
    total = sum(part.stop - part.start for part in plan)
    left = sum(part.stop - part.start for part in missing)
    with Bar(total, "row", start=total - left, name=out.name, hidden=not progress) as bar:
        write = partial(write_shard, source, out)
        with closing(in_parallel(write, missing, workers)) as written:
            for _, rows in written:
                bar.update(rows)


def write_shard(source: Source, out: Path, part: _Rows) -> int:
    """Writes a shard and its index, then gives both their names; returns the rows written."""
    tar = out / part.file
    with atomic_write(tar) as stream:
        _write_tar(source, part, stream).write(out / index_name(part.file))
    return part.stop - part.start


def _write_tar(source: Source, part: _Rows, stream: BinaryIO) -> ShardIndex:
    """Writes a shard's samples, a block of vectors or an image each; returns where they lie."""
    from webdataset import TarWriter  # late: it imports a lot, and whoever reads needs none of it

    views = source.views
    partial = any(view.missing for view in views)
    members = [*member_names(views, source.block_rows), LABELS, *([PRESENT] if partial else [])]
    keys, offsets, lengths, checksums, labels, present = [], [], [], [], [], []
    step = source.block_rows or IMAGES_AT_ONCE
    # Times and owners are left out, so that the same rows are the same bytes.
    with TarWriter(stream, user="", group="", mode=0o644, mtime=0, encoder=False) as writer:
        tar = writer.tarstream
        tar.format = tarfile.USTAR_FORMAT  # its default too, which it does not pass on
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            rows = source.read(part.split, start, stop)
            block = f"{part.split}-{start // step:06d}"
            if (fault := _fault(source, views, rows, stop - start)) is not None:
                raise ShardError(f"{source.name}, {block}: {fault}; this is a fault of the source")
            size = step if source.block_rows else 1
            there = np.stack([is_there(rows.views[view.name]) for view in views], 1)
            for first in range(0, stop - start, size):
                sample = slice(first, first + size)
                keys.append(block if rows.keys is None else rows.keys[first])
                labels.append(rows.labels[sample])
                present.append(there[sample].astype(np.uint8))
                values = [
                    _written(
                        rows.views[view.name][sample], there[sample, number], source.block_rows
                    )
                    for number, view in enumerate(views)
                ]
                values += [labels[-1], present[-1]][: len(members) - len(views)]
                for suffix, value in zip(members, values, strict=True):
                    if value is None:  # the row lacks the view: the sample has no such member
                        offsets.append(tar.offset)
                        lengths.append(0)
                        checksums.append(0)
                        continue
                    payload = npy(value) if isinstance(value, np.ndarray) else value[0]
                    offsets.append(tar.offset + BLOCK)
                    lengths.append(len(payload))
                    checksums.append(zlib.crc32(payload))
                    # One at a time: the members of a sample would be sorted by their suffixes.
                    writer.write({"__key__": keys[-1], suffix: payload})
    shape = (len(keys), len(members))
    return ShardIndex(
        keys=np.array(keys),
        members=np.array(members),
        offsets=np.array(offsets, np.int64).reshape(shape),
        lengths=np.array(lengths, np.int64).reshape(shape),
        crc32=np.array(checksums, np.uint32).reshape(shape),
        rows=np.array([len(block) for block in labels], np.int64),
        labels=np.concatenate(labels),
        present=np.concatenate(present) if partial else None,
    )


def _written(values: Any, there: NDArray[np.bool_], block_rows: int | None) -> Any:
    """Returns what a tar holds of a view: zeros for rows of a block that lack it, or no member."""
    if there.all():
        return values
    return None if block_rows is None else np.where(there[:, None], values, np.float32(0))


def _fault(source: Source, views: list[View], rows: Rows, count: int) -> str | None:
    """Says in what `count` rows are not what their source declares, or returns None."""
    if (fault := source.labels.fault(np.asarray(rows.labels), count)) is not None:
        return fault
    names = [view.name for view in views]
    if sorted(rows.views) != sorted(names):
        return f"views are {', '.join(rows.views) or 'none'}; expected {', '.join(names)}"
    if source.block_rows is None and len(rows.keys or []) != count:
        return f"{len(rows.keys or [])} keys; expected {count}, one for each row of pictures"
    there = {view.name: is_there(rows.views[view.name]) for view in views}
    for view in views:
        values = rows.views[view.name]
        here = there[view.name]
        if not here.all() and not view.missing:
            return (
                f"row {int(np.argmin(here))} lacks view {view.name!r}; expected it in every row, "
                'or a view with missing="allow"'
            )
        if source.block_rows is None and view.kind != "vector":
            stated = [value for value in values if value is not None]
            if len(values) != count or not all(isinstance(value, bytes) for value in stated):
                return f"view {view.name!r} is not the bytes of {count} {view.kind}s"
            continue
        array, shape = np.asarray(values), (count, *view.shape)
        if array.dtype != view.dtype or array.shape != shape:
            return (
                f"view {view.name!r} is {array.dtype} {array.shape}; expected {view.dtype} {shape}"
            )
        if not (finite := np.isfinite(array).reshape(count, -1).all(1) | ~here).all():
            row = int(np.argmin(finite))
            return f"view {view.name!r}, row {row} of the block, is not finite; expected numbers"
    if not (some := np.stack(list(there.values())).any(0)).all():
        return f"row {int(np.argmin(some))} has none of its views; expected one at least: drop it"
    return None


def npy(array: NDArray[Any]) -> bytes:
    """Returns an array as the bytes of an npy file."""
    stream = BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(array), (1, 0), allow_pickle=False)
    return stream.getvalue()


def _manifest(draft: Manifest, out: Path, plan: list[_Rows]) -> Manifest:
    """Measures the shards on disk: those of this run and of interrupted ones alike."""
    splits: dict[str, list[Shard]] = {split: [] for split in draft.splits}
    moments = {n: Moments() for n, view in enumerate(draft.views) if view.kind == "vector"}
    for part in plan:
        tar, index_file = out / part.file, out / index_name(part.file)
        index = ShardIndex.read(index_file)
        splits[part.split].append(Shard.of(tar, index))
        if part.split == ("train" if "train" in splits else part.split):
            for column, moment in moments.items():
                there = index.lengths[:, column] > 0
                spans = index.offsets[there, column], index.lengths[there, column]
                starts = index.starts[:-1][there].tolist()
                for start, block in zip(starts, map_arrays(tar, *spans), strict=True):
                    if index.present is not None:
                        block = block[index.present[start : start + len(block), column] > 0]
                    if len(block):
                        moment.add(block)
    views = [moments[n].onto(v) if n in moments else v for n, v in enumerate(draft.views)]
    return Manifest.model_validate(dict(draft) | {"views": views, "splits": splits})
