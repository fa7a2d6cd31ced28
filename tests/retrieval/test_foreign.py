"""What an index of others names is neither fetched nor followed."""

from pathlib import Path

import pytest

from heron.base.artefact import MANIFEST, FileSum
from heron.base.errors import RetrievalError, ShardError
from heron.experiment.config import dump_config, load_config
from heron.retrieval.build import build_index
from heron.retrieval.query import Retriever
from tests.retrieval.made import clustered, unlabelled
from tests.sealed import seal

FACES = Path(__file__).parents[2] / "configs" / "faces.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An index."""
    stored = unlabelled(tmp_path / "e", clustered(100, 8))
    build_index(stored, tmp_path / "flat", kind="flat", queries=20, k=5, progress=False)
    return tmp_path / "flat"


def test_an_address_that_an_index_names_is_not_fetched(folder: Path) -> None:
    seal(folder / MANIFEST, data="http://127.0.0.1:9/data", embeddings="/none", run="/none")
    opened = Retriever.open(folder)
    message = "flat uses the data set http://127.0.0.1:9/data, which is only fetched if you name it"
    with pytest.raises(RetrievalError, match=message):
        opened.picture(0)
    with pytest.raises(RetrievalError, match=message):
        opened.by_file(b"any")


def test_options_of_a_run_that_an_index_names_lead_nowhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may name an endpoint, which would be sent the user's credentials."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    endpoint = "data.storage_options={endpoint_url: 'http://127.0.0.1:9'}"
    (foreign / "config.yaml").write_text(dump_config(load_config(FACES, [endpoint])))
    (foreign / "model.safetensors").write_bytes(b"weights")
    weights = FileSum.of(foreign / "model.safetensors").sha256
    seal(folder / MANIFEST, run=str(foreign), checkpoint=weights)
    opened = Retriever.open(folder, data="s3://mine/x")
    message = "s3://mine/x with data.* endpoint_url, which could send your credentials elsewhere"
    with pytest.raises(RetrievalError, match=message):
        opened.picture(0)
    with pytest.raises(RetrievalError, match=message):
        opened.by_file(b"any")

    def reached(*_: object) -> None:
        raise ShardError("the address was reached")

    monkeypatch.setattr("heron.retrieval.pictures.open_store", reached)
    with pytest.raises(ShardError, match="the address was reached"):
        Retriever.open(folder, run=foreign, data="s3://mine/x").picture(0)
    with pytest.raises(ShardError, match="here/manifest.json"):  # a folder, which is looked into
        Retriever.open(folder, data=tmp_path / "here").picture(0)
