"""The commands of the README and docs/commands.md work, and every path; long jobs are cut."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from benchmarks.workloads import TERMS
from heron.base.artefact import sha256
from heron.experiment.config import load_config
from heron.losses.named_terms import named_terms
from heron.studies.published import TABLES
from tests import forked
from tests.shards.others import cats, write_wds

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = README + (ROOT / "docs" / "commands.md").read_text()
SCENE = ROOT.parent / "shared" / "data" / "scene"
PAGES = [f"docs/{p.name}" for p in sorted(ROOT.glob("docs/*.md")) if p.name != "log.md"]
EXAMPLE = "heron/losses/decoupled.py"  # of the guide's worked example, which nobody writes
SOME = list(TABLES["scene"].methods)[::3]
STEP = ["train.steps=1", "train.cpu_threads=1", "evaluate.map_rows=20"]
SMALL = [  # of each experiment
    "data.build.train=300",
    "data.build.test=40",
    "data.protocol.labelled=40",
    "data.batch.labelled=20",
    "data.batch.unlabelled=40",
    "evaluate.seeds=1",
    "evaluate.baselines=false",
]
WHOLE = {"evaluate.baselines=false": "evaluate.baselines=true"}
# What a command has made, which no later one may change.
MADE = (
    *("runs/**/result.json", "runs/**/report.html", "runs/**/metrics.jsonl", "runs/**/config.yaml"),
    *("runs/**/*.safetensors", "*/*/manifest.json", "reports/*/negatives.json", "*.yaml", "*.png"),
)


def test_terms_and_methods_are_as_many_as_it_says() -> None:
    methods = yaml.safe_load((ROOT / "configs" / "methods.yaml").read_text())
    assert f"{len(named_terms())} terms, {len(methods)} methods" in README


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", COMMANDS, re.DOTALL)
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


def made(place: Path) -> dict[str, str]:
    """The sha256 of each result that is there, by its path."""
    files = {path for pattern in MADE for path in place.glob(pattern) if path.is_file()}
    return {str(path.relative_to(place)): sha256(path) for path in sorted(files)}


def shortened(words: Sequence[str]) -> list[str]:
    """The words of a run, which is then one step on few rows."""
    own_data = any(name in words for name in ("mine.yaml", "scene"))
    small = SMALL[-2:] if own_data else SMALL
    return [*words, *small, *STEP]


def run_heron(command: str, place: Path) -> str:
    """The output of a command of ours, shortened."""
    words = shlex.split(command)[1:]
    if words[0] == "pretrain" and "--processes" in words:  # starts processes of its own
        return called(["heron", *shortened(words)], place)
    if words[0] == "pretrain":
        words = shortened(words)
    elif words[0] == "reproduce":
        words += [*STEP, "--runs", "1", "--only", *SOME]
    elif "--address" in words:
        words = words[: words.index("--address")]  # tests/negatives/test_on_cluster.py joins one
    elif words[0] == "study":
        words += ["--dry-run"]  # tests/studies/test_on_ray.py runs some
    return forked.output(words, place)


def only_launch(words: Sequence[str]) -> int:
    """Read what `accelerate launch` asks for, and start nothing."""
    asked = launch_command_parser().parse_args(words[1:])
    words = asked.training_script_args
    assert asked.training_script == "pipeline/pretrain.py"
    options = {w: words[i + 1] for i, w in enumerate(words) if w.startswith("--")}
    overrides = [w for w in words if "=" in w]
    assert len(words) == 2 * len(options) + len(overrides)
    path = options.pop("--config", "configs/faces.yaml")
    load_config(path, overrides, options.pop("--method", None))
    assert not options and (asked.config_file is None or Path(asked.config_file).is_file())
    print("report: none")
    return 0


def benchmark(words: Sequence[str]) -> int:
    """Run `python -m MODULE words...`, of which these are the words from MODULE on."""
    sys.argv = list(words)
    return import_module(words[0]).main() or 0


def run_benchmark(command: str, place: Path) -> str:
    """The output of a benchmark, shortened."""
    words = shlex.split(command)[2:]
    short = {"benchmarks.objectives": ["--sizes", "64"], "benchmarks.scaling": ["--help"]}
    return forked.output([*words, *short.get(words[0], ["--small"])], place, main=benchmark)


def run(command: str, place: Path) -> str:
    """The output of a command, shortened, as a shell in the activated environment has it."""
    words = shlex.split(command.replace("HOST", "127.0.0.1"))
    if words[0] == "accelerate" and "--machine_rank" in words:
        return forked.output(words[1:], place, main=only_launch)
    if words == ["make", "pretrain"]:  # its recipe, with baselines
        recipe = re.search(r"^pretrain:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
        assert recipe is not None
        train, *others = [shlex.split(line)[1:] for line in recipe[1].splitlines()]
        assert train == ["pretrain", "faces"]
        said = forked.output([WHOLE.get(word, word) for word in shortened(train)], place)
        return said + "".join(forked.output(line, place) for line in others)
    if words[0] == "make":
        words = ["make", "--dry-run", "--directory", str(ROOT), *words[1:]]
    elif words[0] == "accelerate":
        words = shortened(words)
    return called(words, place)


def called(words: Sequence[str], place: Path) -> str:
    """The output of a program of the activated environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words,
        cwd=place,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


# What needs several machines, a scheduler, an environment or a browser has tests of its own.
ELSEWHERE = "source", "pip", "sbatch", "HOSTS=", "heron serve"
ALONE = [c for c in commands() if "--machine_rank" not in c and not c.startswith(ELSEWHERE)]


@pytest.mark.parametrize("command", ALONE)
def test_command(command: str, place: Path) -> None:
    """In the README's order, in one folder: no command changes what an earlier one has made."""
    before = made(place)
    try:
        check_command(command, place)
    finally:
        changed = before.items() - made(place).items()
        assert not changed, f"{command} changed {sorted(name for name, _ in changed)}"


def test_every_result_is_there(place: Path) -> None:
    """At the end; of the folders that the commands name."""
    if not (place / "runs/faces/result.json").exists():
        pytest.skip("only after the README's commands")
    ran = [c for c in ALONE if SCENE.is_dir() or "scene" not in c]
    named = {word.partition("=")[2] for c in ran for word in c.split() if "run.dir=" in word}
    files = [f"{run}/result.json" for run in {"runs/faces", "runs/mine", "runs/frames", *named}]
    files += ["runs/faces/plain/result.json"]
    files += ["embeddings/faces/manifest.json", "indexes/faces/manifest.json", "near.png"]
    files += ["reports/faces/report.html", "data/mine/manifest.json", "mine.yaml"]
    assert [name for name in files if not (place / name).exists()] == []
    print(*made(place), sep="\n")


def check_command(command: str, place: Path) -> None:
    if "scene" in command and not SCENE.is_dir():
        pytest.skip(f"needs Mulan's Scene in {SCENE}")
    if command.startswith("heron "):
        output = run_heron(command, place)
    elif command.startswith("python -m benchmarks."):
        output = run_benchmark(command, place)
    else:
        output = run(command, place)
    if command.startswith(("accelerate", "heron pretrain")):
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
        assert "\n0 errors; " in output
    if "benchmarks.data" in command:
        assert all(
            f"| {what} | ours |" in output for what in ("pictures", "half", "stream", "vectors")
        )
    if "reproduce" in command:
        lines = [line for line in output.splitlines() if line.startswith("| ")]
        rows = [line.split(" | ") for line in lines if not line.startswith("| --")][1:]
        assert [row[0] for row in rows] == [f"| {name}" for name in SOME]
        assert all(float(row[2].split()[0]) > 0 for row in rows)  # measured


def test_commands_of_two_machines_can_be_read(place: Path) -> None:
    """tests/launch/test_two_hosts.py runs them."""
    assert len(machines(0)) == len(machines(1)) == 1
    for rank in (0, 1):
        assert "report" in run(machines(rank)[0], place)


def test_every_path_is_there() -> None:
    assert "@@" not in README
    named = re.findall(r"`([\w./-]+/[\w./-]*|\w+\.(?:md|toml|lock|py))`|\]\(([\w./-]+)\)", README)
    paths = [first or second for first, second in named]
    paths += re.findall(r"(?<= )(?:configs|launch|pipeline)/[\w./-]+", README)
    assert len(paths) > 10
    missing = [p for p in paths if not (ROOT / p).exists() and not p.startswith("runs/")]
    assert not missing


def test_the_python_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert found is not None
    code, shown = found.groups()
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == shown


def test_it_is_short_and_the_first_command_stands_early() -> None:
    lines = README.splitlines()
    assert len(lines) <= 110
    assert any(line.startswith("make ") for line in lines[:25])


def test_the_map_names_every_room() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = [p.parent.relative_to(ROOT) for p in ROOT.glob("heron/*/__init__.py")]
    assert len(rooms) > 5
    assert [r for r in rooms if f"`{r}/`" not in guide] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_links_and_paths_of_a_page_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = path.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)  # encoders[0](x) is no link
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", prose) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    named = re.findall(
        r"(?<![\w/.])(?:benchmarks|configs|heron|launch|pipeline|shards|tests)/[\w./-]*\w", text
    )
    missing += [p for p in named if not any((r / p).exists() for r in (ROOT, ROOT / "tests"))]
    assert [p for p in missing if p != EXAMPLE] == []
