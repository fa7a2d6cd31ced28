"""What one tar of others holds: the places, checksums, sizes and labels of its samples."""

from __future__ import annotations

import mmap
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shards.annotation import Label, Unlabelled
from shards.errors import ShardError
from shards.index import Member, ShardIndex, array_at
from shards.layout import Column, Layout
from shards.manifest import Manifest
from shards.picture import read_header
from shards.sources.base import sha256
from shards.tarball import Place, contents

SKIP = "mend it, or leave such samples out with `--on-error skip`"


@dataclass(frozen=True, eq=False)
class Survey:
    """What one tar holds: places [samples, views, 2] and crc32 [samples, views]."""

    keys: list[str]
    places: NDArray[np.int64]
    crc32: NDArray[np.uint32]
    labels: list[Label | None]
    shapes: list[dict[tuple[int, ...], str]]  # of each view, and a sample that has it
    skipped: list[str]
    strays: list[str]
    others: set[str]
    bytes: int
    sha256: str


def survey(layout: Layout, tar: Path) -> Survey:
    """Read one tar.

    Raises:
        ShardError: it is damaged, or a sample is and `on_error` is "raise".
    """
    found = contents(tar)
    keys, places, sums, labels, skipped = [], [], [], [], []
    shapes: list[dict[tuple[int, ...], str]] = [{} for _ in layout.columns]
    used = {suffix for column in layout.columns for suffix in column.suffixes}
    if layout.annotation is not None:
        used.add(layout.annotation.suffix)
    with tar.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for key, members in found.samples.items():
            try:
                spots = [_place(column, members) for column in layout.columns]
                views = [data[spot.offset : spot.offset + spot.length] for spot in spots]
                sizes = [_size(*one) for one in zip(layout.columns, views, strict=True)]
                label = _label(layout, members, data)
            except ValueError as fault:
                line = f"{tar.name} sample {key} {fault}"
                if layout.on_error == "raise":
                    raise ShardError(f"{line}; {SKIP}") from None
                skipped.append(line)
                continue
            keys.append(f"{tar.stem}/{key}" if layout.prefix_keys else key)
            places.append(spots)
            sums.append([zlib.crc32(view) for view in views])
            labels.append(label)
            for shape, size in zip(shapes, sizes, strict=True):
                shape.setdefault(size, f"{tar.name} sample {key}")
    if not keys:
        raise ShardError(
            f"{tar.name} holds no sample that can be indexed: {len(found.samples)} samples, "
            f"{len(found.strays)} files of none; expected some"
            + "".join(f"; {line}" for line in skipped[:1])
        )
    return Survey(
        keys=keys,
        places=np.array(places, np.int64),
        crc32=np.array(sums, np.uint32),
        labels=labels,
        shapes=shapes,
        skipped=skipped,
        strays=[f"{tar.name} {path}" for path in found.strays],
        others={suffix for members in found.samples.values() for suffix in members} - used,
        bytes=tar.stat().st_size,
        sha256=sha256(tar),
    )


def indexed(tar: Path, manifest: Manifest, index: ShardIndex) -> dict[str, list[Member]]:
    """The samples of a tar that its index has, each with those members that lie where it says."""
    prefix = f"{tar.stem}/" if manifest.built_from.options.get("prefix_keys") else ""
    numbers = {key.removeprefix(prefix): n for n, key in enumerate(index.keys.tolist())}
    samples = {}
    for key, members in contents(tar).samples.items():
        if (number := numbers.get(key)) is not None:
            present = set(members.values())
            places = zip(
                index.offsets[number].tolist(), index.lengths[number].tolist(), strict=True
            )
            spots = zip(manifest.members, map(Place._make, places), strict=True)
            name = str(index.keys[number])
            samples[name] = [Member(name, one, *at) for one, at in spots if at in present]
    return samples


def _place(column: Column, members: dict[str, Place]) -> Place:
    found = [suffix for suffix in column.suffixes if suffix in members]
    if len(found) != 1:
        wanted = " or ".join(map(repr, column.suffixes))
        fault = "has both" if found else "lacks"
        raise ValueError(f"{fault} {wanted}; found {list(members)[:8]}; expected one of each view")
    return members[found[0]]


def _size(column: Column, payload: bytes) -> tuple[int, ...]:
    """The shape of a view of one sample, of which a picture's header alone is read."""
    try:
        if column.kind == "vector":
            return _vector(payload).shape
        header = read_header(payload)
        return header.height, header.width, 3
    except (ValueError, ShardError) as fault:
        raise ValueError(f"member {column.suffixes[0]!r} {fault}") from None


def _vector(payload: bytes) -> NDArray[np.float32]:
    array = array_at(np.frombuffer(payload, np.uint8), 0, len(payload), "is no vector")
    if array.ndim != 1 or not array.size or array.dtype != np.dtype("<f4"):
        raise ValueError(
            f"is {array.dtype} {array.shape}; expected a vector of float32, since it is mapped "
            "where it lies; write it again as array.astype('float32').ravel()"
        )
    if not np.isfinite(array).all():
        raise ValueError("has a NaN or infinite value; expected finite ones")
    return array


def _label(layout: Layout, members: dict[str, Place], data: mmap.mmap) -> Label | None:
    """The label of one sample, None where it is unlabelled and may be."""
    annotation = layout.annotation
    if annotation is None:
        return None
    try:
        if annotation.suffix not in members:
            raise Unlabelled(f"is missing; found {list(members)[:8]}")
        start, length = members[annotation.suffix]
        return annotation.read(data[start : start + length])
    except Unlabelled as fault:
        if layout.missing_label == "unlabelled":
            return None
        raise ValueError(
            f"has no label: {annotation.suffix!r} {fault}; take it as unlabelled with "
            "`--missing-label unlabelled`"
        ) from None
    except ValueError as fault:
        raise ValueError(f"member {annotation.suffix!r} {fault}") from None
