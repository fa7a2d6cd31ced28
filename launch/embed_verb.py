"""`heron embed`: a checkpoint over a data set."""

import argparse
from pathlib import Path

from heron.launch.verb import Verb


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, metavar="RUN", help="folder of a run or a checkpoint"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write, or to go on with")
    parser.add_argument("--split", help="rows of one split (default: all)")
    parser.add_argument(
        "--role", choices=["labelled", "unlabelled", "test"], help="rows of one role in the run"
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=["hidden", "projection", "weight"],
        help="layers to write (default: those that the model has)",
    )
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--part-rows", type=int, default=65_536, help="rows of a file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("overrides", nargs="*", help="of the run's configuration: data.workers=4")


def _run(arguments: argparse.Namespace) -> int:
    from heron.pipeline.distributed import (
        collectives,  # here, so that `heron --help` need not load torch
    )
    from heron.pipeline.retrieval.embed import embed
    from heron.pipeline.retrieval.embedder import Choice

    choice = Choice(
        arguments.split, arguments.role, arguments.layers, arguments.dtype, arguments.part_rows
    )
    found = embed(
        arguments.checkpoint, arguments.out, choice, arguments.overrides, not arguments.quiet
    )
    if collectives.rank() == 0:
        layers = (f"{name} {layer.dim}" for name, layer in found.manifest.layers.items())
        print(f"{arguments.out}: {len(found):,} embeddings, {', '.join(layers)}")
        for row, fault in list(found.manifest.lost.items())[:5]:
            print(f"left out row {row}: {fault}")
        if (count := len(found.manifest.lost)) > 5:
            print(f"left out {count:,} rows in all; {arguments.out}/manifest.json names them")
    collectives.close()
    return 0


EMBED = Verb("embed a data set with a trained model", _add, _run)
