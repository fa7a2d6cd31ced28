"""`heron query`: the neighbours of a sample, a file or a vector."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from heron.launch.verb import Verb

if TYPE_CHECKING:  # both load more than `heron --help` needs
    from heron.pipeline.retrieval.answer import Answer, Hit
    from heron.pipeline.retrieval.query import Retriever


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", type=Path, metavar="INDEX", help="folder that `heron index` wrote")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--key", help="of a sample")
    asked.add_argument(
        "--file",
        action="append",
        metavar="[VIEW=]PATH",
        help="JPEG, PNG or npy of a vector view, through the model; one for each view it sees",
    )
    asked.add_argument(
        "--vector", type=Path, metavar="FILE.npy", help="a vector of the index's layer"
    )
    parser.add_argument("--row", type=int, default=0, help="of an npy file (default: 0)")
    parser.add_argument("--k", type=int, default=10, help="samples to find (default: 10)")
    parser.add_argument(
        "--where", default="", metavar="FILTER", help='by label: "Smiling and not Male"'
    )
    parser.add_argument(
        "--relation",
        choices=["neighbours", "hard", "false"],
        default="neighbours",
        help="hard: with labels far from the query's; false: with the same labels",
    )
    parser.add_argument(
        "--far",
        type=float,
        help="label distance from which on a neighbour is hard "
        "(default: the median distance to the query; of classes, any other)",
    )
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--sheet", type=Path, metavar="PNG", help="draw query and hits")
    parser.add_argument("--embeddings", type=Path, help="(default: those that the index names)")
    parser.add_argument(
        "--run", dest="from_run", metavar="RUN", help="of the model (default: the index's)"
    )
    parser.add_argument("--data", help="the shards (default: the index's)")


def _run(arguments: argparse.Namespace) -> int:
    from heron.pipeline.retrieval.query import Retriever  # here, so that `heron --help` is quick

    if arguments.sheet is not None:
        from heron.pipeline.retrieval.sheet import check_sheet

        check_sheet(arguments.sheet)
    retriever = Retriever.open(
        arguments.index, arguments.embeddings, arguments.from_run, arguments.data
    )
    answer = _ask(retriever, arguments)
    if arguments.format == "json":
        known = retriever.index.manifest
        index = {"folder": str(arguments.index)} | known.model_dump(
            include={"kind", "layer", "dim", "count", "checkpoint"}
        )
        print(json.dumps(answer.plain() | {"index": index}, indent=1, allow_nan=False))
    else:
        print("\n".join(_table(retriever, answer)))
    if arguments.sheet is not None:
        _draw(retriever, answer, arguments)
    return 0


def _ask(retriever: "Retriever", arguments: argparse.Namespace) -> "Answer":
    k, where, relation = arguments.k, arguments.where, arguments.relation
    if arguments.key is not None:
        return retriever.by_key(arguments.key, k, where, relation, arguments.far)
    if arguments.vector is not None:
        from heron.pipeline.retrieval.given import mapped, vector_row

        name = f"{arguments.vector} row {arguments.row}"
        vector = vector_row(mapped(arguments.vector), str(arguments.vector), arguments.row)
        return retriever.by_vector(vector, k, where, relation, name)
    files = retriever.files(arguments.file)
    return retriever.by_file(files, k, where, relation, row=arguments.row)


def _table(retriever: "Retriever", answer: "Answer") -> list[str]:
    """The answer as lines: what was asked, then a line a hit."""
    manifest, query = retriever.index.manifest, answer.query
    labels = f": {', '.join(query.labels)}" if query.labels else ""
    asked = {"neighbours": "neighbours", "hard": "hard negatives", "false": "false negatives"}
    how = asked[answer.relation]
    if answer.far is not None:
        how += f", at a label distance of {answer.far:.4g} or more"
    if answer.where:
        how += f", where {answer.where}"
    lines = [
        f"query   {query.key}{labels}",
        f"vector  {query.vector}",
        f"index   {manifest.kind} of {manifest.count:,} x {manifest.dim} '{manifest.layer}', "
        f"{answer.metric}",
        f"found   {len(answer.hits):,} of {answer.k:,} asked for, among {answer.allowed:,} {how}",
        "",
    ]
    compared = query.number is not None and bool(retriever.samples.known[query.number])
    title = f"{'apart':>6}  labels (+ beside the query's, - without)" if compared else "labels"
    width = max([len(hit.key) for hit in answer.hits] + [3])
    lines.append(f"{'':>4}  {answer.metric:>13}  {'key':<{width}}  {title}")
    for place, hit in enumerate(answer.hits):
        apart = "" if hit.label_distance is None else f"{hit.label_distance:.4f}"
        apart = f"{apart:>6}  " if compared else ""
        start = f"{place + 1:>4}  {hit.score:>13.6f}  {hit.key:<{width}}  {apart}"
        lines.append(f"{start}{_labels(answer, hit)}".rstrip())
    return lines


def _labels(answer: "Answer", hit: "Hit") -> str:
    """A hit's labels: how they differ from the query's, where it has any."""
    if hit.label_distance is None:
        return ", ".join(hit.labels) or "none"
    ours, theirs = answer.query.labels, hit.labels
    more = [f"+{name}" for name in theirs if name not in ours]
    less = [f"-{name}" for name in ours if name not in theirs]
    return " ".join(more + less) or "the same"


def _draw(retriever: "Retriever", answer: "Answer", arguments: argparse.Namespace) -> None:
    from heron.pipeline.retrieval.given import NPY, upright
    from heron.pipeline.retrieval.sheet import draw_answer, save_sheet

    picture = None
    for path in retriever.files(arguments.file).values() if arguments.file else ():
        if picture is None and not (data := path.read_bytes()).startswith(NPY):
            picture = upright(data, str(path))
    save_sheet(draw_answer(retriever, answer, picture), arguments.sheet)


QUERY = Verb("find the neighbours of a sample, a file or a vector", _add, _run)
