"""Complementary labels from the protocol to the loss, and the faults of labels that are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.data.options import Protocol
from heron.data.streams import complementary
from heron.experiment.config import parse_config
from heron.losses.momentum import MomentumQueue
from heron.losses.pico import Disambiguation
from heron.training.checkpoint import complete_checkpoints
from tests import ranks
from tests.experiments import frames, merge
from tests.test_pretrain import losses, weights

VIEW = {"stored": "view1", "augment": ["noise"]}
MULCO: dict[str, Any] = {
    "data": {
        "protocol": {"complementary": 2},
        "batch": {"unlabelled": 0},
        "views": [VIEW, VIEW],
        "epoch": "labelled",
    },
    "model": {"shared_encoder": True, "shared_projector": True, "classify_on": "first_view"},
    "objective": {
        "cross_entropy": None,
        "weighted_unsupervised": None,
        "weighted_supervised": None,
        "ub_log": {"weight": 1.0},
        "mulco": {"weight": 1.0, "queue": 25, "momentum": 0.9, "tau": 0.2},
    },
}
PICO: dict[str, Any] = {name: None for name in MULCO["objective"]} | {"pico": {"queue": 25}}


def mulco(folder: str, name: str, steps: int, resume: str = "never") -> list[float]:
    changes = MULCO | {
        "train": {"steps": steps, "save_every_epochs": 1, "epochs": 3},
        "run": {"dir": f"{folder}/{name}", "resume": resume},
    }
    pretrain(frames(Path(folder), name, **changes))
    return [row["loss"] for row in losses(Path(folder) / name)]


def test_sets_are_drawn_by_row_and_never_hold_the_class() -> None:
    rows = np.arange(4000)
    y = np.eye(5, dtype=np.float32)[rows % 5]
    drawn = complementary(y, rows, 2, Protocol(seed=1, fold=2))
    assert (drawn.sum(1) == 2).all()
    assert not (drawn * y).any()
    some = np.array([7, 3999, 0])
    assert (complementary(y[some], some, 2, Protocol(seed=1, fold=2)) == drawn[some]).all()
    assert (complementary(y, rows, 2, Protocol(seed=1, fold=3)) != drawn).any()
    share = drawn[y[:, 0] == 1].mean(0)  # of class 0, each other class half the time
    assert share[1:] == pytest.approx([0.5] * 4, abs=0.06)


def test_mulco_in_two_parts_ends_with_the_bits_of_one(tmp_path: Path) -> None:
    """The momentum encoder and the queue are in the checkpoint."""
    whole = mulco(str(tmp_path), "whole", 14)
    mulco(str(tmp_path), "parts", 9)
    again = mulco(str(tmp_path), "parts", 14, resume="auto")
    assert again[9:] == whole[9:]
    for kind in ("model", "memories"):
        one, two = (weights(tmp_path / name, kind) for name in ("whole", "parts"))
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert len(complete_checkpoints(tmp_path / "parts" / "checkpoints")) == 2


def test_mulco_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    (one,) = ranks.run(1, mulco, str(tmp_path), "one", 5)
    for result in ranks.run(2, mulco, str(tmp_path), "two", 5):
        assert result == pytest.approx(one, abs=1e-5)


def trained_pico(folder: str, name: str) -> list[float]:
    MULCO["objective"] = PICO
    return mulco(folder, name, 14)


def test_pico_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    """Past its warm-up; the state of both runs is the same, too."""
    (one,) = ranks.run(1, trained_pico, str(tmp_path), "one")
    for result in ranks.run(2, trained_pico, str(tmp_path), "two"):
        assert result == pytest.approx(one, rel=1e-5, abs=1e-5)
    alone, shared = (weights(tmp_path / name, "memories") for name in ("one", "two"))
    for key in alone:
        torch.testing.assert_close(shared[key], alone[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.fixture
def pico(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of this file train PiCO; its warm-up ends within them."""
    options = {"queue": 25, "momentum": 0.9, "tau": 0.2, "gamma": 0.9, "phi_epochs": 3}
    monkeypatch.setitem(MULCO, "objective", PICO | {"pico": options})


def test_two_terms_keep_a_queue_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = MULCO["objective"] | {"pico": {"queue": 30, "momentum": 0.5}}
    monkeypatch.setitem(MULCO, "objective", both)
    whole = mulco(str(tmp_path), "whole", 5)
    mulco(str(tmp_path), "parts", 3)
    assert mulco(str(tmp_path), "parts", 5, resume="auto")[3:] == whole[3:]
    kept = weights(tmp_path / "whole", "memories")
    assert (len(kept["mulco/keys"]), len(kept["pico/keys"])) == (25, 30)
    names = [name for name in kept if name.startswith("mulco/encoder") and name.endswith("weight")]
    assert any(not torch.equal(kept[n], kept[n.replace("mulco", "pico")]) for n in names)


def test_pico_in_two_parts_ends_with_the_bits_of_one(tmp_path: Path, pico: None) -> None:
    """Prototypes and pseudo-targets are in the checkpoint, too."""
    whole = mulco(str(tmp_path), "whole", 14)
    mulco(str(tmp_path), "parts", 9)
    assert mulco(str(tmp_path), "parts", 14, resume="auto")[9:] == whole[9:]
    one, two = (weights(tmp_path / name, "memories") for name in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert one["pico/disambiguation.prototypes"].any()
    targets = one["pico/disambiguation.targets"]
    assert targets.shape == (60, 4)
    assert ((targets > 0).sum(1) <= 2).all()
    assert (targets.max(1).values > 0.5).any()  # some have moved from uniform


def test_pico_s_phi_falls_linearly_and_then_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a warm-up of one epoch of six steps, from .9 to .5 over two epochs from the start."""
    options = {"queue": 25, "phi_start": 0.9, "phi_end": 0.5, "phi_epochs": 2, "warmup_epochs": 1}
    monkeypatch.setitem(MULCO, "objective", PICO | {"pico": options})
    real, given = Disambiguation.update_targets, list[float]()

    def watch(labels: Disambiguation, *args: Any) -> None:
        given.append(args[-1])
        real(labels, *args)

    monkeypatch.setattr(Disambiguation, "update_targets", watch)
    mulco(str(tmp_path), "phi", 15)
    steps = range(6, 15)  # of the warm-up, none
    assert given == pytest.approx([0.9 - 0.4 * min(t / 12, 1) for t in steps])
    assert given[-3:] == pytest.approx([0.5] * 3)


def test_the_queue_keeps_the_newest_in_order() -> None:
    memory = MomentumQueue.__new__(MomentumQueue)
    torch.nn.Module.__init__(memory)
    for name, value in (
        ("keys", torch.zeros(5, 1)),
        ("posteriors", torch.zeros(5, 2)),
        ("filled", torch.tensor(0)),
        ("position", torch.tensor(0)),
    ):
        memory.register_buffer(name, value)
    assert len(memory.queue()[0]) == 0
    for start in (0, 3, 6):
        keys = torch.arange(start, start + 3.0)[:, None]
        memory.enqueue(keys, keys.expand(3, 2))
    assert memory.queue()[0][:, 0].tolist() == [5, 6, 7, 8, 4]


def arrays(folder: Path, kind: str, labels: Any) -> Any:
    """A run on arrays of one's own, of 40 rows."""
    np.savez(folder / "mine.npz", view1=np.ones((40, 4), np.float32), labels=labels)
    source = {"source": "arrays", "npz": str(folder / "mine.npz"), "label_kind": kind}
    gone = {"train": None, "test": None, "classes": None, "seed": None}
    changes = MULCO["data"] | {
        "build": source | gone,
        "split": "all",
        "protocol": {"labelled": 20, "test": "unlabelled"},
    }
    return changes


WRONG = np.tile([1, 0, 1, 0], (40, 1)).astype(np.uint8)
TREE = np.stack([np.arange(40) % 2, np.arange(40) % 4], 1)
CROSSED = np.stack([np.arange(40) % 2, np.arange(40) % 3], 1)


@pytest.mark.parametrize(
    ("kind", "labels", "message"),
    [
        (
            "complementary",
            WRONG * 0,
            "has 0 complementary labels of 4 classes; it must have 1 to 3",
        ),
        ("complementary", WRONG * 0 + 1, "has 4 complementary labels of 4 classes"),
        ("hierarchical", CROSSED, "tree: '0' of level 2 is below '0' and below '1'"),
        ("hierarchical", TREE, "ub_log needs labels of kind complementary, but training sees hier"),
        ("multi_label", WRONG, "ub_log needs labels of kind complementary, but training sees mult"),
    ],
)
def test_labels_that_no_loss_can_use_are_refused(
    tmp_path: Path, kind: str, labels: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pretrain(frames(tmp_path, **MULCO | {"data": arrays(tmp_path, kind, labels)}))


def test_tested_rows_must_say_what_they_are(tmp_path: Path) -> None:
    """Stored complementary labels train; a row is scored when they leave one class."""
    config = MULCO | {"data": arrays(tmp_path, "complementary", WRONG)}
    with pytest.raises(
        ConfigError, match=" leave 2 classes, but rows that are tested or probed must"
    ):
        pretrain(frames(tmp_path, **config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": {"mulco": {"queue": 9}}},
            "queue must be at least 10, or the 10 labelled rows",
        ),
        ({"model": {"shared_projector": False}}, "set model.shared_encoder and model.shared_proj"),
        ({"data": {"protocol": {"complementary": 4}}}, ", so that a class is left, got 4"),
        ({"data": {"views": [VIEW]}}, "mulco needs at least 2 views, but data.views has 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    tree = merge(frames(tmp_path, **MULCO).model_dump(), changes)
    with pytest.raises(ConfigError, match=message):
        pretrain(parse_config(tree))
