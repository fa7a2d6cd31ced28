"""Mined hard negatives: which rows they are, and that batches stay what the plan says."""

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from heron.api import job as story
from heron.api.job import pretrain
from heron.base.errors import CheckpointError, ConfigError, ShardError
from heron.data.batches import batches
from heron.data.dataset import build_data
from heron.data.options import Negatives
from heron.data.plan import Stream
from heron.data.rows import Listed
from heron.data.streams import MinedStream, ShardBatches, table_name
from heron.experiment.config import Config
from heron.experiment.open_data import open_data
from heron.training import mining as miner_of
from heron.training.mining import SEARCHED_PER_HARD, mine
from heron.training.tracking import read_metrics
from tests import ranks
from tests.experiments import frames

MINING: dict[str, Any] = {"mine": 6, "every_steps": 2, "nearest": 4}
LONG: dict[str, Any] = {"epochs": 3, "steps": 9}


def stream(folder: Path, mine: int = 5, every: int = 2) -> MinedStream:
    rows = Listed.from_shards([np.arange(100, 120), np.arange(130, 150)])
    base = Stream("labelled", rows, 8, 0, 4, 16)
    return MinedStream(base, Negatives(mine=mine, every_steps=every), folder, base.seed)


def by_loop(hidden: Any, y: Any, rows: Any, nearest: int, exclusive: bool) -> list[list[int]]:
    """The rule of `mine`, a row at a time."""
    unit = hidden.astype(float) / np.linalg.norm(hidden.astype(float), axis=1, keepdims=True)
    out = []
    for i in range(len(rows)):
        distances = [int((y[i] != y[j]).sum()) for j in range(len(rows))]
        least = 1 if exclusive else max(1, np.median(distances[:i] + distances[i + 1 :]))
        near = sorted((j for j in range(len(rows)) if j != i), key=lambda j: -unit[i] @ unit[j])
        far = [int(rows[j]) for j in near[: SEARCHED_PER_HARD * nearest] if distances[j] >= least][
            :nearest
        ]
        out.append(far + [-1] * (nearest - len(far)))
    return out


@pytest.mark.parametrize("exclusive", [False, True])
def test_mined_rows_are_the_nearest_with_far_labels(exclusive: bool) -> None:
    draw = np.random.default_rng(0)
    hidden = draw.normal(size=(60, 5)).astype(np.float32)
    y = draw.integers(0, 2, (60, 7)).astype(np.float32)
    if exclusive:
        y = np.eye(3, dtype=np.float32)[draw.integers(0, 3, 60)]
    rows = draw.permutation(1000)[:60]
    found = mine(hidden, y, rows, 3, exclusive)
    assert found.tolist() == by_loop(hidden, y, rows, 3, exclusive)


def test_rows_that_have_no_hard_negative_have_none() -> None:
    y = np.ones((4, 2), np.float32)
    assert (mine(np.eye(4, dtype=np.float32), y, np.arange(4), 2, True) == -1).all()


def test_a_batch_is_its_random_rows_and_then_others_each_once(tmp_path: Path) -> None:
    mined = stream(tmp_path)
    for t in range(4):  # before the first table
        rows = mined.batch_rows(t)
        assert rows[:8].tolist() == mined.base.batch_rows(t).tolist()
        assert len(set(rows.tolist())) == len(rows) == mined.batch == 13
        assert np.isin(rows, mined.candidates).all()
    assert stream(tmp_path).batch_rows(3).tolist() == mined.batch_rows(3).tolist()


def test_mined_rows_come_from_the_table_of_the_period_before(tmp_path: Path) -> None:
    mined = stream(tmp_path)
    table = np.full((40, 3), -1)
    table[:, 0] = mined.candidates[(np.arange(40) + 7) % 40]
    np.save(tmp_path / table_name(2), table)
    for t in (4, 5):
        rows = mined.batch_rows(t)
        allowed = set(table[np.searchsorted(mined.candidates, rows[:8]), 0]) - set(
            rows[:8].tolist()
        )
        chosen = rows[8 : 8 + min(5, len(allowed))]
        assert set(chosen.tolist()) <= allowed
        assert len(set(rows.tolist())) == 13  # filled up with random ones where they end


def test_a_batch_waits_for_its_table_while_the_run_goes_on(tmp_path: Path) -> None:
    waited = stream(tmp_path)
    written = tmp_path / "written"
    with written.open("wb") as file:
        np.save(file, np.full((40, 1), -1))
    # Whole at once, as the miner's are.
    late = threading.Timer(0.1, written.rename, (tmp_path / table_name(2),))
    late.start()
    assert len(waited.batch_rows(4)) == 13
    assert not late.is_alive()
    other = stream(tmp_path)
    threading.Timer(0.1, other.ended.set).start()
    with pytest.raises(ShardError, match=r"step-00000004.npy will not be read: the run has ended"):
        other.batch_rows(6)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mined")
    pretrain(frames(folder, negatives=MINING, train=LONG))
    return folder


def again(folder: Path, straight: Path, **changes: Any) -> Config:
    shards = {"path": str(straight / "frames"), **changes.pop("data", {})}
    return frames(folder, data=shards, negatives=MINING, train=LONG, **changes)


def assert_same(a: Path, b: Path, exact: bool = True) -> None:
    one, other = (load_file(x / "run/checkpoints/latest/model.safetensors") for x in (a, b))
    for name, value in one.items():
        if exact:
            assert torch.equal(value, other[name]), name
        else:
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_what_is_trained_on_is_mined(straight: Path) -> None:
    """Every mined row of a batch is in the table's row of one of its random rows."""
    config = frames(straight, negatives=MINING, train=LONG)
    streams = open_data(config)
    assert isinstance(streams.labelled, MinedStream)
    source = ShardBatches(streams, config.seed, 0, 1)
    # The tables that checkpoints may need are kept: those of the last two periods.
    assert sorted(p.name for p in (straight / "run/negatives").glob("*.npy")) == [
        table_name(6),
        table_name(8),
    ]
    table = np.load(straight / "run/negatives" / table_name(6))
    batch = next(batches(source, 8, 9, 0))
    rows = batch.indices.numpy()[:16]
    assert batch.labelled == 16
    candidates = table[np.searchsorted(streams.labelled.candidates, rows[:10])]
    assert np.isin(rows[10:], candidates).all()
    classes = streams.reader.targets(streams.labelled.candidates).argmax(1)
    for place, near in enumerate(table):
        far = classes[np.searchsorted(streams.labelled.candidates, near[near >= 0])]
        assert (far != classes[place]).all()


def test_reading_processes_change_nothing(straight: Path, tmp_path: Path) -> None:
    pretrain(again(tmp_path, straight, data={"workers": 1}))
    assert_same(straight, tmp_path)


def train_here(folder: str, straight: str) -> int:
    pretrain(again(Path(folder), Path(straight)))
    return 0


def test_two_processes_end_as_one(straight: Path, tmp_path: Path) -> None:
    ranks.run(2, train_here, str(tmp_path), str(straight))
    assert_same(straight, tmp_path, exact=False)


def test_a_run_in_parts_ends_as_one(straight: Path, tmp_path: Path) -> None:
    for steps in (3, 4, 7):
        part = again(tmp_path, straight, run={"resume": "auto"})
        part = part.model_copy(update={"train": part.train.model_copy(update={"steps": steps})})
        pretrain(part)
    stale = tmp_path / "run/negatives" / table_name(8)
    np.save(stale, np.zeros((60, 4), np.int64))  # of a run that was killed further on
    pretrain(again(tmp_path, straight, run={"resume": "auto"}))
    assert_same(straight, tmp_path)


def test_tables_of_an_earlier_run_are_set_aside(straight: Path, tmp_path: Path) -> None:
    for overwrite in (False, True):
        short = again(tmp_path, straight)
        short = short.model_copy(update={"train": short.train.model_copy(update={"steps": 3})})
        pretrain(short, overwrite)
    assert (tmp_path / "run/negatives" / table_name(2)).exists()
    assert (tmp_path / "run-1/negatives" / table_name(2)).exists()


def test_a_lost_table_is_an_error(straight: Path, tmp_path: Path) -> None:
    short = again(tmp_path, straight, run={"resume": "auto"})
    pretrain(short.model_copy(update={"train": short.train.model_copy(update={"steps": 5})}))
    table = tmp_path / "run/negatives" / table_name(4)
    data, sums = table.read_bytes(), table.with_suffix(".json").read_text()

    def refused(message: str) -> None:
        with pytest.raises(
            CheckpointError, match=f"{message}.*; the batches .* need it; restore it"
        ):
            pretrain(again(tmp_path, straight, run={"resume": "auto"}))

    table.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused("step-00000004.npy was altered: its sha256 is .* instead of")
    table.write_bytes(data[:-1])
    refused("has 2,047 bytes instead of 2,048")
    table.unlink()
    refused("step-00000004.npy: No such file or directory")
    table.write_bytes(data)
    table.with_suffix(".json").write_text(sums.replace('"bytes": ', '"bytes": -'))
    refused("step-00000004.json: bytes must be greater than or equal to 0")
    table.with_suffix(".json").unlink()
    refused("cannot read .*step-00000004.npy")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_table_that_cannot_be_made_ends_the_run(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("heron.training.mining.np.save", full)
    with pytest.raises(ShardError, match="the disk is full"):
        story.pretrain(again(tmp_path, straight, data={"workers": workers}))
    assert not multiprocessing.active_children()  # one that waits on would keep the process
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in row]
    assert len(rows) <= 4  # it does not wait for what never comes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": {"batch": {"labelled": 0}}},
            "with no labelled rows in the batch, but hard negatives",
        ),
        (
            {"data": {"protocol": {"complementary": 2}}},
            ", with complementary labels, but hard negatives are found by labels",
        ),
        (
            {"negatives": {"mine": 51}},
            "negatives\\.mine is 61, but there are only 60 labelled rows",
        ),
    ],
)
def test_what_cannot_be_mined(tmp_path: Path, changes: Any, message: str) -> None:
    config = frames(tmp_path, **({"negatives": MINING} | changes))
    build_data(config.data, progress=False)
    with pytest.raises(ConfigError, match=message):
        open_data(config)


def test_a_folder_that_not_all_processes_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = frames(tmp_path, negatives=MINING)
    build_data(config.data, progress=False)
    labelled = open_data(config).labelled
    assert isinstance(labelled, MinedStream)
    monkeypatch.setattr(miner_of, "on_main", lambda work: work() and "what rank 0 wrote elsewhere")
    monkeypatch.setattr(miner_of, "gather_if_any", lambda blind: ["", blind.replace("0", "1")])
    unused: Any = None
    with pytest.raises(
        CheckpointError, match=r"negatives is not the same folder .*: rank 1 cannot"
    ):
        miner_of.Miner(config.negatives, labelled, unused, tmp_path).begin(0)
