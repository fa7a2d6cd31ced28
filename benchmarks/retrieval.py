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
from heron.data.batches import Batch
from heron.data.dataset import build_data, open_reader
from heron.data.reader import Reader
from heron.data.rows import Rows
from heron.data.views import Views
from heron.experiment.config import Config, dump_config
from heron.losses.objective import build_losses
from heron.models.heterogeneous import Heterogeneous
from heron.retrieval.build import build_index
from heron.retrieval.embed import Embedder, embed
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index
from heron.retrieval.index_plan import (
    CODED,
    KINDS,
    MAX_POINTS,
    Kind,
    Plan,
    format_bytes,
    parse_bytes,
)
from heron.retrieval.vectors import prepare_vectors
from heron.training.signature import Signature

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


def bare_build(vectors: NDArray[np.float32], plan: Plan, excluded: int, path: Path) -> float:
    """Returns the seconds that FAISS takes for an index of the same plan, including its file.

    Args:
        vectors: [rows, dim], in memory.
        plan: of ours.
        excluded: leading vectors that are not in the training sample.
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
    index.train(vectors[excluded : excluded + plan.training])
    index.add(vectors)
    faiss.write_index(index, str(path))
    return time.perf_counter() - begin


class Bench:
    """The parts."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.arguments = folder, arguments
        self.indices: dict[Kind, Index] = {}

    def build(self) -> dict[str, Any]:
        arguments = self.arguments
        write_embeddings(self.folder / "vectors", arguments.rows, arguments.dim)
        embeddings = Embeddings.open(self.folder / "vectors")
        vectors = np.concatenate([block for _, block in embeddings.blocks("hidden")])
        head("kind", "ours s", "bare s", "ours / bare", "recall and checksums s")
        numbers: dict[str, Any] = {}
        for kind in KINDS:
            turns = [
                self.turn(embeddings, vectors, kind, number)
                for number in range(arguments.rounds if kind in ("flat", "ivf") else 1)
            ]
            our_seconds, bare_seconds, extra_seconds = (
                statistics.median(x) for x in zip(*turns, strict=True)
            )
            ratio = statistics.median(a / b for a, b, _ in turns)
            numbers[kind] = {"ratio": ratio, "turns": turns}
            cells = [
                f"{our_seconds:.3f}",
                f"{bare_seconds:.3f}",
                f"{ratio:.3f}",
                f"{extra_seconds:.3f}",
            ]
            print(Table.row([kind, *cells]), flush=True)
        return numbers

    def turn(
        self, embeddings: Embeddings, vectors: NDArray[np.float32], kind: Kind, number: int
    ) -> tuple[float, float, float]:
        """Returns seconds of our build, of FAISS's, and of the steps that only ours has."""

        def build_ours() -> None:
            out = self.folder / f"{kind}-{number}"
            build_index(embeddings, out, kind=kind, progress=False)
            self.indices[kind] = Index.open(out, verify=False)

        def build_bare() -> float:
            plan = self.indices[kind].manifest.plan  # of the round before
            return bare_build(vectors, plan, len(vectors) - plan.training, self.folder / "bare")

        bare_first = build_bare() if number % 2 else 0.0
        build_ours()
        seconds = self.indices[kind].manifest.seconds
        our_seconds = sum(seconds.get(step, 0.0) for step in BUILDING)
        return our_seconds, bare_first or build_bare(), sum(seconds.values()) - our_seconds

    def search(self) -> dict[str, Any]:
        arguments = self.arguments
        queries = next(draw(2 * max(arguments.batches), arguments.dim, seed=1))
        head(
            *("kind", "setting", "recall@10", "batch", "ours ms", "bare ms", "ours / bare"),
            *("short", "ours / bare of full"),
        )
        numbers: dict[str, Any] = {}
        for kind, index in self.indices.items():
            measured = index.manifest.recall
            assert measured is not None
            full = (index.faiss.search(prepare_vectors(queries, True, str), 10)[1] >= 0).all(1)
            for batch in arguments.batches:
                ratio, seconds = self.beside(index, queries[:batch])
                full_ratio, _ = self.beside(index, queries[full][:batch])
                short = 1 - float(full[:batch].mean())
                numbers[f"{kind}, {batch}"] = {
                    "ratio": ratio,
                    "full": full_ratio,
                    "short": short,
                    **seconds,
                }
                setting = ", ".join(f"{k} {v}" for k, v in index.manifest.search.items())
                shown = [f"{1e3 * statistics.median(x):.3f}" for x in seconds.values()]
                cells = [kind, setting, f"{measured.value:.3f}", str(batch), *shown]
                print(Table.row([*cells, f"{ratio:.3f}", f"{short:.1%}", f"{full_ratio:.3f}"]))
        return numbers

    def beside(
        self, index: Index, queries: NDArray[np.float32]
    ) -> tuple[float, dict[str, list[float]]]:
        """Returns the median ratio of our search time to FAISS's, and both times."""
        turns: dict[str, Callable[[], Any]] = {
            "ours": partial(index.search, queries, 10),
            "bare": partial(index.faiss.search, prepare_vectors(queries, True, str), 10),
        }
        seconds = race(turns, 9 * self.arguments.rounds, self.arguments.seconds)
        return statistics.median(a / b for a, b in zip(*seconds.values(), strict=True)), seconds

    def embed(self) -> dict[str, Any]:
        arguments = self.arguments
        config = faces(self.folder, arguments)
        build_data(config.data, progress=False)
        reader = open_reader(config.data)
        views = Views(reader, config.data, torch.device("cpu"))
        run, batch = self.folder / "model", config.evaluate.batch
        model = write_model(run, config, views).eval()
        rows = np.arange(reader.starts[-1])
        batches_in_memory = [
            in_memory(reader, rows[first : first + batch], views, model)
            for first in range(0, len(rows), batch)
        ]
        numbers = iter(range(1000))

        @torch.inference_mode()
        def forward() -> None:
            for inputs, keys, sizes in batches_in_memory:
                model(inputs, keys, sizes)

        overrides, after_first = ["data.workers=1"], list[float]()
        embed_parts = Embedder.run

        def timed(*args: Any) -> Iterator[int]:
            """Yields the rows done; `after_first` gets the seconds at the rate after batch one."""
            start = 0.0
            for count in embed_parts(*args):
                start = start or time.perf_counter()
                yield count
            after_first.append((time.perf_counter() - start) * len(rows) / (len(rows) - batch))

        def embed_all() -> None:
            with patch.object(Embedder, "run", timed):
                embed(run, self.folder / f"out-{next(numbers)}", None, overrides, progress=False)

        seconds = race({"whole": embed_all, "forward": forward}, arguments.rounds, 0.0)
        seconds = {
            "embed": after_first[-len(seconds["whole"]) :],
            "with its start": seconds["whole"],
        } | seconds
        head("", "rows/s", "of the forward pass")
        ratios = {}
        for name in ("embed", "with its start", "forward"):
            pairs = zip(seconds["forward"], seconds[name], strict=True)
            ratios[name] = statistics.median(a / b for a, b in pairs)
            rate = f"{len(rows) / statistics.median(seconds[name]):,.0f}"
            print(Table.row([name, rate, f"{ratios[name]:.3f}"]))
        return {"ratio": ratios["embed"], "rows": len(rows), **seconds}

    def million(self) -> dict[str, Any]:
        arguments = self.arguments
        folder = self.folder / "million"
        if (
            fault := alone(write_embeddings, folder, arguments.million, 128, limit_s=LIMIT_S)
        ) is not None:
            raise SystemExit(f"million: {fault.missing}")
        head("budget", "kind", "predicted", "peak", "open", "recall@10", "target", "setting")
        numbers: dict[str, Any] = {}
        for budget in arguments.memory:
            out = self.folder / f"million-{budget}"
            result = alone(index_million, folder, out, parse_bytes(budget), limit_s=LIMIT_S)
            if isinstance(result, Outcome):
                raise SystemExit(f"million, {budget}: {result.missing}")
            numbers[budget] = result
            shown = [format_bytes(result[name]) for name in ("predicted", "peak", "open")]
            recall = [f"{result['recall']:.4f}", str(result["target"])]
            print(Table.row([budget, result["kind"], *shown, *recall, result["setting"]]))
        print()
        head("budget", "ms a query", *next(iter(numbers.values()))["seconds"])
        for budget, result in numbers.items():
            shown = [f"{seconds:.1f} s" for seconds in result["seconds"].values()]
            print(Table.row([budget, f"{result['ms']:.3f}", *shown]))
        return numbers


def race(
    turns: dict[str, Callable[[], Any]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Returns seconds per call, one per round: the mean over calls for at least `seconds`."""
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


def faces(folder: Path, arguments: argparse.Namespace) -> Config:
    """The model of configs/faces.yaml on drawn faces."""
    encoder = {"kind": "cnn", "channels": arguments.channels}
    model = {"encoder": encoder, "projection_width": 64}
    config = experiment(
        folder, "none", "herocon", arguments.faces, arguments.batch, arguments.size, model
    )
    evaluate = config.evaluate.model_copy(update={"batch": arguments.batch})
    return config.model_copy(update={"evaluate": evaluate})


def write_model(folder: Path, config: Config, views: Views) -> Heterogeneous:
    """A checkpoint of the model as it is initialised."""
    model = Heterogeneous(config.model, views.shapes, 40, build_losses(config.objective))
    folder.mkdir()
    weights = {name: values.contiguous() for name, values in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    signature = Signature.of(open_reader(config.data), config.data.views)
    (folder / "model.json").write_text(signature.text())
    (folder / "config.yaml").write_text(dump_config(config))
    return model


def in_memory(
    reader: Reader, rows: Rows, views: Views, model: Heterogeneous
) -> tuple[list[torch.Tensor], torch.Tensor, list[int]]:
    """Returns the model's inputs for some rows."""
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
    arguments = parser.parse_args(words)
    if "search" in arguments.parts and "build" not in arguments.parts:
        parser.error(
            "--parts search: it searches what `build` built; expected --parts build search"
        )
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    numbers = {}
    print(f"{cores()} cores, 1 thread, torch {torch.__version__}, FAISS {faiss.__version__}")
    with tempfile.TemporaryDirectory(prefix="heron-") as scratch:
        bench = Bench(Path(scratch), arguments)
        for part in (part for part in PARTS if part in arguments.parts):
            print(f"\n{part}\n", flush=True)
            numbers[part] = getattr(bench, part)()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
