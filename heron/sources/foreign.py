"""Indexes tars that others wrote in place: adds an index beside each, and a manifest."""

import os
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from heron.base.artefact import MANIFEST, FileSum, describe_errors
from heron.base.atomic import Kept, aside_name, kept_in_cache, locked
from heron.base.errors import ShardError, SourceError, list_faults
from heron.base.terminal import Bar, counted
from heron.base.workers import ALONE, Executor
from heron.shards.annotation import encode_labels
from heron.shards.index import map_arrays
from heron.shards.manifest import (
    FOREIGN_SOURCE,
    JOURNAL,
    KINDS,
    SCHEMA_VERSION,
    BuiltFrom,
    Labels,
    Manifest,
    Shard,
    Skipped,
    View,
    index_name,
    load_manifest,
)
from heron.shards.source import file_record
from heron.shards.tarball import read_contents
from heron.shards.texts import TOKENIZER, add_words, count_words, write_tokenizers
from heron.shards.write_shard import Moments
from heron.sources.layout import Layout, complete
from heron.sources.survey import REMEDY, Survey, dump, load, survey_tar

INITIAL_SHAPES = {"image": (-1, -1, 3), "vector": (0,), "text": (-1,)}  # before measurement
SAMPLES_READ = 1000  # which tell views from labels
VECTORS_PER_READ = 4096  # while their statistics are computed


@dataclass(frozen=True)
class Outcome:
    """The manifest, and what was left out of it: see `Survey`."""

    folder: Path
    manifest: Manifest
    strays: list[str] = field(default_factory=list)
    unrequested: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Returns a line for each split and view, for the labels, and for what was left out."""
        lines = []
        for split, shards in self.manifest.splits.items():
            rows = f"{self.manifest.rows(split):,} rows in {counted(len(shards), 'shard')}"
            lines.append(f"{self.folder}: {split} {rows}")
        for view in self.manifest.views:
            lines.append(f"view {view.name}: {view.kind} {view.extent}, of {view.member}")
        labels = self.manifest.labels
        names = f", {len(labels.names):,} names" if labels.names else ""
        lines.append(f"labels: {labels.kind}{names}")
        if self.unrequested:
            lines.append(f"not indexed: members {', '.join(self.unrequested)}")
        if self.strays:
            lines.append(
                f"not indexed: {len(self.strays):,} files that are in no sample, because they "
                f"have no suffix or begin with a dot, such as {self.strays[0]}"
            )
        if self.manifest.skipped:
            lines.append(str(self.manifest.skipped))
        return "\n".join(lines)


def index(
    folder: Path | str,
    layout: Layout,
    *,
    executor: Executor = ALONE,
    progress: bool = True,
    overwrite: bool = False,
) -> Outcome:
    """Writes an index beside every tar of a folder, and a manifest; the tars are not changed.

    All tars are read before anything is written beside them, and the manifest is written last. What
    was found in each is kept in the cache folder: an interrupted run can simply be repeated, and
    then reads only the tars that it had not read, or that have changed. Raises ShardError where a
    tar or sample is damaged, two samples share a key, or the folder holds a build of ours or
    another index; InUse where another command writes it; SourceError where an option is wrong or
    labels are inconsistent.
    """
    folder = Path(folder)
    splits = layout.splits(folder)
    with locked(folder):
        tars = [tar for tars in splits.values() for tar in tars]
        if not layout.columns:
            layout = _completed(layout, folder, tars[0])
        unmeasured = draft_manifest(folder, layout, splits)
        if (finished := _load_finished(folder, unmeasured, splits, overwrite)) is not None:
            return Outcome(folder, finished)
        if not os.access(folder, os.W_OK):
            raise ShardError(
                f"cannot write to {folder}, where an index goes beside each tar; make a folder of "
                "symbolic links to the tars, and index that"
            )
        kept_folder = kept_in_cache("tars", folder.resolve())
        surveys = _survey_tars(tars, layout, executor, progress, kept_folder)
        labels, targets = encode_labels(
            _collect_keys(surveys),
            [label for survey in surveys.values() for label in survey.labels],
            layout.names,
        )
        if layout.label is not None and labels.kind == "none":
            raise SourceError(f"label: no sample has {layout.label!r}; use another, or none")
        views = [_measure_view(view, n, surveys, splits) for n, view in enumerate(unmeasured.views)]
        _set_index_aside(folder)
        ends = np.cumsum([len(survey.labels) for survey in surveys.values()])
        shard_of = {}
        for (tar, survey), rows in zip(surveys.items(), np.split(targets, ends[:-1]), strict=True):
            path = tar.with_name(index_name(tar.name))
            index = replace(survey.index, labels=rows)
            index.write(path)
            shard_of[tar] = Shard.of(tar, index, FileSum(bytes=survey.bytes, sha256=survey.sha256))
        training_tars = splits.get("train", list(surveys))
        words = dict[str, Counter[str]]()
        for tar in training_tars:
            add_words(words, count_words(tar, surveys[tar].index, views))
        write_tokenizers(folder, words)
        shards_of = {split: [shard_of[tar] for tar in tars] for split, tars in splits.items()}
        skipped = Skipped.of(
            {k: v for survey in surveys.values() for k, v in survey.skipped.items()}
        )
        measured = {"views": views, "labels": labels, "splits": shards_of, "skipped": skipped}
        manifest = Manifest.model_validate(dict(unmeasured) | measured).write(folder / MANIFEST)
        shutil.rmtree(kept_folder, ignore_errors=True)
        return Outcome(
            folder,
            manifest,
            [line for survey in surveys.values() for line in survey.strays],
            sorted({suffix for survey in surveys.values() for suffix in survey.unrequested}),
        )


def _completed(layout: Layout, folder: Path, tar: Path) -> Layout:
    """Returns the layout with the views and the label that a tar has."""
    samples = read_contents(tar).samples
    with tar.open("rb") as stream:

        def read(key: str, suffix: str) -> bytes:
            start, length = samples[key][suffix]
            return os.pread(stream.fileno(), length, start)

        return complete(layout, folder, dict(islice(samples.items(), SAMPLES_READ)), read)


def draft_manifest(folder: Path, layout: Layout, splits: dict[str, list[Path]]) -> Manifest:
    """Returns the manifest without its measured fields; SourceError where it would be invalid."""
    # Later options are left out at their default, as in older folders.
    excluded = {"label_names"} | ({"minus_one"} if layout.minus_one == "unlabelled" else set())
    try:
        return Manifest(
            dataset=folder.resolve().name,
            schema_version=SCHEMA_VERSION,
            views=[
                View(
                    name=column.name,
                    kind=column.kind,
                    shape=INITIAL_SHAPES[column.kind],
                    dtype=KINDS[column.kind][0],
                    member=column.suffixes[0],
                    field=column.field,
                )
                for column in layout.columns
            ],
            labels=Labels(kind="none", names=[]),
            splits=dict.fromkeys(splits, []),
            built_from=BuiltFrom(
                source=FOREIGN_SOURCE,
                options=layout.model_dump(mode="json", exclude=excluded),
                files=[] if layout.label_names is None else [file_record(layout.label_names)],
                shard_rows=0,  # not fixed: each tar keeps its size
            ),
        )
    except ValidationError as fault:
        raise SourceError(describe_errors(fault)) from None


def _load_finished(
    folder: Path, expected: Manifest, splits: dict[str, list[Path]], overwrite: bool
) -> Manifest | None:
    """Returns the manifest of the same index, if there is one; ShardError for any other content."""
    if (folder / JOURNAL).exists():
        raise ShardError(
            f"{folder} has an unfinished build of Heron, not tars to index; pass another folder"
        )
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = load_manifest(folder)
    except ShardError:
        if overwrite:  # replaces a manifest that cannot be read
            return None
        raise
    if not manifest.foreign:
        raise ShardError(
            f"{folder} has a build of Heron, from {manifest.built_from.source}, which is already "
            "indexed; pass a folder of other tars"
        )
    if overwrite:
        return None
    present = {(split, t.name, t.stat().st_size) for split, tars in splits.items() for t in tars}
    listed = {(split, s.file, s.bytes) for split, shards in manifest.splits.items() for s in shards}
    if manifest.built_from != expected.built_from or present != listed:
        change = "other tars" if manifest.built_from == expected.built_from else "other options"
        raise ShardError(
            f"{folder} was indexed with {change}; --overwrite indexes it again, and keeps the "
            f"former index in {aside_name(folder / 'index')}"
        )
    return manifest


def _set_index_aside(folder: Path) -> None:
    """Moves an older manifest and its indexes into a folder beside them, and says so."""
    if (folder / MANIFEST).exists():
        stale = [*folder.glob(f"*{TOKENIZER}"), *folder.glob(index_name("*.tar"))]
        aside = aside_name(folder / "index")
        aside.mkdir()
        for path in (folder / MANIFEST, *stale):
            path.rename(aside / path.name)
        print(f"the former index is now in {aside}", flush=True)


def _survey_tars(
    tars: list[Path], layout: Layout, executor: Executor, progress: bool, folder: Path
) -> dict[Path, Survey]:
    """Surveys the tars in parallel; returns the surveys in the order of the tars.

    Each is kept in a folder, and one that is there of an unchanged tar is not made again.
    """
    exclude = {"label_names", "split", "on_error"}  # what is read of a tar depends on the others
    made_from = layout.model_dump(mode="json", exclude=exclude)
    kept = Kept(folder, made_from | {"schema_version": SCHEMA_VERSION})
    states = {tar: tar.stat() for tar in tars}
    sizes, faults = {tar: state.st_size for tar, state in states.items()}, dict[str, str]()
    # The time of change moves with any byte, even where a copy sets that of modification.
    times = {tar: f"{state.st_mtime_ns}-{state.st_ctime_ns}" for tar, state in states.items()}
    name_of = {tar: f"{tar.name}-{sizes[tar]}-{times[tar]}" for tar in tars}
    found = ((tar, load(kept.get(name_of[tar]) or b"")) for tar in tars)
    surveys = {t: s for t, s in found if s and (layout.on_error == "skip" or not s.skipped)}
    if kept.goes_on and progress:
        print(f"an unfinished index goes on: {len(surveys)} of {len(tars)} tars are read")
    start, missing = sum(map(sizes.__getitem__, surveys)), [t for t in tars if t not in surveys]
    bar = Bar(sum(sizes.values()), "B", start=start, name=tars[0].parent.name, hidden=not progress)
    with bar, closing(executor.map(partial(survey_tar, layout), missing)) as results:
        for tar, result in results:
            bar.update(sizes[tar])
            if isinstance(result, Survey):
                surveys[tar] = result
                kept.put(name_of[tar], dump(result))
            else:
                faults |= result
    if faults:
        raise ShardError(f"{list_faults(dict(sorted(faults.items())))}; {REMEDY}")
    return {tar: surveys[tar] for tar in tars}


def _collect_keys(surveys: dict[Path, Survey]) -> list[str]:
    """Returns the keys of all samples; ShardError where two tars share a key."""
    tar_of: dict[str, str] = {}
    for tar, survey in surveys.items():
        keys = survey.index.keys.tolist()
        if shared := [key for key in keys if key in tar_of]:
            raise ShardError(
                f"{tar.name} sample {shared[0]}: duplicate key: {tar_of[shared[0]]} has it too, "
                "but keys must be unique; `--prefix-keys true` tells tars apart"
            )
        tar_of |= dict.fromkeys(keys, tar.name)
    return list(tar_of)


def _measure_view(
    view: View, column: int, surveys: dict[Path, Survey], splits: dict[str, list[Path]]
) -> View:
    """Returns the view with its shape, -1 where that varies, and its statistics, if of vectors."""
    sample_of: dict[tuple[int, ...], str] = {}  # an example of each shape
    for survey in surveys.values():
        sample_of = survey.shapes[column] | sample_of
    if view.kind == "image":
        axes = [set(axis) for axis in zip(*sample_of, strict=True)]
        shape = tuple(axis.pop() if len(axis) == 1 else -1 for axis in axes)
        return view.model_copy(update={"shape": shape})
    if view.kind == "text":
        return view
    if len(sample_of) > 1:
        ((width,), sample), ((other_width,), other), *_ = sample_of.items()
        raise ShardError(
            f"view {view.name!r} must have one width, got {width} values in {sample} and "
            f"{other_width} in {other}"
        )
    moments = Moments()
    for tar in splits.get("train", surveys):
        index = surveys[tar].index
        for first in range(0, len(index.keys), VECTORS_PER_READ):
            position = slice(first, first + VECTORS_PER_READ), column
            moments.add(np.stack(map_arrays(tar, index.offsets[position], index.lengths[position])))
    return moments.apply_to(view.model_copy(update={"shape": next(iter(sample_of))}))
