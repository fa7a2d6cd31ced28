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
    from heron.pipeline.negatives import report  # here, so that --help is quick
    from heron.pipeline.negatives.neighbours import Question, find_neighbours
    from heron.pipeline.negatives.repulsion import Temperatures
    from heron.pipeline.retrieval.embeddings import Embeddings
    from heron.pipeline.retrieval.index import Index

    embeddings = Embeddings.open(arguments.embeddings)
    index = None if arguments.index is None else Index.open(arguments.index)
    layer = arguments.layer or ("hidden" if index is None else index.manifest.layer)
    pictures, without = report.find_pictures(embeddings, arguments.data)  # first, if it is wrong
    question = Question(layer, arguments.k, arguments.anchors, arguments.seed)
    near = find_neighbours(embeddings, question, index)
    temperatures = Temperatures.of_run(embeddings.manifest.run)
    numbers = report.measure(near, temperatures, index, without)
    path = report.write(near, numbers, arguments.out, pictures)
    rates = numbers["false_negatives"]["close"]
    rate = float(rates["near"].value[near.ks.index(question.k)])
    print(
        f"{numbers['anchors']:,} anchors: {report.percent(rate)} of the {question.k} nearest are "
        f"false negatives, of random pairs {report.percent(float(rates['random'].value))}"
    )
    if weight := numbers["weight"]:
        print(f"rank correlation of g and label similarity: {weight['label_rank'].value:.3f}")
    print(f"report: {path}")
    return 0


NEGATIVES = Verb("false and hard negatives of embeddings, as a report", _add, _run)
