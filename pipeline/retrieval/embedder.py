"""Parts of an embedding: computed by a process, written while the next is computed."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.config.experiment import Config
from heron.pipeline.data.batches import VIEW, batches
from heron.pipeline.data.plan import Rows
from heron.pipeline.data.reader import Reader
from heron.pipeline.data.slots import Form, Room
from heron.pipeline.data.views import Views
from heron.pipeline.distributed.collectives import rank, world_size
from heron.pipeline.models.heterogeneous import Features, Heterogeneous
from heron.pipeline.retrieval.embeddings import Layer, LayerRecord, Part, part_name
from heron.shards.atomic import atomic_write, save_json
from heron.shards.progress import progress_bar
from heron.shards.sources.base import sha256

PART_ROWS = 65_536


@dataclass(frozen=True)
class Choice:
    """What of a data set to embed, and how.

    Attributes:
        split: a split of the data set; None: all.
        role: `labelled`, `unlabelled` or `test`, as the run's protocol has them; None: all rows.
        layers: to write; None: those that the model has.
        dtype: of the files.
        part_rows: rows of a file; a crash costs a process two of them at most.
    """

    split: str | None = None
    role: str | None = None
    layers: Sequence[Layer] | None = None
    dtype: str = "float32"
    part_rows: int = PART_ROWS


def layer_vectors(found: Features, layer: Layer) -> Tensor:
    """A layer as it is written, [rows, dim]: heads of each view are unit vectors, side by side."""
    if layer == "hidden":
        return found["hidden"][0]
    heads = found["projections" if layer == "projection" else "weights"]
    return torch.cat([normalize(head, dim=1) for head in heads], 1)


class _Work:
    """Batches of the parts that a process embeds: what the reading processes are given."""

    def __init__(self, reader: Reader, names: list[str], work: list[Rows], size: int) -> None:
        self.reader, self.names, self.work, self.size = reader, names, work, size

    def forms(self) -> dict[str, Form]:
        """Shape and type of every array of a batch."""
        shapes = {name: self.reader.shape(name) for name in self.names}
        return {
            VIEW + name: ((self.size, *shape), self.reader.view(name).dtype)
            for name, shape in shapes.items()
        } | {
            "targets": ((0, 0), "float32"),
            "rows": ((self.size,), "int64"),
            "keys": ((self.size,), "int64"),
            "paths": ((0, 0), "int64"),
        }

    def load(self, t: int, room: Room) -> tuple[list[int], dict[int, str]]:
        """Read batch t; a short one is filled up, so that all are of one size."""
        rows = np.resize(self.work[t], self.size)
        self.reader.fill({name: room[VIEW + name] for name in self.names}, rows)
        room["rows"][:], room["keys"][:] = rows, 0
        lost = {int(row): self.reader.lost[int(row)] for row in rows if row in self.reader.lost}
        return [self.size], lost


class Embedder:
    """Embeds parts and writes them, the last part while the next is computed.

    Attributes:
        mine: numbers of the parts of this process.
    """

    def __init__(
        self,
        model: Heterogeneous,
        views: Views,
        reader: Reader,
        config: Config,
        rows: Rows,
        out: Path,
        choice: Choice,
        layers: dict[Layer, LayerRecord],
    ) -> None:
        """Embed what `views` make of `rows` of `reader`; write `layers` to `out`."""
        self.model, self.views, self.reader, self.config = model, views, reader, config
        self.rows, self.out, self.choice, self.layers = rows, out, choice, layers
        starts = range(0, len(rows), choice.part_rows)
        self.parts = [rows[start : start + choice.part_rows] for start in starts]
        self.mine = range(rank(), len(self.parts), world_size())

    def run_all(self, progress: bool) -> None:
        """Embed this process's parts that are not there, under a bar."""
        missing = [n for n in self.mine if not self.finished(n, len(self.parts[n]))]
        total = sum(len(self.parts[number]) for number in self.mine)
        left = sum(len(self.parts[number]) for number in missing)
        hidden = rank() > 0 or not progress
        settings: dict[str, Any] = {"unit": "row", "desc": self.out.name, "disable": hidden}
        with progress_bar(total=total, initial=total - left, **settings) as bar:
            for count in self.run(missing):
                bar.update(count)

    def finished(self, number: int, rows: int) -> bool:
        """Whether a part is there: its list of lost rows is written last."""
        note = self.out / f"lost/{number:05d}.json"
        if not note.exists():
            return False
        left = rows - len(json.loads(note.read_text()))
        for name, layer in self.layers.items():
            try:
                found = np.load(self.out / part_name(name, number), "r", allow_pickle=False)
            except (OSError, ValueError):
                return False
            if found.shape != (left, layer.dim) or found.dtype != layer.dtype:
                return False
        return True

    def record(self, number: int) -> tuple[Part, dict[int, str]]:
        """What the manifest says of a part, and its lost rows."""
        paths = {name: self.out / part_name(name, number) for name in self.layers}
        count = len(np.load(next(iter(paths.values())), "r", allow_pickle=False))
        lost = json.loads((self.out / f"lost/{number:05d}.json").read_text())
        part = Part(count=count, sha256={name: sha256(path) for name, path in paths.items()})
        return part, {int(row): why for row, why in lost.items()}

    def run(self, missing: Sequence[int]) -> Iterator[int]:
        """Embed the parts that are missing; gives the rows of every batch that is done."""
        size, parts = self.config.evaluate.batch, self.parts
        cuts = [
            (number, first) for number in missing for first in range(0, len(parts[number]), size)
        ]
        work = [parts[number][first : first + size] for number, first in cuts]
        names = list(dict.fromkeys(v.stored for v in self.views.views[: self.model.classified]))
        source = _Work(self.reader, names, work, size)
        pin = self.views.device.type == "cuda"
        read = batches(source, 0, len(work), self.config.data.workers, pin)
        with ThreadPoolExecutor(1) as writer, closing(read):
            writing: Future[None] | None = None
            for number in missing:
                rows = parts[number]
                arrays = {
                    name: np.empty((len(rows), layer.dim), layer.dtype)
                    for name, layer in self.layers.items()
                }
                lost: dict[int, str] = {}
                for first in range(0, len(rows), size):
                    batch = next(read).to(self.views.device)
                    count = min(size, len(rows) - first)
                    for name, vectors in self._forward(batch).items():
                        arrays[name][first : first + count] = vectors[:count].cpu().numpy()
                    lost |= batch.lost
                    yield count
                if writing is not None:
                    writing.result()  # at most one part waits to be written
                writing = writer.submit(self._write, number, rows, arrays, lost)
            if writing is not None:
                writing.result()

    @torch.inference_mode()
    def _forward(self, batch: Any) -> dict[Layer, Tensor]:
        inputs = self.views(batch, train=False, first=self.model.classified)
        found: Features = self.model(inputs, batch.keys, batch.parts)
        return {name: layer_vectors(found, name) for name in self.layers}

    def _write(
        self, number: int, rows: Rows, arrays: dict[Layer, NDArray[Any]], lost: dict[int, str]
    ) -> None:
        """Write a part: its rows that could be read, all of them finite."""
        kept = ~np.isin(rows, np.array(list(lost), np.int64))
        for name, array in arrays.items():
            vectors = array[kept] if lost else array
            if len(bad := np.flatnonzero(~np.isfinite(vectors).all(1))):
                keys = self.reader.keys(rows[kept][bad[:5]])
                raise RetrievalError(
                    f"layer '{name}' of {len(bad)} samples is not finite in {self.choice.dtype}, "
                    f"the first {', '.join(keys)}; expected finite numbers; "
                    + (
                        "embed in float32"
                        if self.choice.dtype == "float16"
                        else "look at the samples and at the run's loss"
                    )
                )
            path = self.out / part_name(name, number)
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path) as stream:
                np.save(stream, vectors, allow_pickle=False)
        note = self.out / f"lost/{number:05d}.json"
        note.parent.mkdir(exist_ok=True)
        save_json(note, lost)
