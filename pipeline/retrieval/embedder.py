"""Parts of an embedding: computed by a process, written while the next is computed."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.config.experiment import Config
from heron.pipeline.data.batches import VIEW, array_specs, batches
from heron.pipeline.data.buffers import ArraySpec, Buffer
from heron.pipeline.data.plan import Rows
from heron.pipeline.data.workers import readers
from heron.pipeline.distributed.collectives import rank, world_size
from heron.pipeline.retrieval.embeddings import FORMAT, Layer, LayerRecord, Part, Role, part_name
from heron.pipeline.retrieval.layers import EmbeddingModel
from heron.shards.artefact import Artefact, Count, FileSum
from heron.shards.atomic import atomic_write
from heron.shards.terminal import Bar


@dataclass(frozen=True)
class Choice:
    """What of a data set to embed, and how."""

    split: str | None = None  # of the data set; None: all
    role: Role | None = None  # of the rows by the run's protocol; None: all rows
    layers: Sequence[Layer] | None = None  # to write; None: those that the model has
    dtype: Literal["float32", "float16"] = "float32"  # of the files
    part_rows: int = 65_536  # rows of a file; a crash costs a process two of them at most


class PartManifest(Artefact):
    """A part as it was written, and the rows of it that could not be read."""

    what: ClassVar[str] = "the manifest of a part"
    error: ClassVar[type[RetrievalError]] = RetrievalError
    again: ClassVar[str] = "embed it again"
    versions: ClassVar[tuple[int, ...]] = (FORMAT,)

    format: Literal[2]
    part: Part
    lost: dict[Count, str]


class _PartBatches:
    """The batches of the parts that a process embeds: what the reading processes are given."""

    def __init__(self, model: EmbeddingModel, work: list[Rows], size: int) -> None:
        self.reader, self.names, self.work, self.size = model.reader, model.stored, work, size
        self.viewed = model.viewed

    def specs(self) -> dict[str, ArraySpec]:
        """Returns the shape and type of every array of a batch."""
        partial = len(self.viewed) if self.reader.partial else 0
        return array_specs(self.reader, self.names, self.size, partial=partial)

    def load(self, t: int, buffer: Buffer) -> tuple[list[int], dict[int, str]]:
        """Reads batch t; a short one is filled up, so that all are of one size."""
        rows = np.resize(self.work[t], self.size)
        self.reader.fill({name: buffer[VIEW + name] for name in self.names}, rows)
        buffer["indices"][:], buffer["rng_keys"][:] = rows, 0
        if self.reader.partial:
            buffer["present"][:] = self.reader.present(rows, self.viewed)
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
        self.mine = range(rank(), len(self.parts), world_size())

    def run_all(self, progress: bool) -> None:
        """Embeds this process's parts that are not there, under a bar."""
        missing = [number for number in self.mine if not self._finished(number)]
        total = sum(len(self.parts[number]) for number in self.mine)
        left = sum(len(self.parts[number]) for number in missing)
        hidden = rank() > 0 or not progress
        with Bar(total, "row", start=total - left, name=self.out.name, hidden=hidden) as bar:
            for count in self.run(missing):
                bar.update(count)

    def _manifest(self, number: int) -> Path:
        """The manifest of a part; it is written last."""
        return self.out / f"parts/{number:05d}.json"

    def _finished(self, number: int) -> bool:
        """Returns whether a part is there, as it was written."""
        try:
            found = self.record(number)
        except RetrievalError:
            return False
        files, rows = found.part.files, found.part.count + len(found.lost)
        if files.keys() != self.layers.keys() or rows != len(self.parts[number]):
            return False
        faults = (file.fault(self.out / part_name(n, number)) for n, file in files.items())
        return not any(faults)

    def record(self, number: int) -> PartManifest:
        """Returns what was written of a part."""
        return PartManifest.read(self._manifest(number))

    def run(self, missing: Sequence[int]) -> Iterator[int]:
        """Embeds the parts that are missing; yields the rows of every batch that is done."""
        size = self.config.evaluate.batch
        work = [
            self.parts[number][first : first + size]
            for number in missing
            for first in range(0, len(self.parts[number]), size)
        ]
        source = _PartBatches(self.model, work, size)
        device = self.model.views.device
        pin = device.type == "cuda"
        read = batches(source, 0, len(work), readers(self.config.data), pin)
        writing: Future[None] | None = None
        with ThreadPoolExecutor(1) as writer, closing(read):
            for number in missing:
                rows = self.parts[number]
                arrays = {
                    name: np.empty((len(rows), layer.dim), layer.dtype)
                    for name, layer in self.layers.items()
                }
                lost: dict[int, str] = {}
                for first in range(0, len(rows), size):
                    batch = next(read).to(device)
                    count = min(size, len(rows) - first)
                    for name, vectors in self.model.forward(batch, self.layers).items():
                        arrays[name][first : first + count] = vectors[:count].cpu().numpy()
                    lost |= batch.lost
                    yield count
                if writing is not None:
                    writing.result()  # at most one part waits to be written
                writing = writer.submit(self._write, number, rows, arrays, lost)
            if writing is not None:
                writing.result()

    def _write(
        self, number: int, rows: Rows, arrays: dict[Layer, NDArray[Any]], lost: dict[int, str]
    ) -> None:
        """Writes a part: its rows that could be read, all of them finite."""
        kept = ~np.isin(rows, np.array(list(lost), np.int64))
        files = dict[Layer, FileSum]()
        for name, array in arrays.items():
            vectors = array[kept] if lost else array
            if len(bad := np.flatnonzero(~np.isfinite(vectors).all(1))):
                keys, half = (
                    self.reader.sample_keys(rows[kept][bad[:5]]),
                    vectors.dtype == np.float16,
                )
                remedy = "embed in float32" if half else "look at the samples and the run's loss"
                raise RetrievalError(
                    f"layer '{name}' of {len(bad)} samples is not finite in {vectors.dtype}, the "
                    f"first {', '.join(keys)}; expected finite numbers; {remedy}"
                )
            path = self.out / part_name(name, number)
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path) as stream:
                np.save(stream, vectors, allow_pickle=False)
            files[name] = FileSum.of(path)
        self._manifest(number).parent.mkdir(exist_ok=True)
        part = Part(count=int(kept.sum()), files=files)
        PartManifest(format=FORMAT, part=part, lost=lost).write(self._manifest(number))
