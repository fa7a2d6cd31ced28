"""FixMatch: its value by hand, its gradient, and runs on one process and on two."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heron import losses as h
from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.experiment.config import parse_config
from heron.losses.functional import fixmatch
from heron.shards.build import build
from heron.sources import make_source
from heron.training.tracking import read_metrics
from tests import ranks

DRAW = np.random.default_rng(0)


def by_hand(logits: Any, others: list[Any], threshold: float) -> float:
    """Equation 4, row by row."""
    found = 0.0
    for row in range(len(logits)):
        p = np.exp(logits[row]) / np.exp(logits[row]).sum()
        if p.max() >= threshold:
            for other in others:
                q = np.exp(other[row]) / np.exp(other[row]).sum()
                found -= np.log(q[p.argmax()])
    return found / (len(logits) * len(others))


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.95])
def test_the_value_is_the_equations(threshold: float) -> None:
    logits, *others = 3 * DRAW.normal(size=(3, 12, 4))
    loss = h.Fixmatch(threshold=threshold)
    found = loss(torch.tensor(logits), [torch.tensor(x) for x in others])
    expected = by_hand(logits, others, threshold)
    assert expected > 0 and found.item() == pytest.approx(expected, rel=1e-12)
    halves = [
        fixmatch(
            torch.tensor(logits[at]), [torch.tensor(x[at]) for x in others],
            threshold=threshold, total=12,
        )
        for at in (slice(5), slice(5, 12))
    ]  # fmt: skip
    assert torch.stack(halves).sum().item() == pytest.approx(expected, rel=1e-12)


def test_only_other_views_of_sure_rows_have_a_gradient() -> None:
    first = torch.tensor([[4.0, 0, 0], [0.1, 0, 0]], requires_grad=True)
    other = torch.zeros(2, 3, requires_grad=True)
    h.Fixmatch()(first, [other]).backward()  # type: ignore[no-untyped-call]
    assert first.grad is None or not first.grad.any()
    assert other.grad is not None and other.grad[0].any() and not other.grad[1].any()
    torch.testing.assert_close(other.grad[0], torch.tensor([-2 / 3, 1 / 3, 1 / 3]) / 2)
    none = torch.zeros(0, 3, requires_grad=True)
    value = fixmatch(none, [none], threshold=0.95, total=0)
    assert value.item() == 0 and value.requires_grad


def experiment(folder: str, name: str, **changes: Any) -> dict[str, Any]:
    view = {"stored": "image", "augment": [{"crop": {"area": [0.7, 1.0], "flip": 0.0}}]}
    model = {"encoder": {"kind": "convnet", "channels": [4], "widths": [8]}, "projection_width": 4}
    model |= {"shared_encoder": True, "shared_projector": True, "classify_on": "first_view"}
    return {
        "run": {"dir": f"{folder}/{name}"},
        "data": {
            "path": f"{folder}/data",
            "split": "all",
            "protocol": {"labelled": 12, "test": "unlabelled"},
            "batch": {"labelled": 5, "unlabelled": 14},
            "views": [view, view],
        },
        "model": model,
        "objective": {"cross_entropy": {}, "fixmatch": {"threshold": 0.4}},
        "train": {"total_steps": 6, "cpu_threads": 1, "precision": "fp64"},
        "evaluate": {"map": "never"},
    } | changes


def trained(folder: str, name: str, weight: float) -> None:
    objective = {"cross_entropy": {}, "fixmatch": {"threshold": 0.4, "weight": weight}}
    pretrain(parse_config(experiment(folder, name, objective=objective)))


def test_a_run_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    pictures = DRAW.integers(0, 256, (60, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "made.npz", image=pictures, labels=np.arange(60) % 3)
    build(make_source("arrays", {"npz": tmp_path / "made.npz"}), tmp_path / "data", progress=False)
    for world, name, weight in ((1, "one", 1.0), (2, "two", 1.0), (1, "less", 1e-6)):
        ranks.run(world, trained, str(tmp_path), name, weight)
    one, two, less = (
        [row for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row]
        for name in ("one", "two", "less")
    )
    assert any(row["loss/fixmatch"] > 0 for row in one)
    for key in ("loss", "loss/fixmatch", "gradient_norm"):
        assert [r[key] for r in two] == pytest.approx([r[key] for r in one], rel=1e-9)
    assert one[-1]["loss/cross_entropy"] != less[-1]["loss/cross_entropy"]  # it teaches


def test_what_it_refuses(tmp_path: Path) -> None:
    pictures = DRAW.integers(0, 256, (60, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "made.npz", image=pictures, labels=np.arange(60) % 3)
    build(make_source("arrays", {"npz": tmp_path / "made.npz"}), tmp_path / "data", progress=False)
    tree = experiment(str(tmp_path), "run", objective={"nt_xent": {}, "fixmatch": {}})
    with pytest.raises(ConfigError, match="objective.fixmatch needs a classifier of classes, so"):
        pretrain(parse_config(tree))
    tree = experiment(str(tmp_path), "run")
    tree["model"]["classify_on"] = "all_views"
    with pytest.raises(ConfigError, match="set model.classify_on=first_view and model.shared_enco"):
        pretrain(parse_config(tree))
    tree["model"]["classify_on"] = "first_view"
    assert pretrain(parse_config(tree))["steps"] == 6
