"""Every command and every path in the README works; long jobs are cut to a step."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.workloads import TERMS
from heron.launch.tables import TABLES
from heron.pipeline.objectives import catalogue
from tests.shards.others import cats, write_wds

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SCENE = ROOT.parent / "shared" / "data" / "scene"
SOME = list(TABLES["scene"].methods)[::3]
STEP = ["train.steps=1", "evaluate.map_rows=20"]
SMALL = {
    "faces": ["data.build.train=300", "data.build.test=40", "data.protocol.labelled=80"],
    "frames": ["data.build.train=2000", "data.build.test=40"],
    "scene": [],
}


# Runs of each kind have tests of their own: of these commands it is read what they ask for.
RUN = ["accelerate launch pipeline/pretrain.py"]
LOADS = """
import sys
from accelerate.commands.launch import launch_command_parser
from heron.pipeline.config.experiment import load_config
asked = launch_command_parser().parse_args(sys.argv[3:])
words = asked.training_script_args
assert asked.training_script == "pipeline/pretrain.py"
options = {w: words[i + 1] for i, w in enumerate(words) if w.startswith("--")}
overrides = [w for w in words if "=" in w]
assert len(words) == 2 * len(options) + len(overrides)
path = options.pop("--config", "configs/faces.yaml")
load_config(path, overrides, options.pop("--method", None))
assert not options and (asked.config_file is None or open(asked.config_file))
print("report: none")
"""


def test_terms_and_methods_are_as_many_as_it_says() -> None:
    methods = yaml.safe_load((ROOT / "configs" / "methods.yaml").read_text())
    assert f"{len(catalogue.TERMS)} terms, {len(methods)} methods" in README


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def machines(rank: int) -> list[str]:
    return [c for c in commands() if f"--machine_rank {rank}" in c]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that looks like the clone, with the files that the commands name."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("pipeline", "configs", "launch", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    for path in SCENE.glob("scene*"):
        (folder / path.name).symlink_to(path)
    draw = np.random.default_rng(0)
    one, two = (draw.normal(size=(30, 4)).astype(np.float32) for _ in range(2))
    labels = draw.integers(0, 2, (30, 3)).astype(np.uint8)
    np.savez(folder / "mine.npz", view1=one, view2=two, labels=labels)
    (folder / "theirs").mkdir()
    write_wds(folder / "theirs" / "all.tar", cats(0, 5))
    yield folder


def run(command: str, place: Path) -> subprocess.Popen[str]:
    """Start a command of the README, shortened, as a shell in the activated environment would."""
    words = shlex.split(command.replace("HOST", "127.0.0.1"))
    if words[0] == "make":
        words = ["make", "--dry-run", "--directory", str(ROOT), *words[1:]]
    elif words[0] == "accelerate" and command not in RUN:
        words = [sys.executable, "-c", LOADS, *words]
    elif words[0] == "accelerate":
        named = re.search(r"configs/(\w+)\.yaml", command)
        words += [*SMALL[named[1] if named else "faces"], *STEP]
    elif words[1:2] == ["reproduce"]:
        words += [*STEP, "--runs", "1", "--only", *SOME]
    elif words[1:2] == ["study"]:
        words += ["--dry-run"]  # tests/studies/test_on_ray.py runs some
    elif "benchmarks.objectives" in words:
        words += ["--sizes", "64"]
    elif words[-1] in ("benchmarks.data", "benchmarks.retrieval", "benchmarks.serve"):
        words += ["--small"]
    elif words[-1] == "benchmarks.scaling":
        words += ["--help"]  # it has tests of its own
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        words,
        cwd=place,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    return output


# What needs several machines, a scheduler or a browser has tests of its own.
ELSEWHERE = "source", "sbatch", "HOSTS=", "heron serve"
ALONE = [c for c in commands() if "--machine_rank" not in c and not c.startswith(ELSEWHERE)]


@pytest.mark.parametrize("command", ALONE)
def test_command(command: str, place: Path) -> None:
    if "scene" in command and not SCENE.is_dir():
        pytest.skip(f"needs Mulan's Scene in {SCENE}")
    output = finish(run(command, place))
    if "accelerate" in command:
        assert "report: " in output
    if "benchmarks.objectives" in command:
        first = [line.split(" | ")[0] for line in output.splitlines()]
        assert [name for name in first if name[2:] in TERMS] == [f"| {name}" for name in TERMS]
        assert "nan" not in output
    if "benchmarks.retrieval" in command:
        parts = re.split(r"\n(build|search|embed|million)\n", output)
        assert parts[1::2] == ["build", "search", "embed", "million"]
        assert all(part.count("\n| ") > 1 for part in parts[2::2])  # a head and rows
    if "benchmarks.serve" in command:
        assert output.endswith("\n0 errors\n")
    if "benchmarks.data" in command:
        assert all(f"| {what} | ours |" in output for what in ("pictures", "half", "vectors"))
    if "reproduce" in command:
        rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| ")]
        assert [row[0] for row in rows[1:]] == [f"| {name}" for name in SOME]
        assert all(float(row[2].split()[0]) > 0 for row in rows[1:])  # measured


def test_commands_of_two_machines_can_be_read(place: Path) -> None:
    """tests/launch/test_two_hosts.py runs them."""
    assert len(machines(0)) == len(machines(1)) == 1
    for rank in (0, 1):
        assert "report" in finish(run(machines(rank)[0], place))


def test_every_path_is_there() -> None:
    assert "@@" not in README
    named = re.findall(r"`([\w./-]+/[\w./-]*|\w+\.(?:md|toml|lock|py))`|\]\(([\w./-]+)\)", README)
    paths = [first or second for first, second in named]
    paths += re.findall(r"(?<= )(?:configs|launch|pipeline)/[\w./-]+", README)
    assert len(paths) > 10
    missing = [p for p in paths if not (ROOT / p).exists() and not p.startswith("runs/")]
    assert not missing


def test_the_tree_names_every_file() -> None:
    tree = README.split("## What is where")[1]
    files = [
        *ROOT.glob("pipeline/**/*.py"),
        *ROOT.glob("shards/**/*.py"),
        *ROOT.glob("launch/*.py"),
    ]
    missing = [p.name for p in files if p.name != "__init__.py" and p.name not in tree]
    assert not missing
