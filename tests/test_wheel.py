"""The wheel is the product: what is in it, and that it works alone, from another folder."""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.cli.pretrain import LAUNCHERS

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("configs", "launch", "CITATION.cff")  # what setup.py puts into the wheel
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
SMALL = ["data.build.train=300", "data.build.test=40", "data.protocol.labelled=80"]
SHORT = ["train.steps=2", "train.cpu_threads=1", "evaluate.map=never"]


def tracked(*folders: str) -> list[str]:
    """The files that git knows, or would know, of some folders or of all."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in found.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel of what git knows, and one of the source distribution of that."""
    place = tmp_path_factory.mktemp("built")
    source = place / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        _copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-c", BUILD, place], cwd=source, check=True, capture_output=True
    )
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(place / "sdist", filter="data")
    (unpacked,) = (place / "sdist").iterdir()
    return _wheel(source, place / "one"), _wheel(unpacked, place / "two")


def _copy(path: Path, to: Path) -> None:
    if path.is_symlink():
        to.symlink_to(os.readlink(path))
        return
    to.write_bytes(path.read_bytes())
    to.chmod(path.stat().st_mode)


def _wheel(source: Path, out: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", out, source], check=True, capture_output=True)
    (wheel,) = out.iterdir()
    return wheel


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_it_holds_what_git_knows_and_nothing_else(wheels: tuple[Path, Path]) -> None:
    expected = {*tracked("heron"), *(f"heron/{name}" for name in tracked(*BESIDE))}
    for wheel in wheels:
        found = names(wheel)
        info = {name for name in found if ".dist-info/" in name}
        assert found - info == expected
        assert {name.partition("/")[2] for name in info} == {
            *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt"),
            "licenses/LICENSE",
        }
    with zipfile.ZipFile(wheels[0]) as archive:
        script = archive.getinfo("heron/launch/hosts/pretrain.sh")
        assert script.external_attr >> 16 & 0o111  # it can be run
        licence = archive.read(next(name for name in archive.namelist() if "LICENSE" in name))
        assert b"Apache License" in licence and len(licence) > 10_000
        citation = archive.read("heron/CITATION.cff").decode()
    assert f"version: {project()['version']}\n" in citation


def project() -> dict[str, str]:
    found: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_its_metadata_is_complete(wheels: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(wheels[0]) as archive:
        path = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The Heron authors"
    assert metadata["Keywords"] and metadata.get_all("Classifier")
    base = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert not [one for one in base if one.startswith(("faiss", "ray", "fastapi", "pytest"))]
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"cpu", "gpu", "remote", "serve", "study", "dev"} <= extras


def test_the_two_locks_agree_and_pin_what_pyproject_asks_for() -> None:
    user, dev = (
        (ROOT / name).read_text() for name in ("requirements.lock", "requirements-dev.lock")
    )
    assert "--requirement requirements.lock\n" in dev
    pins = [line.partition("==")[0].lower() for text in (user, dev) for line in text.splitlines()
            if "==" in line]  # fmt: skip
    assert len(pins) == len(set(pins))
    assert {"torch", "faiss-cpu", "ray", "fastapi"} <= {*pins} and "pytest" not in user


@pytest.fixture(scope="module")
def installed(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and the libraries of this one but not its Heron.

    A plain path in a .pth file adds a folder without the .pth files in it, which an editable
    install is.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "libraries.pth").write_text("".join(f"{path}\n" for path in libraries))
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--ignore-installed", wheels[0]], check=True)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a small data set in Scene's place."""
    folder = tmp_path_factory.mktemp("elsewhere")
    draw = np.random.default_rng(0)
    views: Any = {
        name: draw.normal(size=(240, 12)).astype(np.float32) for name in ("view1", "view2")
    }
    labels = np.tile(np.eye(4, 6, dtype=np.uint8), (60, 1))  # each vector often enough for 20 folds
    np.savez(folder / "scene.npz", labels=labels, **views)
    return folder


def run(installed: Path, place: Path, *words: str) -> str:
    """What a command of the environment prints; it sees no checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [installed / "bin" / words[0], *words[1:]],
        cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_every_module_is_the_wheel_s(installed: Path, place: Path) -> None:
    code = (
        "import sys, pkgutil, importlib, heron\n"
        "for m in pkgutil.walk_packages(heron.__path__, 'heron.'):\n"
        "    if not m.name.endswith('_triton'): importlib.import_module(m.name)\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'heron'))"
    )
    files = run(installed, place, "python", "-c", code).split()
    assert len(files) > 100
    assert [path for path in files if not path.startswith(str(installed))] == []


def test_it_says_its_version(installed: Path, place: Path) -> None:
    assert run(installed, place, "heron", "--version") == f"heron {project()['version']}\n"


def test_the_main_job(installed: Path, place: Path) -> None:
    said = run(
        installed, place, "heron", "pretrain", "faces", *SMALL, *SHORT, "evaluate.baselines=false"
    )
    assert "report: runs/faces/report.html" in said
    assert (place / "runs" / "faces" / "result.json").exists()


def test_an_experiment_of_one_s_own_and_its_launchers(installed: Path, place: Path) -> None:
    build = "shards build arrays --npz scene.npz --out data/scene --quiet"
    run(installed, place, "heron", *build.split())
    said = run(installed, place, "heron", "init", "data/scene", "--out", "mine.yaml")
    assert said.endswith("next: heron pretrain mine.yaml\n")
    *copied, after = run(installed, place, "heron", "launchers", "cluster").splitlines()
    assert after == "next: sbatch cluster/slurm/pretrain.sbatch"
    shipped = sorted(tracked(*(f"launch/{name}" for name in LAUNCHERS)))
    assert copied == [name.replace("launch/", "cluster/") for name in shipped]
    assert "widths" in run(installed, place, "heron", "config", "mine.yaml", "model")


def test_a_reproduction_and_a_study(installed: Path, place: Path) -> None:
    words = [
        "--runs",
        "1",
        "--only",
        "DNN",
        "--out",
        "table",
        "train.steps=1",
        "evaluate.map=never",
    ]
    table = run(installed, place, "heron", "reproduce", "scene", *words)
    (row,) = [line for line in table.splitlines() if line.startswith("| DNN ")]
    assert float(row.split(" | ")[2].split()[0]) >= 0  # measured
    said = run(installed, place, "heron", "study", "negatives", "--small", "--dry-run")
    assert "8 trials by grid" in said
