"""Optimisers against their formulas, schedules as functions of the epoch."""

import pytest
import torch
from torch import nn

from pipeline.config import Optim
from pipeline.optim import Lars, build_optimizer, learning_rate


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


@pytest.mark.parametrize("kind", ["sgd", "lars", "adamw"])
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
