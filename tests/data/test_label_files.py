"""Samples left out of training, and labels that count less, by files; and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from heron.api.job import pretrain
from heron.base.errors import CheckpointError, ConfigError
from heron.data.dataset import load_or_assign_roles, open_reader
from heron.data.label_files import LabelWeights
from heron.data.options import Data
from heron.data.protocol import write_roles
from heron.data.reader import Reader
from heron.data.streams import ShardBatches
from heron.experiment.config import Config, parse_config
from heron.experiment.open_data import open_data
from heron.shards.build import build
from heron.sources import make_source
from heron.training.tracking import read_metrics
from tests import ranks
from tests.experiments import merge

RANDOM = np.random.default_rng(0)
ROWS, LABELS = 200, 4
TREE: dict[str, Any] = {
    "data": {
        "split": "all",
        "protocol": {"labelled": 80, "validation": 0.2},
        "batch": {"labelled": 21, "unlabelled": 30},
        "views": [{"stored": "v1"}, {"stored": "v2"}],
        "standardise": True,
    },
    "model": {"encoder": {"kind": "mlp", "widths": [8]}, "projection_width": 4},
    "objective": {"bce": {}, "weighted_unsupervised": {}, "weighted_supervised": {}},
    "train": {"epochs": 3, "cpu_threads": 1, "precision": "fp64"},
    "evaluate": {"knn": 5},
    "tracking": [],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two views and four labels of 200 rows, and a file of weights of half of them."""
    path = tmp_path_factory.mktemp("label-files")
    labels = RANDOM.integers(0, 2, (ROWS, LABELS))
    hidden = labels @ RANDOM.normal(size=(LABELS, 6))
    views: dict[str, Any] = {
        name: (hidden + RANDOM.normal(size=(ROWS, 6))).astype("f4") for name in ("v1", "v2")
    }
    np.savez(path / "mine.npz", labels=labels, **views)
    build(make_source("arrays", {"npz": path / "mine.npz"}), path / "mine", progress=False)
    names = Reader(path / "mine").manifest.labels.names
    table = pd.DataFrame(
        [
            {"key": key, "label": name, "suspicion": RANDOM.uniform()}
            for key in keys(path, np.arange(0, ROWS, 2))
            for name in names
        ]
    )
    table.to_parquet(path / "labels.parquet", index=False)
    return path


def keys(folder: Path, rows: Any) -> list[str]:
    return Reader(folder / "mine").sample_keys(np.asarray(rows))


def experiment(folder: Path, out: Path, **changes: Any) -> Config:
    own = {"data": {"path": str(folder / "mine")}, "run": {"dir": str(out)}}
    return parse_config(merge(merge(TREE, own), changes))


def listed(path: Path, lines: list[str], header: str = "key,decision") -> str:
    path.write_text("\n".join([header, *lines, ""]))
    return str(path)


def test_left_out_rows_are_not_trained_on_but_tested(folder: Path, tmp_path: Path) -> None:
    plain = open_data(experiment(folder, tmp_path)).roles
    some = [*plain.labelled[:3], *plain.validation[:2], *plain.unlabelled[:4]]
    trained = ("labelled", "unlabelled")
    decided = ["wrong", "unknown", "drop", "drop", "wrong", "drop", "drop", "drop", "drop"]
    lines = [f"{key},{d}" for key, d in zip(keys(folder, some), decided, strict=True)]
    kept = [f"{key},{d}" for key in keys(folder, plain.labelled[5:7]) for d in ("right",)]
    path = listed(tmp_path / "d.csv", [*lines, *kept, f"{keys(folder, [plain.labelled[9]])[0]},"])
    protocol = {"data": {"protocol": {"leave_out": path}}}
    roles = open_data(experiment(folder, tmp_path, **protocol)).roles
    for role in ("labelled", "unlabelled", "test", "validation"):
        left = some if role in trained else []
        expected = [row for row in plain.rows_of(role).tolist() if row not in left]
        assert roles.rows_of(role).tolist() == expected, role
    for header in ("key,Decision", " Key, decision ", "KEY,decision"):  # not all are left out
        listed(tmp_path / "h.csv", [*lines, *kept], header)
        other = {"data": {"protocol": {"leave_out": str(tmp_path / "h.csv")}}}
        again = open_data(experiment(folder, tmp_path, **other)).roles
        assert again.labelled.tolist() == roles.labelled.tolist()
    bare = listed(tmp_path / "k.csv", keys(folder, some), "key")
    protocol["data"]["protocol"]["leave_out"] = bare
    roles = open_data(experiment(folder, tmp_path, **protocol)).roles
    assert roles.labelled.tolist() == plain.labelled[3:].tolist()


def test_weights_of_a_batch_are_those_of_the_file(folder: Path, tmp_path: Path) -> None:
    table = pd.read_parquet(folder / "labels.parquet")
    expected = np.ones((ROWS, LABELS), np.float32)
    names = Reader(folder / "mine").manifest.labels.names
    row_of = {key: row for row, key in enumerate(keys(folder, np.arange(ROWS)))}
    for line in table.itertuples():
        place = row_of[line.key], names.index(line.label)
        expected[place] = 1 - np.float32(line.suspicion)
    weights = {"data": {"protocol": {"label_weights": str(folder / "labels.parquet")}}}
    streams = open_data(experiment(folder, tmp_path, **weights))
    source = ShardBatches(streams, 0, 0, 1)
    buffer = {name: np.empty(*spec) for name, spec in source.specs().items()}
    for t in range(3):
        source.load(t, buffer)
        rows = buffer["indices"][:21]
        np.testing.assert_array_equal(buffer["label_weights"], expected[rows])
    path = tmp_path / "w.csv"
    table.assign(weight=1 - table.suspicion).drop(columns="suspicion").to_csv(path, index=False)
    again = LabelWeights.read(streams.reader, path)
    np.testing.assert_allclose(again.of(np.arange(ROWS)), expected, atol=1e-6)
    whole = listed(path, [f"{key},0.25" for key in keys(folder, [7, 3])], "key,weight")
    found = LabelWeights.read(streams.reader, Path(whole)).of(np.array([3, 4, 7]))
    assert found.tolist() == [[0.25] * 4, [1] * 4, [0.25] * 4]


def losses(folder: Path, out: Path, **protocol: str) -> list[float]:
    """Trains; the loss of each step that was written down."""
    pretrain(experiment(folder, out, data={"protocol": protocol}))
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]


def test_two_processes_train_what_one_does(folder: Path, tmp_path: Path) -> None:
    weights = {"label_weights": str(folder / "labels.parquet")}
    (one,) = ranks.run(1, partial(losses, folder, tmp_path / "one", **weights))
    ranks.run(2, partial(losses, folder, tmp_path / "two", **weights))
    two = [row["loss"] for row in read_metrics(tmp_path / "two" / "metrics.jsonl") if "loss" in row]
    assert len(one) > 1 and one == pytest.approx(two, rel=1e-9)
    assert abs(one[0] - losses(folder, tmp_path / "plain")[0]) > 1e-3


def test_a_changed_file_does_not_resume(folder: Path, tmp_path: Path) -> None:
    path = listed(tmp_path / "k.csv", keys(folder, [1]), "key")
    protocol = {"data": {"protocol": {"leave_out": path}}}
    short = experiment(folder, tmp_path / "run", **protocol, train={"steps": 3})
    pretrain(short)
    longer = experiment(
        folder, tmp_path / "run", **protocol, train={"epochs": 4}, run={"resume": "force"}
    )
    listed(Path(path), keys(folder, [1, 2]), "key")
    with pytest.raises(CheckpointError, match=r"was trained with other contents of data.protocol"):
        pretrain(longer)
    moved = listed(tmp_path / "moved.csv", keys(folder, [1]), "key")  # the content is what counts
    again = {"data": {"protocol": {"leave_out": moved}}, "run": {"resume": "auto"}}
    assert pretrain(experiment(folder, tmp_path / "run", **again, train={"epochs": 4}))["steps"] > 3


def test_written_roles_belong_to_the_content_of_the_file(folder: Path, tmp_path: Path) -> None:
    path = listed(tmp_path / "k.csv", keys(folder, [1]), "key")
    config = experiment(folder, tmp_path / "run", data={"protocol": {"leave_out": path}})
    reader = open_reader(config.data)
    write_roles(reader, load_or_assign_roles(reader, config.data), config.data, tmp_path / "roles")
    data = config.data.model_copy(update={"roles": str(tmp_path / "roles")})
    assert load_or_assign_roles(reader, data).count("test")
    listed(Path(path), keys(folder, [1, 2]), "key")
    with pytest.raises(ConfigError, match="was written for the protocol"):
        load_or_assign_roles(reader, data)


def test_weights_that_no_term_reads_are_refused(folder: Path, tmp_path: Path) -> None:
    weights = {"label_weights": str(folder / "labels.parquet")}
    tree = {"data": {"protocol": weights}, "objective": {"bce": None, "weighted_supervised": None}}
    with pytest.raises(
        ConfigError, match="none of weighted_unsupervised counts them; add weighted"
    ):
        pretrain(experiment(folder, tmp_path / "run", **tree))


@pytest.mark.parametrize(
    ("key", "lines", "said"),
    [
        ("leave_out", ["key"], "names no sample to leave out; fill in its column 'decision'"),
        ("leave_out", ["key,decision", "K,"], "names no sample to leave out; fill in its column"),
        ("leave_out", ["key,decision", "K,maybe"], "line 2: the decision must be one of right, w"),
        ("leave_out", ["key", "nobody"], "has no sample 'nobody' (1 of 1 lines); pass a file on"),
        ("leave_out", ["name", "K"], "has no column 'key'"),
        ("leave_out", ["key,decision", "K"], "line 2 has 1 cells, the first 2; pass a CSV file"),
        ("leave_out", None, "No such file"),
        ("label_weights", ["key,weight", "K,1.5"], "a number must be 0 to 1, got 1.5 of sample"),
        ("label_weights", ["key,weight", "K,1", "K,0"], "has two lines on a label of sample"),
        ("label_weights", ["key,weight", "K,nan"], "a number must be 0 to 1, got nan of sample"),
        ("label_weights", ["key,weight", "K,much"], "column 'weight' must have a number from 0"),
        ("label_weights", ["key,label,weight", "K,x,1"], "has no label 'x'; it has 0, 1, 2, 3"),
        ("label_weights", ["key", "K"], "has no column 'suspicion'; it must have key, label and"),
    ],
)
def test_what_is_refused(
    folder: Path, tmp_path: Path, key: str, lines: list[str] | None, said: str
) -> None:
    path = tmp_path / "file.csv"
    if lines is not None:
        path.write_text("\n".join(lines).replace("K", keys(folder, [0])[0]) + "\n")
    protocol = {"data": {"protocol": {key: str(path)}}}
    with pytest.raises(ConfigError) as refused:
        open_data(experiment(folder, tmp_path, **protocol))
    assert f"data.protocol.{key} {path}" in str(refused.value) and said in str(refused.value)


def test_another_data_set_takes_no_file(folder: Path) -> None:
    data = experiment(folder, folder / "run").data
    chosen = data.protocol.model_copy(update={"leave_out": "a", "label_weights": "b"})
    other = Data.for_data_set(data.model_copy(update={"protocol": chosen}), "elsewhere")
    assert other.protocol.leave_out is None and other.protocol.label_weights is None
