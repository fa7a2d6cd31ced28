"""The command after each verb: one that `heron` would take, of the arguments that were given."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from heron.base.errors import STOPPED
from heron.cli.arguments import Verb, choose, parse
from heron.cli.main import VERBS, main
from heron.cli.next_step import NEXT, next_commands
from tests.launch.test_cli import PAGES
from tests.studies import made

RUNNABLE = [" ".join(words) for words, verb in PAGES if isinstance(verb, Verb)]


def called(words: str) -> tuple[str, partial[Any]]:
    """A verb's name and the call of its function that some words ask for."""
    left, prog, verb = shlex.split(words), "heron", VERBS
    while not isinstance(verb, Verb):
        verb = choose(prog, verb, left)  # type: ignore[assignment]
        prog, left = f"{prog} {left[0]}", left[1:]
    call = parse(prog, verb, left)
    assert isinstance(call, partial)
    return prog.removeprefix("heron "), call


def after(words: str, status: int = 0) -> list[str]:
    return next_commands(*called(words), status)


def test_every_verb_is_in_the_table() -> None:
    known = {"shards build" if one.startswith("shards build") else one for one in RUNNABLE}
    assert known == {*NEXT}


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        ("shards build faces --out data/f", ["heron pretrain faces data.path=data/f"]),
        ("shards build folder --folder . --out 'my data'", ["heron init 'my data'"]),
        ("shards build faces --out 'try #2'",
         [shlex.join(["heron", "pretrain", "faces", "data.path='try #2'"])]),
        ("shards protocol scene roles data.path=data/b",
         ["heron pretrain scene data.path=data/b data.roles=roles"]),
        ("shards verify data/f", ["heron shards show data/f"]),
        ("init data/f --out mine.yaml", ["heron pretrain mine.yaml"]),
        ("pretrain faces run.dir=runs/a", ["heron embed runs/a --out embeddings/a"]),
        ("embed runs/a --out embeddings/a", ["heron index embeddings/a --out indexes/a"]),
        ("index embeddings/a --out indexes/a", ["heron serve indexes/a"]),
        ("query indexes/a --key 1", ["heron serve indexes/a"]),
        ("query indexes/a --key 1 --format json", []),
        ("negatives embeddings/a --out r", ["heron index embeddings/a --out indexes/a"]),
        ("tune scene --methods dnn dnn", ["heron pretrain runs/scene-tune/dnn.yaml"]),
        ("tune scene --methods dnn herocon",
         [f"heron pretrain runs/scene-tune/{name}.yaml" for name in ("dnn", "herocon")]),
        ("tune scene --methods DNN HeroCon optim.lr=1",
         [f"heron pretrain runs/scene-tune/{name}.yaml" for name in ("dnn", "herocon")]),
        ("study negatives --small", ["heron report studies/negatives-small"]),
        ("study negatives --out 'my study'", ["heron report 'my study'"]),
        ("study negatives --small --dry-run", []),
        ("reproduce scene --out o --dry-run", []),
        ("reproduce scene", ["heron runs runs/scene-table"]),
        ("config faces", []),
    ],
)  # fmt: skip
def test_the_next_command(words: str, commands: list[str]) -> None:
    found = after(words)
    assert found == commands
    for command in found:
        assert called(command.removeprefix("heron "))


def test_a_run_that_was_stopped_goes_on_by_the_same_command() -> None:
    words = "pretrain faces run.resume=never optim.lr=0.1 --method simclr --processes 2"
    (command,) = after(words, STOPPED)
    assert command == (
        "heron pretrain faces optim.lr=0.1 run.resume=auto --method=simclr --processes=2"
    )
    assert called(command.removeprefix("heron "))
    assert after(words, 1) == [] == after("index a --out b", STOPPED)


def test_it_is_said_beside_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr: a pipe is fed what it was fed before. A report names the best trial's command."""
    lines = [made.trial(f"00{n}", {"optim.lr": n}, result={"f1_weighted": n}) for n in (1, 2)]
    folder = made.study(tmp_path / "study", lines)
    assert main(["report", str(folder)]) == 0
    told = capsys.readouterr()
    assert "next:" not in told.out
    assert told.err.splitlines() == [f"next: {lines[1]['command']}"]
