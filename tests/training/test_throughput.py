"""Counted operations by hand, and which names the table knows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from heron.api.job import pretrain
from heron.losses.classification import Bce
from heron.losses.deepmtmv import Deepmtmv
from heron.models.encoders import build_encoder
from heron.models.heterogeneous import Heterogeneous
from heron.models.options import Cnn, Linear, ModelConfig, Resnet, Transformer
from heron.training import throughput
from heron.training.throughput import (
    model_flops,
    peak_flops,
    step_flops,
)
from heron.training.tracking import read_metrics
from tests.experiments import frames

RESNET50: dict[str, Any] = {
    "widths": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
    "layer": "bottleneck",
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_step_is_three_forwards(device: str) -> None:
    """A layer: 2 rows × in × out; a convolution: 2 rows × height × width × out × in × kernel."""
    convolution = nn.Conv2d(3, 8, 3, padding=1, device=device)
    layer = nn.Linear(8 * 36, 10, device=device)
    x = torch.zeros(5, 3, 6, 6, device=device)
    expected = 2 * 5 * 36 * 8 * 3 * 9 + 2 * 5 * 8 * 36 * 10
    assert step_flops(lambda: layer(convolution(x).relu().flatten(1))) == 3 * expected


def test_a_backward_is_two_forwards() -> None:
    """What the count takes for granted, where the input has a gradient too."""
    layer, x = nn.Linear(4, 6), torch.zeros(3, 4, requires_grad=True)
    both = step_flops(lambda: layer(x).sum().backward())
    assert both == 3 * step_flops(lambda: layer(x))


def test_elementwise_operations_do_not_count() -> None:
    assert step_flops(lambda: torch.ones(9).exp().sum()) == 0


@pytest.mark.parametrize(
    ("name", "fp32", "tf32", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 19.5, 156, 312),
        ("NVIDIA A100-PCIE-40GB", 19.5, 156, 312),
        ("NVIDIA A100 80GB PCIe", 19.5, 156, 312),
        ("NVIDIA H100 80GB HBM3", 67, 494.5, 989.5),
        ("NVIDIA H100 PCIe", 51, 378, 756.5),
        ("NVIDIA H100 NVL", 60, 417.5, 835.5),
        ("NVIDIA H200", 67, 494.5, 989.5),
        ("NVIDIA B200", 75, 1100, 2250),
        ("Tesla V100-SXM2-16GB", 15.7, None, None),
        ("Tesla V100-PCIE-32GB", 14, None, None),
        ("NVIDIA L4", 30.3, 60, 121),
        ("NVIDIA L40S", 91.6, 183, 362.05),
        ("NVIDIA A10", 31.2, 62.5, 125),
        ("NVIDIA A10G", None, None, None),
        ("NVIDIA L40", None, None, None),
        ("NVIDIA GH200 480GB", None, None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None, None),
        ("AMD Instinct MI300X", None, None, None),
    ],
)
def test_peaks_by_name(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fp32: float | None,
    tf32: float | None,
    bf16: float | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peaks = [
        peak_flops("cuda:0", "fp32"),
        peak_flops(torch.device("cuda"), "tf32"),
        peak_flops("cuda", "bf16"),
    ]
    assert peaks == [p if p is None else pytest.approx(p * 1e12) for p in (fp32, tf32, bf16)]


@pytest.mark.parametrize(
    ("name", "fp16"),
    [
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("Tesla T4", 65),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", None),
    ],
)
def test_peaks_of_float16(monkeypatch: pytest.MonkeyPatch, name: str, fp16: float | None) -> None:
    """As published by the makers: on cards with bfloat16 the two are the same."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops("cuda", "fp16") == (fp16 and fp16 * 1e12)


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops("cpu", "fp32") is None


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(
        ValueError, match="precision must be fp32, tf32, bf16, fp16, fp64, got 'fp8'"
    ):
        peak_flops("cpu", "fp8")  # type: ignore[arg-type]


def test_utilisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the peak that a step's model FLOPs are; without a peak there is none."""
    pretrain(frames(tmp_path / "cpu", train={"steps": 2}))
    rows = [row for row in read_metrics(tmp_path / "cpu/run/metrics.jsonl") if "loss" in row]
    assert len(rows) == 2 and not any("mfu" in row for row in rows)
    monkeypatch.setattr(throughput, "peak_flops", lambda device, precision: 4e6)
    monkeypatch.setattr(throughput, "model_flops", lambda model, shapes, rows: 2_000_000)
    result = pretrain(frames(tmp_path / "gpu", train={"steps": 2}))
    rows = [row for row in read_metrics(tmp_path / "gpu/run/metrics.jsonl") if "loss" in row]
    for row in rows:
        assert row["mfu"] == pytest.approx(0.5 / row["seconds"])
    assert result["mfu"] == pytest.approx(1.0 / result["train_seconds"])


def test_a_models_operations_are_those_of_its_products() -> None:
    """Two views of a linear encoder, a classifier on both: two operations a product, tripled."""
    config = ModelConfig(encoder=Linear(width=5))
    model = Heterogeneous(config, [[7], [9]], 3, {"bce": Bce()})
    forward = 2 * 11 * (7 * 5 + 9 * 5 + 10 * 3)
    assert model_flops(model, [[7], [9]], 11) == 3 * forward
    groups = {"bce": Bce(), "deepmtmv": Deepmtmv(widths=[4, 2])}
    model = Heterogeneous(config, [[7], [9]], 3, groups)
    forward = 2 * 11 * (7 * 5 + 9 * 5 + 10 * 4 + 4 * 2 + 3 * 2)
    assert model_flops(model, [[7], [9]], 11) == 3 * forward
    pictures = Heterogeneous(ModelConfig(encoder=Cnn(channels=[4])), [[8, 6, 3]], 3, {"bce": Bce()})
    assert model_flops(pictures, [[8, 6, 3]], 11) == 3 * 2 * 11 * (4 * 3 * 3 * 9 * 4 + 4 * 3)


@pytest.mark.parametrize(
    ("encoder", "published"),
    [
        (Resnet(**RESNET50, stem="standard"), 4.1),  # He et al. 2016, Table 1, and torchvision
        (Resnet(**RESNET50, stem_stride=2), 15.9),  # 3.9 times that: what `small` costs at 224
        (Transformer(config={"model_type": "vit"}), 17.6),  # ViT-B/16, torchvision
    ],
)
def test_published_encoders_cost_what_is_published(encoder: Any, published: float) -> None:
    """In GFLOP of a picture of 224 x 224, a product and a sum counted as one."""
    built, _ = build_encoder(encoder, [224, 224, 3], salt=0)
    picture = torch.empty(1, 3, 224, 224, device="meta")
    keys = torch.empty(1, dtype=torch.int64, device="meta")
    module = built.to("meta").eval()
    assert step_flops(lambda: module(picture, keys)) / 3 / 2e9 == pytest.approx(published, abs=0.05)
