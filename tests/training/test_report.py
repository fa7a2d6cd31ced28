"""The report's map of test rows: where it is drawn, and by whose clock."""

import math
from pathlib import Path
from typing import Literal

import pytest

from heron.pipeline.distributed import collectives
from heron.pipeline.pretrain import pretrain
from heron.pipeline.training import report
from heron.pipeline.training.report import LONG, wants_map
from tests import ranks
from tests.experiments import frames


@pytest.mark.parametrize(
    ("asked", "seconds", "drawn"),
    [
        ("auto", LONG, True),
        ("auto", LONG - 1, False),
        ("always", 0.0, True),
        ("never", LONG, False),
    ],
)
def test_a_map_is_drawn_where_it_is_asked_for_or_the_run_is_long(
    asked: Literal["auto", "always", "never"], seconds: float, drawn: bool
) -> None:
    assert wants_map(asked, seconds) == drawn


def alternately_long(folder: str) -> list[str]:
    """A run whose clocks differ: it is long on rank 0 alone; what the main process wrote."""
    report.LONG = -math.inf if collectives.rank() == 0 else math.inf
    pretrain(frames(Path(folder), train={"steps": 1}))
    return sorted(path.name for path in (Path(folder) / "run").glob("*.png"))


def test_the_main_process_decides_about_the_map(tmp_path: Path) -> None:
    assert "map.png" in ranks.run(2, alternately_long, str(tmp_path))[0]


def test_a_short_run_leaves_no_map_and_none_of_an_earlier_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "map.png").write_bytes(b"of an earlier run")
    pretrain(frames(tmp_path, train={"steps": 1}))
    assert not (tmp_path / "run" / "map.png").exists()
    text = (tmp_path / "run" / "report.html").read_text()
    assert text.count("data:image/png;base64,") == 2
