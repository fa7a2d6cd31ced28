"""Rows of Parquet and Arrow files by number, of which no more is read than a group of rows."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from heron.shards.errors import DOWNLOAD, SourceError, some

MOST_GROUP = 1 << 32  # bytes of a group of rows, which is held as a whole
FAULTS = pa.ArrowException, OSError, ValueError, NotImplementedError, KeyError


class ArrowRows:
    """The rows of some files of one schema, laid end to end.

    Arrow files, as Hugging Face's `Dataset.save_to_disk` writes them, are mapped into memory; of
    Parquet files one group of rows of a column is held at a time. Types that others have defined
    are read as what they are stored as: pyarrow unpickles none since its version 15.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Opens the files; SourceError where one cannot be read, or has other columns."""
        self.paths = list(paths)
        self._files: list[Any] = [_open(path) for path in self.paths]
        self.schema: pa.Schema = _schema(self._files[0])
        for path, file in zip(self.paths, self._files, strict=True):
            if not _schema(file).equals(self.schema):
                raise SourceError(
                    f"{path.name}: its columns are {_columns(_schema(file))}; expected those of "
                    f"{self.paths[0].name}, {_columns(self.schema)}; give the files of one data set"
                )
        counts = [
            [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
            if isinstance(file, pq.ParquetFile)
            else [file.num_rows]
            for file in self._files
        ]
        self._groups = [(n, group) for n, rows in enumerate(counts) for group in range(len(rows))]
        self._starts = np.cumsum([0, *(count for rows in counts for count in rows)])
        self.rows = [sum(rows) for rows in counts]  # of each file
        self._held: dict[str, tuple[int, Any]] = {}  # of a column: a group of rows

    @cached_property
    def features(self) -> dict[str, Any]:
        """What Hugging Face's `datasets` says of the columns, where it wrote the files."""
        stored = (self.schema.metadata or {}).get(b"huggingface", b"{}")
        try:
            found = json.loads(stored)["info"]["features"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def take(self, column: str, rows: NDArray[np.int64]) -> Any:
        """Returns the values of a column in some rows, an array of pyarrow."""
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        parts, order = [], np.argsort(groups, kind="stable")
        for group in np.unique(groups).tolist():
            inside = rows[order][groups[order] == group] - self._starts[group]
            parts.append(_plain(self._group(column, group).take(pa.array(inside))))
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return pa.concat_arrays(parts).take(pa.array(back)) if parts else pa.array([])

    def _group(self, column: str, group: int) -> Any:
        if self._held.get(column, (-1, None))[0] != group:
            number, part = self._groups[group]
            file, path = self._files[number], self.paths[number]
            try:
                if isinstance(file, pq.ParquetFile):
                    size = file.metadata.row_group(part).total_byte_size
                    if size > MOST_GROUP:
                        raise SourceError(
                            f"{path.name}: a group of rows has {size:,} bytes; expected "
                            f"{MOST_GROUP:,} at most; write it again in smaller groups"
                        )
                    values = file.read_row_group(part, columns=[column], use_threads=False).column(
                        0
                    )
                else:
                    values = file.column(column)
            except FAULTS as fault:
                raise SourceError(
                    f"{path.name}: column {column!r} is damaged ({fault}); {DOWNLOAD}"
                ) from None
            self._held[column] = group, values
        return self._held[column][1]


def _plain(values: Any) -> Any:
    """Returns values as one array, of the type that they are stored as."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):  # of more bytes than one array's offsets reach
            values = pa.concat_arrays(values.chunks)
    while isinstance(values, pa.ExtensionArray):
        values = values.storage
    if isinstance(values, pa.DictionaryArray):
        values = values.dictionary_decode()
    return values


def _open(path: Path) -> Any:
    """Opens a Parquet file, or maps an Arrow file or stream into memory."""
    try:
        if path.suffix == ".parquet":
            return pq.ParquetFile(path, memory_map=True)
        source = pa.memory_map(str(path))
        try:
            return pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(source).read_all()
    except FAULTS as fault:
        raise SourceError(
            f"{path.name}: cannot be read ({fault}); expected a Parquet or an Arrow file; "
            f"{DOWNLOAD}"
        ) from None


def _schema(file: Any) -> Any:
    return file.schema_arrow if isinstance(file, pq.ParquetFile) else file.schema


def _columns(schema: Any) -> str:
    return some([f"{field.name} {field.type}" for field in schema])
