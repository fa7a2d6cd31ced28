"""Two sites that a module's tests share."""

from collections.abc import Iterator

import pytest

from tests.serve.served import LIMITS, Site, retriever, running


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    found = retriever(tmp_path_factory.mktemp("faces"), "faces")
    with running(found, LIMITS) as url:
        yield Site(url, found)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    found = retriever(tmp_path_factory.mktemp("frames"), "frames")
    with running(found, LIMITS) as url:
        yield Site(url, found)
