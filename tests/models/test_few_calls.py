"""On a GPU a module without batch norm is called once for all streams and views; values stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heron.distributed import sync_batchnorm
from heron.distributed.sync_batchnorm import call_by_stream

SIZES = [3, 5]


class Counted(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.calls = nn.Sequential(*layers), 0

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.layers(x) + keys[:, None]
        return result


def encoder(norm: bool) -> Counted:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(6) if norm else nn.LayerNorm(6)
    return Counted(nn.Linear(4, 6), middle, nn.ReLU(), nn.Linear(6, 2)).double()


def called(modules: list[Any], inputs: list[list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of all parameters of a function that tells views apart."""
    outputs = call_by_stream(modules, SIZES, inputs)
    loss = torch.stack([(x * (n + 1)).square().sum() for n, x in enumerate(outputs)]).sum()
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return outputs, [*torch.autograd.grad(loss, [*parameters.values()])]


def views(count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = sum(SIZES)
    return [
        [torch.randn(rows, 4, generator=generator).double(), torch.arange(rows) + 0.5 * view]
        for view in range(count)
    ]


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (lambda: [encoder(False)] * 3, [1]),
        (lambda: [encoder(False), encoder(False)], [1, 1]),
        (lambda: [encoder(True)] * 3, [6]),  # each stream of each view alone
        (lambda: [encoder(True), encoder(False), encoder(True)], [2, 1, 2]),
    ],
    ids=["one", "two", "norm", "mixed"],
)
def test_values_and_gradients_stay(
    make: Callable[[], list[Counted]], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = make()
    outputs, gradients = called(modules, views(len(modules)))
    running = [buffer.clone() for module in modules for buffer in module.buffers()]
    monkeypatch.setattr(sync_batchnorm, "prefers_few_calls", lambda device: True)
    modules = make()
    found, found_gradients = called(modules, views(len(modules)))
    for a, b in zip([*outputs, *gradients], [*found, *found_gradients], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    for a, b in zip(running, [b for module in modules for b in module.buffers()], strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
    assert [module.calls for module in dict.fromkeys(modules)] == calls


def test_views_of_other_shapes_are_called_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_batchnorm, "prefers_few_calls", lambda device: True)
    pool = nn.AdaptiveAvgPool1d(2)
    inputs = [[torch.rand(8, 1, 5)], [torch.rand(8, 1, 7)], [torch.rand(8, 1, 5)]]
    found = call_by_stream([pool] * 3, SIZES, inputs)
    for output, (x,) in zip(found, inputs, strict=True):
        torch.testing.assert_close(output, pool(x), rtol=0, atol=0)


def test_only_a_gpu_prefers_few_calls() -> None:
    assert sync_batchnorm.prefers_few_calls(torch.device("cuda", 0))
    assert not sync_batchnorm.prefers_few_calls(torch.device("cpu"))
