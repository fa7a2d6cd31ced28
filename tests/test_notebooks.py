"""The notebooks run from top to bottom in an empty folder, and are kept without outputs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import called

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
nbformat = pytest.importorskip("nbformat", reason="needs the extra dev")
nbclient = pytest.importorskip("nbclient", reason="needs the extra dev")


@contextmanager
def one_core() -> Iterator[None]:
    """What is begun has one core, and so computes on one thread; two wait for each other."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [max(cores)])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    context = {"metadata": {"path": str(tmp_path)}}
    with called.heron() as commands:
        for name, first in {"PATH": commands, "PYTHONPATH": ROOT}.items():  # this heron
            monkeypatch.setenv(name, f"{first}{os.pathsep}{os.environ.get(name, '')}")
        with one_core():
            nbclient.NotebookClient(notebook, timeout=300, resources=context).execute()
    failed = [
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stdout" and "error: " in output["text"]  # of a command in a cell
    ]
    assert failed == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 3
    assert [c.id for c in cells if c.outputs or c.execution_count is not None] == []
