"""Where the Parquet and Arrow files of a data set lie, here or on the Hub, and their splits."""

import json
import re
from pathlib import Path
from typing import Any

from heron.shards.errors import SourceError, shown
from heron.shards.remote import EXTRA
from heron.shards.sources.base import WHOLE
from heron.shards.sources.text import BY_WORD

MOST_BYTES = 1 << 38  # of a data set on the Hub: 256 GiB


def listed(path: Path) -> dict[str, list[Path]]:
    """Returns the files of each split of a folder that was saved, or of Parquet files."""
    if path.is_file():
        return by_words([(path.name, path)])
    whole = path / "dataset_dict.json"
    if whole.is_file():
        return {split: _saved(path / split) for split in _strings(whole, "splits")}
    if (path / "state.json").is_file():
        return {WHOLE: _saved(path)}
    found = sorted(path.rglob("*.parquet"))
    if not found:
        raise SourceError(
            f"{path}: no Parquet files, and no state.json of Dataset.save_to_disk; expected either"
        )
    return by_words([(str(one.relative_to(path)), one) for one in found])


def _saved(folder: Path) -> list[Path]:
    """Returns the files of a data set that `Dataset.save_to_disk` wrote."""
    names = _strings(folder / "state.json", "_data_files")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise SourceError(f"{folder}: {missing[0]} is missing, which its state.json lists")
    return [folder / name for name in names]


def _strings(path: Path, key: str) -> list[str]:
    """Returns the plain names that a JSON file of `datasets` lists."""
    try:
        values = json.loads(path.read_bytes())[key]
        names = [value["filename"] if isinstance(value, dict) else value for value in values]
        good = bool(names) and all(re.fullmatch(r"[\w-][\w.-]*", name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise SourceError(
            f"{path}: no list of names under {key!r}; expected a file of Dataset.save_to_disk"
        )
    return names


def by_words(files: list[tuple[str, Path]]) -> dict[str, list[Path]]:
    """Returns the files of each split, by the words in their names or their folders'."""
    splits: dict[str, list[Path]] = {}
    for path, file in files:
        words = [part for part in reversed(path.split("/"))]
        found = (s for word in words for s, pattern in BY_WORD if re.fullmatch(pattern, word))
        splits.setdefault(next(found, WHOLE), []).append(file)
    return splits


def fetch(name: str, subset: str | None) -> list[tuple[str, Path]]:
    """Returns the Parquet files of a data set: the path of each there, and where it lies here.

    They are fetched into the cache of `huggingface_hub`, once.

    Args:
        name: OWNER/NAME@COMMIT.
        subset: the folder whose files are meant; None: all.

    Raises:
        SourceError: there is no such data set or commit, it has no such files or too many bytes, or
            the Hub cannot be reached.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError:
        raise SourceError(
            f"hub: {name} needs the package huggingface_hub, which is not installed; expected an "
            f"extra: {EXTRA}"
        ) from None
    data_set, _, commit = name.partition("@")
    pinned = re.fullmatch("[0-9a-f]{40}", commit) is not None
    found = _asked(
        name, HfApi().dataset_info, data_set, revision=commit or None, files_metadata=True
    )
    if not pinned:
        raise SourceError(
            f"hub: {shown(name)} names no commit; expected one, so that the rows stay the same; "
            f"this one is --hub {data_set}@{found.sha}"
        )
    top = f"{subset.strip('/')}/" if subset else ""
    files = [one for one in found.siblings if one.rfilename.endswith(".parquet")]
    sizes = {one.rfilename: one.size or 0 for one in files if one.rfilename.startswith(top)}
    if not sizes or sum(sizes.values()) > MOST_BYTES:
        folders = sorted({one.rfilename.rpartition("/")[0] for one in files})
        raise SourceError(
            f"hub: {name} has {len(sizes)} Parquet files of {sum(sizes.values()):,} bytes in "
            f"{top or 'all'}; expected some, of {MOST_BYTES:,} bytes at most; its folders with some"
            f" are {', '.join(folders) or 'none'}: give a --subset, or a commit of the branch "
            "refs/convert/parquet"
        )
    return [
        (
            path,
            Path(
                _asked(name, hf_hub_download, data_set, path, repo_type="dataset", revision=commit)
            ),
        )
        for path in sorted(sizes)
    ]


def _asked(name: str, ask: Any, *words: str, **options: Any) -> Any:
    try:
        return ask(*words, **options)
    except Exception as fault:  # httpx and the package have their own
        said = " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
        raise SourceError(
            f"hub: {name}: {said}; expected a data set and a network that reaches it; without one, "
            "give files that are here with --data"
        ) from None
