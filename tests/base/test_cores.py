"""The cores that a command counts, and how its threads wait, as libgomp itself says."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heron.base import cores
from heron.base.cores import SPIN_KEYS, cores_per_process, share_cores
from tests.launch import runs

COPIES = "import torch, faiss"  # each has a libgomp of its own
# Which says its choice as it is loaded: torch itself takes seconds.
LOADED = "import ctypes, importlib.util as u, pathlib as p; ctypes.CDLL(str(next(p.Path(u.find_spec"
LOADED += "('torch').origin).parent.glob('lib/libgomp*'))))"
AFTER = "from heron.__main__ import main; main(['--version']);"
MISSING = "data.path=missing"
V1, V2 = "3:cpu,cpuacct:/{}\n0::/\n", "0::/{}\n"


def spins(*words: str, **chosen: str) -> list[str]:
    """Returns the spins of every copy of libgomp in every process of a command, as it is loaded."""
    plain = {key: value for key, value in os.environ.items() if key not in SPIN_KEYS}
    found = subprocess.run(
        [sys.executable, *words],
        cwd=runs.ROOT,
        env=plain | {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(runs.ROOT)} | chosen,
        capture_output=True,
        text=True,
        check=False,
    )
    return re.findall(r"GOMP_SPINCOUNT = '(\w+)'", found.stderr)


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        (["-c", f"{AFTER} {COPIES}"], 2),
        (["-m", "heron", "pretrain", "scene", "--processes", "2", MISSING], 3),
        (["pipeline/pretrain.py", "--config", "scene", MISSING], 1),
        (["pipeline/embed.py", "missing", "--out", "missing"], 1),
    ],
)
def test_a_command_bounds_the_spins_of_all_its_processes(words: list[str], copies: int) -> None:
    found = spins(*words)
    assert set(found) == {"1000"}
    assert len(found) >= copies


def test_what_the_user_chose_stays() -> None:
    assert set(spins("-c", f"{AFTER} {LOADED}", GOMP_SPINCOUNT="7")) == {"7"}
    assert set(spins("-c", f"{AFTER} {LOADED}", OMP_WAIT_POLICY="PASSIVE")) == {"0"}


def test_a_library_chooses_nothing() -> None:
    (plain,) = spins("-c", LOADED)
    assert plain != "1000"
    assert set(spins("-c", "import heron.losses, heron.api.job")) == {plain}


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of cgroups, of a process that may use eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "chosen_here", set())
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(cores.THREADS, raising=False)
        yield tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.", 1)).write_text(text + "\n")


@pytest.mark.parametrize(
    ("quotas", "counted"),
    [
        ({}, 8),  # no cgroups
        ({"": {"cpu_max": "max 100000"}}, 8),
        ({"": {"cpu_max": "300000 100000"}}, 3),  # a container, which sees its group as the root
        ({"slice/job": {"cpu_max": "250000 100000"}}, 3),  # a part of a core is one
        ({"slice": {"cpu_max": "200000 100000"}, "slice/job": {"cpu_max": "max 100000"}}, 2),
        ({"slice/job": {"cpu_max": "50000 100000"}}, 1),
        ({"slice/job": {"cpu_max": "9900000 100000"}}, 8),
        ({"slice/job": {"cpu_max": "nonsense"}}, 8),
    ],
)
def test_quotas(
    group: Path,
    monkeypatch: pytest.MonkeyPatch,
    quotas: dict[str, dict[str, str]],
    counted: int,
) -> None:
    membership = group / "membership"
    membership.write_text(V2.format("slice/job"))
    monkeypatch.setattr(cores, "MEMBERSHIP", membership)
    for folder, files in quotas.items():
        write(group / folder, **files)
    assert cores.cores() == counted
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores_per_process() == max(1, counted // 2)


def test_quotas_of_the_first_version(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    membership = group / "membership"
    membership.write_text(V1.format("docker/1"))
    monkeypatch.setattr(cores, "MEMBERSHIP", membership)
    write(group / "cpu", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    assert cores.cores() == 8
    write(group / "cpu/docker/1", cpu_cfs_quota_us="400000", cpu_cfs_period_us="100000")
    assert cores.cores() == 4
    monkeypatch.setattr(cores, "MEMBERSHIP", group / "none")  # no Linux
    assert cores.cores() == 8


def test_a_quota_bounds_the_threads_of_all_libraries(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP sees the affinity alone: 64 threads in a container of two cores."""
    for key in SPIN_KEYS:
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    share_cores()
    assert cores.THREADS not in os.environ  # no quota: OpenMP's own count is right
    write(group, cpu_max="300000 100000")
    (group / "membership").write_text(V2.format(""))
    monkeypatch.setattr(cores, "MEMBERSHIP", group / "membership")
    share_cores()
    assert os.environ[cores.THREADS] == "3"
    assert cores.chosen_here == {"GOMP_SPINCOUNT", cores.THREADS}
    os.environ[cores.THREADS] = "5"
    share_cores()
    assert os.environ[cores.THREADS] == "5"
