"""Embeds a data set with a checkpoint: every row once, on any number of processes, resumably.

accelerate launch --num_processes 8 -m heron embed runs/celeba --out embeddings/celeba
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from heron.base.artefact import MANIFEST, FileSum, parse_json
from heron.base.atomic import atomic_write, locked, remove_partial_files, save_json
from heron.base.errors import RetrievalError, short_repr
from heron.base.terminal import Bar
from heron.data.batches import (
    VIEW_PREFIX,
    ArraySpec,
    Buffer,
    array_specs,
    batches,
    on_device,
    worker_count,
)
from heron.data.rows import Rows
from heron.distributed.agreement import differences
from heron.distributed.collectives import gather_objects, on_all, rank, world_size
from heron.experiment.config import Config
from heron.retrieval.embedding_model import (
    EmbeddingModel,
    chosen_rows,
    no_layer,
    open_run,
    read_samples,
)
from heron.retrieval.embeddings import (
    FORMAT,
    LAYERS,
    PLAN,
    Embeddings,
    EmbeddingsManifest,
    Layer,
    LayerRecord,
    Part,
    PartManifest,
    Role,
    part_name,
    record_name,
)
from heron.retrieval.locations import Output
from heron.shards.remote import Missing
from heron.training.pretrained import weights_sha256


@dataclass(frozen=True)
class Choice:
    """What to embed of a data set, and how."""

    split: str | None = None  # of the data set; None: all
    role: Role | None = None  # of the rows in the run's protocol; None: all rows
    layers: Sequence[Layer] | None = None  # to write; None: all that the model has
    dtype: Literal["float32", "float16"] = "float32"  # of the files
    part_rows: int = 65_536  # rows per file; a crash costs each process two files at most


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
        out: Output,
        layers: dict[Layer, LayerRecord],
        part_rows: int,
    ) -> None:
        """Takes this process's share of the parts."""
        self.model, self.reader, self.config = model, model.reader, config
        self.rows, self.out, self.layers = rows, out, layers
        # The rows of each part, of all processes, and the numbers of this process's parts.
        self.parts = [rows[at : at + part_rows] for at in range(0, len(rows), part_rows)]
        self.part_numbers = range(rank(), len(self.parts), world_size())

    def run_missing(self, run: Callable[[list[int]], Iterator[int]], progress: bool) -> None:
        """Has `run` embed this process's missing parts; it yields how many rows are done."""
        missing = [number for number in self.part_numbers if not self._finished(number)]
        total = sum(len(self.parts[number]) for number in self.part_numbers)
        start = total - sum(len(self.parts[number]) for number in missing)
        with Bar(
            total, "row", start=start, name=Path(str(self.out)).name, hidden=not progress
        ) as bar:
            for count in run(missing):
                bar.update(count)

    def _finished(self, number: int) -> bool:
        """Returns whether a part is complete and undamaged."""
        if not self.out.has(record_name(number)):
            return False
        try:
            manifest = self.record(number)
        except RetrievalError:
            return False
        files, rows = manifest.part.files, manifest.part.count + len(manifest.lost)
        if files.keys() != self.layers.keys() or rows != len(self.parts[number]):
            return False
        return self.out.has_files({part_name(name, number): sum for name, sum in files.items()})

    def record(self, number: int) -> PartManifest:
        """Reads the manifest of a part, which is written last; RetrievalError without one."""
        name = record_name(number)
        try:
            data = self.out.read(name)
        except Missing as fault:
            raise RetrievalError(str(fault)) from None
        return PartManifest.parse(data, f"{self.out}/{name}")

    def run(self, missing: Sequence[int]) -> Iterator[int]:
        """Embeds the missing parts; yields the number of rows of each batch when it is done."""
        size = self.config.evaluate.batch
        batch_rows = [
            self.parts[number][first : first + size]
            for number in missing
            for first in range(0, len(self.parts[number]), size)
        ]
        source = _PartBatches(self.model, batch_rows, size)
        loaded = batches(source, 0, len(batch_rows), worker_count(self.config.data))
        batch_iterator = on_device(loaded, self.model.views.device)
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
                    batch = next(batch_iterator)
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
        files, checked = dict[Layer, FileSum](), dict[Layer, NDArray[Any]]()
        for name, array in arrays.items():
            vectors = array[readable] if lost else array
            if len(bad := np.flatnonzero(~np.isfinite(vectors).all(1))):
                keys = self.reader.sample_keys(rows[readable][bad[:5]])
                is_half = vectors.dtype == np.float16
                remedy = "embed in float32" if is_half else "check the samples and the run's loss"
                raise RetrievalError(
                    f"layer '{name}' of {len(bad)} samples has NaN or infinite values in "
                    f"{vectors.dtype}, first in {', '.join(keys)}; {remedy}"
                )
            checked[name] = vectors
        with self.out.writing(last=record_name(number)) as folder:
            for name, vectors in checked.items():
                path = folder / part_name(name, number)
                path.parent.mkdir(exist_ok=True)
                with atomic_write(path, several=True) as stream:
                    np.save(stream, vectors, allow_pickle=False)
                files[name] = FileSum.of(path)
            record = folder / record_name(number)
            record.parent.mkdir(exist_ok=True)
            part = Part(count=int(readable.sum()), files=files)
            PartManifest(format=FORMAT, part=part, lost=lost).write(record, True)


def embed(
    run: str | Path,  # folder of a run or of a checkpoint
    out: str | Path,  # folder or URL to write; keeps what an earlier identical call has finished
    choice: Choice | None = None,
    overrides: Sequence[str] = (),  # of the run's configuration, such as `data.path=data/other`
    progress: bool = True,
    overwrite: bool = False,  # move what `out` holds aside, and begin anew
    trust_code: bool = False,  # import the classes that the run names: see `load_saved`
) -> Embeddings:
    """Embeds a data set; every process of a launch must call it.

    The run need not be trusted: none of its code is run without `trust_code`; no data set is built,
    nor any fetched unless `overrides` name it.

    Raises a RetrievalError if `out` holds other embeddings, the data does not fit the model, or
    embeddings are not finite; a CheckpointError, ConfigError or ShardError if the model, an
    override or split, or the data set is missing or damaged.
    """
    model, config, checkpoint = open_run(run, overrides, trust_code)
    weights = weights_sha256(checkpoint)
    return embed_by(model, weights, str(run), config, out, choice or Choice(), progress, overwrite)


def embed_by(
    model: EmbeddingModel,
    weights: str,  # their sha256
    run: str,  # the model's name in manifests
    config: Config,
    out: str | Path,
    choice: Choice,
    progress: bool = True,
    overwrite: bool = False,
) -> Embeddings:
    """Embeds a model's data set: see `embed`."""
    embedder, plan = on_all(lambda: open_embedder(model, weights, config, out, choice))
    for other_rank, other_plan in enumerate(gather_objects(plan)):
        if differ := differences(plan, other_plan):
            raise RetrievalError(
                f"rank {other_rank} would embed something different: {'; '.join(differ)}; if the "
                "run is still training, pass the folder of a checkpoint"
            )
    return write(embedder, plan, run, embedder.run, progress, overwrite)


def write(
    embedder: Embedder,
    plan: dict[str, Any],
    run: str,
    embed_parts: Callable[[list[int]], Iterator[int]],  # see `Embedder.run_missing`
    progress: bool,
    overwrite: bool,
) -> Embeddings:
    """Begins or goes on, has missing parts embedded, and ends; every process must call it."""
    with ExitStack() as held:

        def start() -> None:
            held.enter_context(locked(embedder.out, embedder.out.lock))
            start_folder(embedder, plan, overwrite)

        on_all(lambda: start() if rank() == 0 else None)
        on_all(lambda: embedder.run_missing(embed_parts, progress and rank() == 0))
        parts = on_all(lambda: {n: embedder.record(n) for n in embedder.part_numbers})
        records = dict(item for own in gather_objects(parts) for item in own.items())
        on_all(lambda: finish(embedder, plan, run, records) if rank() == 0 else None)
    return Embeddings.open(embedder.out.place, verify=False)  # it has just been written


def open_embedder(
    model: EmbeddingModel, weights: str, config: Config, out: str | Path, choice: Choice
) -> tuple[Embedder, dict[str, Any]]:
    """Chooses rows and layers; the plan identifies this embedding, to resume it."""
    if choice.part_rows < 1:
        raise RetrievalError(f"part_rows must be at least 1, got {choice.part_rows}")
    rows = chosen_rows(model.reader, config, choice.split, choice.role)
    layers = _layers(model, choice)
    inputs = config.data.model_dump(mode="json", include={"views", "standardise", "draft"})
    inputs["canvas"] = config.data.decode_size  # the name in plans on disk
    plan = {
        "checkpoint": weights,
        "data_fingerprint": model.reader.manifest.fingerprint,
        "rows": len(rows),
        "rows_sha256": hashlib.sha256(rows.tobytes()).hexdigest(),
        "split": choice.split,
        "role": choice.role,
        "seen": inputs,
        "batch": config.evaluate.batch,
        "dtype": choice.dtype,
        "layers": list(layers),
        "part_rows": choice.part_rows,
        "precision": config.train.precision,
    }
    return Embedder(model, config, rows, Output(out), layers, choice.part_rows), plan


def _layers(model: EmbeddingModel, choice: Choice) -> dict[Layer, LayerRecord]:
    if choice.dtype not in ("float32", "float16"):
        raise RetrievalError(f"dtype must be float32 or float16, got '{choice.dtype}'")
    widths = model.widths
    for name in choice.layers or ():
        if name not in widths:
            raise RetrievalError(str(no_layer(name, widths)))
    return {
        name: LayerRecord(dim=widths[name], dtype=choice.dtype, views=model.model.classified)
        for name in LAYERS
        if name in (choice.layers or widths)
    }


def start_folder(embedder: Embedder, plan: dict[str, Any], overwrite: bool) -> None:
    """Makes the folder and saves the plan in it, or resumes a folder with the same plan.

    The caller has its lock: see `atomic.locked`. Raises a RetrievalError if the folder holds
    something else, or two rows have the same key.
    """
    out = embedder.out
    read_samples(embedder.reader, embedder.rows).refuse_duplicates()
    if not out.claim(overwrite, lambda names: PLAN in names):
        with out.writing(PLAN) as folder:
            save_json(folder / PLAN, plan)
        return
    try:
        if not isinstance(saved_plan := parse_json(out.read(PLAN)), dict):
            raise ValueError(f"it is {short_repr(saved_plan)}")
    except ValueError as error:
        raise RetrievalError(
            f"{out}/{PLAN} is not the plan of an unfinished embedding: {error}; choose another "
            f"--out, or {out.remedy}"
        ) from None
    if differ := differences(plan, saved_plan):
        raise RetrievalError(
            f"{out} has embeddings with other settings: {'; '.join(differ)}; choose another "
            f"--out, or {out.remedy}"
        )
    if out.folder is not None:
        remove_partial_files(out.folder, "*/.*.part")  # of processes that were killed


def finish(
    embedder: Embedder, plan: dict[str, Any], run: str, records: Mapping[int, PartManifest]
) -> None:
    """Writes the samples and then, last, the manifest; `records` are those of all parts.

    Nothing is written where a manifest of these parts is there, with the samples.
    """
    out = embedder.out
    if out.folder is not None:
        remove_partial_files(out.folder, "*/.*.part")  # of tasks that were done twice
    parts = [records[number].part for number in range(len(records))]
    lost = {row: why for part in records.values() for row, why in part.lost.items()}
    with suppress(Missing, RetrievalError):
        earlier = EmbeddingsManifest.parse(out.read(MANIFEST), f"{out}/{MANIFEST}")
        whole = out.folder is None or out.has_files(earlier.samples)  # it was put last
        if whole and (earlier.parts, earlier.lost) == (parts, lost):
            return
    rows = embedder.rows[~np.isin(embedder.rows, np.array(list(lost), np.int64))]
    with out.writing(last=MANIFEST) as folder:
        EmbeddingsManifest(
            format=FORMAT,
            run=run,
            checkpoint=plan["checkpoint"],
            data=embedder.config.data.path,
            data_fingerprint=plan["data_fingerprint"],
            precision=plan["precision"],
            rows=len(rows),
            views=embedder.model.view_records,
            missing=embedder.model.missing,
            layers=embedder.layers,
            parts=parts,
            samples=read_samples(embedder.reader, rows).save(folder),
            lost=lost,
        ).write(folder / MANIFEST)
