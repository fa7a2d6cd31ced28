"""Workers of builds are forked from a server with the libraries loaded."""

import multiprocessing
from types import SimpleNamespace

import pytest

from heron.base import workers
from tests.ranks import begin_server

# How workers begin, and what they find, is asked about there.
NEW_INTERPRETERS = "test_workers", "test_own_source"


@pytest.fixture(autouse=True)
def forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a build loads for two seconds, in which it would build hundreds of shards.

    It has the environment with which the server began, not what a test sets.
    """
    if request.path.stem in NEW_INTERPRETERS:
        return

    def context(method: str) -> multiprocessing.context.ForkServerContext:
        assert method == "spawn"
        begin_server()
        return multiprocessing.get_context("forkserver")

    monkeypatch.setattr(workers, "multiprocessing", SimpleNamespace(get_context=context))
