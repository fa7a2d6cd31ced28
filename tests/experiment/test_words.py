"""Words of a command line are what was typed: texts with #, dates, numbers, `on`, `~`."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from heron.base.errors import ConfigError
from heron.base.shipped import find_config
from heron.cli.arguments import Verb, parse
from heron.cli.main import main
from heron.experiment.config import Config, load_config
from heron.experiment.overrides import as_typed, parse_override
from heron.studies.study import load_study
from heron.studies.trials import plan

TEXTS = ["try #2", "2026-11-26", "007", "1e3", "on", "yes", "a: b", "[x]", "{y}", "*z", "&a", "!t"]
TEXTS += ["50%", "it's", 'say "x"', "#1", "- a", "a, b", "1_000", "0x10", "12:30:00", "null.d", "="]


@pytest.mark.parametrize("word", TEXTS)
def test_a_text_is_what_was_typed(word: str) -> None:
    words = [f"run.dir={word}", f"data.path={word}", f"data.split={word}"]
    config = load_config(find_config("faces"), words)
    assert (config.run.dir, config.data.path, config.data.split) == (word, word, word)
    assert parse_override(f"run.dir={as_typed(word)}", Config) == ("run.dir", word)


def test_quotes_around_the_whole_are_taken_off() -> None:
    for quoted in ("'try #2'", '"try #2"'):
        assert load_config(find_config("faces"), [f"run.dir={quoted}"]).run.dir == "try #2"
    for word in ("'a' and 'b'", '"a', "'"):
        assert load_config(find_config("faces"), [f"run.dir={word}"]).run.dir == word


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In an override, in a file, and in an option written with `=`, where no shell expands it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(find_config("faces"), ["run.dir=~/x", "data.path=~/y"])
    assert (config.run.dir, config.data.path) == (f"{tmp_path}/x", f"{tmp_path}/y")
    seen: list[Path] = []

    def verb(*, out: Path) -> None:
        seen.append(out)

    parse("heron verb", Verb(verb, about="a"), ["--out=~/there"])()
    assert seen == [tmp_path / "there"]
    with pytest.raises(
        ConfigError, match="'~nobody-here' has no home directory; .*, write ./~nobody-he"
    ):
        load_config(find_config("faces"), ["run.dir=~nobody-here/x"])
    here = load_config(find_config("faces"), ["run.dir=./~nobody-here/x"])
    assert here.run.dir == "./~nobody-here/x"


def test_numbers_lists_and_sections_are_yaml() -> None:
    words = ["optim.lr=1e-3", "train.steps=7", "tracking=[]", "data.views.0.augment=[noise]"]
    words += ["evaluate.baselines=plain", "data.build=null", "data.verify=off", "data.roles=null"]
    config = load_config(find_config("frames"), words)
    assert (config.optim.lr, config.train.steps, config.tracking) == (1e-3, 7, [])
    assert (config.evaluate.baselines, config.data.build, config.data.verify) == (
        "plain",
        None,
        False,
    )
    assert config.data.roles is None
    assert parse_override("objective.nt_xent.tau=0.5", Config) == ("objective.nt_xent.tau", 0.5)


def test_no_comment_is_dropped() -> None:
    """A number with a comment was read without it, a text of no known key lost what follows."""
    with pytest.raises(ConfigError, match="'#2' would be a comment; remove it"):
        load_config(find_config("faces"), ["optim.lr=0.1 #2"])
    assert parse_override("data.build.note=try #2", Config)[1] == "try #2"
    assert parse_override("data.build.note='try #2'", Config)[1] == "try #2"
    assert parse_override("data.build.list=['#a', b]", Config)[1] == ["#a", "b"]


FAKE = """#!{python}
import json, sys
print(json.dumps(sys.argv[1:]))
"""


def through_a_shell(command: str, folder: Path) -> list[str]:
    """The words that a program gets from a command that was copied into a shell."""
    for name in ("accelerate", "heron"):
        (folder / name).write_text(FAKE.format(python=sys.executable))
        (folder / name).chmod(0o755)
    env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", command], env=env, capture_output=True, text=True, check=True
    )
    words: list[str] = json.loads(done.stdout)
    return words


def test_each_printed_command_of_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "it's #1 of $HOME"
    words = ["data.path=data/try #2; echo 'x'", "data.split=007", "train.steps=3"]
    shown = ["study", "negatives", "--small", *words, "--out", str(out), "--dry-run"]
    assert main(shown) == 0
    printed = capsys.readouterr().out
    commands = re.findall(r"^  ((?:env .*)?accelerate .*)$", printed, re.MULTILINE)
    study = load_study(find_study("negatives"), True, words)
    trials = plan(study, out)
    assert len(commands) == len(trials) > 1
    for command, trial in zip(commands, trials, strict=True):
        given = through_a_shell(command, tmp_path)
        overrides = given[given.index("--config") + 2 :]
        assert all("=" in word for word in overrides)
        config = load_config(find_config(study.base), overrides)
        expected = trial.config()
        assert config.data.path == "data/try #2; echo 'x'" and config.data.split == "007"
        assert config.run.dir.startswith(str(out))
        assert config.model_copy(update={"run": expected.run}) == expected


def find_study(name: str) -> Path:
    from heron.base.shipped import STUDIES, find_shipped

    return find_shipped(name, STUDIES, "study")


def test_the_next_command_of_a_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "it's #1"
    assert (
        main(["shards", "build", "faces", "--train", "20", "--test", "4", "--out", str(out)]) == 0
    )
    (command,) = re.findall(r"^next: (.*)$", capsys.readouterr().err, re.MULTILINE)
    verb, config, *overrides = through_a_shell(command, tmp_path)
    assert (verb, load_config(find_config(config), overrides).data.path) == ("pretrain", str(out))
    assert shlex.split(command)[0] == "heron"
