"""Processes that would not train the same run end together, and say in what they differ."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from heron.base.dotted import loaded_files
from heron.base.errors import LOST, STOPPED, Lost, Stopped, TrainingError
from heron.distributed import agreement
from heron.distributed.agreement import agree, code_sha256
from heron.distributed.collectives import rank
from heron.experiment.config import load_config, run_facts
from tests import ranks

ROOT = Path(__file__).resolve().parents[2]
FACES = str(ROOT / "configs" / "faces.yaml")
DIFFERENT = {
    "seed": "1",
    "data.protocol.labelled": "300",
    "data.batch.labelled": "32",
    "data.window_rows": "128",
    "data.views.0.augment": "[]",
    "model.encoder.widths": "[100]",
    "objective.weighted_supervised.tau": "0.5",
    "optim.lr": "0.1",
    "optim.kind": "sgd",
    "train.steps": "7",
    "train.epochs": "3",
    "train.precision": "bf16",
    "train.micro_batch": "8",
    "run.resume": "auto",
}
HERE = {
    "run.dir": "elsewhere",
    "data.path": "copy",
    "data.cache.dir": "elsewhere",
    "data.storage_options": "{anon: true}",
    "data.verify": "false",
    "data.workers": "1",
    "train.cpu_threads": "1",
}


def refusals() -> dict[str, str]:
    """What every rank says of each case in which the last one differs."""
    said = {}
    cases = {f"{key}={value}": {key: value} for key, value in (DIFFERENT | HERE).items()}
    for name, change in (cases | {"code": {}, "nothing": {}}).items():
        last = rank() == 2
        overrides = [f"{key}={value}" for key, value in change.items()] if last else []
        facts = run_facts(load_config(FACES, overrides))
        if name == "code" and last:
            facts["versions"] |= {"code": "other"}
        try:
            agree(facts, 60)
            said[name] = ""
        except TrainingError as error:
            said[name] = str(error)
    return said


def test_every_rank_says_which_keys_differ() -> None:
    first, second, third = ranks.run(3, refusals)
    assert first == second == third
    assert [first.pop(f"{key}={value}") for key, value in HERE.items()] == [""] * len(HERE)
    assert first.pop("nothing") == ""
    assert f"rank 2: versions.code is other, not {code_sha256()[:9]}" in first.pop("code")
    for name, text in first.items():
        key = name.partition("=")[0].partition(".0.")[0]
        assert text.startswith(f"the processes would not train the same run: rank 2: {key}"), name
        assert (
            " is " in text
            and ", not " in text
            and "start all of them with one configuration" in text
        )


def absence() -> str:
    if rank() == 1:
        time.sleep(1.5)
        return ""
    try:
        agree({}, 0.5)
    except Lost as error:
        return str(error)
    return "nothing was missed"


def test_a_rank_that_says_nothing_is_named() -> None:
    first, _, third = ranks.run(3, absence)
    assert first == third
    assert first.startswith(
        "rank 1 did not say within 0.5 s what it trains; check that process's log"
    )


def stopping() -> str:
    if rank() == 1:
        time.sleep(1.5)
        return ""
    try:
        agree({}, 60, lambda: rank() == 0)
    except (Lost, Stopped) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was heard"


def test_a_signal_ends_the_wait_for_what_others_say() -> None:
    first, *_ = ranks.run(2, stopping)
    assert first == "Stopped: a signal came before all processes said what they train"


def alone(port: int, timeout_s: int) -> subprocess.Popen[str]:
    """Rank 0 of two, with no rank 1."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    who = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "pipeline/pretrain.py", f"train.timeout_s={timeout_s}"]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | place | who, stderr=subprocess.PIPE, text=True
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_meeting_that_does_not_come_about_ends() -> None:
    port = free_port()
    process = alone(port, 1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == LOST
    assert f"rank 0 of 2: not all processes reached 127.0.0.1:{port} within 1 s; check" in said


def test_a_signal_ends_a_meeting() -> None:
    port = free_port()
    process = alone(port, 600)
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == STOPPED
    assert f"rank 0 of 2: SIGTERM before all had reached 127.0.0.1:{port}" in said


def test_the_code_is_all_source_files_and_own_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[Path]()
    real = Path.read_bytes

    def counted(path: Path) -> bytes:
        read.append(path)
        return real(path)

    own: Any = tmp_path / "mine.py"
    own.write_text("x = 1")
    code_sha256.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", counted)
    before = code_sha256((own,))
    assert {"pretrain.py", "manifest.py", "index_plan.py", "mine.py"} <= {
        path.name for path in read
    }
    assert len(read) > 150 and len(set(read)) == len(read)
    own.write_text("x = 2")
    code_sha256.cache_clear()
    assert code_sha256((own,)) != before != code_sha256()
    assert agreement.versions()["code"] == code_sha256(tuple(loaded_files()))


class CountingStore(dict[str, bytes]):
    """A store of one process, which counts what it is asked."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return all(key in self for key in keys)


@pytest.mark.parametrize("absent", [[], [3], [0, 2048, 4095], list(range(1, 4096, 2))])
def test_ranks_that_did_not_come_are_found_in_few_messages(absent: list[int]) -> None:
    """Of 4,096, each of which asks: one by one that were 16 million messages."""
    store = CountingStore({f"came-{n}": b"" for n in range(4096) if n not in set(absent)})
    found = agreement._absent(store, range(4096))
    assert found[: agreement.NAMED] == absent[: agreement.NAMED]
    assert store.asked <= 2 * 12 * min(len(absent), agreement.NAMED) + 1
