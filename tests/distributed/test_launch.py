"""How a process joins the others, and leaves."""

import pytest
import torch

from heron.base.errors import TrainingError
from heron.experiment.config import load_config
from heron.training import launch
from tests.distributed.test_agreement import FACES


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    message = "process 2 of this machine has no GPU, because there are only 1; start at most"
    with pytest.raises(TrainingError, match=message):
        launch.start_processes(load_config(FACES))


@pytest.mark.parametrize(("said", "expected"), [("null", 3), ("2", 2)])
def test_threads_are_the_cores_of_a_process_unless_it_is_said(
    said: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(launch, "cores_per_process", lambda: 3)
    monkeypatch.setattr(launch, "keep_freed_memory", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    launch.start_processes(load_config(FACES, [f"train.cpu_threads={said}"]))
    assert threads == [expected]


def test_a_process_alone_ends_as_programs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs at the interpreter's end, such as a tracker's last lines, still does."""
    monkeypatch.setattr(launch, "leave", lambda _: pytest.fail("it left at once"))
    assert (launch.fail(), launch.end(0)) == (1, 0)
