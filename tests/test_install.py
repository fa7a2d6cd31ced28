"""Heron where it was never installed, and the files that build and check it elsewhere."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "heron"


def test_a_checkout_that_was_never_installed_has_a_version(tmp_path: Path) -> None:
    """`-S` hides site-packages; in another folder no metadata of a build is found either."""
    (tmp_path / "heron").symlink_to(PACKAGE)
    command = [sys.executable, "-S", "-c", "import heron; print(heron.__version__)"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "not installed"


def test_the_image_is_made_of_files_that_are_there_at_the_lock_s_versions() -> None:
    text = (ROOT / "Dockerfile").read_text()
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "requirements.lock").read_text(), re.M))
    assert re.findall(r"torch==([\d.]+)", text) == [pins["torch"]]
    assert "faiss-cpu" in pins and re.findall(r"AS (\w+)", text) == ["wheel", "base", "cpu", "gpu"]
    context = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in context if line.startswith("!")]
    assert {"requirements.lock", "pyproject.toml", "README.md", "LICENSE"} <= {*kept}
    (shipped,) = re.findall(r"^SHIPPED = (.+)$", (ROOT / "setup.py").read_text(), re.M)
    assert {"heron", "setup.py", *ast.literal_eval(shipped)} <= {*kept}
    assert not any(path.is_symlink() for path in PACKAGE.iterdir())
    assert [name for name in kept if not (ROOT / name).exists()] == []
    for stage in re.split(r"^FROM ", text, flags=re.M)[1:]:  # what is copied is there
        for words in re.findall(r"^COPY (?!--)(.+) \S+$", stage, re.M):
            assert all((ROOT / word).exists() for word in words.split())
    built, used = re.search(r"--wheel-dir (\S+)", text), re.findall(r"(/\S+)/\*\.whl", text)
    assert built and f"COPY --from=wheel {built[1]} /dist" in text and {*used} == {"/dist"}
    locks = re.findall(r"--requirement (\S+)", text)
    assert locks == ["/requirements.lock", "/gpu.lock"] and "COPY requirements.lock .\n" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]  # one version of both, which the lock's is
    assert optional["gpu"] == [one.replace("faiss-cpu", "faiss-gpu") for one in optional["cpu"]]
    assert re.search(r"sed 's/\^faiss-cpu==/faiss-gpu==/' /requirements.lock > /gpu.lock", text)
    (python,) = set(re.findall(r"^FROM python:([\d.]+)-slim", text, re.M))
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    words = re.findall(r"(?:heron:\w+|\bheron) pretrain (\w+)", text)
    assert words and all((ROOT / "configs" / f"{name}.yaml").exists() for name in words)


def test_ci_and_the_hooks_run_what_make_check_runs() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["check"][
        "steps"
    ]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    assert [hook["entry"] for hook in hooks] == commands[:3]
