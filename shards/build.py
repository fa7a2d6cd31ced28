"""Build a folder of shards: in parallel, resumable, the same bytes whoever wrote which shard."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from shards.errors import ShardError
from shards.index import BLOCK, ShardIndex, map_array
from shards.manifest import (
    MANIFEST,
    BuiltFrom,
    Manifest,
    Shard,
    View,
    index_name,
    load_manifest,
    member_names,
    save_json,
)
from shards.sources.base import Rows, Source, sha256

JOURNAL = "build.json"  # what an unfinished build is building; the manifest replaces it
IMAGES_AT_ONCE = 64  # read this many images at a time, whatever the length of a shard


def build(
    source: Source,
    out: Path | str,
    *,
    shard_rows: int | None = None,
    workers: int = 1,
    progress: bool = True,
    overwrite: bool = False,
) -> Manifest:
    """Write a source as shards under `out`, or go on where an interrupted build stopped.

    A finished shard is never written twice, and a finished build is left alone. `shard_rows`
    defaults to 1,000 images or 8,192 vectors. Raises ShardError where `out` holds another build
    or the disk is full, SourceError where the publisher's files are wrong.
    """
    out = Path(out)
    if shard_rows is None:
        shard_rows = 1000 if source.block_rows is None else 32 * source.block_rows
    plan = list(_plan(source, shard_rows))
    built_from = BuiltFrom(
        source=source.name,
        options=source.options(),
        files=source.input_files(),
        shard_rows=shard_rows,
    )
    out.mkdir(parents=True, exist_ok=True)
    with _only_builder(out), _room_on_disk(out):
        if overwrite:
            _clear(out)
        if (done := _finished(out, built_from)) is not None:
            if progress:
                print(f"{out} is complete: {_counts(done)}; nothing to do")
            return done
        save_json(out / JOURNAL, built_from.model_dump(mode="json"))
        _write_all(source, out, plan, workers, progress)
        manifest = _manifest(source, out, plan, built_from)
        manifest.save(out)
        (out / JOURNAL).unlink()
        if progress:
            print(f"{out}: {_counts(manifest)}")
        return manifest


class _Part(NamedTuple):
    """Rows [start, stop) of a split, which make one shard."""

    file: str
    split: str
    start: int
    stop: int


def _plan(source: Source, shard_rows: int) -> Iterator[_Part]:
    block = source.block_rows or 1
    if shard_rows < 1 or shard_rows % block:
        raise ShardError(
            f"shard_rows is {shard_rows}; expected a positive multiple of block_rows = {block}; "
            f"try {max(1, round(shard_rows / block)) * block}"
        )
    for split, rows in source.splits.items():
        for number, start in enumerate(range(0, rows, shard_rows)):
            file = f"{split}-{number:06d}.tar"
            yield _Part(file, split, start, min(start + shard_rows, rows))


@contextmanager
def _only_builder(out: Path) -> Iterator[None]:
    """Let one process build in a folder; others wait, and then find the build complete."""
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{out}: waiting for another build to finish")
            fcntl.flock(folder, fcntl.LOCK_EX)
        for leftover in out.glob(".*.part"):  # of a build that was killed
            leftover.unlink()
        yield
    finally:
        os.close(folder)


@contextmanager
def _room_on_disk(path: Path) -> Iterator[None]:
    """Say what to do where a disk fills up; the caller leaves nothing half written."""
    try:
        yield
    except OSError as fault:
        if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ShardError(
            f"{path}: the disk is full; finished shards are kept; "
            "free some space and run the same build again"
        ) from None


def _clear(out: Path) -> None:
    """Remove what a build made, the manifest first: half a data set must not look whole."""
    for pattern in (MANIFEST, JOURNAL, "*-[0-9]*.tar", "*-[0-9]*.index.npz"):
        for path in out.glob(pattern):
            path.unlink()


def _finished(out: Path, built_from: BuiltFrom) -> Manifest | None:
    """The manifest where this build is complete; ShardError where another build lies here."""
    wanted = built_from.model_dump(mode="json")
    found: dict[str, Any]
    manifest = None
    if (out / MANIFEST).exists():
        manifest = load_manifest(out)
        found = manifest.built_from.model_dump(mode="json")
    elif (out / JOURNAL).exists():
        found = json.loads((out / JOURNAL).read_text(encoding="utf-8"))
    elif strays := sorted(out.glob("*.tar")):
        raise ShardError(
            f"{out} holds {strays[0].name} but neither {MANIFEST} nor {JOURNAL}; expected an empty "
            "folder or a build of ours; choose another --out, or --overwrite to start again"
        )
    else:
        return None
    if found != wanted:
        changed = _difference(found, wanted)
        raise ShardError(
            f"{out} holds another build: {changed}; choose another --out, "
            "or --overwrite to start again"
        )
    return manifest


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Name the first thing in which two builds differ."""
    if found.get("source") == wanted["source"] and found.get("options") != wanted["options"]:
        found, wanted = found["options"], wanted["options"]
    for name in wanted:
        if found.get(name) != wanted[name]:
            if name == "files":
                return "the bytes of its input files were others"
            return f"its {name} is {found.get(name)!r}, this one's {wanted[name]!r}"
    return f"it has {', '.join(sorted(set(found) - set(wanted)))}"


def _counts(manifest: Manifest) -> str:
    parts = (
        f"{split} {manifest.rows(split):,} rows in {len(shards)} shards"
        for split, shards in manifest.splits.items()
    )
    return ", ".join(parts)


def _write_all(source: Source, out: Path, plan: list[_Part], workers: int, progress: bool) -> None:
    """Write the shards that are not there yet."""
    missing = [part for part in plan if not _is_whole(out / part.file)]
    with tqdm(
        total=sum(part.stop - part.start for part in plan),
        initial=sum(part.stop - part.start for part in plan if part not in missing),
        desc=out.name,
        unit="row",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        if workers <= 1 or len(missing) <= 1:
            for part in missing:
                bar.update(write_shard(source, out, part))
            return
        # Spawn, since a fork of a process with threads (torch, a GPU) may hang.
        pool = ProcessPoolExecutor(
            min(workers, len(missing)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_receive,
            initargs=(source, out),
        )
        try:
            tasks: list[Future[int]] = [pool.submit(_write_received, part) for part in missing]
            for task in as_completed(tasks):
                bar.update(task.result())
        finally:
            pool.shutdown(cancel_futures=True)


_received: tuple[Source, Path]  # in a worker: sent once, not with every shard


def _receive(source: Source, out: Path) -> None:
    global _received
    _received = (source, out)


def _write_received(part: _Part) -> int:
    source, out = _received
    return write_shard(source, out, part)


def _is_whole(tar: Path) -> bool:
    """A tar gets its name after its index has: where it is, both are whole."""
    return tar.exists() and tar.with_name(index_name(tar.name)).exists()


def write_shard(source: Source, out: Path, part: _Part) -> int:
    """Write one shard and its index under temporary names, then give both their own."""
    tar, index = out / part.file, out / index_name(part.file)
    partial_tar, partial_index = (p.with_name(f".{p.name}.part") for p in (tar, index))
    try:
        with _room_on_disk(tar):
            with partial_tar.open("wb") as stream:
                found = _write_tar(source, part, stream)
                stream.flush()
                os.fsync(stream.fileno())
            found.write(partial_index)
            partial_index.replace(index)
            partial_tar.replace(tar)
    except BaseException:
        with suppress(OSError):
            partial_tar.unlink(missing_ok=True)
            partial_index.unlink(missing_ok=True)
        raise
    return part.stop - part.start


def _write_tar(source: Source, part: _Part, stream: Any) -> ShardIndex:
    """Write a shard's samples; the index follows from what was written."""
    members = member_names(source.views)
    keys: list[str] = []
    offsets: list[list[int]] = []
    lengths: list[list[int]] = []
    counts: list[int] = []
    labels: list[NDArray[Any]] = []
    step = source.block_rows or IMAGES_AT_ONCE
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for start in range(part.start, part.stop, step):
            rows = source.read(part.split, start, min(start + step, part.stop))
            for sample in _samples(source, rows, f"{part.split}-{start // step:06d}"):
                keys.append(sample.key)
                counts.append(len(sample.labels))
                labels.append(sample.labels)
                offsets.append([])
                lengths.append([])
                for suffix, payload in zip(members, sample.payloads, strict=True):
                    info = tarfile.TarInfo(f"{sample.key}.{suffix}")
                    info.size, info.mode = len(payload), 0o644  # times and owners stay zero
                    offsets[-1].append(stream.tell() + BLOCK)
                    lengths[-1].append(len(payload))
                    tar.addfile(info, BytesIO(payload))
    return ShardIndex(
        keys=np.array(keys),
        members=np.array(members),
        offsets=np.array(offsets, np.int64),
        lengths=np.array(lengths, np.int64),
        rows=np.array(counts, np.int64),
        labels=np.concatenate(labels),
    )


@dataclass(frozen=True, eq=False)
class _Sample:
    key: str
    payloads: list[bytes]
    labels: NDArray[Any]


def _samples(source: Source, rows: Rows, block_key: str) -> Iterator[_Sample]:
    """One tar sample for a block of vectors, or one for each row of images."""
    count = len(rows.labels)
    if (fault := source.labels.fault(rows.labels, count)) is not None:
        raise ShardError(f"{source.name}, {block_key}: {fault}; this is a fault of the source")
    views = [rows.views[view.name] for view in source.views]
    for first in range(0, count, count if source.block_rows else 1):
        labels = rows.labels[first : first + (count if source.block_rows else 1)]
        payloads = [
            npy(view[first : first + len(labels)]) if isinstance(view, np.ndarray) else view[first]
            for view in views
        ]
        key = block_key if rows.keys is None else rows.keys[first]
        yield _Sample(key, [*payloads, npy(labels)], labels)


def npy(array: NDArray[Any]) -> bytes:
    """An array as the bytes of an npy file."""
    stream = BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(array), (1, 0), allow_pickle=False)
    return stream.getvalue()


def _manifest(source: Source, out: Path, plan: list[_Part], built_from: BuiltFrom) -> Manifest:
    """Measure the shards on disk: those of this run and of interrupted ones alike."""
    splits: dict[str, list[Shard]] = {split: [] for split in source.splits}
    moments = {view.name: Moments() for view in source.views if view.kind == "vector"}
    for part in plan:
        tar, index_file = out / part.file, out / index_name(part.file)
        shard = Shard(
            file=part.file,
            samples=part.stop - part.start,
            bytes=tar.stat().st_size,
            sha256=sha256(tar),
            index_sha256=sha256(index_file),
        )
        splits[part.split].append(shard)
        if moments and part.split == ("train" if "train" in splits else part.split):
            index = ShardIndex.read(index_file)
            for name, moment in moments.items():
                column = index.column(f"{name}.npy")
                places = zip(index.offsets[:, column], index.lengths[:, column], strict=True)
                for offset, length in places:
                    moment.add(map_array(tar, int(offset), int(length)))
    return Manifest(
        dataset=source.dataset,
        schema_version=1,
        views=[_with_moments(view, moments) for view in source.views],
        labels=source.labels,
        block_rows=source.block_rows,
        splits=splits,
        built_from=built_from,
        seed=source.seed,
    )


def _with_moments(view: View, moments: dict[str, Moments]) -> View:
    if view.name not in moments:
        return view
    moment = moments[view.name]
    return view.model_copy(update={"mean": moment.mean.tolist(), "std": moment.std.tolist()})


class Moments:
    """Mean and variance of columns, block by block in float64 (Chan, Golub and LeVeque 1979)."""

    def __init__(self) -> None:
        """Begin with no rows."""
        self.rows = 0
        self.mean: NDArray[np.float64] = np.zeros(1)
        self.squares: NDArray[np.float64] = np.zeros(1)  # of distances to the mean

    def add(self, block: NDArray[Any]) -> None:
        """Merge a block [rows, width]."""
        values = np.asarray(block, np.float64)
        mean = values.mean(0)
        total = self.rows + len(values)
        shift = mean - self.mean
        self.squares = (
            self.squares
            + ((values - mean) ** 2).sum(0)
            + shift**2 * (self.rows * len(values) / total)
        )
        self.mean = self.mean + shift * (len(values) / total)
        self.rows = total

    @property
    def std(self) -> NDArray[np.float64]:
        """The standard deviation of every column, over all rows (not n - 1)."""
        return np.sqrt(self.squares / max(1, self.rows))
