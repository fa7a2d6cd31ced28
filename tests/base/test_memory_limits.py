"""What the limits of containers leave free."""

import sys
from pathlib import Path

import pytest

from heron.base import cores
from heron.base.cores import cgroup_free


@pytest.mark.parametrize(
    ("groups", "files", "least"),
    [
        (
            "0::/job\n",
            {
                "job/memory.max": "5000",
                "job/memory.current": "3000",
                "job/memory.stat": "anon 1\ninactive_file 500\n",
            },
            2500,
        ),
        (
            "4:memory:/of/host\n1:cpu:/\n",
            {
                "memory/memory.limit_in_bytes": "7000",
                "memory/memory.usage_in_bytes": "9000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
            },
            0,
        ),
        ("0::/job\n", {"job/memory.max": "100", "job/memory.current": "60"}, 40),
        (
            "0::/job/step\n",
            {
                "job/step/memory.max": "max",
                "job/step/memory.current": "1",
                "job/memory.max": "3000",
                "job/memory.current": "1000",
            },
            2000,
        ),
        ("0::/\n", {"memory.max": "max", "memory.current": "1", "memory.stat": ""}, sys.maxsize),
    ],
)
def test_unused_page_cache_is_free(
    groups: str,
    files: dict[str, str],
    least: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in {"cgroup": groups, **{f"mounted/{k}": v for k, v in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "mounted")
    assert min(cgroup_free()) == least
