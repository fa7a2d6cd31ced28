"""Terms against their loop oracles, in their special cases and corners, share by share."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.losses import engine
from heron.losses.classification import bce, cross_entropy
from heron.losses.engine import unit
from heron.losses.single_view import single_view_unsupervised
from heron.losses.supervised import weighted_supervised
from heron.losses.unsupervised import weighted_unsupervised
from tests import oracles

UNSUPERVISED = list(itertools.product(["first", "all"], ["all_views", "cross_view"], [0.1, 1.0]))
SUPERVISED = list(itertools.product(["hamming", "indicator"], [False, True], [0.1, 1.0]))


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several strips a batch, so that their borders are tested."""
    monkeypatch.setitem(engine.STRIP_ELEMENTS, "cpu", 64)
    monkeypatch.setattr(engine, "MIN_STRIP_ROWS", 3)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def labels(batch: int, count: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch, count, generator=generator) < 0.4).to(dtype)


def gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs))


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("anchors", "negatives", "tau"), UNSUPERVISED)
@pytest.mark.parametrize("views", [2, 3])
def test_unsupervised_is_its_oracle(anchors: Any, negatives: Any, tau: float, views: int) -> None:
    z = [draw(7, 4, seed=v) for v in range(views)]
    h = [draw(7, 4, seed=10 + v) for v in range(views)]
    found = weighted_unsupervised(z, h, tau=tau, anchors=anchors, negatives=negatives)
    expected = oracles.weighted_unsupervised(z, h, tau, anchors, negatives)
    assert_same(found, expected, [*z, *h])


@pytest.mark.parametrize("tau", [0.1, 1.0])
@pytest.mark.parametrize("views", [1, 2])
def test_the_loss_of_one_view_is_its_oracle_and_its_shares_add_up(views: int, tau: float) -> None:
    x, z, h = ([draw(7, 4, seed=10 * n + v) for v in range(views)] for n in range(3))
    whole = single_view_unsupervised(x, z, h, tau=tau)
    assert_same(whole, oracles.single_view_unsupervised(x, z, h, tau), [*x, *z, *h])
    for cuts in ([0, 3, 7], [0, 0, 5, 7]):
        shares = [
            single_view_unsupervised(x, z, h, tau=tau, rows=slice(a, b))
            for a, b in itertools.pairwise(cuts)
        ]
        whole = single_view_unsupervised(x, z, h, tau=tau)
        assert_same(torch.stack(shares).sum(), whole, [*x, *z, *h])


@pytest.mark.parametrize("batch", [0, 1])
def test_the_loss_of_one_view_without_other_samples_is_zero(batch: int) -> None:
    parts = [draw(batch, 4, seed=n) for n in range(3)]
    loss = single_view_unsupervised(*([part] for part in parts))
    assert loss == 0
    assert all(g.isfinite().all() for g in gradients(loss, parts))


@pytest.mark.parametrize(("distance", "self_pairs", "tau"), SUPERVISED)
def test_supervised_is_its_oracle(distance: Any, self_pairs: bool, tau: float) -> None:
    s, y = draw(9, 5), labels(9, 4)
    found = weighted_supervised(s, y, tau=tau, distance=distance, self_pairs=self_pairs)
    assert_same(found, oracles.weighted_supervised(s, y, tau, distance, self_pairs), [s])


def test_cold_temperature_needs_no_running_maximum() -> None:
    z, h = [draw(6, 4, seed=v) for v in (0, 1)], [draw(6, 4, seed=v) for v in (2, 3)]
    found = weighted_unsupervised([v.float() for v in z], [v.float() for v in h], tau=0.01)
    expected = oracles.weighted_unsupervised(z, h, 0.01, "all", "all_views")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    s, y = draw(8, 4), labels(8, 3)
    found = weighted_supervised(s.float(), y.float(), tau=0.01)
    expected = oracles.weighted_supervised(s, y, 0.01, "hamming", False)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_constant_weights_make_simclr() -> None:
    """With H orthogonal to every z, g = e; the loss of weight 1 has f+ scaled by e instead."""
    z = [torch.nn.functional.pad(draw(6, 3, seed=v), (0, 1)) for v in (0, 1)]
    away = torch.tensor([0.0, 0, 0, 1], dtype=torch.float64).expand(6, 4)
    found = weighted_unsupervised(z, [away, away], tau=0.5)
    torch.testing.assert_close(found, _simclr_with_weight(z, 0.5, torch.e))
    torch.testing.assert_close(_simclr_with_weight(z, 0.5, 1.0), oracles.nt_xent(z, 0.5))


def _simclr_with_weight(z: list[Tensor], tau: float, weight: float) -> Tensor:
    vectors = unit(torch.cat(z))
    f = torch.exp(vectors @ vectors.T / tau)
    batch = len(z[0])
    own = torch.arange(2 * batch) % batch
    negative = (f * (own[:, None] != own)).sum(1) * weight
    positive = torch.exp((vectors * vectors.roll(batch, 0)).sum(1) / tau)
    return torch.log1p(negative / positive).mean()


@pytest.mark.parametrize("cuts", [[0, 4, 11], [0, 0, 5, 11]])
def test_shares_add_up(cuts: list[int]) -> None:
    z, h = [draw(11, 4, seed=v) for v in (0, 1)], [draw(11, 4, seed=v) for v in (2, 3)]
    s, y = draw(11, 5), labels(11, 3)
    parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    for negatives in ("all_views", "cross_view"):
        whole = weighted_unsupervised(z, h, tau=0.3, negatives=negatives)
        share = [
            weighted_unsupervised(z, h, tau=0.3, negatives=negatives, rows=rows) for rows in parts
        ]
        assert_same(torch.stack(share).sum(), whole, [*z, *h])
    share = [weighted_supervised(s, y, tau=0.3, rows=rows) for rows in parts]
    assert_same(torch.stack(share).sum(), weighted_supervised(s, y, tau=0.3), [s])


def test_order_of_the_batch_changes_nothing() -> None:
    s, y = draw(9, 5), labels(9, 4)
    turned = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(weighted_supervised(s[turned], y[turned]), weighted_supervised(s, y))


@pytest.mark.parametrize("y", [torch.zeros(6, 3), torch.ones(6, 3), torch.eye(6), labels(6, 1)])
def test_supervised_corners_are_finite(y: Tensor) -> None:
    """No positive, no negative, one sample a label, one label."""
    s = draw(6, 4)
    loss = weighted_supervised(s, y.double(), tau=0.1)
    (gradient,) = gradients(loss, [s])
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    if y.sum(0).max() <= 1:
        assert loss == 0


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("rows", ["same", "zero", "bf16"])
def test_unsupervised_corners_are_finite(tau: float, rows: str) -> None:
    z = torch.ones(5, 4) if rows == "same" else torch.zeros(5, 4)
    z = draw(5, 4, dtype=torch.bfloat16) if rows == "bf16" else z.requires_grad_()
    loss = weighted_unsupervised([z, z], [z, z], tau=tau)
    assert torch.isfinite(loss)
    assert loss.dtype in (torch.float32, torch.float64)
    assert torch.isfinite(gradients(loss, [z])[0]).all()


def test_no_labelled_sample_is_zero_and_differentiable() -> None:
    logits, s = draw(0, 4), draw(0, 5)
    y = torch.zeros(0, 4, dtype=torch.float64)
    for loss in (
        bce(logits, y, total=0),
        cross_entropy(logits, y, total=0),
        weighted_supervised(s, y),
    ):
        assert loss == 0
        loss.backward()  # type: ignore[no-untyped-call]


def test_classifier_losses_are_torch_s() -> None:
    logits, y = draw(8, 3), labels(8, 3)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)
    torch.testing.assert_close(bce(logits, y, total=8), expected)
    one_hot = torch.eye(3, dtype=torch.float64)[torch.arange(8) % 3]
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(8) % 3)
    torch.testing.assert_close(cross_entropy(logits, one_hot, total=8), expected)


@pytest.mark.parametrize("tau", [0.0, -1.0, float("nan")])
def test_a_temperature_must_be_positive(tau: float) -> None:
    with pytest.raises(ValueError, match=r"temperature tau must be above 0, e.g. 0.1, got"):
        weighted_supervised(draw(4, 3), labels(4, 2), tau=tau)


def test_labels_are_0_or_1() -> None:
    y = labels(6, 3)
    y[4, 1] = 2
    with pytest.raises(ValueError, match="weighted_supervised: labels of row 4 must be 0 or 1"):
        weighted_supervised(draw(6, 4), y)


def test_one_view_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 2 views, got 1"):
        weighted_unsupervised([draw(4, 3)], [draw(4, 3)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_numbers() -> None:
    z, h = [draw(40, 8, seed=v) for v in (0, 1)], [draw(40, 8, seed=v) for v in (2, 3)]
    s, y = draw(40, 9), labels(40, 5)
    here = [weighted_unsupervised(z, h, tau=0.2), weighted_supervised(s, y, tau=0.2)]
    there = [
        weighted_unsupervised([v.cuda() for v in z], [v.cuda() for v in h], tau=0.2),
        weighted_supervised(s.cuda(), y.cuda(), tau=0.2),
    ]
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(other.cpu(), one)
    assert_same(there[0].cpu(), here[0], [*z, *h])
    assert_same(there[1].cpu(), here[1], [s])
