"""Freed memory of tensors is kept, until it is released."""

import multiprocessing
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import allocator
from heron.base.cores import keep_freed_memory, release_freed_memory

ROWS, TIMES = 1 << 18, 8  # of 256 floats: 256 MB, where 32 MB are what malloc keeps by itself


def resident() -> int:
    """Pages of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def faults() -> int:
    """Pages that the kernel had to clear while tensors came and went."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(TIMES):
        torch.full((ROWS, 256), 1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def measure(answer: Connection, settings: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        before, keeps = faults(), keep_freed_memory()
        first, later, held = faults(), faults(), resident()
        release_freed_memory()
        answer.send((keeps, before, first, later, held, resident()))


def measured(settings: dict[str, str], method: str = "forkserver") -> list[int]:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(theirs, settings))
    process.start()
    found = list(ours.recv())
    process.join()
    return found


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_tensors_come_again_without_a_page_fault(method: str) -> None:
    """Also in a process that has not freed anything yet, which held up to eight blocks for one."""
    keeps, before, first, later, held, released = measured({"MALLOC_ARENA_MAX": "2"}, method)
    pages = ROWS * 1024 // resource.getpagesize()
    assert keeps and before > 0.9 * pages * TIMES / 512  # pages may be huge ones, of 2 MB
    assert first < before / 2 and later < before / 100
    assert held - released > 0.9 * pages


@pytest.mark.parametrize("name", ["MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_users_own_stay(name: str) -> None:
    keeps, before, _, later, *_ = measured({name: ""})
    assert not keeps and later > 0.9 * before


def test_the_benchmark_has_a_row_of_each_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rows", "2", "--size", "8", "--steps", "1", "--rounds", "1"]
    allocator.main([*small, "--encoders", "cnn", "convnet"])
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split(" | ")[0] for row in rows] == ["| cnn", "| convnet"]
    assert all(row.count("|") == 9 for row in rows)
