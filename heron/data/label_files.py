"""Files that say which samples training leaves out, and how much each label of a sample counts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from heron.base.artefact import sha256
from heron.base.decisions import read_columns, read_decisions
from heron.base.errors import CheckpointError, ConfigError
from heron.data.options import Protocol
from heron.data.reader import Reader
from heron.data.rows import Roles, Rows

LEAVE_OUT, WEIGHTS = "data.protocol.leave_out", "data.protocol.label_weights"
CHOSEN = "chosen.json"  # beside a checkpoint: checksums of the files


def leave_out(reader: Reader, roles: Roles, path: Path) -> Roles:
    """Removes samples from the rows that are trained on; those that judge stay comparable.

    They are those of the column `key` of a CSV file; if it has a column `decision`, only those
    decided to be wrong, unknown or drop. Raises ConfigError if it names none, or an unknown one.
    """
    columns = read_columns(path, ["key"], LEAVE_OUT, ConfigError)
    keys = columns["key"]
    if "decision" in columns:
        lines = read_decisions(path, LEAVE_OUT, ConfigError)
        keys = [line.key for line in lines if line.acts]
    if not keys:
        raise ConfigError(
            f"{LEAVE_OUT} {path} names no sample to leave out; fill in its column 'decision', or "
            "remove this column to leave out all of its samples"
        )
    rows = _rows_of(reader, keys, LEAVE_OUT, path)
    kept = [np.setdiff1d(roles.rows_of(role), rows) for role in ("labelled", "unlabelled")]
    return Roles(reader.starts, *kept, roles.test, roles.validation)


@dataclass(frozen=True, eq=False)
class LabelWeights:
    """How much each label of some samples counts; those of all others count 1.

    `rows` are their ascending numbers, [n]; `weights` are 0 to 1, [n, labels].
    """

    rows: Rows
    weights: NDArray[np.float32]

    @classmethod
    def read(cls, reader: Reader, path: Path) -> Self:
        """Reads a CSV or parquet file with the columns key, label and weight, or suspicion.

        A label counts by its weight or, where there is no such column, by 1 - its suspicion, as of
        the labels.parquet of an audit. Without a label, a line is of all labels of the sample.
        Raises ConfigError if the file does not fit the data set, or a number is not from 0 to 1.
        """
        keys, labels, numbers = _read_weights(path)
        names = {name: n for n, name in enumerate(reader.manifest.labels.names)}
        if unknown := [label for label in dict.fromkeys(labels) if label and label not in names]:
            raise ConfigError(
                f"{WEIGHTS} {path}: {reader.store} has no label '{unknown[0]}'; it has "
                f"{', '.join([*names][:20])}"
            )
        if len(bad := np.flatnonzero(~((numbers >= 0) & (numbers <= 1)))):
            raise ConfigError(
                f"{WEIGHTS} {path}: a number must be 0 to 1, got {numbers[bad[0]]:g} of sample "
                f"'{keys[bad[0]]}'"
            )
        rows = _rows_of(reader, keys, WEIGHTS, path)
        distinct, place = np.unique(rows, return_inverse=True)
        weights = np.ones((len(distinct), len(names)), np.float32)
        column = np.array([names.get(label, -1) for label in labels], np.int64)
        _, first = np.unique(np.stack([rows, column]), axis=1, return_index=True)
        if len(twice := np.setdiff1d(np.arange(len(rows)), first)):
            raise ConfigError(
                f"{WEIGHTS} {path} has two lines on a label of sample '{keys[twice[0]]}'; remove "
                "one of them"
            )
        whole = column < 0
        weights[place[whole]] = numbers[whole, None]
        weights[place[~whole], column[~whole]] = numbers[~whole]
        return cls(distinct, weights)

    def of(self, rows: Rows) -> NDArray[np.float32]:
        """Returns the weights of the labels of rows, [rows, labels]."""
        found = np.ones((len(rows), self.weights.shape[1]), np.float32)
        if len(self.rows):
            place = np.searchsorted(self.rows, rows).clip(max=len(self.rows) - 1)
            listed = self.rows[place] == rows
            found[listed] = self.weights[place[listed]]
        return found


def _read_weights(path: Path) -> tuple[Sequence[str], Sequence[str], NDArray[np.float32]]:
    """Returns the key, the label and the weight of each line."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq  # here: it is slow to load

        try:
            table = pq.read_table(path)
            columns = {name: table[name].to_pylist() for name in table.column_names}
        except (OSError, ValueError) as fault:
            raise ConfigError(f"cannot read {WEIGHTS} {path}: {fault}; pass another file") from None
    else:
        columns = dict(read_columns(path, ["key"], WEIGHTS, ConfigError))
    name = "weight" if "weight" in columns else "suspicion"
    if missing := {"key", name} - columns.keys():
        raise ConfigError(
            f"{WEIGHTS} {path} has no column '{missing.pop()}'; it must have key, label and "
            "weight, or suspicion"
        )
    keys = columns["key"]
    try:
        numbers = np.array(columns[name], np.float32)
    except (ValueError, TypeError):
        raise ConfigError(
            f"{WEIGHTS} {path}: column '{name}' must have a number from 0 to 1 in each line"
        ) from None
    if name == "suspicion":
        numbers = 1 - numbers
    return keys, columns.get("label", [""] * len(keys)), numbers


def rows_by_key(reader: Reader) -> dict[str, int]:
    """Returns the number of each row of a data set, by its key."""
    everyone = np.arange(int(reader.starts[-1]))
    return dict(zip(reader.sample_keys(everyone), everyone.tolist(), strict=True))


def _rows_of(reader: Reader, keys: Sequence[str], option: str, path: Path) -> Rows:
    row_of = rows_by_key(reader)
    if absent := [key for key in keys if key not in row_of]:
        raise ConfigError(
            f"{option} {path}: {reader.store} has no sample '{absent[0]}' ({len(absent):,} of "
            f"{len(keys):,} lines); pass a file on its own samples"
        )
    return np.array([row_of[key] for key in keys], np.int64)


def chosen_files(protocol: Protocol) -> dict[str, str]:
    """Returns the text of `CHOSEN` by its name; empty if the protocol names no file."""
    paths = {LEAVE_OUT: protocol.leave_out, WEIGHTS: protocol.label_weights}
    sums = {option: sha256(Path(path)) for option, path in paths.items() if path is not None}
    return {CHOSEN: json.dumps(sums)} if sums else {}


def refuse_other_files(checkpoint: Path, protocol: Protocol) -> None:
    """Raises CheckpointError if a checkpoint was trained with other contents of these files."""
    expected, path = chosen_files(protocol).get(CHOSEN, ""), checkpoint / CHOSEN
    if (path.read_text() if path.exists() else "") != expected:
        raise CheckpointError(
            f"{checkpoint} was trained with other contents of {LEAVE_OUT} or {WEIGHTS}; restore "
            "the file, or run with run.resume=never"
        )
