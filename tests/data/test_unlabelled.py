"""Rows without a label: drawn from, never labelled, never tested."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.data.options import Protocol
from heron.data.protocol import assign
from heron.data.reader import Reader
from heron.experiment.config import Config, parse_config
from heron.shards.build import build
from heron.sources import make_source


def folder(tmp_path: Path, labels: np.ndarray | None) -> Path:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "view1": random.normal(size=(60, 5)).astype("f4"),
        "view2": random.normal(size=(60, 3)).astype("f4"),
    }
    if labels is not None:
        arrays["labels"] = labels
    np.savez(tmp_path / "mine.npz", **arrays)
    build(make_source("arrays", {"npz": tmp_path / "mine.npz"}), tmp_path / "mine", progress=False)
    return tmp_path / "mine"


def config(path: Path, **changes: Any) -> Config:
    return parse_config(
        {
            "run": {"dir": str(path.parent / "run")},
            "data": {
                "path": str(path),
                "split": "all",
                "batch": {"labelled": 0, "unlabelled": 20},
                "views": [{"stored": "view1"}, {"stored": "view2"}],
            },
            "model": {"encoder": {"kind": "mlp", "widths": [8]}, "projection_width": 4},
            "objective": {"cmc": {}},
            "train": {"epochs": 2, "cpu_threads": 1},
            **changes,
        }
    )


def some_labels() -> np.ndarray:
    """Every third row is unlabelled."""
    return np.where(np.arange(60) % 3 == 0, -1, np.arange(60) % 4)


def test_roles_follow_the_labels(tmp_path: Path) -> None:
    reader = Reader(folder(tmp_path, some_labels()))
    known = np.flatnonzero(np.arange(60) % 3)
    for protocol in (Protocol(labelled=25), Protocol(folds=2, fold=1)):
        roles = assign(reader, "all", protocol)
        assert set(roles.labelled) <= set(known)
        assert set(roles.test) == set(known) - set(roles.labelled)
        assert set(roles.unlabelled) == set(range(60)) - set(roles.labelled)
    with pytest.raises(
        ConfigError, match="data\\.protocol\\.folds is 600, but no label vector occurs"
    ):
        assign(reader, "all", Protocol(folds=600))
    for protocol in (Protocol(), Protocol(labelled=40)):
        everything = assign(reader, "all", protocol)
        assert sorted(everything.labelled) == known.tolist()
        assert not len(everything.test)  # those that are left have no label
    with pytest.raises(
        ConfigError, match="41, but split 'all' has only 40 rows with a label, of 60"
    ):
        assign(reader, "all", Protocol(labelled=41))


def test_data_without_labels_is_trained_on_and_not_scored(tmp_path: Path) -> None:
    path = folder(tmp_path, None)
    assert Reader(path).manifest.labels.kind == "none"
    result = pretrain(config(path))
    assert result["steps"] == 6
    assert "accuracy" not in result
    with pytest.raises(ConfigError, match="folds is 3, but no row has a label"):
        assign(Reader(path), "all", Protocol(folds=3))
    assert (tmp_path / "run" / "report.html").exists()
    with pytest.raises(ConfigError, match="labelled is 5, but there are only 0 labelled rows;"):
        data = config(path).data.model_dump() | {"batch": {"labelled": 5}}
        pretrain(config(path, data=data), overwrite=True)


def test_data_with_some_labels_is_scored_on_those(tmp_path: Path) -> None:
    path = folder(tmp_path, some_labels())
    data = config(path).data.model_dump()
    data |= {"batch": {"labelled": 10, "unlabelled": 20}, "protocol": {"labelled": 20}}
    result = pretrain(config(path, data=data, objective={"cross_entropy": {}, "cmc": {}}))
    assert 0 < result["accuracy"] < 1
