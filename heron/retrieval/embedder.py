"""Embeds in parts: each process writes one part while it computes the next."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from heron.config.errors import RetrievalError
from heron.config.experiment import Config
from heron.data.batches import VIEW_PREFIX, ArraySpec, Buffer, array_specs, batches, worker_count
from heron.data.rows import Rows
from heron.distributed.collectives import rank, world_size
from heron.retrieval.embeddings import FORMAT, Layer, LayerRecord, Part, Role, part_name
from heron.retrieval.layers import EmbeddingModel
from heron.shards.artefact import Artefact, Count, FileSum
from heron.shards.atomic import atomic_write
from heron.shards.terminal import Bar


@dataclass(frozen=True)
class Choice:
    """What to embed of a data set, and how."""

    split: str | None = None  # of the data set; None: all
    role: Role | None = None  # of the rows in the run's protocol; None: all rows
    layers: Sequence[Layer] | None = None  # to write; None: all that the model has
    dtype: Literal["float32", "float16"] = "float32"  # of the files
    part_rows: int = 65_536  # rows per file; a crash costs each process two files at most


class PartManifest(Artefact):
    """A part as it was written, and its rows that could not be read."""

    description: ClassVar[str] = "the manifest of a part"
    error: ClassVar[type[RetrievalError]] = RetrievalError
    remedy: ClassVar[str] = "embed it again"
    versions: ClassVar[tuple[int, ...]] = (FORMAT,)

    format: Literal[2]
    part: Part
    lost: dict[Count, str]


class _PartBatches:
    """The batches of the parts that a process embeds, as its data workers read them."""

    def __init__(self, model: EmbeddingModel, batch_rows: list[Rows], size: int) -> None:
        self.reader, self.names, self.size = model.reader, model.stored, size
        self.batch_rows, self.stored_by_view = batch_rows, model.stored_by_view

    def specs(self) -> dict[str, ArraySpec]:
        """Returns the shape and type of every array of a batch."""
        partial = len(self.stored_by_view) if self.reader.may_lack_views else 0
        decoders = {name: self.reader.decoders[name] for name in self.names}
        return array_specs(decoders, self.size, n_model_views=partial)

    def load(self, t: int, buffer: Buffer) -> tuple[list[int], dict[int, str]]:
        """Reads batch t; a short one repeats its rows, so that all have the same size."""
        rows = np.resize(self.batch_rows[t], self.size)
        self.reader.fill({name: buffer[VIEW_PREFIX + name] for name in self.names}, rows)
        buffer["indices"][:], buffer["rng_keys"][:] = rows, 0
        if self.reader.may_lack_views:
            buffer["present"][:] = self.reader.present(rows, self.stored_by_view)
        lost = {int(row): self.reader.lost[int(row)] for row in rows if row in self.reader.lost}
        return [self.size], lost


class Embedder:
    """Embeds parts of `rows` and writes their `layers` to `out`."""

    def __init__(
        self,
        model: EmbeddingModel,
        config: Config,
        rows: Rows,
        out: Path,
        layers: dict[Layer, LayerRecord],
        part_rows: int,
    ) -> None:
        """Takes this process's share of the parts."""
        self.model, self.reader, self.config = model, model.reader, config
        self.rows, self.out, self.layers = rows, out, layers
        # The rows of each part, of all processes, and the numbers of this process's parts.
        self.parts = [rows[at : at + part_rows] for at in range(0, len(rows), part_rows)]
        self.part_numbers = range(rank(), len(self.parts), world_size())

    def run_all(self, progress: bool) -> None:
        """Embeds this process's missing parts, and shows a progress bar."""
        missing = [number for number in self.part_numbers if not self._finished(number)]
        total = sum(len(self.parts[number]) for number in self.part_numbers)
        remaining = sum(len(self.parts[number]) for number in missing)
        hidden = rank() > 0 or not progress
        with Bar(total, "row", start=total - remaining, name=self.out.name, hidden=hidden) as bar:
            for count in self.run(missing):
                bar.update(count)

    def _manifest_path(self, number: int) -> Path:
        """Returns the path of a part's manifest, which is written last."""
        return self.out / f"parts/{number:05d}.json"

    def _finished(self, number: int) -> bool:
        """Returns whether a part is complete and undamaged."""
        try:
            manifest = self.record(number)
        except RetrievalError:
            return False
        files, rows = manifest.part.files, manifest.part.count + len(manifest.lost)
        if files.keys() != self.layers.keys() or rows != len(self.parts[number]):
            return False
        faults = (file.fault(self.out / part_name(n, number)) for n, file in files.items())
        return not any(faults)

    def record(self, number: int) -> PartManifest:
        """Reads the manifest of a part."""
        return PartManifest.read(self._manifest_path(number))

    def run(self, missing: Sequence[int]) -> Iterator[int]:
        """Embeds the missing parts; yields the number of rows of each batch when it is done."""
        size = self.config.evaluate.batch
        batch_rows = [
            self.parts[number][first : first + size]
            for number in missing
            for first in range(0, len(self.parts[number]), size)
        ]
        source = _PartBatches(self.model, batch_rows, size)
        device = self.model.views.device
        pin = device.type == "cuda"
        batch_iterator = batches(source, 0, len(batch_rows), worker_count(self.config.data), pin)
        writing: Future[None] | None = None
        with ThreadPoolExecutor(1) as writer, closing(batch_iterator):
            for number in missing:
                rows = self.parts[number]
                arrays = {
                    name: np.empty((len(rows), layer.dim), layer.dtype)
                    for name, layer in self.layers.items()
                }
                lost: dict[int, str] = {}
                for first in range(0, len(rows), size):
                    batch = next(batch_iterator).to(device)
                    count = min(size, len(rows) - first)
                    for name, vectors in self.model.forward(batch, self.layers).items():
                        arrays[name][first : first + count] = vectors[:count].cpu().numpy()
                    lost |= batch.lost
                    yield count
                if writing is not None:
                    writing.result()  # at most one part is being written
                writing = writer.submit(self._write, number, rows, arrays, lost)
            if writing is not None:
                writing.result()

    def _write(
        self, number: int, rows: Rows, arrays: dict[Layer, NDArray[Any]], lost: dict[int, str]
    ) -> None:
        """Writes the readable rows of a part; refuses embeddings that are not finite."""
        readable = ~np.isin(rows, np.array(list(lost), np.int64))
        files = dict[Layer, FileSum]()
        for name, array in arrays.items():
            vectors = array[readable] if lost else array
            if len(bad := np.flatnonzero(~np.isfinite(vectors).all(1))):
                keys = self.reader.sample_keys(rows[readable][bad[:5]])
                is_half = vectors.dtype == np.float16
                remedy = "embed in float32" if is_half else "look at the samples and the run's loss"
                raise RetrievalError(
                    f"layer '{name}' of {len(bad)} samples is not finite in {vectors.dtype}, the "
                    f"first {', '.join(keys)}; expected finite numbers; {remedy}"
                )
            path = self.out / part_name(name, number)
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path) as stream:
                np.save(stream, vectors, allow_pickle=False)
            files[name] = FileSum.of(path)
        self._manifest_path(number).parent.mkdir(exist_ok=True)
        part = Part(count=int(readable.sum()), files=files)
        PartManifest(format=FORMAT, part=part, lost=lost).write(self._manifest_path(number))
