"""Every command of the tutorial runs, in its order, on its own pictures; training is two steps."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests import forked

ROOT = Path(__file__).parent.parent
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
SHORT = {"range(600)": "range(160)"}
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", TUTORIAL, re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the clone, with the two files that the tutorial has one save."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("pipeline", "launch", "configs"):
        (folder / name).symlink_to(ROOT / name)
    drawing = block("python")
    for long, short in SHORT.items():
        assert long in drawing
        drawing = drawing.replace(long, short)
    (folder / "draw.py").write_text(drawing)
    (folder / "shapes.yaml").write_text(block("yaml"))
    return folder


def run(words: list[str], place: Path) -> str:
    if words[0] == "heron":
        return forked.output(words[1:], place)
    done = subprocess.run(
        words, cwd=place, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return done.stdout


def served(words: list[str], place: Path) -> None:
    """Starts the page on a free port, gets it and a sample's neighbours, and ends it."""
    with subprocess.Popen(
        [*words, "--port", "0"], cwd=place, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := _address(line)))
            with urlopen(address, timeout=30) as page:
                assert b"<html" in page.read()
        finally:
            server.terminate()


def _address(line: str) -> re.Match[str] | None:
    return re.search(r"http://\S+", line)


def test_every_command_of_the_tutorial_runs(place: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", TUTORIAL, re.DOTALL)
    commands = [shlex.split(line) for text in blocks for line in text.splitlines()]
    assert commands.pop(0)[0] == "source"
    said = {}
    for words in commands:
        if words[:2] == ["heron", "serve"]:
            served(words, place)
            continue
        more = ["train.steps=2"] if "shapes.yaml" in words else []
        said[" ".join(words)] = run([*words, *more], place)
    assert len(commands) == 11
    for sheet in ("shapes.png", "near.png"):
        assert (place / sheet).stat().st_size > 1000
    for page in ("runs/shapes/report.html", "reports/shapes/report.html"):
        assert (place / page).is_file()
    result = json.loads((place / "runs/shapes/result.json").read_text())
    assert result["steps"] == 2
    (filtered,) = [text for command, text in said.items() if "not ring" in command]
    assert "found   5 of 5" in filtered
    assert " ring-" not in filtered.partition("labels\n")[2]
