"""Tars that tests stream."""

from pathlib import Path

import pytest

from tests.data.endless import ROWS, TARS, vectors
from tests.shards import others


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    folder = tmp_path / "tars"
    folder.mkdir()
    for number in range(TARS):
        others.write_wds(folder / f"a-{number:02d}.tar", vectors(ROWS * number, ROWS))
        unlabelled = vectors(1000 + ROWS * number, ROWS, label=False)
        others.write_wds(folder / f"b-{number:02d}.tar", unlabelled)
    return folder
