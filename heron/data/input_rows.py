"""Rows that a caller holds in memory, converted to what a reader of shards would return."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from heron.base.errors import HeronError, InputError
from heron.data.decoders import Decoder, TextDecoder
from heron.data.graphs import GraphDecoder
from heron.data.pictures import PictureDecoder
from heron.shards.graph import graph_fault, normalize_edges
from heron.shards.manifest import View

# An array or a tensor [rows, ...], or a sequence with one item per row: an array; a picture, also
# as the bytes of a picture file; a text; or a graph: its node labels, and its edges [edges, 2].
InputRows = ArrayLike | Tensor | Sequence[ArrayLike | Tensor | bytes | str]
REAL = "fiu"  # kinds of numpy's dtypes


class InputView:
    """Rows of one stored view; nothing is copied before `read`."""

    def __init__(self, view: View, decoder: Decoder | None, rows: InputRows) -> None:
        """Raises InputError if shape or type do not fit the view; `decoder` is None for vectors."""
        self.view, self.decoder = view, decoder
        self.rows: Any = rows
        listed = isinstance(rows, list | tuple)
        if isinstance(decoder, GraphDecoder):
            if not listed:
                raise self._refused(f"is {type(rows).__name__}")
            return
        if isinstance(decoder, TextDecoder):
            if not listed and not (isinstance(rows, np.ndarray) and rows.ndim):
                raise self._refused(f"is {type(rows).__name__}")
            texts: Any = rows
            self.rows = list(texts)
            if not_text := [row for row in self.rows if not isinstance(row, str)]:
                raise self._refused(f"one row is {type(not_text[0]).__name__}")
            return
        if not listed or decoder is None:
            self.rows = self._array(rows)
        if not isinstance(self.rows, list | tuple):
            self._refuse_array(self.rows)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Returns rows `start` to `stop` - 1 as `Reader.fill` has them.

        Raises InputError if a number is not finite, or a picture is unreadable or of another size.
        """
        rows = self.rows[start:stop]
        if self.decoder is not None:
            out = np.empty((len(rows), *self.decoder.shape), self.decoder.dtype)
            for number, row in enumerate(rows):
                try:
                    _decode(self.decoder, row, out[number])
                except (ValueError, TypeError, HeronError) as error:
                    raise self._refused(f"row {start + number} {error}") from None
            return out
        with np.errstate(over="ignore"):  # overflow gives infinities, which are refused
            vectors = _numpy(rows).astype(np.float32)
        if len(bad := np.argwhere(~np.isfinite(vectors))):
            row, column = bad[0].tolist()
            raise InputError(
                f"view '{self.view.name}': {len(np.unique(bad[:, 0])):,} rows are not finite in "
                f"float32, starting with row {start + row} in column {column}; fix or drop these "
                "rows"
            )
        return vectors

    def _array(self, rows: InputRows) -> Any:
        if isinstance(rows, Tensor) and (fault := _sparse_fault(rows)):
            raise self._refused(fault)
        if isinstance(rows, Tensor | np.ndarray):
            return rows
        try:
            if isinstance(rows, list | tuple) and any(isinstance(row, Tensor) for row in rows):
                return np.stack([_numpy(row) for row in rows])
            return np.asarray(rows)
        except ValueError as error:  # rows of several lengths
            raise self._refused(f"it is not an array ({error})") from None

    def _refuse_array(self, rows: Any) -> None:
        dtype = str(rows.dtype).removeprefix("torch.")
        description = f"it is {dtype} {list(rows.shape)}"
        if isinstance(self.decoder, PictureDecoder):
            shapes = [self.view.shape, self.decoder.shape]
            fits = rows.shape[1:] in shapes or (self.decoder.varying and rows.ndim == 4)
            if dtype != "uint8" or not fits or rows.shape[-1] != self.view.shape[2]:
                raise self._refused(description)
            return
        if isinstance(rows, Tensor):
            is_numeric = not (rows.is_complex() or rows.dtype == torch.bool)
        else:
            is_numeric = rows.dtype.kind in REAL
        if not is_numeric or rows.ndim != 2 or rows.shape[1] != self.view.shape[0]:
            raise self._refused(description)

    def _refused(self, description: str) -> InputError:
        expected = {
            TextDecoder: "a list of texts, one per row; the model tokenizes them itself",
            GraphDecoder: "a list of graphs, each a pair: integers [nodes], labels as in the "
            "training data, and [edges, 2], pairs of nodes from 0",
            PictureDecoder: f"uint8 [rows, {self.view.extent}] with channels last and values 0 to "
            "255, as in the shards that the model was trained on, or a list of pictures; the model "
            "scales and resizes them itself",
            type(None): f"numbers [rows, {self.view.shape[0]}], raw as in the shards that the "
            "model was trained on; the model standardises them itself",
        }[type(self.decoder)]
        return InputError(f"view '{self.view.name}' must be {expected}; {description}")


def _decode(decoder: Decoder, row: Any, out: NDArray[Any]) -> None:
    if isinstance(decoder, TextDecoder):
        decoder.decode(row.encode(), out)
    elif isinstance(decoder, GraphDecoder):
        _write_graph(decoder, row, out)
    elif isinstance(decoder, PictureDecoder):
        if isinstance(row, bytes):
            if decoder.stored[2] != 3:
                raise ValueError(f"is bytes, which decode to 3 channels: {row[:8]!r}")
            decoder.decode(row, out)
            return
        picture = _numpy(row)
        if picture.dtype != np.uint8:
            raise ValueError(f"is {picture.dtype} {list(picture.shape)}")
        out[:] = decoder.fit(picture)


def _write_graph(decoder: GraphDecoder, graph: Any, out: NDArray[np.int32]) -> None:
    if isinstance(graph, bytes):
        return decoder.decode(graph, out)
    labels, edges = (_numpy(array) for array in graph)
    pairs = edges.reshape(-1, 2) if edges.size == 0 else edges
    if not (labels.ndim == 1 and pairs.ndim == 2 and pairs.shape[1] == 2):
        raise ValueError(f"is labels {list(labels.shape)} and edges {list(edges.shape)}")
    if any(array.size and array.dtype.kind not in "iu" for array in (labels, pairs)):
        raise ValueError(f"is labels {labels.dtype} and edges {edges.dtype}")
    if max(int(np.abs(array).max(initial=0)) for array in (labels, pairs)) >= 2**31:
        raise ValueError("has a number of more than 31 bits")
    tidied = normalize_edges(pairs.astype(np.int64))
    if fault := graph_fault(labels.astype(np.int32), tidied, decoder.stored):
        raise ValueError(fault)
    decoder.write(labels.astype(np.int32), tidied, out)


def _numpy(rows: Any) -> NDArray[Any]:
    """Returns rows as a NumPy array; tensors may have any device and dtype."""
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu()
        if fault := _sparse_fault(rows):
            raise ValueError(fault)
        return np.asarray((rows.float() if rows.dtype == torch.bfloat16 else rows).numpy())
    return np.asarray(rows)


def _sparse_fault(rows: Tensor) -> str:
    """Returns what is wrong with a tensor that is not strided, such as a sparse one, or ""."""
    if rows.layout == torch.strided:
        return ""
    return f"it is a tensor of layout {rows.layout}; pass x.to_dense()"
