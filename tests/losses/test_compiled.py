"""A step with a loss compiles as one graph, with the value and the gradient of the plain step."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heron import losses as h
from heron.distributed.derivatives import OPERATIONS

ROWS, DIM, CLASSES = 24, 16, 5
NUMBERS = torch.arange(ROWS) % CLASSES
LABELS = (torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(1)) < 0.4).float()
Call = Callable[[Any, list[Tensor]], Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "NtXent": (h.NtXent, lambda loss, z: loss(z)),
    "NtXent of a stack": (h.NtXent, lambda loss, z: loss(torch.stack(z, 1), sizes=[ROWS])),
    "Supcon": (h.Supcon, lambda loss, z: loss(z, NUMBERS)),
    "L_u": (lambda: h.WeightedUnsupervised(DIM), lambda loss, z: loss(z)),
    "Clip": (h.Clip, lambda loss, z: loss(z)),
    "L_s": (h.WeightedSupervised, lambda loss, z: loss(z, LABELS)),
    "Matryoshka": (lambda: h.Matryoshka(h.NtXent(), [8, DIM]), lambda loss, z: loss(z)),
    "Bce": (h.Bce, lambda loss, z: loss(z[0][:, :CLASSES], LABELS)),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def stepped(name: str, double: bool) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """A step of a small network, and its parameters and the loss's."""
    torch.manual_seed(0)
    make, call = CASES[name]
    net, loss = nn.Linear(8, DIM), make()
    if double:
        net, loss = net.double(), loss.double()

    def step(x: Tensor) -> Tensor:
        z = net(x)
        return 2 * call(loss, [z, z.tanh()])

    return step, [*net.parameters(), *loss.parameters()]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_one_graph(name: str, double: bool) -> None:
    step, parameters = stepped(name, double)
    x = torch.randn(ROWS, 8, dtype=torch.float64 if double else torch.float32)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (x, x.flip(0), x * 2):
        expected, found = step(rows), compiled(rows)
        assert found.dtype == x.dtype  # CLIP's plain value is float64
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0)
        for a, b in zip(
            *(torch.autograd.grad(v, parameters) for v in (found, expected)), strict=True
        ):
            torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).double(), step(x).double(), rtol=1e-6, atol=0)


def test_a_copy_is_compiled_on_its_own() -> None:
    """With its own option; and no loss is kept alive."""
    loss = h.NtXent(tau=0.5)
    other = copy.deepcopy(loss)
    other.tau = 0.1
    z = [torch.randn(ROWS, DIM) for _ in range(2)]
    for x in (loss, other):
        torch._dynamo.reset()
        compiled = torch.compile(lambda z, x=x: x(z) + 0, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(z), x(z))
    number = id(other)
    assert number in OPERATIONS
    del other, x, compiled
    torch._dynamo.reset()
    assert number not in OPERATIONS


def test_an_error_says_what_it_says_otherwise() -> None:
    loss = h.Supcon()
    compiled = torch.compile(lambda z, y: loss(z, y) + 0, fullgraph=True, backend="aot_eager")
    z = torch.randn(ROWS, DIM)
    with pytest.raises(h.LossError, match="Supcon: labels of row 2 must be 0 or more, got"):
        compiled(z, torch.tensor([0, 1, -1] * 8))
    torch.testing.assert_close(compiled(z, NUMBERS), loss(z, NUMBERS))
