"""`heron index | query | serve`.

A verb imports what it needs when it runs, so that `heron --help` is quick.
"""

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from heron.base.atomic import locked, new_folder
from heron.base.decisions import AUDIT, DECIDED
from heron.base.errors import RetrievalError
from heron.base.extras import require
from heron.cli.arguments import ONE_EACH, Address, Location, Overwrite, Quiet, UsageError, executor
from heron.cli.models import TrustCode
from heron.retrieval.answer import Answer, Relation
from heron.retrieval.embeddings import Layer
from heron.retrieval.index_plan import MapKind, Metric, RequestedKind, parse_bytes

if TYPE_CHECKING:
    from heron.retrieval.index_files import IndexManifest
    from heron.retrieval.query import Retriever

EmbeddingsFolder = Annotated[Location, "folder that `heron embed` wrote, or its URL"]
IndexFolder = Annotated[Location, "folder that `heron index` wrote, or its URL"]
OtherEmbeddings = Annotated[Location | None, "folder of embeddings (default: the index's)"]
OtherRun = Annotated[Location | None, "run whose model encodes files (default: the index's)"]
OtherData = Annotated[Location | None, "shards with the pictures (default: the index's)"]
NoVerify = Annotated[bool, "check only the sizes of files, not their checksums"]
Gpu = Annotated[bool, "search on the GPUs that faiss-gpu sees"]
Size = Annotated[int, BeforeValidator(parse_bytes)]
DISTANCE = "label distance"  # the title of a column


def index(
    embeddings: EmbeddingsFolder,
    *,
    out: Annotated[Location, "folder to write, or s3://bucket/folder"],
    layer: Annotated[Layer | None, "layer to index (default: hidden, or the only one)"] = None,
    kind: Annotated[
        RequestedKind, "auto picks the most exact that is fast enough and fits --memory"
    ] = "auto",
    metric: Annotated[Metric, "how to compare vectors"] = "cosine",
    memory: Annotated[Size | None, "memory to use: 2GB (default: half of what is free)"] = None,
    recall: Annotated[float, "recall@k to reach"] = 0.95,
    queries: Annotated[int, "queries to measure recall with"] = 1000,
    k: Annotated[int, "neighbours to measure recall with"] = 10,
    seed: Annotated[int, "seed that selects queries and training sample"] = 0,
    width: Annotated[int | None, "values to use of each view's vector (default: all)"] = None,
    map: Annotated[MapKind, "projection of the page's map; umap is slow"] = "pca",
    gpu: Gpu = False,
    address: Address = None,
    no_verify: NoVerify = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Indexes embeddings, and measures the index's recall.

    heron index embeddings/faces --out indexes/faces
    heron index embeddings/celeba --out indexes/celeba --kind ivf --address auto
    """
    from heron.retrieval.build import build_index
    from heron.retrieval.embeddings import Embeddings
    from heron.retrieval.index_plan import format_bytes

    source = Embeddings.open(embeddings, not no_verify)
    with executor(None, address, gpu) as spread:
        manifest = build_index(
            source,
            out,
            layer=layer or source.default_layer,
            kind=kind,
            metric=metric,
            memory_bytes=memory,
            recall=recall,
            k=k,
            queries=queries,
            seed=seed,
            width=width,
            gpu=gpu,
            executor=spread,
            map=map,
            progress=not quiet,
            overwrite=overwrite,
        )
    plan, measured = manifest.plan, manifest.recall
    print(
        f"{out}: {manifest.kind} of {manifest.count:,} vectors of {manifest.dim} dimensions, "
        f"{manifest.metric} of layer '{manifest.layer}'"
    )
    print(f"why: {plan.why}")
    print(
        f"memory: {format_bytes(plan.index_bytes)} open, {format_bytes(plan.build_bytes)} "
        f"predicted to build, budget {format_bytes(plan.memory_bytes)}"
        f"{', mapped' if plan.mapped else ''}"
    )
    if manifest.map is not None:
        print(f"map: {manifest.map.how}")
    if measured is None:
        return
    setting = "".join(f", {name} {value}" for name, value in manifest.search.items())
    print(
        f"recall@{measured.k}: {measured.value:.4f} of {measured.queries} held-out queries, "
        f"target {measured.target}{setting}"
    )
    if not measured.reached:
        print("the index does not reach the target; raise --memory, or choose another --kind")


def query(
    index: IndexFolder,
    *,
    key: Annotated[str | None, "query by a sample's key (or --file, --text, --vector)"] = None,
    file: Annotated[
        tuple[str, ...], ONE_EACH, "query by [VIEW=]picture or npy; may be repeated for more views"
    ] = (),
    across: Annotated[
        bool, "compare files with the other views; needs an index of --layer projection"
    ] = False,
    text: Annotated[str | None, "query by words; needs an index of --layer projection"] = None,
    vector: Annotated[Path | None, "query by a vector of the index's layer, an npy file"] = None,
    row: Annotated[int, "row of an npy file"] = 0,
    k: Annotated[int, "samples to find"] = 10,
    where: Annotated[str, 'filter by label: "Smiling and not Male"'] = "",
    relation: Annotated[
        Relation, "hard: samples with labels far from the query's; false: with the same or close"
    ] = "neighbours",
    far: Annotated[
        float | None, "minimum label distance of hard (default: the median; with classes, any)"
    ] = None,
    format: Annotated[Literal["table", "json"], "how to print the answer"] = "table",
    sheet: Annotated[Path | None, "file to draw the query and its hits to"] = None,
    embeddings: OtherEmbeddings = None,
    run: OtherRun = None,
    data: OtherData = None,
    gpu: Gpu = False,
    no_verify: NoVerify = False,
    trust_code: TrustCode = False,
) -> None:
    """Finds the neighbours of a sample, a file, a text or a vector.

    heron query indexes/faces --key 000008 --where "Smiling and not Male" --sheet near.png
    heron query indexes/faces --file face.jpg --k 5 --format json
    """
    from heron.retrieval import file_reader
    from heron.retrieval.query import Retriever

    if [key is not None, bool(file), text is not None, vector is not None].count(True) != 1:
        raise UsageError("pass exactly one of --key, --file, --text and --vector")
    if across and not file:
        raise UsageError("--across compares files with the other views; pass --file")
    if sheet is not None:
        from heron.retrieval.sheet import check_sheet, draw_answer
        from heron.shards.show import save_sheet

        check_sheet(sheet)
    retriever = Retriever.open(index, embeddings, run, data, not no_verify, gpu, trust_code)
    files = retriever.files(file, row) if file else {}
    if key is not None:
        answer = retriever.by_key(key, k, where, relation, far)
    elif text is not None:
        answer = retriever.by_text(text, k, where, relation)
    elif vector is not None:
        numbers = file_reader.vector_row(file_reader.map_bytes(vector), str(vector), row)
        answer = retriever.by_vector(numbers, k, where, relation, f"{vector} row {row}")
    else:
        answer = retriever.by_file(files, k, where, relation, row=row, across=across)
    manifest = retriever.index.manifest
    if format == "json":
        facts = manifest.model_dump(include={"kind", "layer", "dim", "count", "checkpoint"})
        tree = answer.plain() | {"index": {"folder": str(index)} | facts}
        print(json.dumps(tree, indent=1, allow_nan=False))
    else:
        number = answer.query.number
        has_labels = number is not None and bool(retriever.samples.known[number])
        print("\n".join([*_heading(answer, manifest), "", *_hits(answer, has_labels)]))
    if sheet is not None:
        contents = ((path, path.read_bytes()) for path in files.values())
        pictures = (
            file_reader.upright_picture(d, str(p))
            for p, d in contents
            if not d.startswith(file_reader.NPY)
        )
        save_sheet(draw_answer(retriever, answer, next(pictures, None)), sheet)


def _heading(answer: Answer, manifest: "IndexManifest") -> list[str]:
    """Returns the lines that say what was searched for, and in which index."""
    query = answer.query
    labels = f": {', '.join(query.labels)}" if query.labels else ""
    candidates = answer.relation + ("" if answer.relation == "neighbours" else " negatives")
    if answer.far is not None:
        candidates += f", at a label distance of {answer.far:.4g} or more"
    if answer.close is not None:
        candidates += f", at a label distance of {answer.close:.4g} or less"
    if answer.instead:
        candidates = f"samples, none of them {candidates}: the nearest in label space"
    if answer.where:
        candidates += f", where {answer.where}"
    return [
        f"query   {query.key}{labels}",
        f"vector  {query.vector}",
        *([f"views   {query.compares}"] if query.compares else []),
        f"index   {manifest.kind} of {manifest.count:,} x {manifest.dim} '{manifest.layer}', "
        f"{answer.metric}",
        f"found   {len(answer.hits):,} of {answer.k:,} requested, among {answer.allowed:,} "
        f"{candidates}",
    ]


def _hits(answer: Answer, has_labels: bool) -> Iterator[str]:
    """Yields a line per hit, with the labels that it adds to the query's (+) and lacks (-)."""
    width = max([3, *(len(hit.key) for hit in answer.hits)])
    labels = "labels (+ not the query's, - only the query's)" if has_labels else "labels"
    titles = f"{DISTANCE}  {labels}" if has_labels else labels
    yield f"      {answer.metric:>13}  {'key':<{width}}  {titles}"
    query_labels = answer.query.labels
    for number, hit in enumerate(answer.hits, 1):
        if hit.label_distance is None:
            space = " " * (len(DISTANCE) + 2) if has_labels else ""
            labels = f"{space}{', '.join(hit.labels) or 'none'}"
        else:
            added = [f"+{name}" for name in hit.labels if name not in query_labels]
            missing = [f"-{name}" for name in query_labels if name not in hit.labels]
            changes = " ".join(added + missing) or "the same"
            labels = f"{hit.label_distance:>{len(DISTANCE)}.4f}  {changes}"
        yield f"{number:>4}  {hit.score:>13.6f}  {hit.key:<{width}}  {labels}"


def serve(
    index: Annotated[Location, "folder that `heron index` or `heron audit` wrote, or its URL"],
    *others: Annotated[Location, "more indexes, of other data or models"],
    host: Annotated[str, "address to listen on; only loopback needs no token"] = "127.0.0.1",
    port: Annotated[int, "port to listen on; 0 picks a free one"] = 8000,
    token: Annotated[
        str | None, "that requests must send (default: HERON_TOKEN; off loopback, a random one)"
    ] = None,
    embeddings: OtherEmbeddings = None,
    run: OtherRun = None,
    data: OtherData = None,
    export: Annotated[Path | None, "folder to write the page to, for any web server"] = None,
    overwrite: Overwrite = False,
    gpu: Gpu = False,
    no_verify: NoVerify = False,
    trust_code: TrustCode = False,
) -> None:
    """Shows an index, or several, as a web page; or writes the page to a folder.

    An audit is shown with keys to decide on the labels that look wrong, into its decisions.csv.

    heron serve indexes/faces
    heron serve indexes/faces indexes/birds
    heron serve indexes/faces --export site
    heron serve reports/audit
    """
    from heron.retrieval.query import Retriever

    for package in ("fastapi", "uvicorn"):
        require(package, "the web page")
    from heron.serve.server import address, choose_token, listen, make_server

    given_token = os.environ.get("HERON_TOKEN") or None if token is None else token
    if others and (embeddings, run, data, export) != (None, None, None, None):
        raise UsageError(
            "--embeddings, --run, --data and --export work with one index only; pass one"
        )
    options = embeddings, run, data, not no_verify, gpu, trust_code
    if (Path(index) / AUDIT).is_file():
        if others or export:
            raise UsageError("an audit is served alone, without --export; pass one folder")
        _serve_audit(Path(index), embeddings, data, host, port, given_token)
        return
    if export is not None:
        _export(Retriever.open(index, *options), export, overwrite)
        return
    with listen(host, port) as listening:  # a taken port fails before the indexes are opened
        token = choose_token(listening, given_token)
        retrievers: dict[str, Retriever] = {}
        for folder in (index, *others):
            name = folder if Path(folder).name in retrievers else Path(folder).name
            retrievers[name] = Retriever.open(folder, *options)
        server = make_server(retrievers, listening, token=token)
        count = sum(len(retriever.samples) for retriever in retrievers.values())
        folders = ", ".join(map(str, (index, *others)))
        print(f"{folders}: {count:,} samples at {address(listening, token)}")
        print("press Ctrl-C to stop", flush=True)
        server.run(sockets=[listening])


def _serve_audit(
    folder: Path,
    embeddings: str | None,
    data: str | None,
    host: str,
    port: int,
    given_token: str | None,
) -> None:
    """Serves the page on which the labels of an audit are decided."""
    from heron.audit.report import pictures_of
    from heron.serve.decide import Decisions
    from heron.serve.server import address, choose_token, listen, make_decision_server

    with locked(folder), listen(host, port) as listening:
        token = choose_token(listening, given_token)
        decisions = Decisions(folder)
        shown, why = pictures_of(folder, embeddings, data)
        server = make_decision_server(decisions, shown, why, listening, token)
        print(f"{folder}: {len(decisions.lines):,} labels at {address(listening, token)}")
        print(f"decisions: {folder / DECIDED}; press Ctrl-C to stop", flush=True)
        server.run(sockets=[listening])


def _export(retriever: "Retriever", site: Path, overwrite: bool) -> None:
    from heron.base.terminal import Bar
    from heron.serve.static_site import write_site

    count = len(retriever.samples)
    with (
        new_folder(site, overwrite, RetrievalError, "--export") as folder,
        closing(Bar(count, "sample", name=str(site))) as bar,
    ):
        write_site(retriever, folder, bar.update)
    size = sum(file.stat().st_size for file in site.rglob("*") if file.is_file())
    print(f"{site}: {count:,} samples, {size / 1e6:,.1f} MB")
    print(f"next: python -m http.server --directory {shlex.quote(str(site))}")
