"""Digits of the fused terms: types of operands, small and large numbers; see `test_fused`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.losses import fused
from heron.losses.fused import layout
from tests.objectives import kernel_cases as cases
from tests.objectives.kernel_cases import DEVICE, INTERPRETED, kernels


@kernels
@pytest.mark.parametrize(("precision", "bound"), [("fp16", 4e-3), ("bf16", 6e-2)])
def test_coarse_products(precision: Any, bound: float) -> None:
    """In the interpreter this rounds the operands and multiplies in float32."""
    options = cases.complete(37, 70, {"moments": (2.0, 1.0), "tags": True, "weights": 3})
    y = cases.labels(37, 5, 7), cases.labels(70, 5, 8)
    number, weight = cases.integers(37, 70, 9), torch.ones(5, device=DEVICE)
    vectors = [cases.draw(37, 20, 1), cases.draw(70, 20, 2)]
    cases.assert_same(
        lambda a, k: fused.exponential_sums(a, k, **options, precision=precision),
        lambda a, k: cases.dense_sums(a, k, **options),
        vectors,
        bound,
    )
    cases.assert_same(
        lambda a, k, t: fused.pair_losses(a, k, t.exp(), *y, weight, number, "hamming", precision),
        lambda a, k, t: cases.dense_pairs(a, k, t, *y, weight, number, "hamming"),
        [*vectors, cases.draw(37, 5, 3)],
        bound,
    )


@kernels
def test_types_and_strides_of_the_inputs() -> None:
    """bfloat16 vectors make bf16 products; gradients have their vectors' type."""
    a, k = cases.draw(20, 30, 1), cases.draw(20, 40, 2)
    expected = cases.dense_sums(a.T.double(), k.T.double(), moments=(1.0,)).float()
    torch.testing.assert_close(
        fused.exponential_sums(a.T, k.T, precision="ieee"), expected, rtol=1e-5, atol=0
    )
    narrow = [x.detach().T.bfloat16().requires_grad_() for x in (a, k)]
    found = fused.exponential_sums(*narrow)
    assert torch.equal(found, fused.exponential_sums(*narrow, precision="bf16"))
    assert found.dtype == torch.float32
    assert {x.dtype for x in torch.autograd.grad(found.sum(), narrow)} == {torch.bfloat16}


@kernels
def test_two_runs_agree_to_the_last_bit() -> None:
    a, k, total = cases.draw(37, 20, 1), cases.draw(70, 20, 2), cases.draw(37, 5, 3)
    y = cases.labels(37, 5, 4), cases.labels(70, 5, 5)
    number, weight = cases.integers(37, 70, 6), torch.ones(5, device=DEVICE)

    def run() -> list[Tensor]:
        sums = fused.exponential_sums(a, k, moments=(1.5, 0.5))
        repulsion = fused.label_sums(a, k, *y, "hamming")
        loss = fused.pair_losses(a, k, total.exp(), *y, weight, number, "hamming")
        everything = sums.sum() + repulsion.sum() + loss
        return [sums, repulsion, loss, *torch.autograd.grad(everything, [a, k, total])]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@kernels
@pytest.mark.parametrize(("precision", "bound"), [("ieee", 1e-5), ("fp16", 4e-3)])
@pytest.mark.parametrize("moments", [(1.0,), (1.0, 0.0), (1.5, 0.5)])
def test_a_mutual_gradient_is_the_dense_one(
    precision: Any, bound: float, moments: tuple[float, ...]
) -> None:
    """Also where derivatives are as small as those of a mean over many rows."""
    options: dict[str, Any] = {
        "moments": moments,
        "floor": 0.1,
        "anchor_tag": cases.integers(37, 5, 3),
    }
    options["key_tag"] = cases.integers(70, 5, 4)
    a, k = cases.draw(37, 20, 1).detach(), cases.draw(70, 20, 2).detach()
    own, of_keys = (cases.draw(n, len(moments), n).detach() * 1e-9 for n in (37, 70))
    x, y = a.double(), k.double()
    logits = x @ y.T
    counted = (logits >= 0.1) & (options["anchor_tag"][:, None] != options["key_tag"])
    expected = torch.zeros_like(x)
    for r, m in enumerate(moments):
        if m:
            s = own[:, r, None].double() + of_keys[:, r].double()
            expected += (s * counted * torch.exp(m * logits)) @ y
    operands = fused.mutual_operands(a, k, precision=precision, **options)
    found = operands.gradient((own, of_keys))
    assert (found - expected).abs().max() <= bound * expected.abs().max()
    most = (expected.new_tensor(2e-9) * torch.exp(2 * logits.max())).float()
    again = operands.gradient((own, of_keys), bound=most)
    assert (again - expected).abs().max() <= 2 * bound * expected.abs().max()


@kernels
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
@pytest.mark.parametrize("span", [2.0, 25.0])
def test_fp16_holds_any_loss(size: float, span: float) -> None:
    """Exponentials up to e^25 and down to e^-25, of losses far below and above fp16's numbers."""
    a, k = cases.draw(37, 20, 1).detach(), cases.draw(70, 20, 2).detach()
    a *= span / float((a @ k.T).abs().max())
    y = cases.labels(37, 5, 7), cases.labels(70, 5, 8)
    number, tags = cases.integers(37, 70, 9), (cases.integers(37, 3, 3), cases.integers(70, 3, 4))
    weight = torch.tensor([1.0, 1e-3, 1e-1, 1.0, 1e-2], device=DEVICE) * size
    bound = 2**-9 * max(1.0, span / 4)  # a logit of 25 is off by 25 x 2^-11

    def terms(sums: Callable[..., Tensor], repel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, z: size * (sums(x, z)[:, 0].log().sum() + repel(x, z).log().sum())[None]

    def repelled(x: Tensor, z: Tensor) -> Tensor:
        return (cases.dense_distance(*y, "hamming") * torch.exp(x @ z.T)) @ (1 - y[1].double())

    def close(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *more: Tensor) -> None:
        inputs = [x.detach().clone().requires_grad_() for x in (a, k, *more)]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        found, expected = ours(*inputs), theirs(*exact)
        gradients = torch.autograd.grad(found.sum(), inputs)
        those = torch.autograd.grad(expected.sum(), exact)
        for p, q in zip((found, *gradients), (expected, *those), strict=True):
            assert (p - q).abs().max() <= bound * q.abs().max()

    of_tags: dict[str, Any] = {"anchor_tag": tags[0], "key_tag": tags[1]}
    close(
        terms(
            lambda x, z: fused.exponential_sums(x, z, **of_tags, precision="fp16"),
            lambda x, z: fused.label_sums(x, z, *y, "hamming", "fp16"),
        ),
        terms(lambda x, z: cases.dense_sums(x, z, moments=(1.0,), **of_tags), repelled),
    )
    close(
        lambda x, z, t: fused.pair_losses(x, z, t.exp(), *y, weight, number, "hamming", "fp16"),
        lambda x, z, t: cases.dense_pairs(x, z, t, *y, weight, number, "hamming"),
        cases.draw(37, 5, 3),
    )


@kernels
@pytest.mark.skipif(not INTERPRETED, reason="a GPU cuts its sums off by itself")
def test_long_sums_are_chains_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that cut sums off at 10 bits, as matrix units do at 24: chains limit the bias."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    exact = builder.create_dot

    def cut(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        done = exact(self, a, b, d, *options)
        if (d.data != 0).any():  # a sum that goes on
            done.data = (done.data.view("int32") & -0x4000).view("float32")
        return done

    n, m = 8, 32 * 16
    a, k = torch.rand(n, 4) / 8, torch.rand(m, 4)
    y = torch.tensor([[1.0, 0.0]]).expand(n, 2), torch.tensor([[0.0, 1.0]]).expand(m, 2)
    tags = torch.zeros(n).int(), torch.zeros(m).int()
    total, none = torch.full((n,), 3.0), torch.full((n,), -1).int()

    def run() -> list[Tensor]:
        x = a.clone().requires_grad_()
        sums = fused.exponential_sums(x, k, precision="ieee").sum()
        repulsion = fused.label_sums(x, k, *y, "hamming", "ieee")
        loss = fused.tagged_pair_losses(x, k, total, *tags, none, total, "ieee")
        parts = [torch.autograd.grad(part, x)[0] for part in (sums, repulsion.sum(), loss)]
        return [repulsion.detach()[:, :1], *parts]

    expected = run()
    monkeypatch.setattr(layout, "PROGRAMS_INTERPRETED", 1)
    monkeypatch.setattr(builder, "create_dot", cut)
    long = [float((x / y - 1).abs().mean()) for x, y in zip(run(), expected, strict=True)]
    monkeypatch.setattr(layout, "CHAIN", 64)
    short = [float((x / y - 1).abs().mean()) for x, y in zip(run(), expected, strict=True)]
    for before, after in zip(long, short, strict=True):
        assert before > 4e-3 and after < before / 4, (long, short)
