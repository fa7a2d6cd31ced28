"""`heron negatives | audit`: reports on embeddings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from heron.base.atomic import named, refuse_taken
from heron.base.errors import RetrievalError
from heron.cli.arguments import ONE_EACH, Address, Location, Overwrite, UsageError, executor
from heron.cli.models import TrustCode
from heron.cli.retrieval import NoVerify
from heron.retrieval.embeddings import Layer

if TYPE_CHECKING:
    from heron.retrieval.embeddings import Embeddings

NearLayer = Literal["hidden", "projection"]
Source = Annotated[Location | None, "folder that `heron embed` wrote (or --encoder)"]
Encoder = Annotated[
    Location | None,
    "encoder for --data, used as it is: timm:NAME, hf:PATH or a folder with safetensors",
]
Data = Annotated[str | None, "shards with the pictures (default: those embedded)"]
Page = Annotated[str, "address of `heron serve` for links"]
ADDRESS = "http://127.0.0.1:8000/"


def open_source(
    embeddings: str | None,
    encoder: str | None,
    data: str | None,
    out: Path,
    view: tuple[str, ...],
    verify: bool,
    overwrite: bool,
) -> "Embeddings":
    """Opens embeddings, or makes those of an encoder, which are kept beside `out`."""
    from heron.retrieval.embed import Choice, embed_by
    from heron.retrieval.embedding_model import open_encoder
    from heron.retrieval.embeddings import Embeddings

    if embeddings is not None:
        return Embeddings.open(embeddings, verify)
    assert encoder is not None and data is not None
    model, weights, config = open_encoder(encoder, data, *view)
    kept = Path(f"{named(out)}-embeddings")
    choice = Choice(layers=["hidden"])
    source = embed_by(model, weights, encoder, config, kept, choice, overwrite=overwrite)
    print(f"{kept}: {len(source):,} embeddings")
    return source


def _refuse_both(embeddings: str | None, encoder: str | None) -> None:
    if (embeddings is None) == (encoder is None):
        raise UsageError("pass either a folder of embeddings, or --encoder and --data")


def negatives(
    embeddings: Source = None,
    *,
    out: Annotated[Path, "folder for the report"],
    encoder: Encoder = None,
    view: Annotated[
        tuple[str, ...], ONE_EACH, "view to compare; may be repeated (default: all)"
    ] = (),
    index: Annotated[
        Location | None, "index to take neighbours from (default: exact search)"
    ] = None,
    layer: Annotated[
        NearLayer | None, "layer to find neighbours in (default: the index's, or hidden)"
    ] = None,
    k: Annotated[int, "neighbours per sample"] = 10,
    anchors: Annotated[int, "samples to find neighbours of; 0: all with labels"] = 2000,
    seed: Annotated[int, "seed that selects these samples"] = 0,
    data: Data = None,
    page: Page = ADDRESS,
    address: Address = None,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    trust_code: TrustCode = False,
) -> None:
    """Reports false and hard negatives of embeddings.

    heron negatives embeddings/faces --out reports/faces
    heron negatives embeddings/faces --view left --out reports/left
    heron negatives embeddings/faces --anchors 0 --out reports/faces --address auto
    heron negatives --encoder timm:resnet18.a1_in1k --data data/faces --out reports/resnet
    """
    from heron.negatives.neighbours import Question
    from heron.negatives.report import percent, report
    from heron.retrieval.index import Index
    from heron.retrieval.some_views import EmbeddingsOfViews

    _refuse_both(embeddings, encoder)
    if encoder is not None and (data is None or index is not None or len(view) > 1):
        raise UsageError("--encoder needs --data, takes one --view at most, and no --index")
    refuse_taken(out, overwrite, RetrievalError)
    opened_index = None if index is None else Index.open(index, not no_verify)
    index_layer: Layer = "hidden" if opened_index is None else opened_index.manifest.layer
    question = Question(layer or index_layer, k, anchors, seed)
    source = open_source(embeddings, encoder, data, out, view, not no_verify, overwrite)
    view = view if encoder is None else ()
    if view or source.manifest.missing:
        source = EmbeddingsOfViews(source, view)
    with executor(None, address) as spread:
        options = data, page, overwrite, spread, trust_code
        numbers = report(source, question, out, opened_index, *options)
    rates = numbers["false_negatives"]
    rate = rates["close"]["near"].value[rates["k"].index(k)]
    print(
        f"{numbers['anchors']:,} anchors: {percent(rate)} of the {k} nearest are false negatives, "
        f"against {percent(float(rates['close']['random'].value))} of random pairs"
    )
    if source.compares:
        print(f"views: {source.compares}")
    if weight := numbers["weight"]:
        print(f"rank correlation of g and label similarity: {weight['label_rank'].value:.3f}")
    print(f"report: {out / 'report.html'}")


def audit(
    embeddings: Source = None,
    *,
    out: Annotated[Path, "folder for the report"],
    encoder: Encoder = None,
    layer: Annotated[NearLayer, "layer whose vectors are compared"] = "hidden",
    groups: Annotated[
        Path | None, "CSV file, key,group, of samples that belong together, as those of one person"
    ] = None,
    seed: Annotated[int, "seed of folds and planted faults"] = 0,
    data: Annotated[str | None, "shards with labels and pictures (default: those embedded)"] = None,
    page: Page = ADDRESS,
    address: Address = None,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
) -> None:
    """Finds labels, pairs of views and copies that look wrong, and says how many it would find.

    heron audit embeddings/faces --out reports/audit
    heron audit --encoder timm:resnet18.a1_in1k --data data/faces --out reports/audit
    """
    from heron.audit.report import audit as write
    from heron.audit.report import sentences

    _refuse_both(embeddings, encoder)
    if encoder is not None and data is None:
        raise UsageError("an audit by --encoder needs the shards: add --data DATA")
    refuse_taken(out, overwrite, RetrievalError)
    source = open_source(embeddings, encoder, data, out, (), not no_verify, overwrite)
    with executor(None, address) as spread:
        numbers = write(source, out, layer, data, groups, seed, page, overwrite, spread)
    print("\n".join(sentences(numbers)))
    print(f"report: {out / 'report.html'}")
