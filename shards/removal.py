"""Removes an older build from a folder, and nothing else that others put there."""

from contextlib import suppress
from pathlib import Path

import numpy as np

from heron.shards.artefact import MANIFEST
from heron.shards.errors import ShardError, SourceError, first_few
from heron.shards.index import ShardIndex, map_arrays
from heron.shards.manifest import JOURNAL, LABELS, Manifest
from heron.shards.texts import TOKENIZER

NUMBER = "[0-9]" * 6  # glob for the number in the names of our shards


def remove_build(out: Path) -> None:
    """Removes the files of a build; until the last is gone, the folder still looks like a build.

    Raises ShardError for tars of no known build, and SourceError for indexed tars of others.
    """
    if not any((out / name).exists() for name in (MANIFEST, JOURNAL)):
        return  # no build has been here
    manifest = _readable_manifest(out)
    if manifest is not None and manifest.foreign:
        raise SourceError(
            f"{out} holds tars of others, indexed where they lie; a build would remove them; "
            "choose another --out"
        )
    files = _recognised_files(out) if manifest is None else _listed_files(manifest)
    if others := sorted(path.name for path in out.glob("*.tar") if path.name not in files):
        raise ShardError(
            f"{out}: no build is known to have written {first_few(others)}; expected only files of "
            "a build of ours, which --overwrite removes; move others away, or choose another --out"
        )
    if folders := [name for name in (*files, MANIFEST, JOURNAL) if (out / name).is_dir()]:
        raise ShardError(
            f"{out}: {first_few(folders)} should be files, and are folders; move them away, or "
            "choose another --out"
        )
    with suppress(FileNotFoundError):
        (out / MANIFEST).replace(out / JOURNAL)
    for name in [*files, JOURNAL]:
        (out / name).unlink(missing_ok=True)


def _readable_manifest(out: Path) -> Manifest | None:
    """Returns the manifest; an interrupted removal has renamed it to the journal."""
    for name in (MANIFEST, JOURNAL):
        with suppress(OSError, ShardError):
            return Manifest.parse((out / name).read_bytes(), name)
    return None


def _listed_files(manifest: Manifest) -> list[str]:
    shards = [shard for shards in manifest.splits.values() for shard in shards]
    return [
        *(shard.file for shard in shards),
        *(shard.index_file for shard in shards),
        *(f"{view.name}{TOKENIZER}" for view in manifest.views if view.kind == "text"),
    ]


def _recognised_files(out: Path) -> list[str]:
    """Returns the tars, indexes and tokenizers that a build of ours wrote, by what is in them.

    Our tars hold the labels that their index lists; foreign tars do not. A killed build may leave
    an index without its tar. A copy of both under another name counts as ours.
    """
    tars, indexes, tokenizers = list[str](), list[str](), list[str]()
    for path in sorted(out.glob(f"*-{NUMBER}.index.npz")):
        tar = path.with_name(path.name.removesuffix(".index.npz") + ".tar")
        if not path.is_file() or (tar.exists() and not tar.is_file()):
            continue  # such as a pipe, which would never end
        with suppress(OSError, ShardError, ValueError):
            index = ShardIndex.read(path)
            column = index.column(LABELS)
            if tar.exists():
                spans = index.offsets[:1, column], index.lengths[:1, column]
                (labels,) = map_arrays(tar, *spans)
                expected = index.labels[: index.rows[0]]
                if labels.dtype != expected.dtype or not np.array_equal(labels, expected):
                    continue
                tars.append(tar.name)
            indexes.append(path.name)
            if any(member.split(".")[-1] == "txt" for member in index.members.tolist()):
                tokenizers = sorted(path.name for path in out.glob(f"*{TOKENIZER}"))
    return [*tars, *indexes, *tokenizers]
