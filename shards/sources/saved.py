"""Where the Parquet and Arrow files of a data set lie, and which split each is of."""

import json
import re
from pathlib import Path

from heron.shards.errors import SourceError
from heron.shards.sources.base import WHOLE
from heron.shards.sources.text import BY_WORD


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
