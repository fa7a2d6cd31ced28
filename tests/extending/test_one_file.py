"""To add a source, an encoder, an augmentation or a loss: one file outside the repository.

Each diff here adds one file. Applied, all four are used by one data set and one run.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from heron.api.job import pretrain
from heron.cli.main import main
from heron.experiment.config import parse_config
from heron.training.tracking import read_metrics
from tests import ranks

DIFFS = Path(__file__).parent
KINDS = {
    "source": "my_lab.moons.Moons",
    "encoder": "my_lab.gated.Gated",
    "augmentation": "my_lab.scale.Scale",
    "loss": "my_lab.alignment.AlignUniform",
}


@pytest.fixture
def lab(my_lab: Path) -> Path:
    """A folder on the Python path to which the four diffs are applied."""
    for kind in KINDS:
        diff = DIFFS / f"{kind}.diff"
        subprocess.run(["git", "apply", str(diff)], cwd=my_lab.parent, check=True)
    return my_lab.parent


@pytest.mark.parametrize("kind", KINDS)
def test_a_diff_adds_one_file(kind: str) -> None:
    (name,) = re.findall(r"^\+\+\+ b/(\S+)", (DIFFS / f"{kind}.diff").read_text(), re.M)
    assert name.removesuffix(".py").replace("/", ".") == KINDS[kind].rpartition(".")[0]


def train(folder: str, name: str) -> list[float]:
    """Losses and norms of the gradients of a run in float64 that has all four."""
    views = [
        {"stored": view, "augment": [{KINDS["augmentation"]: {"by": 0.1}}]}
        for view in ("front", "side")
    ]
    config = parse_config(
        {
            "seed": 3,
            "run": {"dir": str(Path(folder) / name)},
            "data": {
                "path": str(Path(folder) / "moons"),
                "batch": {"labelled": 20, "unlabelled": 31},
                "protocol": {"labelled": 40},
                "views": views,
            },
            "model": {"encoder": {"kind": KINDS["encoder"], "width": 8}, "projection_width": 6},
            "objective": {"cross_entropy": {}, KINDS["loss"]: {"weight": 0.5, "t": 1.5}},
            "train": {"precision": "fp64", "epochs": None, "total_steps": 12, "cpu_threads": 1},
        }
    )
    pretrain(config)
    rows = [row for row in read_metrics(Path(folder) / name / "metrics.jsonl") if "loss" in row]
    return [value for row in rows for value in (row["loss"], row["gradient_norm"])]


def test_they_are_used_together_on_one_process_and_two(lab: Path) -> None:
    words = ["shards", "build", KINDS["source"], "--rows", "200", "--out", str(lab / "moons")]
    assert main([*words, "--quiet"]) == 0
    (one,) = ranks.run(1, train, str(lab), "one")
    two = ranks.run(2, train, str(lab), "two")
    assert len(one) == 24 and one[-2] < one[0]
    torch.testing.assert_close(torch.tensor(two[0]), torch.tensor(one), rtol=1e-8, atol=1e-8)
