"""Random access to rows of Parquet and Arrow files, one row group at a time."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import types

from heron.base.errors import DOWNLOAD_AGAIN, FILL, SourceError, first_few, short_repr

MAX_GROUP_BYTES = 1 << 32  # of a row group, which is held whole
# Files, those of the indices of the rows that there are, and what `datasets` says of the columns.
Part = tuple[Sequence[Path], Sequence[Path], Mapping[str, Any] | None]
READ_ERRORS = pa.ArrowException, OSError, ValueError, NotImplementedError, KeyError


class ArrowRows:
    """The concatenated rows of parts of files with the same schema, each as its indices say.

    Arrow files are mapped into memory; of Parquet files one row group per column is held at a time.
    Extension types are read as their storage type; pyarrow unpickles none since version 15.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Opens the files; SourceError where one cannot be read or has other columns."""
        self.paths = [path for files, *_ in parts for path in files]
        self._files: list[Any] = [_open(path) for path in self.paths]
        self.schema: pa.Schema = _schema(self._files[0])
        for path, file in zip(self.paths, self._files, strict=True):
            if not _schema(file).equals(self.schema):
                raise SourceError(
                    f"{path.name}: its columns {_column_list(_schema(file))} differ from those of "
                    f"{self.paths[0].name}, {_column_list(self.schema)}; pass files of one data set"
                )
        counts = [
            [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            if isinstance(file, pq.ParquetFile)
            else [file.num_rows]
            for file in self._files
        ]
        self._groups = [(i, group) for i, rows in enumerate(counts) for group in range(len(rows))]
        self._starts = np.cumsum([0, *(count for rows in counts for count in rows)])
        self.rows = list[int]()  # of each part
        # What `datasets` records of the columns, by file.
        self._recorded = {
            p: _features(_schema(f)) for p, f in zip(self.paths, self._files, strict=True)
        }
        rows_of, stored, first = dict(zip(self.paths, map(sum, counts), strict=True)), [], 0
        for files, indices, features in parts:
            rows = sum(rows_of[path] for path in files)
            stored.append(first + (_indices(indices, rows) if indices else np.arange(rows)))
            self.rows.append(len(stored[-1]))
            self._recorded |= dict.fromkeys(files, features) if features else {}
            first += rows
        self._stored = np.concatenate(stored) if any(part[1] for part in parts) else None
        self._first_lengths: dict[str, set[int]] = {}  # of the lists in a column's first row
        self._cached: dict[str, tuple[int, Any]] = {}  # column: number and values of a row group

    def class_names(self, column: str) -> list[str] | None:
        """The names of a column's classes, on which all files that have some must agree."""
        found = [(path, _class_names(f.get(column))) for path, f in self._recorded.items()]
        named = [(path, names) for path, names in found if names]
        for path, names in named:
            if names != named[0][1]:
                raise SourceError(
                    f"{path}: the classes of {column} are {first_few(names)}, but those of "
                    f"{named[0][0]} {first_few(named[0][1])}; pass files of one data set"
                )
        return named[0][1] if named else None

    def take(self, column: str, rows: NDArray[np.int64]) -> Any:
        """Returns the values of a column in `rows`, as a pyarrow array."""
        rows = rows if self._stored is None else self._stored[rows]
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        chunks, order = [], np.argsort(groups, kind="stable")
        for group in np.unique(groups).tolist():
            local_rows = rows[order][groups[order] == group] - self._starts[group]
            chunks.append(_storage_array(self._group(column, group).take(pa.array(local_rows))))
        inverse = np.empty(len(rows), np.int64)
        inverse[order] = np.arange(len(rows))
        return pa.concat_arrays(chunks).take(pa.array(inverse)) if chunks else pa.array([])

    def files_of(
        self, column: str, kind: str, where: str, indices: NDArray[np.int64]
    ) -> list[bytes]:
        """Returns a column's texts, or files of pictures; SourceError, which says `where`."""
        payloads = []
        values = self.take(column, indices).to_pylist()
        for row, value in zip(indices.tolist(), values, strict=True):
            if kind == "image" and isinstance(value, dict):
                value = value.get("bytes")
            if kind == "text" and isinstance(value, str):
                value = value.encode()
            if not isinstance(value, bytes):
                raise SourceError(
                    f"{where}, row {row} must be text, got {short_repr(value)}; {FILL}"
                )
            payloads.append(value)
        return payloads

    def numbers_of(self, column: str, where: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns a column of numbers, or of lists of them, [rows, columns]; as `files_of`."""
        values = self.take(column, indices)
        if column not in self._first_lengths:
            self._first_lengths[column] = _lengths(self.take(column, np.zeros(1, np.int64)))
        widths = _lengths(values) | self._first_lengths[column]
        while True:
            if len(widths) > 1:
                raise SourceError(
                    f"{where}: lists of {' and '.join(map(str, sorted(widths)[:2]))} values; "
                    f"every row must have the same number; {FILL}"
                )
            if not hasattr(values, "flatten") or types.is_struct(values.type) or values.null_count:
                break
            values = values.flatten()
            widths = _lengths(values)
        dtype = values.type
        numeric = types.is_integer(dtype) or types.is_floating(dtype) or types.is_boolean(dtype)
        if not numeric or values.null_count or len(values) % len(indices):
            problem = "with rows that are missing or of several lengths" * numeric
            raise SourceError(
                f"{where}: {column} is {dtype} {problem}; every row must have the same number of "
                f"numbers; {FILL}"
            )
        array: NDArray[Any] = np.asarray(values).reshape(len(indices), -1)
        return array

    def _group(self, column: str, group: int) -> Any:
        if self._cached.get(column, (-1, None))[0] != group:
            file_index, local_group = self._groups[group]
            file, path = self._files[file_index], self.paths[file_index]
            try:
                if isinstance(file, pq.ParquetFile):
                    size = file.metadata.row_group(local_group).total_byte_size
                    if size > MAX_GROUP_BYTES:
                        raise SourceError(
                            f"{path.name}: a group of rows has {size:,} bytes, and the limit is "
                            f"{MAX_GROUP_BYTES:,}; write it again in smaller groups"
                        )
                    table = file.read_row_group(local_group, columns=[column], use_threads=False)
                    values = table.column(0)
                else:
                    values = file.column(column)
            except READ_ERRORS as fault:
                raise SourceError(
                    f"{path.name}: column {column!r} is damaged ({fault}); {DOWNLOAD_AGAIN}"
                ) from None
            self._cached[column] = group, values
        return self._cached[column][1]


def _lengths(lists: Any) -> set[int]:
    listed = types.is_list(lists.type) or types.is_large_list(lists.type)
    return set(lists.value_lengths().drop_null().to_pylist()) if listed else set()


def _storage_array(values: Any) -> Any:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):  # more bytes than 32-bit offsets reach
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
    except READ_ERRORS as fault:
        raise SourceError(
            f"cannot read {path.name} ({fault}), which must be a Parquet or an Arrow file; "
            f"{DOWNLOAD_AGAIN}"
        ) from None


def _class_names(feature: Any) -> list[str] | None:
    """Returns the class names that `datasets` records for a column, or for its lists."""
    while isinstance(feature, list) and feature:
        feature = feature[0]
    while isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    names = feature.get("names") if isinstance(feature, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return names if len(set(names)) == len(names) else None


def _features(schema: Any) -> Mapping[str, Any]:
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _indices(paths: Sequence[Path], rows: int) -> NDArray[np.int64]:
    """Reads the numbers of the rows that a data set has, in their order."""
    columns = [_open(path) for path in paths]
    name = paths[0].name
    if any(table.column_names != ["indices"] for table in columns):
        raise SourceError(f"{name} has no column 'indices' alone; {DOWNLOAD_AGAIN}")
    values = np.concatenate([np.asarray(table.column(0)) for table in columns])
    if values.dtype.kind not in "iu" or not ((values >= 0) & (values < rows)).all():
        raise SourceError(f"{name}: indices must be 0 to {rows - 1}; {DOWNLOAD_AGAIN}")
    return values.astype(np.int64)


def _schema(file: Any) -> Any:
    return file.schema_arrow if isinstance(file, pq.ParquetFile) else file.schema


def _column_list(schema: Any) -> str:
    return first_few([f"{field.name} {field.type}" for field in schema])
