"""`python -m benchmarks.gpu` without a GPU: its parts on a CPU, and parts that die or hang."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import wheels
from tests.weekly import weekly

ROOT = Path(__file__).parents[1]
# What a machine with a GPU lacks: packages of extras, none of which training and retrieval need.
ABSENT = {
    "aiohttp", "s3fs", "botocore", "boto3", "wandb", "mlflow", "sqlalchemy", "alembic", "trackio",
    "fastapi", "uvicorn", "starlette", "umap", "ray", "peft", "torch_geometric", "timm",
    "torchvision", "onnx", "onnxruntime", "onnxscript", "datasets", "moto", "flask", "hypothesis",
    "lightning", "pytest", "playwright", "mkdocs", "nbclient", "ipykernel", "beartype",
}  # fmt: skip
IMPORTS = f"""
import importlib.util, sys
ABSENT = {sorted(ABSENT)}
find_spec = importlib.util.find_spec  # by which libraries look for what they can use
importlib.util.find_spec = lambda name, *x: (
    None if name.partition(".")[0] in ABSENT else find_spec(name, *x)
)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from benchmarks.gpu.machine import failed_imports
print(*failed_imports(), sep="\\n", end="")
"""


def test_every_module_is_imported_without_the_extras() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


def test_a_module_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.machine import failed_imports

    info = pkgutil.ModuleInfo(importlib.machinery.FileFinder("."), "heron.no_such_room", False)
    monkeypatch.setattr(pkgutil, "walk_packages", lambda *_: [info])
    assert failed_imports() == [
        "heron.no_such_room: ModuleNotFoundError: No module named 'heron.no_such_room'"
    ]


@weekly("a tool that is run by hand, where there is a GPU")
def test_parts_on_a_cpu(tmp_path: Path) -> None:
    """Kernels in the interpreter against float64, a term timed, collectives, a step."""
    parts = ["right", "fast", "nccl", "step"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--minutes", "3", "--parts", *parts],
        cwd=ROOT, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    by_part = {part: [row for row in rows if row["part"] == part] for part in parts}
    terms = {row["term"]: row["path"] for row in by_part["right"]}
    assert set(terms) == {"nt_xent", "weighted_supervised", "h_scl", "weighted_unsupervised"}
    path = "pull_kernel+slope_kernel+sum_kernel+unit_gradient_kernel+unit_kernel"
    assert terms["nt_xent"] == path and all(row["ok"] and row["same"] for row in by_part["right"])
    assert [row["method"] for row in by_part["fast"]] == ["ours", "dense"]
    assert all(row["ms"] > 0 for row in by_part["fast"])
    assert len(by_part["nccl"]) == 7 and all(row["ok"] for row in by_part["nccl"])
    assert by_part["step"][0]["step_ms"] > 0
    assert "right: 4 of 4" in done.stdout


WORKER = """
import json, os, sys, time
first = int(sys.argv[1])
for number in range(first, 4):
    print("@ " + json.dumps({"what": "begin", "number": number}), flush=True)
    if number == 1:
        os._exit(7)
    if number == 2:
        time.sleep(600)
    print("@ " + json.dumps({"what": "case", "number": number}), flush=True)
"""


def test_a_part_goes_on_after_a_case_that_dies_and_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.STALL_S, "fast", 3)
    results = gpu.Results(tmp_path)
    assert gpu.run_part("fast", 60, results, [sys.executable, "-c", WORKER]) == "done"
    results.close()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert rows == results.rows
    assert [(row["what"], row.get("number", row.get("case"))) for row in rows] == [
        ("case", 0), ("died", 1), ("died", 2), ("case", 3),
    ]  # fmt: skip
    assert [row["status"] for row in rows if row["what"] == "died"] == [7, -9]


def test_a_part_that_never_begins_is_not_tried_for_ever(tmp_path: Path) -> None:
    results = gpu.Results(tmp_path)
    command = [sys.executable, "-c", "raise SystemExit(5)"]
    assert gpu.run_part("env", 60, results, command) == "died with status 5"
    results.close()
    assert [row["status"] for row in results.rows] == [5]


def test_wheels_that_are_too_much_are_refused(tmp_path: Path) -> None:
    tree = wheels.size_mib(tmp_path)
    assert 1 < tree < wheels.MOST_MIB
    (tmp_path / "a.whl").write_bytes(b"0" * (3 << 20))
    assert wheels.size_mib(tmp_path) == pytest.approx(tree + 3)
    wheels.refuse_too_much(64.0)
    with pytest.raises(SystemExit, match="are 65 MiB; expected at most 64: take a wheel"):
        wheels.refuse_too_much(65.0)
    listed = wheels.commands(tmp_path)
    assert [command[-1] for command in listed] == [*wheels.WHEELS, wheels.DEEPSPEED]
    assert all("--no-deps" in command for command in listed)
