"""What starts several processes ends when they cannot: one was stopped, or does not end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from heron.cli import pretrain
from heron.cli.main import main
from heron.training.tracking import read_metrics
from tests import forked
from tests.launch import runs

SCRIPT = "launch/hosts/pretrain.sh"
TOLD = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit({told}))\n"


def child_of_rank(parent: int, rank: str) -> int:
    """The process that a command has started with this rank."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (found,) = (
        int(child)
        for child in children
        if f"\0RANK={rank}\0" in f"\0{Path(f'/proc/{child}/environ').read_text()}"
    )
    return found


@pytest.mark.parametrize("victim", ["1", "0"])
def test_a_run_of_which_a_process_is_stopped_ends(victim: str, tmp_path: Path) -> None:
    """The other leaves, and the command waited for the stopped one for ever."""
    changes = {"epochs": 4000, "timeout_s": 4}
    config = runs.experiment(tmp_path, "run", train={**runs.LENGTH, **changes})
    command = ["pretrain", str(config), "--processes", "2"]
    process = forked.start(command, runs.ROOT, main, runs.environment())
    metrics = tmp_path / "run" / "metrics.jsonl"
    runs.await_that("steps", lambda: metrics.exists() and len(read_metrics(metrics)) > 2, 120, str)
    pid = child_of_rank(process.pid, victim)
    os.kill(pid, signal.SIGSTOP)
    status, said = runs.finish(process, 60)
    assert status == runs.BROKEN, said
    assert f"rank {victim} was stopped (SIGSTOP or Ctrl-Z); it goes on, to end" in said
    assert f"rank {victim} on " in said and "has not moved for" in said  # the other one's words
    assert not Path(f"/proc/{pid}").exists()


def together(
    monkeypatch: pytest.MonkeyPatch, *programs: str, tell: float = 0.2, end: float = 30
) -> tuple[int, float]:
    """Runs programs in place of ranks; returns the status of all and the seconds that it took."""
    start = subprocess.Popen

    def begin(_: Sequence[str], env: Mapping[str, str], **given: Any) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-c", programs[int(env["RANK"])]], env=env, **given)

    monkeypatch.setattr(subprocess, "Popen", begin)
    monkeypatch.setattr(pretrain, "TELL_S", tell)
    monkeypatch.setattr(pretrain, "END_S", end)
    began = time.monotonic()
    status = pretrain.run_together([], [{"RANK": str(n)} for n in range(len(programs))])
    return status, time.monotonic() - began


def test_one_that_does_not_end_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)"
    status, took = together(monkeypatch, "import sys; sys.exit(76)", deaf, end=1.5)
    said = capsys.readouterr().err
    assert status == runs.BROKEN and took < 20
    assert "error: rank 1 (process " in said
    assert (
        "had not ended 1.5 s after rank 0 ended with status 76, and was killed; run again" in said
    )


def test_one_that_stays_after_the_others_ended_well_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, took = together(monkeypatch, "", "import time; time.sleep(60)", end=2)
    assert status == runs.BROKEN and took < 20
    assert "2 s after rank 0 ended with status 0" in capsys.readouterr().err


def test_a_stopped_one_goes_on_and_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = "import os, sys\nos.kill(os.getpid(), 19)\nsys.exit(76)"
    status, took = together(monkeypatch, "import time, sys; time.sleep(1); sys.exit(76)", stopped)
    said = capsys.readouterr().err
    assert status == runs.BROKEN and took < 20
    assert "rank 1 was stopped (SIGSTOP or Ctrl-Z); it goes on, to end" in said
    assert "killed" not in said


@pytest.mark.parametrize("status", [0, 75])
def test_who_still_writes_when_another_has_ended_well_is_left_alone(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writes = TOLD.format(told=99)
    writes += f"time.sleep(2)\nopen({str(tmp_path / 'saved')!r}, 'w')\nsys.exit({status})"
    ends = f"import sys; sys.exit({status})"
    assert together(monkeypatch, ends, writes)[0] == status
    assert (tmp_path / "saved").exists()


def test_who_saves_after_an_error_of_another_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is told to end, saves, and says so; the run has failed all the same."""
    ready = tmp_path / "ready"
    saves = "import signal, sys, time\ntold = []\nsignal.signal(15, lambda *_: told.append(1))\n"
    saves += f"open({str(ready)!r}, 'w')\nwhile not told: time.sleep(.05)\ntime.sleep(1)\n"
    # As `StopSignals` leaves it: a handler of Python's ends before the process, which a second
    # signal would then kill.
    saves += f"open({str(tmp_path / 'saved')!r}, 'w')\nsignal.signal(15, signal.SIG_IGN)\n"
    saves += "sys.exit(75)"
    fails = f"import os, sys, time\nwhile not os.path.exists({str(ready)!r}): time.sleep(.05)\n"
    assert together(monkeypatch, f"{fails}sys.exit(1)", saves)[0] == 1
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("other", "status", "said"),
    [
        ("kill -STOP $$; exit 76", 76, ""),  # it goes on, and ends by itself
        ("exec sleep 60", 76, "error: rank 1 had not ended 2 s after rank 0 ended with status 75"),
        ("sleep 1; exit 75", 75, ""),
    ],
)
def test_the_script_of_hosts(other: str, status: int, said: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\nif ((RANK)); then {other}; fi\nsleep 0.5\nexit 75\n")
    python.chmod(0o755)
    given = {"HOSTS": "localhost", "HOST": "0", "PROCESSES": "2", "END_S": "2"}
    done = subprocess.run(
        [SCRIPT],
        cwd=runs.ROOT,
        env=runs.environment(**given) | {"PYTHON": str(python), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr and f"host 0 of 1: ended with status {status}" in done.stderr
