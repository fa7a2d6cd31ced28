"""Training on shards behind a URL is training on those shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from heron.api.job import pretrain
from heron.base.errors import ConfigError, ShardError
from heron.data.batches import batches
from heron.data.dataset import build_data
from heron.data.streams import ShardBatches
from heron.experiment.open_data import open_data
from tests.experiments import frames
from tests.shards.servers import Fault, Web, web


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """The frames of the small experiment, by HTTP."""
    folder = tmp_path_factory.mktemp("served")
    config = frames(folder)
    build_data(config.data, progress=False)
    with web({path.name: path.read_bytes() for path in (folder / "frames").iterdir()}) as server:
        yield server


def remote(served: Web, folder: Path, **data: Any) -> dict[str, Any]:
    return {
        "path": served.url,
        "build": None,
        "cache": {"dir": str(folder / "cache")},
        **data,
    }


def test_remote_batches_are_the_local_ones(served: Web, tmp_path: Path) -> None:
    local = frames(tmp_path)
    build_data(local.data, progress=False)
    served.faults["train-000000.tar"] = [Fault("status"), Fault("drop", after=1000)]
    config = frames(tmp_path, data=remote(served, tmp_path))
    expected = batches(ShardBatches(open_data(local), 3, 0, 1), 0, 5, 0)
    found = batches(ShardBatches(open_data(config), 3, 0, 1), 0, 5, 2)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.indices, other.indices)
        for name, view in one.stored.items():
            assert torch.equal(view, other.stored[name])
    assert not served.faults["train-000000.tar"]  # they happened, and were got over
    cached = {path.stat().st_size for path in (tmp_path / "cache").iterdir()}
    assert len(served.files["train-000000.tar"]) in cached


def test_a_run_on_a_url_ends_where_one_on_a_folder_does(served: Web, tmp_path: Path) -> None:
    local = pretrain(frames(tmp_path))
    far = pretrain(frames(tmp_path, "far", data=remote(served, tmp_path)))
    assert far["f1_weighted"] == local["f1_weighted"]
    tensors = [
        next((tmp_path / name / "checkpoints").glob("*/model.safetensors")).read_bytes()
        for name in ("run", "far")
    ]
    assert tensors[0] == tensors[1]


def test_a_shard_that_is_not_served_is_named_or_skipped(served: Web, tmp_path: Path) -> None:
    files = {name: data for name, data in served.files.items() if name != "test-000000.tar"}
    with web(files) as partial:
        config = frames(tmp_path, data=remote(partial, tmp_path))
        with pytest.raises(ShardError, match="but the manifest lists it"):
            pretrain(config)
        skip = remote(partial, tmp_path, on_error="skip", max_bad_fraction=0.9)
        result = pretrain(frames(tmp_path, "skip", data=skip))
    assert result["skipped_rows"] == 70


def test_a_cache_that_is_too_small_is_refused_before_the_first_step(
    served: Web, tmp_path: Path
) -> None:
    small = {"dir": str(tmp_path / "cache"), "bytes": 50_000}
    with pytest.raises(
        ConfigError, match="data\\.cache\\.bytes must be 583,680 or more, because up to"
    ):
        open_data(frames(tmp_path, data=remote(served, tmp_path, cache=small)))


def test_nothing_is_built_behind_a_url(tmp_path: Path) -> None:
    config = frames(tmp_path, data={"path": "s3://bucket/frames"})
    with pytest.raises(ConfigError, match="a folder, but data\\.path is s3://bucket/frames"):
        build_data(config.data)


def test_credentials_stay_out_of_the_configuration(tmp_path: Path) -> None:
    for data, what in [
        ({"storage_options": {"aws_secret": "x"}}, "aws_secret"),
        ({"storage_options": {"client_kwargs": {"aws_secret_access_key": "x"}}}, "aws_secret_acc"),
        ({"path": "https://me:x@host/frames"}, "the password in the URL"),
        ({"path": "simplecache::https://me:x@host/frames"}, "the password in the URL"),
        (
            {
                "path": "",
                "webdataset": {
                    "unlabelled": "pipe:curl -s https://me:x@host/a.tar",
                    "samples_per_epoch": 9,
                    "image": ["jpg"],
                },
            },
            "the password in the URL",
        ),
        ({"path": "https://host/frames?X-Amz-Signature=x"}, "X-Amz-Signature"),
        ({"path": "https://a.blob.core.windows.net/frames?sv=1&sig=x"}, "sig"),
        ({"storage_options": {"headers": {"Authorization": "Bearer x"}}}, "Authorization"),
        ({"storage_options": {"connection_string": "AccountKey=x"}}, "connection_string"),
        ({"storage_options": {"password": 1234}}, "password"),
        ({"storage_options": {"api_keys": "x"}}, "api_keys"),
        ({"storage_options": {"secret_keys": 1234}}, "secret_keys"),
    ]:
        with pytest.raises(ConfigError, match=f"{what}.* would be written into the run's folder"):
            frames(tmp_path, data=data)
    frames(tmp_path, data={"storage_options": {"token": "anon", "anon": True}})
    frames(tmp_path, data={"storage_options": {"max_keys": 1000, "headers": {"maxKeys": 9}}})
