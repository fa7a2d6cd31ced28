"""What an index says of itself, and whether its files are those that were written."""

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.embeddings import Layer
from heron.pipeline.retrieval.kinds import Kind, Metric, Plan
from heron.pipeline.retrieval.recall import Recall
from heron.shards.manifest import MANIFEST, Record
from heron.shards.sources.base import sha256

FORMAT: Literal[1] = 1
AGAIN = "build the index again with `heron index`"


class File(Record):
    """A file of the index."""

    bytes: int
    sha256: str


class IndexManifest(Record):
    """What an index holds, how it was made, and how well it finds.

    `cosine` is the inner product of unit vectors: `normalised` says that the vectors were divided
    by their length, as queries are. `compared_by` is what FAISS computes: of unit vectors the
    distance gives the same order, cos = 1 - distance^2 / 2, and `ivfpq` finds far more by it: an
    inner product prefers codes that are longer than the vector they stand for. `checkpoint` is the
    sha256 of the model's weights, `embeddings_sha256` that of the manifest of the embeddings, which
    has those of all its files. `search` is the setting that reaches the target of recall, `seconds`
    what each step took.
    """

    format: Literal[1]
    kind: Kind
    metric: Metric
    normalised: bool
    compared_by: Literal["inner_product", "euclidean"]
    layer: Layer
    dim: int
    count: int
    checkpoint: str
    embeddings: str
    embeddings_sha256: str
    run: str
    data: str
    data_sha256: str
    plan: Plan
    seed: int
    faiss: str
    search: dict[str, int]
    recall: Recall | None
    seconds: dict[str, float]
    files: dict[str, File]


def load_index_manifest(folder: Path) -> IndexManifest:
    """Read the manifest of an index.

    Raises:
        RetrievalError: there is none, or it is of another format.
    """
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise RetrievalError(
            f"{path} cannot be read: {error.strerror}; expected an index; give a folder that "
            "`heron index` wrote"
        ) from None
    except ValueError as error:
        raise RetrievalError(f"{path} is no JSON: {error}; expected a manifest; {AGAIN}") from None
    try:
        return IndexManifest.model_validate(value)
    except ValidationError as error:
        fault = error.errors()[0]
        version = value.get("format") if isinstance(value, dict) else None
        raise RetrievalError(
            f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}; found format "
            f"{version!r}, expected an index of format {FORMAT}; {AGAIN}"
        ) from None


def check_file(path: Path, file: File, verify: bool = True) -> None:
    """Refuse a file that is not what was written.

    Raises:
        RetrievalError: it is missing, of another size, or has another checksum.
    """
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
