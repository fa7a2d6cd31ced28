"""`heron index`: embeddings to an index that finds neighbours."""

import argparse
from pathlib import Path

from heron.launch.verb import Verb


def _size(text: str) -> int:
    from heron.pipeline.retrieval.kinds import bytes_of

    try:
        return bytes_of(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "embeddings", type=Path, metavar="EMBEDDINGS", help="folder that `heron embed` wrote"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--layer", choices=["hidden", "projection", "weight"], default="hidden")
    parser.add_argument(
        "--kind",
        choices=["auto", "flat", "ivf", "ivfpq", "hnsw"],
        default="auto",
        help="auto: the most exact that is fast enough and fits --memory",
    )
    parser.add_argument(
        "--metric", choices=["cosine", "inner_product", "euclidean"], default="cosine"
    )
    parser.add_argument(
        "--memory", type=_size, metavar="SIZE", help="budget: 2GB (default: half of what is free)"
    )
    parser.add_argument("--recall", type=float, default=0.95, help="target of recall@k")
    parser.add_argument("--queries", type=int, default=1000, help="that recall is measured on")
    parser.add_argument("--k", type=int, default=10, help="neighbours that it is measured on")
    parser.add_argument("--seed", type=int, default=0, help="of queries and training sample")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def _run(arguments: argparse.Namespace) -> int:
    from heron.pipeline.retrieval.build import build_index  # here, so that `heron --help` is quick
    from heron.pipeline.retrieval.embeddings import Embeddings
    from heron.pipeline.retrieval.kinds import in_bytes

    made = build_index(
        Embeddings.open(arguments.embeddings),
        arguments.out,
        layer=arguments.layer,
        kind=arguments.kind,
        metric=arguments.metric,
        memory_bytes=arguments.memory,
        recall=arguments.recall,
        k=arguments.k,
        queries=arguments.queries,
        seed=arguments.seed,
        progress=not arguments.quiet,
    ).manifest
    plan, measured = made.plan, made.recall
    print(
        f"{arguments.out}: {made.kind} of {made.count:,} vectors of {made.dim} dimensions, "
        f"{made.metric} of layer '{made.layer}'"
    )
    print(f"why: {plan.why}")
    print(
        f"memory: {in_bytes(plan.index_bytes)} open, {in_bytes(plan.build_bytes)} predicted to "
        f"build, budget {in_bytes(plan.memory_bytes)}{', mapped' if plan.mapped else ''}"
    )
    if measured is not None:
        setting = "".join(f", {name} {value}" for name, value in made.search.items())
        print(
            f"recall@{measured.k}: {measured.value:.4f} of {measured.queries} held-out queries, "
            f"target {measured.target}{setting}"
        )
        if not measured.reached:
            print("the target is out of reach of this index; give more --memory, or another --kind")
    return 0


INDEX = Verb("index embeddings, and measure its recall", _add, _run)
