"""`heron negatives`: near samples that are no neighbours by their labels, and the other way."""

import argparse
from pathlib import Path

from heron.launch.verb import Verb


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("embeddings", type=Path, help="folder that `heron embed` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument(
        "--index", type=Path, help="take neighbours from an index (default: exact ones)"
    )
    parser.add_argument(
        "--layer",
        choices=["hidden", "projection"],
        help="where neighbours are near (default: the index's, or hidden)",
    )
    parser.add_argument("--k", type=int, default=10, help="neighbours that are looked at")
    parser.add_argument(
        "--anchors", type=int, default=2000, help="samples that are compared; 0: all with labels"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw of anchors")
    parser.add_argument("--data", help="shards with the pictures (default: those embedded)")


def _run(arguments: argparse.Namespace) -> int:
    from heron.pipeline.negatives.measure import Question, measure
    from heron.pipeline.negatives.page import percent
    from heron.pipeline.negatives.report import Report, find_pictures
    from heron.pipeline.negatives.repulsion import Temperatures
    from heron.pipeline.negatives.repulsion import measure as measure_repulsion
    from heron.pipeline.retrieval.embeddings import Embeddings  # here, so that --help is quick
    from heron.pipeline.retrieval.index import Index

    embeddings = Embeddings.open(arguments.embeddings)
    index = None if arguments.index is None else Index.open(arguments.index)
    layer = arguments.layer or ("hidden" if index is None else index.manifest.layer)
    pictures = find_pictures(embeddings, arguments.data)  # before the work, if it is wrong
    question = Question(layer, arguments.k, arguments.anchors, arguments.seed)
    found = measure(embeddings, question, index)
    temperatures = Temperatures.of_run(embeddings.manifest.run)
    repulsion = measure_repulsion(embeddings, found.pairs, found.close, temperatures, question.seed)
    report = Report(embeddings, found, repulsion, index, pictures)
    path = report.write(arguments.out)
    near, chance = found.rates["close"]
    at = found.ks.index(question.k)
    print(
        f"{len(found.pairs.anchors):,} anchors: {percent(near.value[at])} of the {question.k} "
        f"nearest are false negatives, of random pairs {percent(float(chance.value))}"
    )
    if repulsion.weight is not None:
        print(
            f"rank correlation of g and label similarity: {repulsion.weight.label_rank.value:.3f}"
        )
    print(f"report: {path}")
    return 0


NEGATIVES = Verb("false and hard negatives of embeddings, as a report", _add, _run)
