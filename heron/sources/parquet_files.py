"""Finds the Parquet and Arrow files of a data set, local or on the Hub, and their splits."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from heron.base.artefact import MAX_MANIFEST_BYTES, parse_json
from heron.base.errors import SourceError, short_repr
from heron.base.extras import require
from heron.sources.base import SINGLE_SPLIT
from heron.sources.text import SPLIT_PATTERNS

MAX_DATASET_BYTES = 1 << 38  # of a data set on the Hub: 256 GiB
INDICES = "_indices_data_files", "_indices_files"  # as versions of `datasets` call them
# What a state.json may say: which files and rows there are, their split, and what changes no row.
STATE = {"_data_files", *INDICES, "_split", "_fingerprint", "_inplace_history", "_indexes"}
STATE |= {"_format_columns", "_format_kwargs", "_format_type", "_output_all_columns"}


class Part(NamedTuple):
    """Files whose rows follow one another.

    Attributes:
        files: Parquet or Arrow files.
        indices: Arrow files of the numbers of the rows that there are, in their order; none: all.
        features: what `datasets` records of the columns, by name; None: it is in the files.
    """

    files: Sequence[Path]
    indices: Sequence[Path] = ()
    features: Mapping[str, Any] | None = None


def find_files(path: Path) -> dict[str, list[Part]]:
    """Returns the parts of each split of a saved folder, a folder of Parquet files, or one file."""
    if path.is_file():
        return group_by_split([(path.name, path)])
    splits_file = path / "dataset_dict.json"
    if splits_file.is_file():
        names = _names(splits_file, _read(splits_file, {"splits"}), "splits")
        return {split: [_saved_part(path / split)[1]] for split in names}
    if (path / "state.json").is_file():
        split, part = _saved_part(path)
        return {split: [part]}
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise SourceError(f"{path} has no Parquet files, and no state.json of Dataset.save_to_disk")
    return group_by_split([(str(file.relative_to(path)), file) for file in files])


def _saved_part(folder: Path) -> tuple[str, Part]:
    """Returns the split and the files of a data set written by `Dataset.save_to_disk`.

    `datasets` since version 2 leaves `_indices_data_files` unread, and gives rows that are not in
    the set.
    """
    path = folder / "state.json"
    state = _read(path, STATE)
    indices = next((_names(path, state, key) for key in INDICES if state.get(key)), [])
    names = _names(path, state, "_data_files")
    if missing := [name for name in (*names, *indices) if not (folder / name).is_file()]:
        raise SourceError(f"{folder}: {missing[0]} is missing, which its state.json lists")
    info = folder / "dataset_info.json"
    features = _read(info).get("features") if info.is_file() else None
    split = re.fullmatch(r"(\w+)(\[.*\])?", str(state.get("_split") or ""), re.A)  # train[:10%]
    return split[1] if split else SINGLE_SPLIT, Part(
        [folder / name for name in names],
        [folder / name for name in indices],
        features if isinstance(features, dict) else None,
    )


def _read(path: Path, known: set[str] | None = None) -> dict[str, Any]:
    """Returns the fields of a JSON file of `datasets`; SourceError where one is not `known`."""
    try:
        with path.open("rb") as stream:
            fields = parse_json(stream.read(MAX_MANIFEST_BYTES + 1))
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as fault:
        raise SourceError(
            f"{path}: {fault}; it must be as Dataset.save_to_disk writes it"
        ) from None
    if unknown := sorted(fields.keys() - known) if known else ():
        raise SourceError(
            f"{path} has {unknown[0]!r}, and what that does to rows is not known; load the data "
            "set with the version of `datasets` that saved it, and write it with to_parquet"
        )
    return fields


def _names(path: Path, fields: dict[str, Any], key: str) -> list[str]:
    """Returns the file or split names that a JSON file of `datasets` lists under `key`."""
    try:
        # Of a part of a file, `skip` and `take` stand beside its name: refused.
        entries = [[*v.items()] if isinstance(v, dict) else [("filename", v)] for v in fields[key]]
        names = [name for [(word, name)] in entries if word == "filename"]
        valid = len(names) == len(entries) > 0 and all(
            re.fullmatch(r"[\w-][\w.-]*", name) for name in names
        )
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise SourceError(
            f"{path} has no list of names under {key!r}, as a file of Dataset.save_to_disk does"
        )
    return names


def group_by_split(files: list[tuple[str, Path]]) -> dict[str, list[Part]]:
    """Groups (path, file) pairs by the split word in the file's name or nearest folder."""
    splits: dict[str, list[Part]] = {}
    for path, file in files:
        names = reversed(path.split("/"))
        matches = (
            s for name in names for s, pattern in SPLIT_PATTERNS if re.fullmatch(pattern, name)
        )
        splits.setdefault(next(matches, SINGLE_SPLIT), []).append(Part([file]))
    return splits


def fetch(name: str, subset: str | None) -> list[tuple[str, Path]]:
    """Fetches the Parquet files of OWNER/NAME@COMMIT from the Hub, or from its local cache.

    Returns each file's path on the Hub and its local path; with `subset`, of that folder alone.
    Raises SourceError where the Hub has no such data set, commit or files, or too many bytes, or
    cannot be reached, and MissingPackage without `huggingface_hub`.
    """
    hub = require("huggingface_hub", f"hub: {name}")
    data_set, _, commit = name.partition("@")
    pinned = re.fullmatch("[0-9a-f]{40}", commit) is not None
    info = _call_hub(
        name, hub.HfApi().dataset_info, data_set, revision=commit or None, files_metadata=True
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
        (path, Path(_call_hub(name, hub.hf_hub_download, data_set, path, **options)))
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
