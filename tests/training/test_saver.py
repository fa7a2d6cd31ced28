"""Checkpoints that a thread writes while the run trains on."""

import errno
import itertools
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heron.api.job import pretrain
from heron.base.errors import CheckpointError
from heron.distributed.watchdog import Watchdog
from heron.experiment.options import Train
from heron.training import checkpoint
from heron.training.checkpoint import Position, Snapshot, complete_checkpoints
from heron.training.kept_weights import Kept
from heron.training.saver import Saver
from tests import ranks
from tests.distributed.test_strategies import choose
from tests.experiments import frames
from tests.launch.runs import steps
from tests.training.test_checkpoint import SAVING, TEXTS


def slow(folder: str, name: str, strategy: str) -> list[int]:
    """A run whose checkpoints are written when training has gone on, or after 20 s.

    Returns by how many steps it had gone on, for each checkpoint; that of the last step is not one.
    """
    choose(strategy)
    run, write, ahead = Path(folder) / name, checkpoint.save, list[int]()

    def save_late(to: Path, snapshot: Snapshot, texts: dict[str, str], newest: int) -> Path:
        step, deadline = snapshot.position.step, time.monotonic() + 20
        while steps(run) <= step < SAVING["steps"] and time.monotonic() < deadline:
            time.sleep(0.005)
        ahead.extend([steps(run) - step] if step < SAVING["steps"] else [])
        return write(to, snapshot, texts, newest)

    setattr(checkpoint, "save", save_late)  # noqa: B010
    pretrain(frames(Path(folder), name, train=SAVING, optim={"kind": "adamw"}))
    return ahead


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_goes_on_while_a_checkpoint_is_written(strategy: str, tmp_path: Path) -> None:
    """It has the weights of its step, though they have changed when it is written."""
    ahead, _ = ranks.run(2, slow, str(tmp_path), "late", strategy)
    assert len(ahead) == 2 and min(ahead) > 0
    ranks.run(2, choose_and_run, str(tmp_path), "straight", strategy)
    for step, kind in itertools.product((3, 6, 9), checkpoint.FILES):
        late, straight = (
            load_file(tmp_path / name / f"checkpoints/step-{step:08d}/{kind}.safetensors")
            for name in ("late", "straight")
        )
        assert late.keys() == straight.keys()
        assert all(torch.equal(value, straight[key]) for key, value in late.items())


def choose_and_run(folder: str, name: str, strategy: str) -> None:
    """A run of `slow` whose training waits for each checkpoint."""
    choose(strategy)
    begin = Saver.begin

    def begin_and_wait(saver: Saver, *args: Any) -> None:
        begin(saver, *args)
        saver.wait()

    setattr(Saver, "begin", begin_and_wait)  # noqa: B010
    pretrain(frames(Path(folder), name, train=SAVING, optim={"kind": "adamw"}))


def failing(folder: str) -> str:
    """A run whose first checkpoint cannot be written, of the two before its end."""

    def refuse(*args: Any) -> None:
        raise OSError("No space left on device")

    setattr(checkpoint, "save", refuse)  # noqa: B010
    train = SAVING | {"steps": 400, "save_every_steps": 200}
    try:
        pretrain(frames(Path(folder), train=train | {"epochs": 100}))
    except CheckpointError as error:
        return str(error)
    return "it was written"


def test_a_checkpoint_that_could_not_be_written_is_told_at_once(tmp_path: Path) -> None:
    """Not at the next one: the steps in between would be lost."""
    for said in ranks.run(2, failing, str(tmp_path)):
        assert said.startswith("cannot write the checkpoint of step 200 to")
        assert "No space left on device; last checkpoint: none" in said
    assert 200 <= steps(tmp_path / "run") < 300


class Held:
    """A strategy and an objective of one tensor, whose gathering waits until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def model_state(self) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(2)}

    memory_state = model_state

    def optimizer_state(self, step: int) -> dict[str, torch.Tensor]:
        return self.model_state()

    def copies(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return state

    def in_full(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self.let_go.wait(20)
        return state


def begun(saver: Saver) -> Held:
    held = Held()
    saver.begin(Position(3, 0, 3), held, held, Kept(held, Train(), True, None))  # type: ignore[arg-type]
    return held


def test_the_second_ctrl_c_does_not_wait_for_a_checkpoint(tmp_path: Path) -> None:
    """The first has said so."""
    with pytest.raises(KeyboardInterrupt), Saver(tmp_path, 1, "", TEXTS, Watchdog(60)) as saver:
        held = begun(saver)
        raise KeyboardInterrupt
    assert not complete_checkpoints(tmp_path) and not saver.failed()
    held.let_go.set()
    saver._thread.shutdown()  # or it would still be writing in the next test
    assert complete_checkpoints(tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_stands_is_noticed_while_a_checkpoint_is_gathered(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the process that writes is busy, while it does: the watchdog takes that for progress."""
    watchdog, seen = Watchdog(60), list[bool]()

    def slow(*args: Any) -> None:
        deadline = time.monotonic() + 20
        while not watchdog._busy and time.monotonic() < deadline:
            time.sleep(0.005)
        seen.append(watchdog._busy)

    monkeypatch.setattr(checkpoint, "save", slow)

    def let_go() -> None:
        time.sleep(0.2)
        seen.append(watchdog._busy)
        held.let_go.set()

    with suppress(ZeroDivisionError), Saver(tmp_path, 1, "", TEXTS, watchdog) as saver:
        held = begun(saver)
        threading.Thread(target=let_go).start()
        1 / 0 if fails else saver.wait()
    assert seen == [False, True]


def test_a_disk_that_is_full_for_the_manifest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes are told: the others would wait for the first one's word."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Saver(tmp_path, 1, "", TEXTS, Watchdog(60)) as saver:
        monkeypatch.setattr("heron.base.atomic.os.fsync", full)
        begun(saver).let_go.set()
        with pytest.raises(CheckpointError) as caught:
            saver.wait()
    assert "state.json: the disk is full; last checkpoint: none; free" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
