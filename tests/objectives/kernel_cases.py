"""What tests of kernels share: where kernels run, inputs, and the dense formulas."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.losses import fused
from heron.losses.fused import switch

INTERPRETED = switch.interpreted()
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
kernels = pytest.mark.skipif(
    not fused.available(DEVICE),
    reason=f"no kernel runs in this process ({switch.missing_requirement(DEVICE)}); "
    "test_kernels_in_the_interpreter runs them in another",
)
with_triton = pytest.mark.skipif(not switch._installed(), reason="triton is not installed")


def draw(rows: int, columns: int, seed: int) -> Tensor:
    """Vectors whose logits are a few units large."""
    generator = torch.Generator().manual_seed(seed)
    x: Tensor = torch.randn(rows, columns, generator=generator) * (1.5 / columns**0.25)
    return x.to(DEVICE).requires_grad_()


def integers(rows: int, below: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(below, (rows,), generator=generator, dtype=torch.int32).to(DEVICE)


def labels(rows: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, count, generator=generator) < 0.4).float().to(DEVICE)


def assert_same(
    loss: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    tolerance: float = 1e-5,
) -> None:
    """Value and gradients, each to `tolerance` of its largest element."""
    found = loss(*inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference(*exact)
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    upstream = draw(1, found.numel(), 99).detach().view(found.shape)
    ours = torch.autograd.grad(found, inputs, upstream)
    theirs = torch.autograd.grad(expected, exact, upstream.double())
    for a, b in zip((found, *ours), (expected, *theirs), strict=True):
        error, size = (a.double() - b).abs().max().item(), b.abs().max().item()
        assert error <= tolerance * size  # false for NaN


def dense_sums(
    anchors: Tensor,
    keys: Tensor,
    *,
    moments: tuple[float, ...],
    floor: float = -math.inf,
    anchor_tag: Tensor | None = None,
    key_tag: Tensor | None = None,
    anchor_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
) -> Tensor:
    logits = anchors @ keys.T
    weight = (logits >= floor).double()
    if anchor_tag is not None and key_tag is not None:
        weight = weight * (anchor_tag[:, None] != key_tag)
    if anchor_weight is not None and key_weight is not None:
        weight = weight * (anchor_weight.double() @ key_weight.double().T)
    return torch.stack([(weight * torch.exp(m * logits)).sum(1) for m in moments], 1)


def dense_distance(anchor_y: Tensor, key_y: Tensor, distance: str) -> Tensor:
    a, k = anchor_y.double(), key_y.double()
    hamming = a @ (1 - k).T + (1 - a) @ k.T
    return (hamming > 0).double() if distance == "indicator" else hamming


def dense_pairs(
    anchors: Tensor,
    keys: Tensor,
    log_total: Tensor,
    anchor_y: Tensor,
    key_y: Tensor,
    weight: Tensor,
    anchor_number: Tensor,
    distance: str,
) -> Tensor:
    logits = anchors @ keys.T
    sigma = torch.ones_like(logits)
    if distance == "hamming":
        sigma = 1 - dense_distance(anchor_y, key_y, distance) / anchor_y.shape[1]
    other = anchor_number[:, None] != torch.arange(len(keys), device=keys.device)
    loss = torch.zeros((), dtype=torch.float64, device=keys.device)
    for a, w in enumerate(weight.tolist()):
        pair = (anchor_y[:, a, None] * key_y[:, a] > 0) & other
        margin = log_total[:, a, None] - logits - torch.where(pair, sigma, 1.0).log()
        loss = loss + w * torch.nn.functional.softplus(margin)[pair].sum()
    return loss


TAGS = {"anchor_tag": 9, "key_tag": 9}
OPTIONS: list[dict[str, Any]] = [
    {"moments": (1.0,)},
    {"moments": (0.5,), "floor": 0.2},
    {"moments": (0.0,), "floor": 0.2},
    {"moments": (1.0, 0.0), "floor": 0.2, "tags": True},
    {"moments": (1.0,), "tags": True, "weights": 3},
    {"moments": (2.0, 1.0), "tags": True},
    {"moments": (1.7, 0.7), "tags": True, "weights": 20},
    {"moments": (0.0, 1.0), "floor": -0.5},
]


def complete(n: int, m: int, options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    if options.pop("tags", False):
        options |= {"anchor_tag": integers(n, 5, 3), "key_tag": integers(m, 5, 4)}
    if width := options.pop("weights", 0):
        options["anchor_weight"] = draw(n, width, 5).detach().abs()
        options["key_weight"] = draw(m, width, 6).detach().abs()
    return options
