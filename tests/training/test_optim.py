"""Optimisers against their formulas, schedules as functions of the epoch."""

import pytest
import torch
from torch import nn

from heron.experiment.options import Optim
from heron.training.optim import Lars, build_optimizer, learning_rate


def test_lars_is_its_formula() -> None:
    """Two steps by hand: rate min(lr, trust |w| / (|g| + decay |w|)), then momentum."""
    lr, momentum, decay, trust = 0.5, 0.9, 0.1, 0.02
    w, g = torch.tensor([3.0, 4.0]), torch.tensor([0.6, 0.8])
    parameter = nn.Parameter(w.clone())
    optimizer = Lars([parameter], lr, momentum, decay, trust)
    velocity = torch.zeros(2)
    for _ in range(2):
        parameter.grad = g.clone()
        optimizer.step()
        rate = min(lr, trust * w.norm() / (g.norm() + decay * w.norm()))
        velocity = momentum * velocity + rate / lr * (g + decay * w)
        w = w - lr * velocity
        torch.testing.assert_close(parameter.detach(), w)
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_lars_of_a_small_gradient_is_sgd() -> None:
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    lars, sgd = Lars([ours], 0.1), torch.optim.SGD([theirs], 0.1)
    for parameter, optimizer in ((ours, lars), (theirs, sgd)):
        parameter.grad = torch.full((3,), 1e-3)
        optimizer.step()
    assert torch.equal(ours, theirs)


def test_lars_leaves_a_zero_parameter_its_rate() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    Lars([parameter], 0.1).step()
    torch.testing.assert_close(parameter.detach(), torch.full((2,), -0.1))


def test_lars_may_leave_vectors_to_sgd() -> None:
    """A bias takes lr g, without decay; a matrix is bounded and decays."""
    bias, matrix = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))
    optimizer = Lars([bias, matrix], 0.5, weight_decay=0.1, exclude_1d=True)
    for parameter in (bias, matrix):
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step()
    torch.testing.assert_close(bias.detach(), torch.full((4,), 1 - 0.5 * 3))
    rate = 0.02 * 2 / (6 + 0.1 * 2)
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 1 - rate * (3 + 0.1)))
    chosen = build_optimizer(Optim(lars_exclude_1d=True), [bias])
    assert isinstance(chosen, Lars) and chosen.exclude_1d


def test_adam_has_l2_decay_and_adamw_its_own() -> None:
    """Step one of Adam is lr * sign(gradient), and L2 is part of the gradient; AdamW's is not."""
    expected = {"adam": -1 + 0.1, "adamw": -(1 - 0.1 * 0.5) - 0.1}
    for kind, value in expected.items():
        parameter = nn.Parameter(torch.tensor([-1.0]))
        config = Optim(kind=kind, lr=0.1, weight_decay=0.5)  # type: ignore[arg-type]
        optimizer = build_optimizer(config, [parameter])
        parameter.grad = torch.tensor([0.2])  # 0.2 - 0.5 < 0 with L2
        optimizer.step()
        assert parameter.item() == pytest.approx(value)


@pytest.mark.parametrize("kind", ["sgd", "lars", "adam", "adamw"])
def test_every_optimiser_descends(kind: str) -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = build_optimizer(Optim(kind=kind, lr=0.05), [parameter])  # type: ignore[arg-type]
    for _ in range(3):
        optimizer.zero_grad()
        parameter.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert 0 < parameter.item() < 2


def test_schedules() -> None:
    constant = Optim(lr=0.2, warmup_epochs=2)
    assert learning_rate(constant, 0, 10) == pytest.approx(0, abs=1e-8)
    assert learning_rate(constant, 1, 10) == pytest.approx(0.1)
    assert learning_rate(constant, 9, 10) == 0.2
    cosine = Optim(lr=0.2, schedule="cosine")
    assert [learning_rate(cosine, e, 10) for e in (0, 5, 10)] == pytest.approx([0.2, 0.1, 0])
    warm = Optim(lr=0.2, schedule="cosine", warmup_epochs=2)
    rates = [learning_rate(warm, e, 10) for e in (1, 2, 4, 6, 8, 10, 11)]
    assert rates == pytest.approx([0.1, 0.2, 0.1 + 0.1 * 0.5**0.5, 0.1, 0.1 - 0.1 * 0.5**0.5, 0, 0])
    step = Optim(lr=0.2, schedule="step", milestones=[6, 4], gamma=0.5, warmup_epochs=2)
    rates = [learning_rate(step, e, 10) for e in (1, 2, 3.9, 4, 5.9, 6, 9)]
    assert rates == pytest.approx([0.1, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05])
    assert learning_rate(step, 5, 100) == learning_rate(step, 5, 10)


def test_lars_scales_all_parameters_at_once_as_one_by_one() -> None:
    torch.manual_seed(0)
    shapes = [(5, 3), (7,), (2, 2, 2), (4, 1)]
    together, alone = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    for one, other in zip(together, alone, strict=True):
        other.copy_(one)
        one.grad = torch.randn_like(one) * 3
        other.grad = one.grad.clone()
    optimizers = [Lars(params, 0.5, 0.9, 0.01) for params in (together, *([p] for p in alone))]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
