"""No Ray cluster lets strangers in: a token in every guide and script, and loopback here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import runs

TOKEN = "RAY_AUTH_MODE=token "
START = re.compile(r"ray start\b")
PLACES = [
    path
    for folder in ("docs", "heron", "launch", "configs", "pipeline", "shards", "benchmarks")
    for path in sorted((runs.ROOT / folder).rglob("*"))
    if path.suffix in (".md", ".py", ".sh", ".sbatch", ".yaml", ".html")
] + sorted(runs.ROOT.glob("*.md"))


def without_token(text: str) -> list[str]:
    """The lines that start Ray, each without a token."""
    places = [(match.start(), text[: match.start()]) for match in START.finditer(text)]
    lines = text.splitlines()
    return [lines[before.count("\n")] for _, before in places if not before.endswith(TOKEN)]


def test_every_ray_start_has_a_token() -> None:
    texts = {path: path.read_text() for path in PLACES}
    found = {str(path): lines for path, text in texts.items() if (lines := without_token(text))}
    assert found == {}
    assert sum(len(START.findall(text)) for text in texts.values()) >= 4  # it sees them


@pytest.mark.parametrize(
    "line", ["ray start --head", "x\n  ray start --address A", "RAY_AUTH_MODE=disabled ray start"]
)
def test_a_start_without_a_token_is_seen(line: str) -> None:
    assert without_token(f"{TOKEN}ray start --head\n{line}\n") == [line.splitlines()[-1]]


LISTENING = """
import os, psutil
from heron.distributed.cluster import connected
with connected(None):
    import ray
    told = ray.remote(lambda: os.environ.get("RAY_AUTH_MODE")).options(num_cpus=0)
    print("mode", ray.get(told.remote()))
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        for one in process.net_connections("inet"):
            if one.status == "LISTEN":
                print("listens", one.laddr.ip)
"""


def test_a_ray_that_is_begun_here_listens_on_loopback_alone(tmp_path: Path) -> None:
    """Driver, scheduler, store and worker; and it has a token."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    found = subprocess.run(
        [sys.executable, "-c", LISTENING],
        cwd=runs.ROOT,
        env=env | {"HOME": str(tmp_path), "PYTHONPATH": str(runs.ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    mode, *listens = found.stdout.splitlines()
    assert mode == "mode token"
    assert not (tmp_path / ".ray" / "auth_token").exists()  # Ray lets all read it
    assert len(listens) > 3
    assert {*listens} <= {"listens 127.0.0.1", "listens ::ffff:127.0.0.1", "listens ::1"}
