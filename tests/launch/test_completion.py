"""Shells complete verbs, options and shipped names."""

import shutil
import subprocess
from pathlib import Path

import pytest

from heron.cli.main import VERBS, main, script

TYPED = {
    "heron pret": ["pretrain"],
    "heron pretrain fa": ["faces", "faces-crops"],
    "heron shards build faces --tr": ["--train"],
    "heron study one": ["one-worker"],
    "heron reproduce sc": ["scene"],
}
BASH = """
source "$1"
COMP_WORDS=($2); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_heron; echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("typed", TYPED)
def test_bash(typed: str, tmp_path: Path) -> None:
    (file := tmp_path / "heron").write_text(script("bash", VERBS))
    words = ["bash", "-c", BASH, "bash", str(file), typed]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == TYPED[typed]


@pytest.mark.parametrize("typed", TYPED)
def test_fish(typed: str, tmp_path: Path) -> None:
    if not shutil.which("fish"):
        pytest.skip("needs fish")
    (file := tmp_path / "heron.fish").write_text(script("fish", VERBS))
    code = f"source {file}; complete -C '{typed}'"
    done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == TYPED[typed]


def test_zsh_reads_it(tmp_path: Path) -> None:
    if not shutil.which("zsh"):
        pytest.skip("needs zsh")
    (file := tmp_path / "heron.zsh").write_text(script("zsh", VERBS))
    code = f"autoload -U compinit; compinit -D; source {file}; _heron_words 'shards'"
    done = subprocess.run(["zsh", "-fc", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["build", "index", "verify", "show"]


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.endswith("complete -o default -F _heron heron\n")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("heron ")
