"""Builds a folder of shards, in parallel and resumably; the bytes do not depend on the workers."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from heron.base.artefact import MANIFEST, fingerprint
from heron.base.atomic import (
    kept_in_cache,
    locked,
    make_parents,
    remove_partial_files,
    save_json,
    set_aside,
)
from heron.base.errors import ShardError
from heron.base.terminal import Bar, counted
from heron.base.workers import ALONE, Executor, in_order
from heron.shards.earlier_build import describe_earlier, describe_unfinished, load_finished
from heron.shards.manifest import (
    JOURNAL,
    SCHEMA_VERSION,
    BuiltFrom,
    Manifest,
    Shard,
    Skipped,
    index_name,
)
from heron.shards.remote_build import open_folder, put_shard, record_name
from heron.shards.source import Source
from heron.shards.store import LocalStore, RemoteStore, is_remote
from heron.shards.texts import add_words, write_tokenizers
from heron.shards.write_shard import Made, Moments, ShardPlan, make_shard


def build(
    source: Source,
    out: Path | str,
    *,
    shard_rows: int | None = None,
    executor: Executor = ALONE,
    progress: bool = True,
    overwrite: bool = False,
    wait: bool = True,
) -> Manifest:
    """Writes a source as shards under `out`, or continues an interrupted build.

    Finished shards are not written again, and a finished build is left as it is; with `overwrite`
    an earlier build is moved aside, whole, and a new one begins. So is an unfinished build with
    other options, as one that failed and is run again with the option that its error named.
    `out` may be a URL that fsspec can write to, such as s3://bucket/folder; nothing is moved aside
    there. `shard_rows` defaults to 1,000 images or 8,192 vectors. One build at a time writes `out`;
    others wait for it or, without `wait`, raise InUse. Raises ShardError where `out` holds another
    build, the disk is full or a server refuses a file, and SourceError where the publisher's files
    are wrong.
    """
    if shard_rows is None:
        shard_rows = 1000 if source.block_rows is None else 32 * source.block_rows
    plan = list(_plan_shards(source, shard_rows))
    draft = _draft_manifest(source, shard_rows)
    if is_remote(str(out)):
        folder = open_folder(str(out), overwrite)
        with locked(folder, kept_in_cache("lock", out), wait):
            manifest, old = _build_remotely(source, folder, draft, plan, executor, progress)
    else:
        out = Path(str(out).removeprefix("file://"))
        with locked(out, wait=wait):
            manifest, old = _build_here(source, out, draft, plan, executor, progress, overwrite)
    if progress and old:
        print(f"{out} is complete: {_describe_counts(manifest)}; nothing to do")
    elif progress:
        print(f"{out}: {_describe_counts(manifest)}")
        if manifest.skipped:
            print(manifest.skipped)
    return manifest


def _build_here(
    source: Source,
    out: Path,
    draft: Manifest,
    plan: list[ShardPlan],
    executor: Executor,
    progress: bool,
    overwrite: bool,
) -> tuple[Manifest, bool]:
    """Writes shards into a folder of a disk; returns their manifest, and whether it was there."""
    make_parents(out / MANIFEST, ShardError)
    remove_partial_files(out)  # of a build that was killed
    if overwrite:
        found = describe_earlier(out)
    else:
        found = describe_unfinished(out, draft.built_from, source)
    if found:
        print(f"{found} in {out} is now in {set_aside(out)}", flush=True)
    try:
        if (finished := load_finished(LocalStore(out), draft.built_from, source)) is not None:
            return finished, True
        save_json(out / JOURNAL, draft.built_from.model_dump(mode="json"))
        names = {path.name for path in out.iterdir()}  # a tar gets its name after its index has
        done = {s.file for s in plan if {s.file, index_name(s.file)} <= names}
        bar = _bar(plan, done, out.name, progress)
        make = partial(make_shard, source, out)
        manifest, words = _make_all(make, draft, plan, done, executor, bar)
        write_tokenizers(out, words)
        manifest = manifest.write(out / MANIFEST)
        (out / JOURNAL).unlink()
        return manifest, False
    finally:
        remove_partial_files(out)  # of workers that were terminated


def _plan_shards(source: Source, shard_rows: int) -> Iterator[ShardPlan]:
    block = source.block_rows or 1
    if shard_rows < 1 or shard_rows % block:
        raise ShardError(
            f"shard_rows must be a positive multiple of block_rows = {block}, got {shard_rows}; "
            f"try {max(1, round(shard_rows / block)) * block}"
        )
    for split, rows in source.splits.items():
        for number, start in enumerate(range(0, rows, shard_rows)):
            file = f"{split}-{number:06d}.tar"
            yield ShardPlan(file, split, start, min(start + shard_rows, rows))


def _draft_manifest(source: Source, shard_rows: int) -> Manifest:
    """Returns the manifest without its measured fields; SourceError where it would be invalid."""
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
            skipped=Skipped.of(source.skipped),
        )
    except ValidationError as fault:
        raise source.invalid(fault) from None


def _describe_counts(manifest: Manifest) -> str:
    counts = (
        f"{split} {manifest.rows(split):,} rows in {counted(len(shards), 'shard')}"
        for split, shards in manifest.splits.items()
    )
    return ", ".join(counts)


def _make_all(
    make: Callable[[ShardPlan], Made],
    draft: Manifest,
    plan: list[ShardPlan],
    done: Collection[str],
    executor: Executor,
    bar: Bar,
) -> tuple[Manifest, dict[str, Counter[str]]]:
    """Has an executor make all shards; returns the manifest, and the words of views of texts.

    `done` names the tars that are made already, which are only measured. Statistics are merged in
    the order of the plan, whatever the order in which shards are made.
    """
    splits: dict[str, list[Shard]] = {split: [] for split in draft.splits}
    moments = {i: Moments() for i, view in enumerate(draft.views) if view.kind == "vector"}
    words = dict[str, Counter[str]]()
    with bar, closing(executor.map(make, plan)) as results:

        def shown() -> Iterator[tuple[ShardPlan, Made]]:
            for shard, made in results:
                bar.update(0 if shard.file in done else shard.rows)
                yield shard, made

        for shard, made in in_order(plan, shown()):
            splits[shard.split].append(made.shard)
            for column, blocks in made.blocks.items():
                for block in blocks:
                    moments[column].merge(block)
            add_words(words, made.words)
    views = [moments[i].apply_to(v) if i in moments else v for i, v in enumerate(draft.views)]
    return Manifest.model_validate(dict(draft) | {"views": views, "splits": splits}), words


def _bar(plan: list[ShardPlan], done: Collection[str], name: str, progress: bool) -> Bar:
    start = sum(shard.rows for shard in plan if shard.file in done)
    total = sum(shard.rows for shard in plan)
    return Bar(total, "row", start=start, name=name, hidden=not progress)


def _build_remotely(
    source: Source,
    folder: RemoteStore,
    draft: Manifest,
    plan: list[ShardPlan],
    executor: Executor,
    progress: bool,
) -> tuple[Manifest, bool]:
    """Writes shards into a folder behind a URL: see `heron.shards.remote_build`."""
    names = folder.names() or set()
    if (finished := load_finished(folder, draft.built_from, source)) is not None:
        return finished, True
    built_from = draft.built_from.model_dump(mode="json")
    folder.put_json(JOURNAL, built_from)
    make = partial(put_shard, source, folder, fingerprint(built_from))
    done = {shard.file for shard in plan if record_name(shard.file) in names}
    bar = _bar(plan, done, folder.where().rpartition("/")[2], progress)
    manifest, words = _make_all(make, draft, plan, done, executor, bar)
    with TemporaryDirectory(prefix="heron-") as temporary:
        for name in write_tokenizers(Path(temporary), words):
            folder.put(Path(temporary) / name)
    manifest = manifest.sealed()
    folder.put_json(MANIFEST, manifest.model_dump(mode="json"))
    folder.remove([*(record_name(shard.file) for shard in plan), JOURNAL])
    return manifest, False
