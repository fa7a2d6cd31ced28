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
    from heron.pipeline.negatives.neighbours import Question  # here, so that --help is quick
    from heron.pipeline.negatives.report import percent, report
    from heron.pipeline.retrieval.embeddings import Embeddings
    from heron.pipeline.retrieval.index import Index

    index = None if arguments.index is None else Index.open(arguments.index)
    layer = arguments.layer or ("hidden" if index is None else index.manifest.layer)
    question = Question(layer, arguments.k, arguments.anchors, arguments.seed)
    embeddings = Embeddings.open(arguments.embeddings)
    numbers = report(embeddings, question, arguments.out, index, arguments.data)
    rates = numbers["false_negatives"]
    rate = rates["close"]["near"].value[rates["k"].index(question.k)]
    print(
        f"{numbers['anchors']:,} anchors: {percent(rate)} of the {question.k} nearest are false "
        f"negatives, of random pairs {percent(float(rates['close']['random'].value))}"
    )
    if weight := numbers["weight"]:
        print(f"rank correlation of g and label similarity: {weight['label_rank'].value:.3f}")
    print(f"report: {arguments.out / 'report.html'}")
    return 0


NEGATIVES = Verb("false and hard negatives of embeddings, as a report", _add, _run)
