"""Rows that someone gives a model in memory, brought to what a reader of shards would give it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from heron.pipeline.config.errors import InputError
from heron.pipeline.data.decoders import Decoder
from heron.pipeline.data.graphs import GraphDecoder
from heron.pipeline.data.pictures import PictureDecoder
from heron.pipeline.data.texts import TextDecoder
from heron.shards.errors import HeronError, some
from heron.shards.graph import graph_fault, tidy
from heron.shards.manifest import View

# An array or a tensor [rows, ...]; or a row each: an array, and of a picture also the bytes of a
# JPEG or PNG; or a text each; or a graph each: the labels of its nodes, and its edges [edges, 2].
GivenRows = ArrayLike | Tensor | Sequence[ArrayLike | Tensor | bytes | str]
REAL = "fiu"  # kinds of numpy's dtypes


class GivenView:
    """Rows of one stored view; nothing is copied before `read` asks for it."""

    def __init__(self, view: View, decoder: Decoder | None, rows: GivenRows) -> None:
        """Looks at shape and type; `decoder` is that of pictures, of texts or of graphs.

        Raises:
            InputError: they are not those of the view.
        """
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
            if wrong := [row for row in self.rows if not isinstance(row, str)]:
                raise self._refused(f"holds {type(wrong[0]).__name__}")
            return
        if not listed or decoder is None:
            self.rows = self._array(rows)
        if not isinstance(self.rows, list | tuple):
            self._refuse_array(self.rows)

    def __len__(self) -> int:
        """Returns how many rows there are."""
        return len(self.rows)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Returns some rows: float32 [rows, width], uint8 [rows, height, width, channels], or ids.

        Raises:
            InputError: a number is not finite, or a picture cannot be read or is of another size.
        """
        part = self.rows[start:stop]
        if self.decoder is not None:
            out = np.empty((len(part), *self.decoder.shape), self.decoder.dtype)
            for number, row in enumerate(part):
                try:
                    _decode(self.decoder, row, out[number])
                except (ValueError, TypeError, HeronError) as fault:
                    raise self._refused(f"row {start + number} {fault}") from None
            return out
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused
            vectors = _numpy(part).astype(np.float32)
        if len(bad := np.argwhere(~np.isfinite(vectors))):
            row, column = bad[0].tolist()
            raise InputError(
                f"view '{self.view.name}': {len(np.unique(bad[:, 0])):,} rows are not finite in "
                f"float32, the first row {start + row} in column {column}; expected finite "
                "numbers; mend these rows or leave them out"
            )
        return vectors

    def _array(self, rows: GivenRows) -> Any:
        """Returns rows as an array or a tensor."""
        if isinstance(rows, Tensor) and (fault := _sparse_fault(rows)):
            raise self._refused(fault)
        if isinstance(rows, Tensor | np.ndarray):
            return rows
        try:
            if isinstance(rows, list | tuple) and any(isinstance(row, Tensor) for row in rows):
                return np.stack([_numpy(row) for row in rows])
            return np.asarray(rows)
        except ValueError as error:  # rows of several lengths
            raise self._refused(f"is no array ({error})") from None

    def _refuse_array(self, rows: Any) -> None:
        """Raises an InputError where an array is not what the view holds."""
        dtype = str(rows.dtype).removeprefix("torch.")
        found = f"is {dtype} {list(rows.shape)}"
        if isinstance(self.decoder, PictureDecoder):
            sides = [self.view.shape, self.decoder.shape]
            fits = rows.shape[1:] in sides or (self.decoder.varying and rows.ndim == 4)
            if dtype != "uint8" or not fits or rows.shape[-1] != self.view.shape[2]:
                raise self._refused(found)
            return
        if isinstance(rows, Tensor):
            numbers = not (rows.is_complex() or rows.dtype == torch.bool)
        else:
            numbers = rows.dtype.kind in REAL
        if not numbers or rows.ndim != 2 or rows.shape[1] != self.view.shape[0]:
            raise self._refused(found)

    def _refused(self, found: str) -> InputError:
        expected = {
            TextDecoder: "a list of texts, a row each; it makes tokens of them itself",
            GraphDecoder: "a list of graphs, each a pair: whole numbers [nodes], labels as those "
            "of the training data, and [edges, 2], pairs of nodes from 0",
            PictureDecoder: f"uint8 [rows, {self.view.extent}] with channels last and values 0 to "
            "255, as in the shards that the model was trained on, or a list of pictures; it scales "
            "and resizes them itself",
            type(None): f"numbers [rows, {self.view.shape[0]}], raw as in the shards that the "
            "model was trained on; it standardises them itself",
        }[type(self.decoder)]
        return InputError(f"view '{self.view.name}' {found}; expected {expected}")


def _decode(decoder: Decoder, row: Any, out: NDArray[Any]) -> None:
    """Writes a text, a graph or a picture to `out`."""
    if isinstance(decoder, TextDecoder):
        decoder.decode(row.encode(), out)
    elif isinstance(decoder, GraphDecoder):
        _write_graph(decoder, row, out)
    elif isinstance(decoder, PictureDecoder):
        if isinstance(row, bytes):
            if decoder.stored[2] != 3:
                raise ValueError(f"is bytes, which decode to 3 channels; found {row[:8]!r}")
            decoder.decode(row, out)
            return
        picture = _numpy(row)
        if picture.dtype != np.uint8:
            raise ValueError(f"is {picture.dtype} {list(picture.shape)}")
        out[:] = decoder.fit(picture)


def _write_graph(decoder: GraphDecoder, graph: Any, out: NDArray[np.int32]) -> None:
    """Writes a graph, as bytes or as its labels and edges, to `out`."""
    if isinstance(graph, bytes):
        return decoder.decode(graph, out)
    labels, edges = (_numpy(part) for part in graph)
    pairs = edges.reshape(-1, 2) if edges.size == 0 else edges
    if not (labels.ndim == 1 and pairs.ndim == 2 and pairs.shape[1] == 2):
        raise ValueError(f"is labels {list(labels.shape)} and edges {list(edges.shape)}")
    if any(part.size and part.dtype.kind not in "iu" for part in (labels, pairs)):
        raise ValueError(f"is labels {labels.dtype} and edges {edges.dtype}")
    if max(int(np.abs(part).max(initial=0)) for part in (labels, pairs)) >= 2**31:
        raise ValueError("has a number of more than 31 bits")
    tidied = tidy(pairs.astype(np.int64))
    if fault := graph_fault(labels.astype(np.int32), tidied, decoder.stored):
        raise ValueError(fault)
    decoder.write(labels.astype(np.int32), tidied, out)


def refuse_names(given: Mapping[str, Any], needed: Sequence[str], known: Sequence[str]) -> None:
    """Raises an InputError where views are missing, or are none of the model's."""
    unknown = [name for name in given if name not in known]
    missing = [name for name in needed if name not in given]
    if unknown or missing:
        what = [f"no {some(missing)}"] if missing else []
        what += [f"{some(unknown)}, which the model does not know"] if unknown else []
        raise InputError(
            f"views {some(list(given)) or '(none)'} are given: {' and '.join(what)}; expected rows "
            f"of each of {', '.join(needed)}, by these names of the stored views"
        )


def _numpy(rows: Any) -> NDArray[Any]:
    """Returns an array of rows, or of a tensor on any device and of any type."""
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu()
        if fault := _sparse_fault(rows):
            raise ValueError(fault)
        return np.asarray((rows.float() if rows.dtype == torch.bfloat16 else rows).numpy())
    return np.asarray(rows)


def _sparse_fault(rows: Tensor) -> str:
    """Returns what is wrong with a sparse tensor, or ""."""
    if rows.layout == torch.strided:
        return ""
    return f"is a sparse tensor ({rows.layout}), which has to be dense: give it as x.to_dense()"
