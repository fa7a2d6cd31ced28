"""One command at a time writes a file or a folder: the second is refused, and touches nothing."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from heron.base.artefact import sha256
from heron.base.atomic import kept_in_cache, locked
from heron.base.errors import InUse
from heron.base.workers import ALONE
from heron.cli.main import main
from heron.experiment.config import dump_config
from heron.retrieval.embed import Choice
from heron.retrieval.embed_tasks import embed_on
from heron.retrieval.index import Index
from heron.training import run_lock
from tests import forked
from tests.experiments import frames
from tests.launch import runs
from tests.shards.others import cats, write_wds
from tests.studies import made

HOLDS = """
import sys, time
from pathlib import Path
from heron.base.atomic import locked, take_lock
out, lock = sys.argv[1:]
with locked(out, Path(lock) if lock else None):
    print("holds", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, its embeddings and their index, tars of others, and a study."""
    home = tmp_path_factory.mktemp("locks")
    config = frames(home, train={"steps": 2}, data={"epoch": "labelled"})
    (home / "mine.yaml").write_text(dump_config(config))
    assert run("pretrain", home / "mine.yaml") == 0
    assert run("embed", home / "run", "--out", home / "e", "--quiet") == 0
    assert run("index", home / "e", "--out", home / "i", "--quiet") == 0
    (home / "tars").mkdir()
    write_wds(home / "tars/a.tar", cats(0, 6))
    made.study(home / "study", [made.trial("000", {"optim.lr": 0.1})])
    asked = {"title": "t", "base": str(home / "mine.yaml"), "vary": {"optim.lr": [0.1]}}
    asked["measure"] = {"x": "optim.lr", "y": ["step_s"], "score": "f1_weighted"}
    (home / "study.yaml").write_text(yaml.safe_dump(asked))
    return home


def run(*words: object) -> int:
    return main([str(word) for word in words])


def searches(verb: str) -> Callable[[Path, Path], list[Any]]:
    return lambda home, out: [verb, home / "mine.yaml", "--methods", "dnn", "--trials", 1]


# The words of a command before `--out OUT`, or with OUT where it has another name.
QUICK: dict[str, Callable[[Path, Path], list[Any]]] = {
    "shards build": lambda home, out: ["shards", "build", "frames", "--train", 300, "--test", 8],
    "shards index": lambda home, out: ["shards", "index", out, "--image", "jpg"],
    "shards protocol": lambda home, out: ["shards", "protocol", home / "mine.yaml", out],
    "embed": lambda home, out: ["embed", home / "run"],
    "predict": lambda home, out: ["predict", home / "run"],
    "index": lambda home, out: ["index", home / "e"],
    "negatives": lambda home, out: ["negatives", home / "e", "--anchors", 20, "--k", 3],
    "serve": lambda home, out: ["serve", home / "i", "--export", out],
    "save": lambda home, out: ["save", home / "run"],
    "export": lambda home, out: ["export", home / "run"],
    "report": lambda home, out: ["report", home / "study"],
    "launchers": lambda home, out: ["launchers", out],
    "init": lambda home, out: ["init", home / "frames"],
    "pretrain": lambda home, out: ["pretrain", home / "mine.yaml", f"run.dir={out}"],
}
LONG: dict[str, Callable[[Path, Path], list[Any]]] = {
    "compare": searches("compare"),
    "tune": searches("tune"),
    "study": lambda home, out: ["study", home / "study.yaml"],
    "reproduce": lambda home, out: ["reproduce", "scene", f"data.path={home / 'frames'}"],
}
BEGUN = {  # what a killed one leaves
    "shards build": "out/.train-000000.tar.1.part",
    "embed": "out/hidden/.00000.npy.1.part",
    **dict.fromkeys(("shards protocol", "index", "negatives", "serve", "save"), ".out.part/half"),
    **{"predict": ".p.csv.part", "export": ".m.pt2.part", "init": ".new.yaml.part"},
}
NAMES = {"predict": "p.csv", "export": "m.pt2", "init": "new.yaml"}
WITH_OUT = ("shards index", "shards protocol", "serve", "launchers", "pretrain")


def words_of(verb: str, home: Path, out: Path) -> list[Any]:
    words = (QUICK | LONG)[verb](home, out)
    return words if verb in WITH_OUT else [*words, "--out", out]


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256(path) if path.is_file() else "folder"
        for path in folder.rglob("*")
        if path.name != run_lock.LOCK
    }


@pytest.fixture
def holder() -> Iterator[Callable[[object, object], subprocess.Popen[bytes]]]:
    """Starts a process that holds the lock of an output."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(out: object, lock: object = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", HOLDS, str(out), str(lock)]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert begun[-1].stdout is not None and begun[-1].stdout.readline() == b"holds\n"
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("verb", [*QUICK, *LONG])
def test_one_command_writes_an_output(
    verb: str,
    home: Path,
    holder: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a killed one had begun is left to who holds the lock, and then in nobody's way."""
    monkeypatch.setattr(run_lock, "WAIT_S", 0.2)
    out = tmp_path / NAMES.get(verb, "out")
    if verb == "shards index":
        out.mkdir()
        write_wds(out / "a.tar", cats(0, 6))
    if verb == "embed":  # killed before its end
        shutil.copytree(home / "e", out)
        (out / "manifest.json").unlink()
    if verb in BEGUN:
        begun = tmp_path / BEGUN[verb]
        begun.parent.mkdir(parents=True, exist_ok=True)
        begun.write_text("half")
    other = holder(out, out / run_lock.LOCK if verb == "pretrain" else "")
    before = contents(tmp_path)
    assert run(*words_of(verb, home, out)) == 1
    said = " ".join(capsys.readouterr().err.split())
    in_use = "still in use" if verb == "pretrain" else "being written"
    assert f"{out} is {in_use} by process {other.pid} on {os.uname().nodename}" in said
    assert "; wait until " in said
    if verb not in ("report", "shards protocol", "launchers", "init"):  # which have no such option
        assert run(*words_of(verb, home, out), "--overwrite") == 1
        assert f"by process {other.pid} on" in " ".join(capsys.readouterr().err.split())
    assert contents(tmp_path) == before
    other.send_signal(signal.SIGKILL)
    other.wait()
    if verb in QUICK:
        assert run(*words_of(verb, home, out)) == 0, capsys.readouterr().err
        assert not [name for name in contents(tmp_path) if name.endswith((".part", ".lock"))]


@pytest.mark.parametrize("verb", ["embed", "index", "shards build"])
def test_a_url_is_locked_on_this_machine(
    verb: str,
    home: Path,
    holder: Callable[..., subprocess.Popen[bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"memory://locks-{verb.replace(' ', '-')}/out"
    other = holder(url, kept_in_cache("lock", url))
    assert run(*QUICK[verb](home, Path()), "--out", url) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"{url} is being written by process {other.pid} on" in said
    assert not fsspec.filesystem("memory").exists(url)
    other.kill()
    other.wait()
    assert run(*QUICK[verb](home, Path()), "--out", url) == 0, capsys.readouterr().err


def test_tasks_and_the_saving_of_an_index_are_refused_too(home: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "out"):
        with pytest.raises(InUse, match=f"out is being written by process {os.getpid()} on"):
            embed_on(ALONE, home / "run", tmp_path / "out", Choice())
        with pytest.raises(InUse, match="out is being written by"):
            Index.open(home / "i").save(tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_where_nothing_can_be_put_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a disk that is mounted in a folder of the system's: the lock is in the cache."""
    (out := tmp_path / "disk").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    with locked(out):
        assert [*tmp_path.iterdir()] == [out]
        with pytest.raises(InUse, match="disk is being written by"), locked(out):
            pytest.fail("it is not locked")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with locked(out):
        assert "cannot be locked; make sure that only one command" in capsys.readouterr().out


def test_who_waits_gets_the_lock_of_the_folder_that_is_there(tmp_path: Path) -> None:
    """Each of many waits for the one before it, though each removes the file that it locked."""
    inside, most = list[int](), list[int]()

    def work(number: int) -> None:
        with locked(tmp_path / "out", wait=True):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.02)
            inside.remove(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(24)))
    assert most == [1] * 24 and [*tmp_path.iterdir()] == []


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path / "out"):
        said = capsys.readouterr().out
    assert f"make sure that only one command writes {tmp_path}/out" in said


def test_a_second_embed_leaves_the_first_its_parts(home: Path, tmp_path: Path) -> None:
    """The first is met amid its work; the second, with other settings, removed what it wrote."""
    out, words = tmp_path / "out", ["embed", str(home / "run"), "--out"]
    first = forked.start([*words, str(out)], tmp_path, slow_parts, dict(os.environ))
    runs.await_that("a part", lambda: bool([*out.glob("*/.*.part")]), 60, str)
    second = forked.start(
        [*words, str(out), "--dtype", "float16"], tmp_path, main, dict(os.environ)
    )
    status, said = runs.finish(second, 60)
    (tmp_path / "go").touch()
    assert status == 1 and f"out is being written by process {first.pid} on" in said
    status, said = runs.finish(first, 60)
    assert status == 0 and "370 embeddings" in said, said


def slow_parts(words: Sequence[str]) -> int:
    """`heron`, whose parts are flushed once there is a file `go`, or after a minute."""
    flush, deadline = os.fsync, time.monotonic() + 60

    def slow(descriptor: int) -> None:
        is_part = ".npy." in os.readlink(f"/proc/self/fd/{descriptor}")
        while is_part and not Path("go").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        flush(descriptor)

    os.fsync = slow  # type: ignore[assignment]
    return main(words)
