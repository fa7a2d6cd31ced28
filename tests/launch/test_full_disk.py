"""A disk that is full, in real: each command names the file, what is kept, and what goes on."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base.atomic import atomic_write, naming
from heron.base.errors import DiskFull
from heron.cli.main import main
from heron.experiment.config import dump_config
from tests.experiments import frames

WORDS: dict[str, Callable[[Path, Path], list[Any]]] = {
    "shards build": lambda home, out: [
        "shards",
        "build",
        "frames",
        "--train",
        300,
        "--test",
        8,
        "--out",
        out,
    ],
    "shards protocol": lambda home, out: ["shards", "protocol", home / "mine.yaml", out],
    "embed": lambda home, out: ["embed", home / "run", "--out", out],
    "predict": lambda home, out: ["predict", home / "run", "--out", f"{out}.csv"],
    "parquet": lambda home, out: ["predict", home / "run", "--out", f"{out}.parquet"],
    "flat": lambda home, out: ["index", home / "e", "--out", out, "--kind", "flat"],
    "ivf": lambda home, out: ["index", home / "e", "--out", out, "--kind", "ivf"],
    "hnsw": lambda home, out: ["index", home / "e", "--out", out, "--kind", "hnsw"],
    "negatives": lambda home, out: ["negatives", home / "e", "--k", 3, "--out", out],
    "serve": lambda home, out: ["serve", home / "i", "--export", out],
    "save": lambda home, out: ["save", home / "run", "--out", out],
    "export": lambda home, out: ["export", home / "run", "--out", f"{out}.pt2"],
    "pretrain": lambda home, out: ["pretrain", home / "long.yaml", f"run.dir={out}"],
}


def run(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for name in ("mine", "long"):
        steps = 2 if name == "mine" else 40
        train = {"steps": steps, "epochs": None, "save_every_steps": 10}
        config = frames(home, train=train, optim={"warmup_epochs": 0}, tracking=[])
        (home / f"{name}.yaml").write_text(dump_config(config))
    assert run("pretrain", home / "mine.yaml") == 0
    assert run("embed", home / "run", "--out", home / "e", "--quiet") == 0
    assert run("index", home / "e", "--out", home / "i", "--quiet") == 0
    return home


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    (disk := tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a disk here: needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, free: int) -> None:
    """Leave so many bytes free."""
    with pytest.raises(OSError, match="No space"), (disk / "filler").open("wb", 0) as stream:
        while True:
            stream.write(bytes(4096))
    with (disk / "filler").open("r+b") as stream:
        stream.truncate((disk / "filler").stat().st_size - free)


@pytest.mark.parametrize("free", [0, 8192, 20480])
@pytest.mark.parametrize("verb", WORDS)
def test_a_full_disk_is_named_and_what_the_error_says_works(
    verb: str, free: int, home: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(disk, free)
    words = [*WORDS[verb](home, disk / "out")]
    status, said = run(*words), " ".join(capsys.readouterr().err.split())
    if status == 0:
        assert free, said
        return
    assert status == 1, said
    error = said[said.index("error: ") :]
    assert f"{disk}/" in error and "free some space, and run" in error, error
    assert "disk is full" in error or "cannot lock" in error, error
    (disk / "filler").unlink()
    if verb == "pretrain" and "cannot lock" not in error:
        assert "run again with run.resume=auto" in error
        words.append("run.resume=auto")
    else:
        assert "run the same command again" in error
    assert run(*words) == 0, capsys.readouterr().err
    assert not [*disk.rglob("*.part")] and not [*disk.rglob("*.lock")]


def test_what_numpy_and_others_do_not_tell(disk: Path) -> None:
    """Numpy says `800 requested and 496 written`."""
    fill(disk, 4096)
    with pytest.raises(DiskFull, match=f"^{disk}/a.npy: the disk is full; free some"):  # noqa: SIM117
        with atomic_write(disk / "a.npy") as stream:
            np.save(stream, np.zeros(100_000))
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_file_that_may_not_grow_is_named(tmp_path: Path) -> None:
    """As by `ulimit -f`: the system says `File too large`, and no name."""
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
    script += "from heron.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["shards", "build", "frames", "--train", "300", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"File too large: '{tmp_path}/out/" in done.stderr, shlex.join(words)


def test_what_a_command_prints(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        script = "import sys; from heron.cli.main import main; main(['config', 'faces'])"
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE)
    assert b"error: what this command prints, or a temporary file: the disk is full" in done.stderr


def test_an_error_of_another_kind_keeps_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'/nowhere'"), naming(tmp_path / "a"):
        open("/nowhere").close()
    with pytest.raises(OSError, match="^told otherwise$"), naming(tmp_path / "a", tmp_path / "a"):
        raise OSError("told otherwise")
