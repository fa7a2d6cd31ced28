"""Named axes are checked while the tests run; small tensors want one thread; slow files first."""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Two threads wait for each other longer than they work, most of all under load: one here and in
# every process that a test starts. It is read when torch and faiss are loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray reads them once, when it is imported: a process that joins a cluster later needs them before.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)  # of tests/studies/nodes.py
if "HERON_CACHE" not in os.environ:  # what was verified here is of no use to the user's own runs
    os.environ["HERON_CACHE"] = tempfile.mkdtemp(prefix="heron-cache-")
    atexit.register(shutil.rmtree, os.environ["HERON_CACHE"], ignore_errors=True)

import multiprocessing

import pytest
import torch
from jaxtyping import install_import_hook

install_import_hook(["heron.losses", "heron.data.views"], "beartype.beartype")
torch.set_num_threads(1)

# Each of these takes half a minute and more, the longest first. A worker takes a file at a time:
# begun last, they would leave the other worker idle.
SLOW = ["test_readme", "test_travel", "test_strategies", "test_pretrain", "test_wheel"]
SLOW += ["test_notebooks", "test_compile", "test_pretrain_verb", "test_fused", "test_two_hosts"]
SLOW += ["test_on_ray", "test_distribution", "test_kills", "test_references", "test_face"]
SLOW += ["test_model", "test_slurm", "test_scaling_benchmark", "test_screenshots", "test_page"]
SLOW += ["test_export", "test_tutorial", "test_map_and_facets", "test_trackers", "test_embed"]
SLOW += ["test_on_cluster", "test_embed_tasks", "test_engine", "test_locations"]
SLOW += ["test_hostile_folders"]


def pytest_collection_finish() -> None:
    """Says what the server loads that `tests.ranks` and `tests.forked` fork from.

    Only now: benchmarks, which tests import, say at their import what theirs is to load.
    """
    multiprocessing.set_forkserver_preload(["tests.preloaded"])


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """A run that does not say so computes on one thread too, and leaves the process with one."""
    from heron.training import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "cores_per_process", lambda: 1)
        yield


@pytest.fixture
def my_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an empty package outside the repository, on the path; forgotten afterwards."""
    package = tmp_path / "my_lab"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file may change within its second
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slow files first; within a file and among the others the order stays."""
    names = {name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: names.get(item.path.stem, len(SLOW)))
