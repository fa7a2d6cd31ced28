"""A sample of the reference losses, which `make references` compares whole."""

import json
from pathlib import Path

from tests.compare_losses import differences
from tests.reference_runs import runs, write

REFERENCES = Path(__file__).parent / "references"
# c2ae-2 is left out: the order of its equal scores, and so its AUC, is the processor's.
SAMPLE = ["herocon", "plnl", "pico", "comco", "deepmtmv", "mib", "h-scl-tau", "himulcone", "hcl"]
SAMPLE += ["herocon-2", "plnl-2", "mulco-soft-2", "c2ae", "herocon-zero2-cut", "herocon-ddp-cut"]


def test_the_sample_is_that_of_the_committed_losses(tmp_path: Path) -> None:
    """To 1e-9 in float64, as another machine rounds; DeepSpeed's float32 to 1e-5."""
    write(tmp_path, SAMPLE)
    for name in SAMPLE:
        single = runs()[name][3].get("precision") != "fp64"
        loss_file = f"{name}.json"
        relative = 1e-5 if single else 1e-9
        assert not differences(tmp_path / loss_file, REFERENCES / loss_file, relative)


def test_every_run_has_its_losses() -> None:
    assert {path.stem for path in REFERENCES.glob("*.json")} == set(runs())


def test_a_changed_value_and_a_missing_row_are_named(tmp_path: Path) -> None:
    rows = json.loads((REFERENCES / "herocon.json").read_text())
    loss = rows[3]["loss"]
    rows[3]["loss"] = loss * (1 + 1e-8)
    mine = tmp_path / "herocon.json"
    mine.write_text(json.dumps(rows))
    expected = REFERENCES / "herocon.json"
    assert not differences(mine, expected, 1e-7)
    (named,) = differences(mine, expected, 1e-9)
    assert named == f"herocon.json: row 3: loss is {rows[3]['loss']!r}; expected {loss!r}"
    mine.write_text(json.dumps(rows[:-1]))
    assert differences(mine, expected, 1.0) == [
        f"herocon.json: {len(rows) - 1} rows; expected {len(rows)}"
    ]
