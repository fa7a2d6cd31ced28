"""Finds the Parquet and Arrow files of a data set, local or on the Hub, and their splits."""

import json
import re
from pathlib import Path
from typing import Any

from heron.shards.errors import SourceError, short_repr
from heron.shards.remote import EXTRA
from heron.shards.sources.base import SINGLE_SPLIT
from heron.shards.sources.text import SPLIT_PATTERNS

MAX_DATASET_BYTES = 1 << 38  # of a data set on the Hub: 256 GiB


def find_files(path: Path) -> dict[str, list[Path]]:
    """Returns the files of each split of a saved folder, a folder of Parquet files, or one file."""
    if path.is_file():
        return group_by_split([(path.name, path)])
    splits_file = path / "dataset_dict.json"
    if splits_file.is_file():
        return {split: _saved_files(path / split) for split in _read_names(splits_file, "splits")}
    if (path / "state.json").is_file():
        return {SINGLE_SPLIT: _saved_files(path)}
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise SourceError(f"{path} has no Parquet files, and no state.json of Dataset.save_to_disk")
    return group_by_split([(str(file.relative_to(path)), file) for file in files])


def _saved_files(folder: Path) -> list[Path]:
    """Returns the files of a data set written by `Dataset.save_to_disk`."""
    names = _read_names(folder / "state.json", "_data_files")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise SourceError(f"{folder}: {missing[0]} is missing, which its state.json lists")
    return [folder / name for name in names]


def _read_names(path: Path, key: str) -> list[str]:
    """Returns the file or split names that a JSON file of `datasets` lists under `key`."""
    try:
        values = json.loads(path.read_bytes())[key]
        names = [value["filename"] if isinstance(value, dict) else value for value in values]
        valid = bool(names) and all(re.fullmatch(r"[\w-][\w.-]*", name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise SourceError(
            f"{path} has no list of names under {key!r}, as a file of Dataset.save_to_disk does"
        )
    return names


def group_by_split(files: list[tuple[str, Path]]) -> dict[str, list[Path]]:
    """Groups (path, file) pairs by the split word in the file's name or nearest folder."""
    splits: dict[str, list[Path]] = {}
    for path, file in files:
        names = reversed(path.split("/"))
        matches = (
            s for name in names for s, pattern in SPLIT_PATTERNS if re.fullmatch(pattern, name)
        )
        splits.setdefault(next(matches, SINGLE_SPLIT), []).append(file)
    return splits


def fetch(name: str, subset: str | None) -> list[tuple[str, Path]]:
    """Fetches the Parquet files of OWNER/NAME@COMMIT from the Hub, or from its local cache.

    Returns each file's path on the Hub and its local path; with `subset`, of that folder alone.
    Raises SourceError where the Hub has no such data set, commit or files, or too many bytes, or
    cannot be reached.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError:
        raise SourceError(
            f"hub: {name} needs the package huggingface_hub, which is not installed; install it "
            f"with: {EXTRA}"
        ) from None
    data_set, _, commit = name.partition("@")
    pinned = re.fullmatch("[0-9a-f]{40}", commit) is not None
    info = _call_hub(
        name, HfApi().dataset_info, data_set, revision=commit or None, files_metadata=True
    )
    if not pinned:
        raise SourceError(
            f"hub: {short_repr(name)} names no commit, which keeps the rows the same; the current "
            f"one is --hub {data_set}@{info.sha}"
        )
    top = f"{subset.strip('/')}/" if subset else ""
    files = [file for file in info.siblings if file.rfilename.endswith(".parquet")]
    sizes = {file.rfilename: file.size or 0 for file in files if file.rfilename.startswith(top)}
    if not sizes or sum(sizes.values()) > MAX_DATASET_BYTES:
        folders = sorted({file.rfilename.rpartition("/")[0] for file in files})
        raise SourceError(
            f"hub: {name} has {len(sizes)} Parquet files of {sum(sizes.values()):,} bytes in "
            f"{top or 'all'}; there must be some, of {MAX_DATASET_BYTES:,} bytes at most; its "
            f"folders with some are {', '.join(folders) or 'none'}: use a --subset, or a commit "
            "of the branch refs/convert/parquet"
        )
    options = {"repo_type": "dataset", "revision": commit}
    return [
        (path, Path(_call_hub(name, hf_hub_download, data_set, path, **options)))
        for path in sorted(sizes)
    ]


def _call_hub(name: str, function: Any, *arguments: str, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except Exception as fault:  # httpx and the package have their own
        message = " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
        raise SourceError(
            f"hub: {name}: {message}; check the name and the network; without one, pass local "
            "files with --data"
        ) from None
