"""Retrieval beside bare FAISS and beside the bare forward pass; and a million vectors in a budget.

    python -m benchmarks.retrieval
    python -m benchmarks.retrieval --parts million --memory 800MB 300MB --json retrieval.json

Everything is measured in this run, on one thread; those that are compared take turns in one
process, in an order that turns round, and a figure is the median of the rounds' ratios. Vectors are
drawn: a mixture of 1,000 Gaussians, each of 16 dimensions within all, as embeddings of classes are.

- `build`: `build_index` up to the open index (training, adding, the file) beside FAISS on the same
  vectors in memory: normalise, train on the same sample, add, write. What only ours does, measuring
  recall and checksums, is a column of its own.
- `search`: the k nearest by `Index.search`, which checks, normalises and scores, beside FAISS's
  own search of the same index for queries that are normalised. Where the lists looked at hold fewer
  than k, FAISS leaves the query short and ours searches again; `short` is the share of such
  queries, and the last column the ratio over queries that FAISS answers in full.
- `embed`: `retrieval.embed` of drawn faces with the model of configs/faces.yaml and one
  reading process, after its first batch, beside the forward pass alone on the same batches, which
  lie in memory as the model takes them. Its start is that of the reading process, some seconds.
- `million`: vectors of 128 dimensions indexed by `auto` in a process of its own for each budget:
  its peak of memory above what it had before beside the bytes that `auto` predicted, recall beside
  the target, milliseconds a query in batches of 64.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from benchmarks.data import cores
from benchmarks.isolation import Outcome, alone
from benchmarks.scaling_steps import experiment
from benchmarks.table import Table
from benchmarks.vectors import draw, index_million, write_embeddings
from heron.pipeline.config.experiment import Config, dump_config
from heron.pipeline.data.batches import Batch
from heron.pipeline.data.dataset import build_data, open_reader
from heron.pipeline.data.plan import Rows
from heron.pipeline.data.reader import Reader
from heron.pipeline.data.views import Views
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.retrieval.build import build_index
from heron.pipeline.retrieval.embed import embed
from heron.pipeline.retrieval.embedder import Embedder
from heron.pipeline.retrieval.embeddings import (
    Embeddings,
)
from heron.pipeline.retrieval.index import Index, prepare_vectors
from heron.pipeline.retrieval.kinds import (
    CODED,
    KINDS,
    MAX_POINTS,
    Kind,
    Plan,
    format_bytes,
    parse_bytes,
)
from heron.shards.atomic import save_json

PARTS = ["build", "search", "embed", "million"]
BUILDING = "train", "assign", "add", "write", "read"  # steps that bare FAISS has too
LIMIT_S = 1200.0  # for a million
SMALL: dict[str, Any] = {
    "rows": 1500,
    "dim": 16,
    "million": 3000,
    "faces": 64,
    "rounds": 1,
    "seconds": 0.01,
}
SMALL |= {"batches": [4, 8], "size": 16, "channels": [4, 8], "memory": ["60MB"], "batch": 16}


def bare_build(vectors: NDArray[np.float32], plan: Plan, own: int, path: Path) -> float:
    """Seconds that FAISS takes for an index of the same plan, its file included.

    Args:
        vectors: [rows, dim], in memory.
        plan: of ours.
        own: vectors that are no part of the training sample.
        path: of the file.
    """
    begin = time.perf_counter()
    vectors = vectors.copy()
    faiss.normalize_L2(vectors)
    dim = vectors.shape[1]
    metric = faiss.METRIC_L2 if plan.kind in CODED else faiss.METRIC_INNER_PRODUCT
    index = faiss.index_factory(dim, plan.factory, metric)
    if plan.kind == "ivfpq":
        index.pq.cp.max_points_per_centroid = MAX_POINTS
    index.train(vectors[own : own + plan.training])
    index.add(vectors)
    faiss.write_index(index, str(path))
    return time.perf_counter() - begin


class Bench:
    """The parts."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.asked = folder, arguments
        self.indices: dict[Kind, Index] = {}

    def build(self) -> dict[str, Any]:
        asked = self.asked
        write_embeddings(self.folder / "vectors", asked.rows, asked.dim)
        embeddings = Embeddings.open(self.folder / "vectors")
        vectors = np.concatenate([block for _, block in embeddings.blocks("hidden")])
        head("kind", "ours s", "bare s", "ours / bare", "recall and checksums s")
        told: dict[str, Any] = {}
        for kind in KINDS:
            took = [
                self.turn(embeddings, vectors, kind, number)
                for number in range(asked.rounds if kind in ("flat", "ivf") else 1)
            ]
            ours, bare, more = (statistics.median(x) for x in zip(*took, strict=True))
            ratio = statistics.median(a / b for a, b, _ in took)
            told[kind] = {"ratio": ratio, "turns": took}
            cells = [f"{ours:.3f}", f"{bare:.3f}", f"{ratio:.3f}", f"{more:.3f}"]
            print(Table.row([kind, *cells]), flush=True)
        return told

    def turn(
        self, embeddings: Embeddings, vectors: NDArray[np.float32], kind: Kind, number: int
    ) -> tuple[float, float, float]:
        """Seconds of our build, of FAISS's, and of what only ours does."""

        def ours() -> None:
            out = self.folder / f"{kind}-{number}"
            self.indices[kind] = build_index(embeddings, out, kind=kind, progress=False)

        def bare() -> float:
            plan = self.indices[kind].manifest.plan  # of the round before
            return bare_build(vectors, plan, len(vectors) - plan.training, self.folder / "bare")

        before = bare() if number % 2 else 0.0
        ours()
        took = self.indices[kind].manifest.seconds
        mine = sum(took.get(step, 0.0) for step in BUILDING)
        return mine, before or bare(), sum(took.values()) - mine

    def search(self) -> dict[str, Any]:
        asked = self.asked
        queries = next(draw(2 * max(asked.batches), asked.dim, seed=1))
        head(
            *("kind", "setting", "recall@10", "batch", "ours ms", "bare ms", "ours / bare"),
            *("short", "ours / bare of full"),
        )
        told: dict[str, Any] = {}
        for kind, index in self.indices.items():
            measured = index.manifest.recall
            assert measured is not None
            full = (index.faiss.search(prepare_vectors(queries, True, str), 10)[1] >= 0).all(1)
            for batch in asked.batches:
                ratio, took = self.beside(index, queries[:batch])
                again, _ = self.beside(index, queries[full][:batch])
                short = 1 - float(full[:batch].mean())
                told[f"{kind}, {batch}"] = {"ratio": ratio, "full": again, "short": short, **took}
                setting = ", ".join(f"{k} {v}" for k, v in index.manifest.search.items())
                shown = [f"{1e3 * statistics.median(x):.3f}" for x in took.values()]
                cells = [kind, setting, f"{measured.value:.3f}", str(batch), *shown]
                print(Table.row([*cells, f"{ratio:.3f}", f"{short:.1%}", f"{again:.3f}"]))
        return told

    def beside(
        self, index: Index, queries: NDArray[np.float32]
    ) -> tuple[float, dict[str, list[float]]]:
        """The median ratio of our search to FAISS's of the same queries, and both times."""
        turns: dict[str, Callable[[], Any]] = {
            "ours": partial(index.search, queries, 10),
            "bare": partial(index.faiss.search, prepare_vectors(queries, True, str), 10),
        }
        took = race(turns, 9 * self.asked.rounds, self.asked.seconds)
        return statistics.median(a / b for a, b in zip(*took.values(), strict=True)), took

    def embed(self) -> dict[str, Any]:
        asked = self.asked
        config = faces(self.folder, asked)
        build_data(config.data, progress=False)
        reader = open_reader(config.data)
        views = Views(reader, config.data, torch.device("cpu"))
        run, batch = self.folder / "model", config.evaluate.batch
        model = write_model(run, config, views).eval()
        rows = np.arange(reader.starts[-1])
        held = [
            in_memory(reader, rows[first : first + batch], views, model)
            for first in range(0, len(rows), batch)
        ]
        numbers = iter(range(1000))

        @torch.inference_mode()
        def forward() -> None:
            for inputs, keys, parts in held:
                model(inputs, keys, parts)

        overrides, going = ["data.workers=1"], list[float]()
        embed_parts = Embedder.run

        def timed(*given: Any) -> Iterator[int]:
            """The rows that are done; how long those after the first batch took goes to `going`."""
            begun = 0.0
            for count in embed_parts(*given):
                begun = begun or time.perf_counter()
                yield count
            going.append((time.perf_counter() - begun) * len(rows) / (len(rows) - batch))

        def whole() -> None:
            with patch.object(Embedder, "run", timed):
                embed(run, self.folder / f"out-{next(numbers)}", None, overrides, progress=False)

        took = race({"whole": whole, "forward": forward}, asked.rounds, 0.0)
        took = {"embed": going[-len(took["whole"]) :], "with its start": took["whole"]} | took
        head("", "rows/s", "of the forward pass")
        ratios = {}
        for name in ("embed", "with its start", "forward"):
            pairs = zip(took["forward"], took[name], strict=True)
            ratios[name] = statistics.median(a / b for a, b in pairs)
            rate = f"{len(rows) / statistics.median(took[name]):,.0f}"
            print(Table.row([name, rate, f"{ratios[name]:.3f}"]))
        return {"ratio": ratios["embed"], "rows": len(rows), **took}

    def million(self) -> dict[str, Any]:
        asked = self.asked
        folder = self.folder / "million"
        if (
            fault := alone(write_embeddings, folder, asked.million, 128, limit_s=LIMIT_S)
        ) is not None:
            raise SystemExit(f"million: {fault.missing}")
        head("budget", "kind", "predicted", "peak", "open", "recall@10", "target", "setting")
        told: dict[str, Any] = {}
        for budget in asked.memory:
            out = self.folder / f"million-{budget}"
            found = alone(index_million, folder, out, parse_bytes(budget), limit_s=LIMIT_S)
            if isinstance(found, Outcome):
                raise SystemExit(f"million, {budget}: {found.missing}")
            told[budget] = found
            shown = [format_bytes(found[name]) for name in ("predicted", "peak", "open")]
            recall = [f"{found['recall']:.4f}", str(found["target"])]
            print(Table.row([budget, found["kind"], *shown, *recall, found["setting"]]))
        print()
        head("budget", "ms a query", *next(iter(told.values()))["seconds"])
        for budget, found in told.items():
            took = [f"{seconds:.1f} s" for seconds in found["seconds"].values()]
            print(Table.row([budget, f"{found['ms']:.3f}", *took]))
        return told


def race(
    turns: dict[str, Callable[[], Any]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds of a call of each, a round each: the mean over calls that last `seconds` or more."""
    took: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            calls, begin = 0, time.perf_counter()
            while not calls or time.perf_counter() - begin < seconds:
                turns[name]()
                calls += 1
            if number:
                took[name].append((time.perf_counter() - begin) / calls)
    return took


def faces(folder: Path, asked: argparse.Namespace) -> Config:
    """The model of configs/faces.yaml on drawn faces."""
    encoder = {"kind": "cnn", "channels": asked.channels}
    model = {"encoder": encoder, "projection_width": 64}
    config = experiment(folder, "none", "herocon", asked.faces, asked.batch, asked.size, model)
    evaluate = config.evaluate.model_copy(update={"batch": asked.batch})
    return config.model_copy(update={"evaluate": evaluate})


def write_model(folder: Path, config: Config, views: Views) -> Heterogeneous:
    """A checkpoint of the model as it is initialised."""
    model = Heterogeneous(config.model, views.shapes, 40, config.objective.terms())
    folder.mkdir()
    weights = {name: values.contiguous() for name, values in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    save_json(folder / "model.json", {"shapes": views.shapes, "labels": 40})
    (folder / "config.yaml").write_text(dump_config(config))
    return model


def in_memory(
    reader: Reader, rows: Rows, views: Views, model: Heterogeneous
) -> tuple[list[torch.Tensor], torch.Tensor, list[int]]:
    """What the model is given for some rows."""
    stored = np.empty((len(rows), *reader.decoders["image"].shape), np.uint8)
    reader.fill({"image": stored}, rows)
    keys, none = torch.zeros(len(rows), dtype=torch.int64), torch.empty(0, 0)
    images = {"image": torch.from_numpy(stored)}
    batch = Batch(images, none, torch.from_numpy(rows), keys, [len(rows)])
    return views(batch, train=False, first=model.classified), keys, [len(rows)]


def head(*names: str) -> None:
    print(f"{Table.row(names)}\n{'|---' * len(names)}|")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", default=PARTS, choices=PARTS, help="`search` needs `build`")
    add("--rows", type=int, default=40_000, help="vectors of `build` and `search`")
    add("--dim", type=int, default=128, help="of them")
    add("--batches", type=int, nargs="+", default=[64, 256], help="queries of a search")
    add("--faces", type=int, default=4096, help="faces to embed")
    add("--size", type=int, default=64, help="of a face, a side")
    add("--channels", type=int, nargs="+", default=[16, 32, 64, 128], help="of the cnn")
    add("--batch", type=int, default=256, help="faces of a batch")
    add("--million", type=int, default=1_000_000, help="vectors of `million`")
    add("--memory", nargs="+", default=["800MB"], help="budgets of `million`")
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=0.05, help="of a turn of `search`, at least")
    add("--small", action="store_true", help="all of it, too small to mean anything")
    add("--json", help="a file for the numbers")
    if parser.parse_args(words).small:
        parser.set_defaults(**SMALL)
    asked = parser.parse_args(words)
    if "search" in asked.parts and "build" not in asked.parts:
        parser.error(
            "--parts search: it searches what `build` built; expected --parts build search"
        )
    return asked


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    found = {}
    print(f"{cores()} cores, 1 thread, torch {torch.__version__}, FAISS {faiss.__version__}")
    with tempfile.TemporaryDirectory(prefix="heron-") as made:
        bench = Bench(Path(made), arguments)
        for part in (part for part in PARTS if part in arguments.parts):
            print(f"\n{part}\n", flush=True)
            found[part] = getattr(bench, part)()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
