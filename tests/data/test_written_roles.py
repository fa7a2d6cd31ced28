"""Roles that are written once are those that a run finds; training then reads no label first."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import plan
from heron.base.errors import ConfigError
from heron.cli.shards import write_protocol
from heron.data import dataset, open_shards
from heron.data.dataset import open_reader
from heron.data.options import Data
from heron.data.protocol import read_roles, write_roles
from heron.data.rows import ROLES
from heron.experiment.config import Config, dump_config
from heron.experiment.open_data import open_data
from heron.shards.build import build
from heron.shards.cache import LocalFile
from heron.shards.store import LocalStore
from heron.sources import make_source
from tests.experiments import frames


def built(folder: Path, **protocol: Any) -> Config:
    protocol = {"labelled": 50, "test": "unlabelled", "validation": 0.2} | protocol
    config = frames(folder, data={"protocol": protocol})
    source = make_source("frames", {"train": 700, "test": 90, "classes": 4, "seed": 2})
    build(source, Path(config.data.path), shard_rows=256, progress=False)
    return config


def written(config: Config, folder: Path) -> Config:
    streams = open_data(config)
    write_roles(streams.reader, streams.roles, config.data, folder)
    return config.model_copy(update={"data": config.data.model_copy(update={"roles": str(folder)})})


def test_they_are_those_that_a_run_finds(tmp_path: Path) -> None:
    config = built(tmp_path)
    other = written(config, tmp_path / "roles")
    found, expected = open_data(other), open_data(config)
    for role in ROLES:
        assert found.roles.rows_of(role).tolist() == expected.roles.rows_of(role).tolist()
    assert not found.reader.indexes._labels and not found.reader.indexes._indexes
    for one, two in ((found.labelled, expected.labelled), (found.unlabelled, expected.unlabelled)):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert [one.batch_rows(t).tolist() for t in range(9)] == [
                two.batch_rows(t).tolist() for t in range(9)
            ]
    assert found.skipped(1).count == expected.skipped(1).count


def test_a_batch_opens_the_shards_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other index is read and no other tar fetched before the first batch."""
    config, opened = built(tmp_path), list[str]()
    other, real = written(config, tmp_path / "roles"), LocalStore.local

    def local(store: LocalStore, name: str, size: int, sha256: str) -> LocalFile:
        opened.append(name)
        return real(store, name, size, sha256)

    monkeypatch.setattr(LocalStore, "local", local)
    found = open_data(other)
    assert found.unlabelled is not None and opened == []
    rows = found.unlabelled.batch_rows(0, slice(0, 1))
    found.reader.read("view1", rows)
    found.targets(rows)
    number = int(rows[0]) // 256
    names = f"train-{number:06d}.index.npz", f"train-{number:06d}.tar"
    assert sorted(opened) == sorted(names)


def test_the_benchmark_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        vars(dataset), "open_store", vars(dataset)["open_store"]
    )  # which it replaces
    found = plan.main(["--shards", "30", "--rows", "10000"])
    assert found["rows"] == 300_000 and found["files_opened"] == 0


def test_others_are_refused(tmp_path: Path) -> None:
    config = built(tmp_path)
    data = written(config, tmp_path / "roles").data
    reader, folder = open_reader(data), tmp_path / "roles"

    def refused(data: Data, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            read_roles(reader, data, folder)

    fold = data.protocol.model_copy(update={"fold": 1})
    refused(data.model_copy(update={"protocol": fold}), r"written for the protocol .*'fold': 0")
    marks = np.load(folder / "marks.npy", mmap_mode="r+")
    marks[3] ^= 1
    marks.flush()
    refused(data, r"marks.npy was altered: .*write them again with heron shards protocol")
    with pytest.raises(ConfigError, match=" already exists; choose a new folder"):
        written(config, folder)
    hidden = data.protocol.model_copy(update={"hide_views": {"view1": 0.5}})
    with pytest.raises(ConfigError, match="hides views or labels"):
        write_roles(reader, open_data(config).roles, data.model_copy(
            update={"protocol": hidden}), tmp_path / "new")  # fmt: skip


def test_labels_that_are_too_many_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = built(tmp_path)
    monkeypatch.setattr(open_shards, "MAX_REQUEST_BYTES", 700 * 8 - 1)
    with pytest.raises(
        ConfigError, match=": the protocol needs the labels of 700 rows, of 8 bytes each: "
    ):
        open_data(config)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    write_protocol(str(path), tmp_path / "roles")
    assert "790 rows of " in capsys.readouterr().out
    monkeypatch.setattr(open_shards, "MAX_REQUEST_BYTES", 700 * 8 - 1)
    update = {"roles": str(tmp_path / "roles")}
    open_data(config.model_copy(update={"data": config.data.model_copy(update=update)}))
