"""One run in a folder: a second waits for the first, and says so when it does not end."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from heron.api.job import pretrain
from heron.base.errors import Held, Stopped, TrainingError
from heron.distributed.watchdog import Watchdog
from heron.training import run_lock
from heron.training.run_lock import LOCK, RunLock
from tests import ranks
from tests.experiments import frames

HOLDS = """
import sys, time
from pathlib import Path
from heron.training.run_lock import RunLock
from heron.distributed.watchdog import Watchdog
lock = RunLock(Path(sys.argv[1]))
lock.acquire(Watchdog(60))
print("holds", flush=True)
time.sleep(600)
"""


def test_a_folder_that_another_run_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the other's is touched, and afterwards the folder is free."""
    monkeypatch.setattr(run_lock, "WAIT_S", 0.2)
    config = frames(tmp_path)
    with RunLock(tmp_path / "run") as first:
        first.acquire(Watchdog(60))
        with pytest.raises(Held, match=f"run is still in use by process {os.getpid()} on"):
            pretrain(config)
        assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    assert pretrain(config)["steps"] == 5


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    """A scheduler that wants the machine back would kill the run before a minute is over."""
    came = iter([False, False, True])
    with RunLock(tmp_path) as first, RunLock(tmp_path) as second:
        first.acquire(Watchdog(60))
        with pytest.raises(Stopped, match=f"came while {tmp_path} was in use by process"):
            second.acquire(Watchdog(60), lambda: next(came))
    assert list(came) == []


def test_a_run_that_is_killed_lets_go(tmp_path: Path) -> None:
    """And one that waits for it goes on."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"holds\n"
        killer = threading.Timer(0.5, other.kill)
        killer.start()
        with RunLock(tmp_path) as second:
            second.acquire(Watchdog(60))
            assert other.wait(1) == -9
            assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one, two = ranks.run(2, refused, str(tmp_path / "file"))
    assert one == two and "file for a run: [Errno 17] File exists" in one


def refused(folder: str) -> str:
    run_lock.WAIT_S = 0.2
    try:
        RunLock(Path(folder)).acquire(Watchdog(60))
    except TrainingError as error:
        return str(error)
    return ""


def test_every_process_is_told(tmp_path: Path) -> None:
    with RunLock(tmp_path) as first:
        first.acquire(Watchdog(60))
        one, two = ranks.run(2, refused, str(tmp_path))
    assert one == two and "a folder takes one run at a time; wait until it ends" in one


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path) as first, RunLock(tmp_path) as second:
        first.acquire(Watchdog(60))
        second.acquire(Watchdog(60))
    assert capsys.readouterr().out.count("cannot be locked ([Errno 37] No locks available)") == 2
