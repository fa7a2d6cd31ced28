"""Surveys a foreign tar: where its samples are, their checksums, shapes and labels."""

import json
import mmap
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from heron.base.artefact import sha256
from heron.base.errors import ShardError, list_faults
from heron.shards.annotation import Label, Unlabelled
from heron.shards.index import NPY_ERRORS, ShardIndex, array_at
from heron.shards.picture import read_complete_header
from heron.shards.tarball import ByteRange, read_contents
from heron.shards.texts import read_text
from heron.sources.layout import Layout, StoredColumn

REMEDY = "fix it, or leave such samples out with `--on-error skip`"
Sample = dict[str, ByteRange]  # where each member is, by its suffix


@dataclass(frozen=True, eq=False)
class Survey:
    """What one tar holds: its index with placeholder labels, and the labels as they are stated.

    `skipped` holds samples with the reason, `strays` files that belong to no sample, and
    `unrequested` the other members of samples.
    """

    index: ShardIndex
    labels: list[Label | None]
    shapes: list[dict[tuple[int, ...], str]]  # per view: a sample that has each shape
    skipped: dict[str, str]
    strays: list[str]
    unrequested: set[str]
    bytes: int
    sha256: str


def dump(survey: Survey) -> bytes:
    """Returns a line of JSON and the index as npz, for `load`; nothing is pickled."""
    rest = {name: x for name, x in vars(survey).items() if name != "index"}
    rest["shapes"] = [[*shapes.items()] for shapes in survey.shapes]
    survey.index.save(stream := BytesIO())
    return json.dumps(rest, default=list).encode() + b"\n" + stream.getvalue()


def load(data: bytes) -> Survey | None:
    """Returns what was dumped; None if this version of Heron did not dump it."""
    head, _, index = data.partition(b"\n")
    try:
        rest = json.loads(head)
        rest["labels"] = [label and Label(*label) for label in rest["labels"]]
        rest["shapes"] = [{tuple(shape): of for shape, of in pairs} for pairs in rest["shapes"]]
        rest["unrequested"] = set(rest["unrequested"])
        return Survey(index=ShardIndex.parse(index, "what was kept"), **rest)
    except (ShardError, *NPY_ERRORS):
        return None


def survey_tar(layout: Layout, tar: Path) -> Survey | dict[str, str]:
    """Reads a tar; ShardError where it is damaged.

    Where samples are bad and `on_error` is "raise", returns what is wrong with each, by its name.
    """
    contents = read_contents(tar)
    keys, ranges, checksums, labels = [], [], [], []
    skipped = dict[str, str]()
    shapes: list[dict[tuple[int, ...], str]] = [{} for _ in layout.columns]
    with tar.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for key, sample in contents.samples.items():
            try:
                spans = [_find_member(column, sample) for column in layout.columns]
                payloads = [data[start : start + length] for start, length in spans]
                sample_shapes = [
                    _measure_shape(*pair) for pair in zip(layout.columns, payloads, strict=True)
                ]
                labels.append(_read_label(layout, sample, data))
            except ValueError as fault:
                skipped[f"{tar.name} sample {key}"] = str(fault)
                continue
            keys.append(f"{tar.stem}/{key}" if layout.prefix_keys else key)
            ranges.append(spans)
            checksums.append([zlib.crc32(payload) for payload in payloads])
            for example_of, shape in zip(shapes, sample_shapes, strict=True):
                example_of.setdefault(shape, f"{tar.name} sample {key}")
    if skipped and layout.on_error == "raise":
        return skipped
    if not keys:
        found = "it has no files"
        if skipped:
            found = f"all {len(skipped):,} are skipped ({list_faults(skipped, 1)})"
        elif contents.strays:
            found = f"none of its {len(contents.strays):,} files has a key and a suffix"
        raise ShardError(
            f"{tar.name} has no sample that can be indexed: {found}; a manifest lists no tar "
            "without rows: fix it, or move it out of the folder"
        )
    requested = {suffix for column in layout.columns for suffix in column.suffixes}
    requested |= {layout.annotation.suffix} if layout.annotation else set()
    offsets, lengths = np.moveaxis(np.array(ranges, np.int64), 2, 0)
    return Survey(
        index=ShardIndex(
            keys=np.array(keys),
            members=np.array([column.suffixes[0] for column in layout.columns]),
            offsets=np.ascontiguousarray(offsets),
            lengths=np.ascontiguousarray(lengths),
            crc32=np.array(checksums, np.uint32),
            rows=np.ones(len(keys), np.int64),
            labels=np.full(len(keys), -1),
        ),
        labels=labels,
        shapes=shapes,
        skipped=skipped,
        strays=[f"{tar.name} {path}" for path in contents.strays],
        unrequested={suffix for sample in contents.samples.values() for suffix in sample}
        - requested,
        bytes=tar.stat().st_size,
        sha256=sha256(tar),
    )


def _find_member(column: StoredColumn, sample: Sample) -> ByteRange:
    matching = [suffix for suffix in column.suffixes if suffix in sample]
    if len(matching) != 1:
        expected = " or ".join(map(repr, column.suffixes))
        fault = "has both" if matching else "lacks"
        raise ValueError(f"{fault} {expected}; it has {list(sample)[:8]}, not one of each view")
    return sample[matching[0]]


def _measure_shape(column: StoredColumn, payload: bytes) -> tuple[int, ...]:
    """Returns the shape of a view of one sample; a picture is scanned, not decoded."""
    try:
        if column.kind == "image":
            header = read_complete_header(payload)
            return header.height, header.width, 3
        if column.kind == "text":
            read_text(payload, column.field)
            return (-1,)
        array = array_at(np.frombuffer(payload, np.uint8), 0, len(payload), "is not a vector")
        if array.ndim != 1 or not array.size or array.dtype != np.dtype("<f4"):
            raise ValueError(
                f"must be a vector of float32, since it is mapped in place, got {array.dtype} "
                f"{array.shape}; write it again as array.astype('float32').ravel()"
            )
        if not np.isfinite(array).all():
            raise ValueError("has NaN or infinite values")
        return array.shape
    except (ValueError, ShardError) as fault:
        raise ValueError(f"member {column.suffixes[0]!r} {fault}") from None


def _read_label(layout: Layout, sample: Sample, data: mmap.mmap) -> Label | None:
    """Returns the label of one sample, or None where it is unlabelled and may be."""
    annotation = layout.annotation
    if annotation is None:
        return None
    try:
        if annotation.suffix not in sample:
            raise Unlabelled(f"is missing; it has {list(sample)[:8]}")
        start, length = sample[annotation.suffix]
        return annotation.read(data[start : start + length])
    except Unlabelled as fault:
        if layout.missing_label == "unlabelled":
            return None
        raise ValueError(
            f"has no label: {annotation.suffix!r} {fault}; treat it as unlabelled with "
            "`--missing-label unlabelled`"
        ) from None
    except ValueError as fault:
        raise ValueError(f"member {annotation.suffix!r} {fault}") from None
