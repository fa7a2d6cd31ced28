"""Verify a folder of shards: every checksum, count, key and shape, and all faults in one go."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.shards.errors import RESTORE, ShardError
from heron.shards.index import Member, ShardIndex, array_at
from heron.shards.manifest import Manifest, Shard, View, load_manifest
from heron.shards.picture import read_header
from heron.shards.sources.base import sha256
from heron.shards.store import Store, open_store
from heron.shards.survey import indexed
from heron.shards.tarball import walk

PICKLES = ("pkl", "pickle", "pyd", "pt", "pth")


@dataclass(frozen=True)
class Verification:
    """What was looked at, and everything that was wrong with it."""

    shards: int
    rows: int
    bytes: int
    faults: list[str]
    listed: bool = True  # False: extra files were not looked for, as the protocol lists no folders

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.faults

    def __str__(self) -> str:
        """Returns one line, or one line a fault."""
        looked = f"{self.shards} shards, {self.rows:,} rows, {self.bytes / 1e6:,.1f} MB"
        if not self.listed:
            looked += " (extra files were not looked for: HTTP lists no folders)"
        if self.ok:
            return f"{looked}: all as the manifest says"
        return "\n".join([*self.faults, f"{looked}: {len(self.faults)} faults; {RESTORE}"])


def verify(folder: Path | str | Store) -> Verification:
    """Compare a folder or a URL with its manifest; ShardError where the manifest cannot be read.

    Of a URL, one shard at a time is fetched, whatever the cache holds. Extra files are found
    where the protocol lists folders, which HTTP does not.
    """
    store = open_store(folder)
    manifest = load_manifest(store)
    shards = [shard for shards in manifest.splits.values() for shard in shards]
    known = {name for shard in shards for name in (shard.file, shard.index_file)}
    names = store.names()
    present = {name for name in names or () if name.endswith((".tar", ".index.npz"))}
    faults = [f"{name}: extra: the manifest does not list it" for name in sorted(present - known)]
    seen: dict[str, str] = {}  # key to shard, over the whole data set
    for shard in shards:
        with store.copies(shard.file, shard.index_file) as copies:
            tar, index = copies / shard.file, copies / shard.index_file
            faults += _file_faults(tar, shard.sha256, shard.bytes)
            faults += _file_faults(index, shard.index_sha256, None)
            if tar.exists() and index.exists():
                try:
                    faults += _shard_faults(copies, manifest, shard, seen)
                except ShardError as fault:  # no use in going on with this one
                    faults.append(str(fault))
    return Verification(
        shards=len(shards),
        rows=sum(shard.samples for shard in shards),
        bytes=sum(shard.bytes for shard in shards),
        faults=faults,
        listed=names is not None,
    )


def _file_faults(path: Path, checksum: str, size: int | None) -> Iterator[str]:
    if not path.exists():
        yield f"{path.name}: missing: the manifest lists it"
    elif size is not None and (bytes_there := path.stat().st_size) != size:
        yield f"{path.name}: {bytes_there:,} bytes; expected {size:,}"
    elif (digest := sha256(path)) != checksum:
        yield f"{path.name}: altered: sha256 is {digest[:12]}…; expected {checksum[:12]}…"


def _shard_faults(
    folder: Path, manifest: Manifest, shard: Shard, seen: dict[str, str]
) -> Iterator[str]:
    """Yields faults of what is inside; ShardError where the tar or the index cannot be read on."""
    index = ShardIndex.read(folder / shard.index_file)
    if index.members.tolist() != manifest.members:
        raise ShardError(
            f"{shard.index_file}: members {index.members.tolist()}; expected {manifest.members}"
        )
    rows = int(index.rows.sum())
    if rows != shard.samples:
        yield f"{shard.index_file}: {rows} rows; expected {shard.samples}"
    if (fault := manifest.labels.fault(index.labels, rows)) is not None:
        yield f"{shard.index_file}: {fault}"
    tar = folder / shard.file
    samples = indexed(tar, manifest, index) if manifest.foreign else _group(tar)
    if list(samples) != index.keys.tolist():
        yield f"{shard.file}: {len(samples)} samples, other than the {len(index.keys)} of its index"
    starts = index.starts
    where = {key: number for number, key in enumerate(index.keys.tolist())}
    data = np.memmap(folder / shard.file, np.uint8, "r")
    for key, members in samples.items():
        sample = f"{shard.file} sample {key}"
        if key in seen:
            yield f"{sample}: duplicate key: {seen[key]} has it too"
        seen[key] = shard.file
        suffixes = [member.suffix for member in members]
        if suffixes != manifest.members:
            yield f"{sample}: found {suffixes}; expected {manifest.members}"
        elif (number := where.get(key)) is not None:
            stored = slice(int(starts[number]), int(starts[number + 1]))
            ranges = np.stack([index.offsets[number], index.lengths[number]], 1).tolist()
            if [[member.offset, member.length] for member in members] != ranges:
                yield f"{sample}: lies elsewhere than its index says"
            for member, checksum in zip(members, index.crc32[number].tolist(), strict=True):
                payload = data[member.offset : member.offset + member.length]
                if zlib.crc32(payload.data) != checksum:
                    yield f"{sample}: member {member.suffix!r} is altered: another crc32"
            for fault in _sample_faults(data, manifest, members, index.labels[stored]):
                yield f"{sample}: {fault}"


def _group(tar: Path) -> dict[str, list[Member]]:
    """Returns members by key, in the order of the tar; a key that comes twice is an error."""
    samples: dict[str, list[Member]] = {}
    last = None
    for path, span in walk(tar):
        key, _, suffix = path.partition(".")
        if not key or not suffix or "/" in path:
            raise ShardError(f"{tar.name} holds {path!r}: a member is KEY.SUFFIX, no path")
        member = Member(key, suffix, *span)
        where = f"{tar.name} sample {member.key}"
        if member.suffix.rpartition(".")[2] in PICKLES:
            raise ShardError(f"{where}: member {member.suffix!r} is a pickle, never decoded")
        known = samples.setdefault(member.key, [])
        if known and member.key != last:
            raise ShardError(f"{where}: duplicate key: it comes again after {last}")
        if member.suffix in [other.suffix for other in known]:
            raise ShardError(f"{where}: duplicate key: member {member.suffix!r} comes twice")
        known.append(member)
        last = member.key
    return samples


def _sample_faults(
    data: NDArray[np.uint8], manifest: Manifest, members: list[Member], labels: NDArray[Any]
) -> Iterator[str]:
    for view, member in zip(manifest.views, members, strict=False):  # then ours have labels
        if view.kind == "image" and manifest.block_rows is None:
            payload = data[member.offset : member.offset + member.length].tobytes()
            yield from _image_faults(view, member.suffix, payload)
        else:
            array = _array(data, member)
            if manifest.foreign and not isinstance(array, str):
                array = array[None]  # the vector of a row
            yield from _vector_faults(array, view, len(labels))
    if manifest.foreign:
        return
    stored = _array(data, members[-1])
    if isinstance(stored, str):
        yield stored
    elif stored.dtype != labels.dtype or not np.array_equal(stored, labels):
        yield "its labels are other than those of the index"


def _array(data: NDArray[np.uint8], member: Member) -> NDArray[Any] | str:
    try:
        return array_at(data, member.offset, member.length, f"member {member.suffix!r}")
    except ShardError as fault:
        return str(fault)


def _vector_faults(array: NDArray[Any] | str, view: View, rows: int) -> Iterator[str]:
    if isinstance(array, str):
        yield array
    elif array.shape != (rows, *view.shape) or array.dtype != view.dtype:
        expected = (rows, *view.shape)
        yield f"view {view.name!r} is {array.dtype} {array.shape}; expected {view.dtype} {expected}"
    elif view.kind == "vector" and not np.isfinite(array).all():
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        yield f"view {view.name!r}, row {row} of the block: NaN or infinite; expected finite"


def _image_faults(view: View, suffix: str, data: bytes) -> Iterator[str]:
    try:
        header = read_header(data)
    except ValueError as fault:
        yield f"member {suffix!r} {fault}"
        return
    shape = (header.height, header.width, 3)  # grey decodes to RGB too
    if any(want not in (-1, got) for got, want in zip(shape, view.shape, strict=True)):
        yield f"view {view.name!r} is {shape}; expected {view.shape}"
