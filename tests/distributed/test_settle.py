"""What `auto` stands for: precision by the device, reading processes by cores and pictures."""

import os

import pytest
import torch

from heron.data.batches import worker_count
from heron.experiment.config import parse_config
from heron.training.launch import resolve_precision
from tests.experiments import FRAMES, merge

PLACES = {"run": {"dir": "runs/x"}, "data": {"path": "data/x"}}
PICTURE = [{"stored": "image", "size": 32}]


@pytest.mark.parametrize(
    ("gpu", "half", "asked", "settled"),
    [
        (False, False, "auto", "fp32"),
        (True, True, "auto", "bf16"),
        (True, False, "auto", "tf32"),
        (True, True, "fp32", "fp32"),
    ],
)
def test_precision(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, half: bool, asked: str, settled: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: half or including_emulation
    )
    config = parse_config(merge(merge(FRAMES, PLACES), {"train": {"precision": asked}}))
    assert resolve_precision(config).train.precision == settled
    assert resolve_precision(resolve_precision(config)) == resolve_precision(config)


@pytest.mark.parametrize(
    ("gpu", "cores", "processes", "views", "workers"),
    [
        (True, 64, 4, PICTURE, 15),
        (True, 256, 4, PICTURE, 16),
        (True, 8, 8, PICTURE, 1),
        (True, 64, 4, FRAMES["data"]["views"], 1),
        (False, 16, 2, [{"stored": "image", "augment": ["crop"]}], 2),
        (False, 2, 1, PICTURE, 0),
        (False, 64, 1, FRAMES["data"]["views"], 0),
    ],
)
def test_reading_processes(
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
    cores: int,
    processes: int,
    views: list[dict[str, object]],
    workers: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    tree = merge(merge(FRAMES, PLACES), {"data": {"views": views, "workers": "auto"}})
    assert worker_count(parse_config(tree).data) == workers
    assert worker_count(parse_config(merge(tree, {"data": {"workers": 3}})).data) == 3
