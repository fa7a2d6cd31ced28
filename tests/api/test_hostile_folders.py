"""Folders of models from someone hostile: no code of theirs runs, no pickle, no request leaves.

They are opened in a process apart, whose imports, sockets, pickles and commands an audit hook
notes: see `tests.hostile`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import hostile

REPOSITORY = Path(__file__).parents[2]
Found = dict[str, dict[str, Any]]
ENCODERS = {f"--encoder {name}": tree for name, tree in hostile.BACKBONES.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def python(root: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A command of this interpreter in the folder that `models/gift` lies in."""
    path = os.pathsep.join((str(REPOSITORY), *filter(None, [variables.pop("PYTHONPATH", "")])))
    environment = os.environ | {"PYTHONPATH": path} | variables
    return subprocess.run(
        [sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(root: Path) -> Found:
    """What happened in each case, by its name."""
    done = python(root, "-m", "tests.hostile", str(root))
    assert done.returncode == 0, done.stderr[-3000:]
    answer: Found = json.loads((root / "found.json").read_text())
    return answer


def of(found: Found, case: str) -> dict[str, Any]:
    if case not in found:
        pytest.skip("needs timm: pip install --target .venv/vision timm")
    return found[case]


@pytest.mark.parametrize("case", [*hostile.CASES, *ENCODERS])
def test_nothing_runs_and_nothing_leaves(found: Found, case: str) -> None:
    one = of(found, case)
    assert (one["seen"], one["ran"], one["raw"]) == ([], False, ""), one


def test_what_is_refused_says_what_allows_it(found: Found) -> None:
    refused = found["code: encoder_beside_the_folder"]["fault"]
    assert "model.encoders.left: kit.evil.Enc is code that is not Heron's" in refused
    assert "if you trust it, pass --trust-code, or trust_code=True in Python" in refused
    trusted = found["code: encoder_beside_the_folder trusted"]  # and so this test can see code run
    assert trusted["ran"] and any("kit/evil.py" in event for event in trusted["seen"])
    assert "Error(s) in loading state_dict" in trusted["fault"]  # the weights are of other layers


def test_files_of_the_folder_do_not_run_even_if_it_is_trusted(found: Found) -> None:
    own = [case for case in hostile.CODES if "evil" in str(hostile.CODES[case])]
    for case in {*own} - {"encoder_beside_the_folder", "tracker", "source", "tokenizer"}:
        one = found[f"code: {case} trusted"]
        assert (one["seen"], one["ran"], one["raw"]) == ([], False, ""), one
        assert "of which no file is ever run" in one["fault"]


def test_a_trusted_folder_has_no_network_either(found: Found) -> None:
    for name, one in found.items():
        if name.endswith(" trusted") and "beside_the_folder" not in name and "code" not in name:
            assert (one["seen"], one["ran"], one["raw"]) == ([], False, ""), (name, one)


@pytest.mark.parametrize("verb", hostile.verbs("gift"))
def test_a_command_runs_code_only_if_it_is_told_to(found: Found, verb: str, root: Path) -> None:
    gift = found[f"heron {verb} gift"]
    assert (gift["seen"], gift["ran"], gift["raw"]) == ([], False, "")
    if verb == "negatives":  # which reads the temperatures of the run's objective alone
        for name in ("gift0", "mine0", "mine1"):
            report = json.loads((root / f"{name}-report" / "negatives.json").read_text())
            assert report["temperatures"]["tau"] == 0.3, report["temperatures"]
        return
    assert gift["status"] == 1 and gift["said"].startswith("error: ")
    if verb in ("config", "pretrain"):
        assert "of which no file is ever run" in gift["said"]
        return
    mine, trusted = (found[f"heron {verb} mine{option}"] for option in ("", " --trust-code"))
    assert (mine["status"], mine["seen"], mine["ran"]) == (1, [], False)
    assert "kit.evil.Enc is code that is not Heron's" in mine["said"]
    assert "pass --trust-code" in mine["said"]
    assert trusted["status"] == 0 and trusted["ran"], trusted


STARTS = {
    "python -c": ["-c", "import heron; heron.from_pretrained('models/gift')"],
    "python -m heron": ["-m", "heron", *hostile.verbs("gift")["embed"]],
    "accelerate launch": ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1",
                          "-m", "heron", *hostile.verbs("gift")["predict"]],
}  # fmt: skip


@pytest.mark.parametrize("start", STARTS)
def test_it_does_not_matter_how_python_was_started(
    root: Path, found: Found, tmp_path: Path, start: str
) -> None:
    honest = json.loads((root / "honest.json").read_text())
    hostile.write(root, "code: encoder", honest)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; from tests import hostile; sys.addaudithook(hostile.watch)"
    )
    watched = tmp_path / "watched.txt"
    done = python(root, *STARTS[start], PYTHONPATH=str(tmp_path), HERON_WATCHED=str(watched))
    assert (
        done.returncode != 0 and "models.gift.evil.Enc is code that is not Heron's" in done.stderr
    )
    assert not (root / hostile.CANARY).exists()
    lines = watched.read_text().splitlines() if watched.exists() else []
    assert [line for line in lines if not line.startswith("subprocess.Popen")] == []
