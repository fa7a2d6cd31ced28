"""Heron where it was never installed, and the files that build and check it elsewhere."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
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


def workflow(name: str) -> dict[str, Any]:
    """The jobs of a workflow."""
    jobs: dict[str, Any] = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())[
        "jobs"
    ]
    return jobs


@pytest.mark.parametrize(
    ("tag", "heading", "said"),
    [
        ("v0.7.0", "## [0.7.0] - 2030-01-31", ""),
        (
            "v0.7.1",
            "## [0.7.0]",
            "The tag must be v0.7.0, the version in pyproject.toml, got v0.7.1\n",
        ),
        ("v0.7.0", "## [0.7.01]", "CHANGELOG.md has no heading '## [0.7.0]'\n"),
    ],
    ids=["right", "another version", "no heading"],
)
def test_a_release_has_the_tag_of_its_version(
    tag: str, heading: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.7.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [Unreleased]\n\n{heading}\n")
    (step,) = [s for s in workflow("release")["build"]["steps"] if "TAG" in s.get("env", {})]
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=tmp_path, env=os.environ | {"TAG": tag}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1 if said else 0, said)


def test_a_release_is_published_without_a_password_by_a_job_that_runs_no_code_of_ours() -> None:
    jobs = workflow("release")
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "build": None, "publish": "build", "docs": "publish",
    }  # fmt: skip
    may = {name: job.get("permissions") for name, job in jobs.items()}
    assert may == {
        "build": None, "publish": {"id-token": "write"}, "docs": {"contents": "write"},
    }  # fmt: skip
    assert jobs["publish"]["environment"] == "pypi"
    assert not [step for step in jobs["publish"]["steps"] if "run" in step]
    up, down = (
        next(
            step["with"]
            for step in jobs[job]["steps"]
            if f"{verb}-artifact" in step.get("uses", "")
        )
        for job, verb in (("build", "upload"), ("publish", "download"))
    )
    assert (up["name"], up["path"]) == (down["name"], down["path"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert "mike==" in str(jobs["docs"]) and "mike" not in str(extras)


def test_the_weekly_checks_are_targets_of_make() -> None:
    (job,) = workflow("weekly").values()
    targets = job["strategy"]["matrix"]["target"]
    made = re.findall(r"^([\w-]+): \$\(TESTED\)", (ROOT / "Makefile").read_text(), re.M)
    assert {*targets} <= {*made} and job["steps"][-1] == {"run": "make ${{ matrix.target }}"}


def test_texts_name_the_wheel_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    texts = [*ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb"), ROOT / "README.md"]
    named = {path.name: re.findall(r"heron_pretrain-([\d.]+)-", path.read_text()) for path in texts}
    assert {"install.md", "losses.ipynb", "search.ipynb"} <= {
        n for n, found in named.items() if found
    }
    assert {one for found in named.values() for one in found} == {version}
