"""Batches of several data sets by their weights, and of all classes in turn."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.api.job import pretrain
from heron.base.errors import ConfigError, ShardError
from heron.cli.main import main
from heron.data.plan import apportion
from heron.data.random_keys import rng_keys
from heron.data.streams import ShardBatches
from heron.experiment.config import Config, parse_config
from heron.experiment.open_data import open_data
from heron.shards.build import build
from heron.sources import make_source
from heron.training.tracking import read_metrics

ROWS = {"large": 300, "small": 20}


def made(folder: Path, **changes: Any) -> None:
    """Two data sets: what a vector begins with is the data set and the number of the row."""
    for number, (name, rows) in enumerate(ROWS.items()):
        draw = np.random.default_rng(number)
        x = np.stack([np.full(rows, number), np.arange(rows), draw.normal(size=rows)], 1)
        labels = (np.arange(rows) % 10 == 0) + 2 * (np.arange(rows) % 4 == 0)
        arrays = {"x": x, "labels": np.minimum(labels, 2)}
        np.savez(folder / f"{name}.npz", **(arrays | changes.get(name, {})))
        build(make_source("arrays", {"npz": folder / f"{name}.npz"}), folder / name, progress=False)


def config(folder: Path, **data: Any) -> Config:
    sources = [{"path": str(folder / "large"), "weight": 3}, {"path": str(folder / "small")}]
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "data": {
            "sources": sources,
            "split": "all",
            "protocol": {"labelled": 240},
            "batch": {"labelled": 12},
            "views": [{"stored": "x", "augment": ["noise"]}, {"stored": "x"}],
            "standardise": True,
        }
        | data,
        "model": {"encoder": {"kind": "mlp", "widths": [6]}, "projection_width": 4},
        "objective": {"supcon": {}},
        "train": {
            "steps": 6,
            "epochs": 9,
            "cpu_threads": 1,
            "save_every_steps": 3,
        },
        "tracking": [],
    }
    return parse_config(tree)


def test_a_batch_takes_its_share_of_each_source(tmp_path: Path) -> None:
    made(tmp_path)
    streams = open_data(config(tmp_path))
    stream, reader = streams.labelled, streams.reader
    assert stream is not None and stream.batch == 12
    assert "a batch takes of its sources 9 of" in streams.describe()[0]
    small = stream.streams[1].rows  # type: ignore[union-attr]
    seen: dict[int, list[int]] = {}
    for t in range(4 * small // 3):
        rows = stream.batch_rows(t)
        source = reader.read("x", rows)[:, 0]
        assert (source == 1).sum() == 3 and len(set(rows.tolist())) == 12
        for half in (slice(0, 6), slice(6, 12)):  # spread over the processes
            assert 1 <= (source[half] == 1).sum() <= 2
        for row, turn in zip(
            rows[source == 1].tolist(), stream.passes(t)[source == 1], strict=True
        ):
            seen.setdefault(int(turn), []).append(row)
    passes = [sorted(rows) for rows in seen.values()]
    assert len(passes) == 4 + (small % 3 > 0)
    assert all(len(set(rows)) == len(rows) for rows in passes)
    again = open_data(config(tmp_path)).labelled
    assert again is not None and again.batch_rows(7).tolist() == stream.batch_rows(7).tolist()

    views = reader.manifest.views[0]
    assert views.mean is not None and views.std is not None
    assert views.mean[0] == pytest.approx(0.25) and views.std[0] == pytest.approx(0.1875**0.5)
    assert len(set(reader.sample_keys(np.arange(320)))) == 320
    reader.verify_payloads()


@pytest.mark.parametrize("balance", [None, "labels"])
def test_processes_share_a_batch_and_its_random_numbers(tmp_path: Path, balance: Any) -> None:
    made(tmp_path)
    streams = open_data(config(tmp_path, balance=balance))
    stream = streams.labelled
    assert stream is not None
    for t in (0, 5, 40):
        parts: list[Any] = []
        for rank in range(3):
            batches = ShardBatches(streams, 0, rank, 3)
            buffer = {name: np.empty(*spec) for name, spec in batches.specs().items()}
            batches.load(t, buffer)
            parts.append(buffer)
        rows = np.concatenate([part["indices"] for part in parts])
        np.testing.assert_array_equal(rows, stream.batch_rows(t))
        keys = np.concatenate([part["rng_keys"] for part in parts])
        np.testing.assert_array_equal(keys, rng_keys(0, stream.passes(t), rows))
        assert len(set(keys.tolist())) == 12  # a row that comes twice is not augmented alike


def test_classes_in_turn(tmp_path: Path) -> None:
    made(tmp_path)
    path = str(tmp_path / "large")
    streams = open_data(config(tmp_path, sources=None, path=path, balance="labels"))
    stream, reader = streams.labelled, streams.reader
    assert stream is not None and "3 classes of" in streams.describe()[0]
    labels = np.concatenate([reader.labels(stream.batch_rows(t)) for t in range(30)])
    assert np.bincount(labels).tolist() == [120] * 3
    rare = [
        row
        for t in range(30)
        for row in stream.batch_rows(t)
        if reader.labels(np.array([row])) == 1
    ]
    counts = np.unique(rare, return_counts=True)[1]
    assert counts.max() - counts.min() <= 1  # each as often as any other of its class


def test_labels_in_turn(tmp_path: Path) -> None:
    sets = np.zeros((300, 3), int)
    sets[:, 0], sets[::7, 1], sets[::50] = np.arange(300) % 3 > 0, 1, 0
    made(tmp_path, large={"labels": sets}, small={"labels": sets[:20]})
    streams = open_data(config(tmp_path, balance="labels"))
    stream, reader = streams.labelled, streams.reader
    assert stream is not None
    drawn = np.concatenate([stream.batch_rows(t) for t in range(40)])
    large = drawn[reader.read("x", drawn)[:, 0] == 0]
    assert len(large) == 360  # the two labels that rows have, and rows of none, in turn
    assert (reader.targets(large)[:, 1] == 1).sum() >= 120
    assert (reader.targets(large).sum(1) == 0).sum() == 120


def test_shares_of_a_batch() -> None:
    assert apportion(10, [1, 1, 1], "labelled") == [4, 3, 3]
    assert apportion(256, [0.5, 0.3, 0.2], "labelled") == [128, 77, 51]
    with pytest.raises(
        ConfigError, match="data\\.sources\\.1 gets no row of a batch: its weight 0\\.01"
    ):
        apportion(10, [1, 0.01], "labelled")


def test_a_run_on_a_mixture_goes_on_where_it_stopped(tmp_path: Path) -> None:
    made(tmp_path)
    whole = config(tmp_path, balance="labels")
    pretrain(whole)
    tree = whole.model_dump(mode="json")
    tree["run"]["dir"] = str(tmp_path / "two")
    tree["train"]["steps"] = 3
    pretrain(parse_config(tree))
    tree["train"]["steps"] = 6
    tree["run"]["resume"] = "auto"
    pretrain(parse_config(tree))
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "two")]
    straight, resumed = ([row["loss"] for row in run if "loss" in row] for run in rows)
    assert len(straight) > 1 and straight == resumed
    tree["data"]["sources"][0]["weight"] = 2.0
    with pytest.raises(Exception, match="data"):
        pretrain(parse_config(tree))
    assert main(["embed", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    words = ["--out", str(tmp_path / "one"), f"data.path={tmp_path / 'small'}"]
    assert main(["embed", str(tmp_path / "run"), *words]) == 0


@pytest.mark.parametrize(
    ("changes", "data", "message"),
    [
        (
            {"small": {"x": np.zeros((20, 4))}},
            {},
            "its views are x (vector 4, x.npy)",
        ),
        ({"small": {"labels": np.arange(20) % 2}}, {}, "its labels are multi_class of 0, 1"),
        (
            {},
            {"batch": {"labelled": "all"}},
            "data.batch.labelled is 'all', but data.sources samples rows",
        ),
        (
            {},
            {"batch": {"labelled": 180}},
            " labelled rows in split 'all', but every batch takes 45;",
        ),
    ],
)
def test_data_that_cannot_be_mixed(tmp_path: Path, changes: Any, data: Any, message: str) -> None:
    made(tmp_path, **changes)
    with pytest.raises((ConfigError, ShardError)) as fault:
        open_data(config(tmp_path, **data))
    assert message in str(fault.value)


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(
        ConfigError, match="sources and path cannot both be set; set one of them to null"
    ):
        config(tmp_path, path="data")
    assert config(tmp_path, path=None).data.path == ""  # `data.path=null` of an override
    with pytest.raises(ConfigError, match="has no shards; build them"):
        sources = [{"path": str(tmp_path / "none")}]
        config(tmp_path, sources=sources).data.refuse_missing("build them")
    text = config(tmp_path, balance="labels").model_dump(mode="json")
    text["negatives"]["mine"] = 3
    with pytest.raises(
        ConfigError, match="may repeat a labelled row in a batch, so it does not work with n"
    ):
        open_data(parse_config(text))
