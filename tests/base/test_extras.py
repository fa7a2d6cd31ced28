"""Without an extra, Heron imports and trains; a verb that needs it says in a line how to get it."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

from heron.base.extras import EXTRAS, MissingPackage, require
from heron.training.trackers import EXTRA

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # Python then finds no such package
from heron.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def run(without: str, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-c", WITHOUT, without, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("without", "words", "told"),
    [
        (
            "faiss",
            ("index", "none", "--out", "x"),
            "error: a search for neighbours needs the package faiss, which is not installed; "
            "install it with: pip install 'heron-pretrain[cpu]', or 'heron-pretrain[gpu]' for "
            "CUDA\n",
        ),
        ("faiss", ("query", "none", "--key", "x"), "the package faiss"),
        ("faiss", ("negatives", "none", "--out", "x"), "the package faiss"),
        ("faiss", ("serve", "none"), "the package faiss"),
        (
            "fastapi",
            ("serve", "none"),
            "error: the web page needs the package fastapi, which is not installed; install it "
            "with: pip install 'heron-pretrain[serve]'\n",
        ),
    ],
)
def test_a_verb_names_the_extra(without: str, words: tuple[str, ...], told: str) -> None:
    status, error = run(without, *words)
    assert status == 1 and error.count("\n") == 1
    assert told in error


def brings() -> dict[str, set[str]]:
    """The packages of each extra of pyproject.toml, as modules are written."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        extra: {re.split(r"[\[<>=]", one)[0].replace("-", "_") for one in packages}
        for extra, packages in project["optional-dependencies"].items()
    }


@pytest.mark.parametrize("module", EXTRAS)
def test_a_missing_package_names_an_extra_that_brings_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackage) as caught:
        require(module, "what is asked for")
    said = str(caught.value)
    assert (
        f"what is asked for needs the package {module}, which is not installed; install it with: "
        in said
    )
    extras = re.findall(r"heron-pretrain\[(\w+)\]", said)
    assert extras and all(
        any(package.startswith(module) for package in brings()[extra]) for extra in extras
    )


def test_every_extra_of_a_user_is_named_by_an_error() -> None:
    """`remote`'s other packages are fsspec's, whose error heron/shards/remote.py passes on."""
    named = {extra for hint in EXTRAS.values() for extra in re.findall(r"\[(\w+)\]", hint)}
    named |= {*EXTRA.values(), "train"}  # which `python -m heron` names, see below
    assert named == brings().keys() - {"all", "dev", "docs"}
    assert all(tracker in {p.split("_")[0] for p in brings()[e]} for tracker, e in EXTRA.items())


LOSSES_ALONE = """
import runpy, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
import torch
from heron.losses import SupConLoss, WeightedSupervised
torch.manual_seed(0)
features, labels = torch.randn(8, 4, requires_grad=True), torch.rand(8, 3) < 0.3
(WeightedSupervised()(features, labels) + SupConLoss()(features, torch.arange(8) % 2)).backward()
print(bool(features.grad.isfinite().all()))
sys.argv = ["heron", "pretrain", "faces"]
runpy.run_module("heron", run_name="__main__")
"""


def brought_by(names: Iterable[str]) -> set[str]:
    """The distributions that pip installs for some, without extras."""
    found, left = set[str](), list(names)
    while left:
        name = re.split(r"[ ;(\[<>=!~]", left.pop())[0].lower().replace("_", "-")
        if name not in found:
            with suppress(PackageNotFoundError):
                left += [one for one in requires(name) or [] if "extra ==" not in one]
                found.add(name)
    return found


def test_the_losses_need_little_and_the_command_says_what_it_needs() -> None:
    """No module but those that pip installs for the losses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kept = brought_by(project["dependencies"])
    assert "torch" in kept and "pandas" not in kept
    absent = [
        module
        for module, owners in packages_distributions().items()
        if not {owner.lower().replace("_", "-") for owner in owners} & {*kept, "heron-pretrain"}
    ]
    command = [sys.executable, "-c", LOSSES_ALONE, ",".join(absent)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True\n", 1), done.stderr
    told = r"error: the command needs \w+, which is not installed with the losses alone: (.*)\n"
    found = re.fullmatch(told, done.stderr)
    assert found and {*re.findall(r"heron-pretrain\[(\w+)\]", found[1])} == {"cpu", "train"}


@pytest.mark.parametrize(
    ("asked", "told"), [("negatives.mine=4", "negatives.mine"), ("evaluate.knn=5", "evaluate.knn")]
)
def test_training_that_needs_faiss_is_refused_before_the_first_step(
    tmp_path: Path, asked: str, told: str
) -> None:
    data = ["data.build.train=60", "data.build.test=20", f"data.path={tmp_path / 'data'}"]
    small = [*data, "data.protocol.labelled=40", f"run.dir={tmp_path / 'run'}", "train.steps=1"]
    small += ["evaluate.baselines=false", "data.batch.labelled=16", "data.batch.unlabelled=16"]
    status, error = run("faiss", "pretrain", "faces", *small, asked)
    assert status == 1
    assert f"{told} needs the package faiss" in error
    assert "Traceback" not in error and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_study_without_ray(tmp_path: Path) -> None:
    study = ["study", "negatives", "--small", "--out", str(tmp_path / "study")]
    status, told = run("ray,faiss", *study, "--dry-run")
    assert status == 0 and not told
    data = ["data.path=" + str(tmp_path)]
    status, error = run("ray", *study, *data)
    assert status == 1
    assert "a study needs the package ray" in error
