"""Verifies a folder of shards: every checksum, count, key and shape; reports all faults at once."""

import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.base.artefact import sha256
from heron.base.errors import RESTORE, ShardError, one_line
from heron.base.terminal import counted
from heron.base.workers import ALONE, Executor, in_order
from heron.shards.graph import unpack_graph
from heron.shards.index import ShardIndex, array_at
from heron.shards.manifest import Manifest, Shard, load_manifest
from heron.shards.picture import decode as decode_picture
from heron.shards.picture import read_complete_header
from heron.shards.remote import TooLong
from heron.shards.store import Store, open_store
from heron.shards.tarball import ByteRange, walk
from heron.shards.texts import read_text


@dataclass(frozen=True)
class Verification:
    """What was verified, and everything that was wrong with it."""

    shards: int
    rows: int
    bytes: int
    faults: list[str]
    listed: bool = True  # False: no search for extra files, as the protocol lists no folders

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.faults

    def __str__(self) -> str:
        """Returns one line, preceded by a line for each fault."""
        shards, rows = counted(self.shards, "shard"), counted(self.rows, "row")
        summary = f"{shards}, {rows}, {self.bytes / 1e6:,.1f} MB"
        if not self.listed:
            summary += " (extra files were not looked for: HTTP lists no folders)"
        if self.ok:
            return f"{summary}: everything is as the manifest says"
        faults = map(one_line, self.faults)
        return "\n".join([*faults, f"{summary}: {counted(len(self.faults), 'error')}; {RESTORE}"])


def verify(
    folder: Path | str | Store, decode: bool = False, executor: Executor = ALONE
) -> Verification:
    """Compares a folder or a URL with its manifest; ShardError where the manifest cannot be read.

    With `decode` every picture is decoded, else only searched for its end. Shards behind a URL are
    fetched one at a time, bypassing the cache. HTTP lists no folders, so extra files stay unseen.
    """
    store = open_store(folder)
    manifest = load_manifest(store)
    shards = [shard for shards in manifest.splits.values() for shard in shards]
    listed = {name for shard in shards for name in (shard.file, shard.index_file)}
    names = store.names()
    present = {name for name in names or () if name.endswith((".tar", ".index.npz"))}
    faults = [
        f"{name}: extra file, which the manifest does not list" for name in sorted(present - listed)
    ]
    plain = manifest.model_copy(update={"splits": {}})  # a task needs its own shard alone
    check = partial(_verify_shard, store, plain, decode)
    seen: dict[str, str] = {}  # keys of the whole data set, and their shards
    with closing(executor.map(check, shards)) as results:
        for shard, (found, keys) in in_order(shards, results):
            faults += found
            for key in keys:
                if key in seen:
                    sample = f"{shard.file} sample {key}"
                    faults.append(f"{sample}: duplicate key: {seen[key]} has it too")
                seen[key] = shard.file
    return Verification(
        shards=len(shards),
        rows=sum(shard.samples for shard in shards),
        bytes=sum(shard.bytes for shard in shards),
        faults=faults,
        listed=names is not None,
    )


def _verify_shard(
    store: Store, manifest: Manifest, decode: bool, shard: Shard
) -> tuple[list[str], list[str]]:
    """Returns the faults of a shard and its index, and the keys of its index as far as it fits."""
    faults, keys = list[str](), list[str]()
    sizes = {shard.file: shard.bytes, shard.index_file: shard.index_bytes}
    try:
        with store.local_copies(sizes) as copies:
            tar, index = copies / shard.file, copies / shard.index_file
            faults += _file_faults(tar, shard.sha256, shard.bytes)
            faults += _file_faults(index, shard.index_sha256, shard.index_bytes)
            if tar.exists() and index.exists():
                try:
                    faults += _shard_faults(copies, manifest, shard, keys, decode)
                except ShardError as fault:  # the rest of this shard cannot be checked
                    faults.append(str(fault))
    except TooLong as fault:
        faults.append(str(fault))
    return faults, keys


def _file_faults(path: Path, checksum: str, size: int) -> Iterator[str]:
    if not path.exists():
        yield f"{path.name}: missing, but the manifest lists it"
    elif (actual_size := path.stat().st_size) != size:
        yield f"{path.name}: {actual_size:,} bytes instead of {size:,}"
    elif (digest := sha256(path)) != checksum:
        yield f"{path.name}: altered: its sha256 is {digest[:12]}… instead of {checksum[:12]}…"


def _shard_faults(
    folder: Path, manifest: Manifest, shard: Shard, keys: list[str], decode: bool
) -> Iterator[str]:
    """Yields the faults inside a shard, and adds its keys; ShardError where it cannot be read."""
    index = ShardIndex.read(folder / shard.index_file)
    if fault := manifest.index_fault(shard, index):
        raise ShardError(f"{shard.index_file}: {fault}")
    tar = folder / shard.file
    files: dict[str, ByteRange] = {}
    for path, span in walk(tar):
        if path in files:
            yield f"{shard.file} has {path!r} twice"
        files[path] = span
    path_of = {span: path for path, span in files.items()}
    data = np.memmap(tar, np.uint8, "r")
    prefix = f"{tar.stem}/" if manifest.built_from.options.get("prefix_keys") else ""
    spans, starts = np.stack([index.offsets, index.lengths], 2).tolist(), index.starts
    for n, key in enumerate(index.keys.tolist()):
        sample = f"{shard.file} sample {key}"
        keys.append(key)
        key_prefix = f"{key.removeprefix(prefix)}."
        rows = slice(starts[n], starts[n + 1])
        labels = index.labels[rows]
        present = None if index.present is None else index.present[rows]
        for column, member in enumerate(manifest.members):
            expected, path = ByteRange(*spans[n][column]), f"{key}.{member}"
            if not expected.length and present is not None and path not in files:
                continue  # the row lacks the view
            actual = None if manifest.foreign else files.pop(path, None)
            # In foreign tars, the file names after the key are arbitrary.
            if manifest.foreign and path_of.get(expected, "").startswith(key_prefix):
                actual = expected
            if actual is None:
                yield (f"{sample}: no file {path!r} at byte {expected.offset}, as its index says")
                continue
            if actual != expected:
                yield f"{sample}: {path!r} is not where its index says"
            payload = data[actual.offset : sum(actual)]
            if zlib.crc32(payload.data) != index.crc32[n, column]:
                yield f"{sample}: member {member!r} was altered: its crc32 differs"
            try:
                fault = _member_fault(manifest, column, payload, labels, present, decode)
            except (ShardError, ValueError) as error:
                fault = f"member {member!r} {error}"
            if fault is not None:
                yield f"{sample}: {fault}"
    for path in files if not manifest.foreign else ():
        yield f"{shard.file} has {path!r}, which its index does not list"


def _member_fault(
    manifest: Manifest,
    column: int,
    payload: NDArray[np.uint8],
    labels: NDArray[Any],
    present: NDArray[Any] | None,
    decode: bool,
) -> str | None:
    """Returns what is wrong with a member whose rows have these labels and views, or None."""
    if column < len(manifest.views):
        view = manifest.views[column]
        if view.kind == "image" and manifest.block_rows is None:
            header = read_complete_header(payload.tobytes())
            shape = (header.height, header.width, 3)  # grey is decoded to RGB too
            if decode:
                decode_picture(payload.tobytes())
            if all(size in (-1, actual) for actual, size in zip(shape, view.shape, strict=True)):
                return None
            return f"view {view.name!r} must be {view.shape}, got {shape}"
        if view.kind == "text":
            read_text(payload.tobytes(), view.field)
            return None
        if view.kind == "graph":
            unpack_graph(payload.tobytes(), view.shape)
            return None
    array = array_at(payload, 0, len(payload), "is not an array")
    if column >= len(manifest.views):  # our own: labels or present
        of_labels = column == len(manifest.views)
        indexed = labels if of_labels or present is None else present
        is_equal = array.dtype == indexed.dtype and np.array_equal(array, indexed)
        what = "labels" if of_labels else "views"
        return None if is_equal else f"its {what} differ from those of the index"
    if manifest.foreign:
        array = array[None]  # a single vector
    expected = (len(labels), *view.shape)
    if array.shape != expected or array.dtype != view.dtype:
        return f"view {view.name!r} is {array.dtype} {array.shape}, not {view.dtype} {expected}"
    if view.kind == "vector" and not np.isfinite(array).all():
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        return f"view {view.name!r}, row {row} of the block, has NaN or infinite values"
    return None
