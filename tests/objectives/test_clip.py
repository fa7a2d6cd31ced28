"""CLIP's and SigLIP's losses against loops over their equations."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from heron.losses.clip import MAX_SCALE, LearntScale, Siglip, clip, siglip
from heron.models.heterogeneous import Encoded, ModelSpec
from heron.models.options import ModelConfig
from tests import oracles

Loss = Callable[..., Tensor]
ROWS, VIEWS = 7, 3


def drawn(scale: float = 3.0) -> tuple[list[Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    z = [torch.randn(ROWS, 5, dtype=torch.float64, requires_grad=True) for _ in range(VIEWS)]
    s = torch.full((ROWS,), scale, dtype=torch.float64, requires_grad=True)
    return z, s, torch.full((ROWS,), -1.0, dtype=torch.float64, requires_grad=True)


LOSSES: dict[str, tuple[Loss, Loss]] = {
    "clip": (
        lambda z, s, b, rows=slice(None): clip(z, s[rows], rows=rows),
        lambda z, s, b: oracles.clip(z, s),
    ),
    "siglip": (
        lambda z, s, b, rows=slice(None): siglip(z, s[rows], b[rows], rows=rows),
        oracles.siglip,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_equation_and_its_shares_add_up(name: str) -> None:
    loss, loop = LOSSES[name]
    z, s, b = drawn()
    leaves = [*z, s, b]
    wanted = loop(z, s, b)
    slopes = torch.autograd.grad(wanted, leaves, allow_unused=True)
    cut = (slice(0, 3), slice(3, 3), slice(3, ROWS))
    for value in (loss(z, s, b), torch.stack([loss(z, s, b, rows=rows) for rows in cut]).sum()):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(value, leaves, allow_unused=True)
        for got, slope in zip(found, slopes, strict=True):
            torch.testing.assert_close(got, slope, rtol=1e-10, atol=1e-12)


def test_the_largest_scale_is_finite_in_float32() -> None:
    z = [view.float() for view in drawn()[0]]
    for loss in (
        clip(z, torch.full((ROWS,), MAX_SCALE)),
        siglip(z, *torch.full((2, ROWS), MAX_SCALE)),
    ):
        assert loss.isfinite()
        assert torch.autograd.grad(loss, z)[0].isfinite().all() if loss.requires_grad else True


@pytest.mark.parametrize(
    ("given", "rows", "bias"),
    [(None, 128, -math.log(127)), (None, 0, -10), (None, 1, 0), (-3.0, 128, -3)],
)
def test_siglip_begins_at_the_odds_of_a_pair(given: float | None, rows: int, bias: float) -> None:
    spec = ModelSpec(ModelConfig(), [], 0, [], 0, rows)
    part = Siglip(bias=given).build_parts(spec)["siglip_scale"]()
    assert float(part.state_dict()["bias"]) == pytest.approx(bias)


def test_the_scale_is_bounded_and_has_a_gradient_above() -> None:
    scale = LearntScale("clip", 1e6)
    rows = torch.arange(3)
    encoded = Encoded([], rows, [], [3], [], rows, [], None, None, None)
    (scales,) = scale.add_features(encoded)["clip_scale"]
    assert scales.tolist() == pytest.approx([MAX_SCALE] * 3)
    (slope,) = torch.autograd.grad(scales.sum(), scale.log_scale)
    assert slope.item() == pytest.approx(3 * MAX_SCALE)  # so that it can fall again


@pytest.mark.parametrize("loss", [lambda z, s: clip(z, s), lambda z, s: siglip(z, s, s)])
def test_one_view_is_refused(loss: Loss) -> None:
    with pytest.raises(ValueError, match="needs at least 2 views, such as picture and text, got 1"):
        loss(drawn()[0][:1], torch.ones(ROWS))
