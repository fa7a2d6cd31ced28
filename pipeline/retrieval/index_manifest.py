"""What an index says of itself, and whether its files are those that were written."""

from pathlib import Path
from typing import Literal

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.embeddings import Layer
from heron.pipeline.retrieval.kinds import Kind, Metric, Plan
from heron.pipeline.retrieval.recall import Recall
from heron.shards.manifest import Record
from heron.shards.sources.base import sha256

AGAIN = "build the index again with `heron index`"


class IndexFile(Record):
    """A file of the index."""

    bytes: int
    sha256: str


class IndexManifest(Record):
    """What an index holds, how it was made, and how well it finds.

    `cosine` is the inner product of unit vectors: `normalised` says that the vectors were divided
    by their length, as queries are. `compared_by` is what FAISS computes: of unit vectors the
    distance gives the same order, cos = 1 - distance^2 / 2, and `ivfpq` finds far more by it: an
    inner product prefers codes that are longer than the vector they stand for.
    """

    format: Literal[1]
    kind: Kind
    metric: Metric
    normalised: bool
    compared_by: Literal["inner_product", "euclidean"]
    layer: Layer
    dim: int
    count: int
    checkpoint: str  # the sha256 of the model's weights
    embeddings: str
    embeddings_sha256: str  # of their manifest, which has those of all its files
    run: str
    data: str
    data_sha256: str
    plan: Plan
    seed: int
    faiss: str
    search: dict[str, int]  # the setting that reaches the target of recall
    recall: Recall | None
    seconds: dict[str, float]  # what each step took
    files: dict[str, IndexFile]


def check_file(path: Path, file: IndexFile, verify: bool = True) -> None:
    """Refuses a file that is missing, of another size, or has another checksum (RetrievalError)."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise RetrievalError(f"{path} cannot be read: {error.strerror}; {AGAIN}") from None
    if size != file.bytes:
        raise RetrievalError(
            f"{path} has {size:,} bytes; expected {file.bytes:,}: it is truncated or foreign; "
            f"bring it back, or {AGAIN}"
        )
    if verify and (found := sha256(path)) != file.sha256:
        raise RetrievalError(
            f"{path} has the checksum {found[:12]}; expected {file.sha256[:12]}: it was altered; "
            f"bring it back, or {AGAIN}"
        )
