"""What `make coverage` counts, lines of other processes too, and its table."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.coverage_table import table

ROOT = Path(__file__).parent.parent
SCRIPT = """
import multiprocessing, os, subprocess, sys

def forked():
    import heron.shards.texts
    os._exit(0)  # as `heron.distributed.watchdog.leave` does

if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=forked)
    process.start()
    process.join()
    command = [sys.executable, "-c", "import heron.base.terminal"]
    subprocess.run(command, cwd=sys.argv[1], check=True)
"""


def test_lines_of_forked_and_of_new_processes_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("coverage", reason="needs the extra dev")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["run"]
    (tmp_path / "tried.py").write_text(SCRIPT)
    lines = "\n".join(
        f"{key} = {', '.join(value) if isinstance(value, list) else value}"
        for key, value in (settings | {"data_file": tmp_path / "data"}).items()
    )
    (tmp_path / "rc").write_text(f"[run]\n{lines}\n")
    others = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    environment = others | {"PYTHONPATH": str(ROOT), "COVERAGE_RCFILE": str(tmp_path / "rc")}

    def coverage(*words: str) -> None:
        command = [sys.executable, "-m", "coverage", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    coverage("run", str(tmp_path / "tried.py"), str(tmp_path))
    coverage("combine", "--quiet")
    coverage("json", "--quiet", "-o", str(tmp_path / "lines.json"))
    files = json.loads((tmp_path / "lines.json").read_text())["files"]
    run = {path for path, found in files.items() if found["executed_lines"]}
    assert {"heron/base/terminal.py", "heron/shards/texts.py"} <= run
    assert len(files) == len([*ROOT.glob("heron/**/*.py")])  # those that nobody imports, too


def test_the_table_has_a_line_for_each_room_and_the_total() -> None:
    counts = {
        "heron/data/rows.py": (1500, 1200),
        "heron/data/plan.py": (500, 300),
        "heron/losses/fused/layout.py": (100, 99),
        "heron/metrics.py": (0, 0),
    }
    files = {
        path: {"summary": {"num_statements": lines, "covered_lines": run}}
        for path, (lines, run) in counts.items()
    }
    assert [line.split() for line in table(files)] == [
        ["room", "files", "lines", "run", "share"],
        ["heron.data", "2", "2,000", "1,500", "75.0%"],
        ["heron.losses", "1", "100", "99", "99.0%"],
        ["heron.metrics", "1", "0", "0", "100.0%"],
        ["total", "4", "2,100", "1,599", "76.1%"],
    ]
