"""Validation rows: drawn with every label in its share, never trained on, never tested."""

from pathlib import Path

import numpy as np
import pytest

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.data.dataset import build_data
from heron.data.options import Protocol
from heron.data.protocol import assign, stratified
from heron.data.reader import Reader
from heron.experiment.open_data import open_data
from heron.training.tracking import read_metrics
from tests.experiments import frames

KEPT = {"labelled": 60, "test": "test", "validation": 0.25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    build_data(frames(folder).data, progress=False)
    return folder


@pytest.mark.parametrize("count", [0, 1, 37, 120, 200])
def test_each_class_has_its_share_to_within_a_row(count: int) -> None:
    classes = np.random.default_rng(0).choice(5, 200, p=[0.5, 0.3, 0.1, 0.07, 0.03])
    y = np.eye(5, dtype=np.float32)[classes]
    chosen = stratified(y, count, np.random.default_rng(1))
    assert len(chosen) == count and (np.diff(chosen) > 0).all()
    shares = y.sum(0) * count / 200
    assert (np.abs(y[chosen].sum(0) - shares) <= 1).all()


def test_several_labels_are_nearer_their_share_than_by_chance() -> None:
    draw = np.random.default_rng(0)
    y = (draw.random((150, 12)) < np.linspace(0.03, 0.6, 12)).astype(np.float32)
    shares = y.sum(0) / 5

    def off(chosen: np.ndarray) -> float:
        return float(np.abs(y[chosen].sum(0) - shares).sum())

    by_chance = [off(draw.permutation(150)[:30]) for _ in range(50)]
    chosen = stratified(y, 30, draw)
    assert len(chosen) == 30 and off(chosen) < np.quantile(by_chance, 0.25)
    rarest = np.argsort(shares)[:4]
    assert (np.abs(y[chosen].sum(0) - shares)[rarest] <= 1).all()
    assert len(stratified(np.zeros((9, 2), np.float32), 4, draw)) == 4  # no row has a label
    assert not len(stratified(np.zeros((0, 2), np.float32), 0, draw))


def test_validation_rows_have_no_other_role(folder: Path) -> None:
    reader = Reader(folder / "frames")
    for given in ({"labelled": 60}, {"folds": 5}, {"labelled": 60, "test": "train"}):
        before = assign(reader, "train", Protocol(**given))
        roles = assign(reader, "train", Protocol(**given, validation=0.25))
        kept = set(roles.validation)
        assert len(kept) == 15 and kept < set(before.labelled)
        assert kept.isdisjoint([*roles.labelled, *roles.unlabelled, *roles.test])
        assert set(roles.labelled) | kept == set(before.labelled)
        assert np.array_equal(roles.unlabelled, before.unlabelled)
        assert set(before.test) - set(roles.test) <= kept
    none = assign(reader, "train", Protocol(labelled=60))
    assert none.validation.size == 0 and len(none.labelled) == 60


def test_labelled_rows_are_stratified_where_that_is_asked_for(folder: Path) -> None:
    reader = Reader(folder / "frames")
    classes = np.bincount(reader.labels(reader.split_rows("train")), minlength=4)
    roles = assign(reader, "train", Protocol(labelled=60, stratified=True, test="test"))
    found = np.bincount(reader.labels(roles.labelled), minlength=4)
    assert (np.abs(found - classes * 60 / 300) <= 1).all()
    again = assign(reader, "train", Protocol(labelled=60, stratified=True, fold=1, test="test"))
    assert set(again.labelled) != set(roles.labelled)


def test_shares_that_leave_nothing_are_refused(folder: Path) -> None:
    reader = Reader(folder / "frames")
    for share, told in [
        (0.01, "which is 0"),
        (0.99, "which is 10"),
    ]:
        with pytest.raises(
            ConfigError, match=f"of 10 labelled rows, {told}; it must leave at least 1"
        ):
            assign(reader, "train", Protocol(labelled=10, validation=share))


def test_a_run_reads_the_tests_at_its_end_alone(folder: Path) -> None:
    data = {"protocol": KEPT, "epoch": "labelled"}
    often = {"evaluate_every_epochs": 1, "steps": 5, "epochs": 3}
    config = frames(folder, "both", data=data, train=often)
    trained = open_data(config).roles
    assert len(trained.labelled) == 45 and len(trained.validation) == 15
    result = pretrain(config)
    lines = [row for row in read_metrics(folder / "both" / "metrics.jsonl") if "loss" not in row]
    assert [sorted({key.split("/")[0] for key in row} - {"step", "epoch"}) for row in lines] == [
        ["validation"],
        ["validation"],
        ["test"],
    ]
    assert result["validation_accuracy"] == lines[1]["validation/accuracy"]
    assert result["accuracy"] == lines[2]["test/accuracy"] != result["validation_accuracy"]

    unread = frames(folder, "unread", data=data, train=often, evaluate={"test": False})
    found = pretrain(unread)
    assert "accuracy" not in found
    assert found["validation_accuracy"] == result["validation_accuracy"]
    read = unread.model_copy(
        update={
            "evaluate": unread.evaluate.model_copy(update={"test": True}),
            "run": unread.run.model_copy(update={"resume": "auto"}),
        }
    )
    assert pretrain(read)["accuracy"] == result["accuracy"]  # no step was taken for it


def test_options_without_validation_rows_are_refused(folder: Path) -> None:
    for evaluate, told in [
        ({"test": False}, "evaluate.test is false, but data.protocol.validation is 0;"),
        (
            {"threshold": "fitted"},
            "evaluate.threshold is fitted, but data.protocol.validation is 0;",
        ),
    ]:
        with pytest.raises(ConfigError, match=told):
            frames(folder, evaluate=evaluate)
    both = {"test": False, "baselines": True}
    with pytest.raises(ConfigError, match=r"test is false, but evaluate\.baselines is true"):
        frames(folder, data={"protocol": KEPT}, evaluate=both)
