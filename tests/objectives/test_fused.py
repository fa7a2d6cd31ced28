"""The fused terms against dense float64, and the switch.

The kernels run on a GPU if there is one. Where there is none they run in Triton's interpreter,
which has to be asked for before Triton is imported, and for a whole process: so one test runs this
file again in a process of its own, and there the others no longer skip.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.pipeline.objectives import fused
from heron.pipeline.objectives.fused import layout, switch

INTERPRETED = switch.interpreted()
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
kernels = pytest.mark.skipif(
    not fused.available(DEVICE),
    reason=f"no kernel runs in this process ({switch.missing(DEVICE)}); "
    "test_kernels_in_the_interpreter runs them in another",
)
with_triton = pytest.mark.skipif(not switch._installed(), reason="triton is not installed")


@with_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(path) for path in sorted(Path(__file__).parent.glob("test_fused*.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop(switch.SWITCH, None)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout + done.stderr


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


@kernels
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sums_are_the_dense_ones(options: dict[str, Any]) -> None:
    options = complete(37, 70, options)
    assert_same(
        lambda a, k: fused.exponential_sums(a, k, **options, precision="ieee"),
        lambda a, k: dense_sums(a, k, **options),
        [draw(37, 20, 1), draw(70, 20, 2)],
    )


@kernels
@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 1), (16, 32, 16), (17, 20, 300), (3, 40, 128)])
@pytest.mark.parametrize("moments", [(1.0,), (1.5, 0.5), (1.0, 0.0)])
@pytest.mark.parametrize("apart", [True, False])
def test_sums_at_any_size(n: int, m: int, d: int, moments: tuple[float, ...], apart: bool) -> None:
    """Weights are 0 of keys past the end; without, the last tile's mask alone leaves these out.

    Tags that lie apart spare the other mask.
    """
    options = complete(n, m, {"moments": moments} | ({} if apart else {"weights": 2}))
    if apart:
        options |= {"anchor_tag": integers(n, 5, 3), "key_tag": 9 + integers(m, 5, 4)}
    assert_same(
        lambda a, k: fused.exponential_sums(a, k, **options, precision="ieee"),
        lambda a, k: dense_sums(a, k, **options),
        [draw(n, d, 1), draw(m, d, 2)],
    )


@kernels
def test_only_one_side_wants_a_gradient() -> None:
    a, k = draw(20, 8, 1), draw(30, 8, 2)
    expected = torch.autograd.grad(dense_sums(a.double(), k.double(), moments=(1.0,)).sum(), [a, k])
    for side, (x, y) in enumerate([(a, k.detach()), (a.detach(), k)]):
        sums = fused.exponential_sums(x, y, precision="ieee")
        (found,) = torch.autograd.grad(sums.sum(), [a, k][side])
        torch.testing.assert_close(found, expected[side], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert not fused.exponential_sums(a, k).requires_grad


@kernels
@pytest.mark.parametrize("distance", ["hamming", "indicator"])
@pytest.mark.parametrize(("n", "m", "d", "c"), [(37, 70, 20, 5), (5, 17, 300, 17)])
def test_label_sums_are_the_dense_ones(distance: Any, n: int, m: int, d: int, c: int) -> None:
    anchor_y, key_y = labels(n, c, 3), labels(m, c, 4)
    key_y[:4] = anchor_y[:4]  # pairs of distance 0

    def dense(a: Tensor, k: Tensor) -> Tensor:
        repulsion = dense_distance(anchor_y, key_y, distance) * torch.exp(a @ k.T)
        return repulsion @ (1 - key_y.double())

    assert_same(
        lambda a, k: fused.label_sums(a, k, anchor_y, key_y, distance, "ieee"),
        dense,
        [draw(n, d, 1), draw(m, d, 2)],
    )


@kernels
@pytest.mark.parametrize("distance", ["hamming", "indicator", "none"])
@pytest.mark.parametrize(("n", "m", "d", "c"), [(37, 70, 20, 5), (17, 18, 300, 3)])
def test_pair_losses_are_the_dense_ones(distance: Any, n: int, m: int, d: int, c: int) -> None:
    anchor_y, key_y, weight = labels(n, c, 3), labels(m, c, 4), draw(1, c, 5).detach()[0].abs()
    number = integers(n, m + 3, 6) - 3
    number[number < 0] = -1
    key_y[number.clamp(min=0).long()] = anchor_y
    options = (anchor_y, key_y, weight, number)
    assert_same(
        lambda a, k, t: fused.pair_losses(a, k, t, *options, distance, "ieee"),
        lambda a, k, t: dense_pairs(a, k, t, *options, distance),
        [draw(n, d, 1), draw(m, d, 2), draw(c, n, 7).detach().T.requires_grad_()],  # strided
    )


@kernels
@pytest.mark.parametrize("classes", [1, 4, 60])
def test_tagged_pair_losses_are_the_dense_ones(classes: int) -> None:
    n, m = 37, 70
    tags = integers(n, classes, 3) - 2, integers(m, classes, 4) - 2
    number = integers(n, m, 6)
    weight = draw(1, n, 5).detach()[0].abs()

    def dense(a: Tensor, k: Tensor, total: Tensor) -> Tensor:
        other = number[:, None] != torch.arange(m, device=DEVICE)
        pair = (tags[0][:, None] == tags[1]) & other
        loss = torch.nn.functional.softplus(total[:, None] - a @ k.T)
        return (torch.where(pair, loss, 0.0).sum(1) * weight.double()).sum()

    total = draw(1, n, 7).detach()[0].requires_grad_()
    assert_same(
        lambda a, k, t: fused.tagged_pair_losses(a, k, t, *tags, number, weight, "ieee"),
        dense,
        [draw(n, 20, 1), draw(m, 20, 2), total],
    )


@kernels
def test_small_and_large_ratios_keep_their_digits() -> None:
    """D / f between exp(-24) and exp(60): neither rounds away nor overflows."""
    n = 16
    a, k = draw(n, 4, 1).detach(), torch.zeros(n, 4, device=DEVICE)
    k[:, 0], a[:, 0] = 1.0, torch.linspace(-30, 12, n)
    total = torch.linspace(30, -12, n, device=DEVICE)
    tag, number = torch.zeros(n, device=DEVICE).int(), torch.arange(n, device=DEVICE).int()
    for i in range(n):
        one = slice(i, i + 1)
        found = fused.tagged_pair_losses(
            a[one], k, total[one], tag[one], tag, number[one], torch.ones(1, device=DEVICE), "ieee"
        )
        margin = torch.tensor([total[i].item() - a[i, 0].item()], dtype=torch.float64)
        expected = 15 * torch.nn.functional.softplus(margin).item()
        assert found.item() == pytest.approx(expected, rel=1e-5)


@kernels
def test_without_a_negative_the_loss_is_zero() -> None:
    """Every key has label 0: D = 0, log D = -inf; label 1 has negatives still."""
    anchors, keys = draw(9, 6, 1), draw(11, 6, 2)
    anchor_y, key_y = labels(9, 2, 3), labels(11, 2, 4)
    anchor_y[:, 0] = key_y[:, 0] = 1
    sums = fused.label_sums(anchors, keys, anchor_y, key_y, "hamming", "ieee")
    assert (sums[:, 0] == 0).all()
    weight, number = torch.tensor([1.0, 0.0], device=DEVICE), integers(9, 11, 5)
    loss = fused.pair_losses(
        anchors, keys, fused.log_sums(sums), anchor_y, key_y, weight, number, "hamming", "ieee"
    )
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, [anchors, keys]):
        assert (gradient == 0).all()


@kernels
@pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0), (0, 0)])
def test_no_anchors_or_no_keys_give_zeros(n: int, m: int) -> None:
    a, k, total = draw(n, 6, 1), draw(m, 6, 2), draw(n, 3, 3)
    y, number = (labels(n, 3, 4), labels(m, 3, 5)), integers(n, 1, 6)
    tags, ones = (integers(n, 2, 7), integers(m, 2, 8)), torch.ones(n, device=DEVICE)
    results = [
        fused.exponential_sums(a, k),
        fused.exponential_sums(a, k, moments=(2.0, 1.0)),
        fused.label_sums(a, k, *y, "hamming"),
        fused.pair_losses(a, k, total, *y, torch.ones(3, device=DEVICE), number, "hamming"),
        fused.tagged_pair_losses(a, k, total[:, 0], *tags, number, ones),
    ]
    assert [list(x.shape) for x in results] == [[n, 1], [n, 2], [n, 3], [], []]
    for result in results:
        assert (result == 0).all()
        for gradient in torch.autograd.grad(result.sum(), [a, k]):
            assert (gradient == 0).all()


@kernels
def test_labels_without_a_pair_give_zero() -> None:
    a, k, total = draw(5, 6, 1), draw(7, 6, 2), draw(5, 3, 3)
    none = torch.zeros(7, 3, device=DEVICE)
    options = torch.ones(3, device=DEVICE), integers(5, 7, 4)
    for anchor_y in (none[:5], none[:5] + 1):
        loss = fused.pair_losses(a, k, total, anchor_y, none, *options, "none")
        assert loss.item() == 0
        for gradient in torch.autograd.grad(loss, [a, k, total]):
            assert (gradient == 0).all()


@kernels
@pytest.mark.parametrize(("precision", "bound"), [("fp16", 4e-3), ("bf16", 6e-2)])
def test_coarse_products(precision: Any, bound: float) -> None:
    """In the interpreter this rounds the operands and multiplies in float32."""
    options = complete(37, 70, {"moments": (2.0, 1.0), "tags": True, "weights": 3})
    y = labels(37, 5, 7), labels(70, 5, 8)
    number, weight = integers(37, 70, 9), torch.ones(5, device=DEVICE)
    vectors = [draw(37, 20, 1), draw(70, 20, 2)]
    assert_same(
        lambda a, k: fused.exponential_sums(a, k, **options, precision=precision),
        lambda a, k: dense_sums(a, k, **options),
        vectors,
        bound,
    )
    assert_same(
        lambda a, k, t: fused.pair_losses(a, k, t, *y, weight, number, "hamming", precision),
        lambda a, k, t: dense_pairs(a, k, t, *y, weight, number, "hamming"),
        [*vectors, draw(37, 5, 3)],
        bound,
    )


@kernels
def test_types_and_strides_of_the_inputs() -> None:
    """bfloat16 vectors make bf16 products; gradients have their vectors' type."""
    a, k = draw(20, 30, 1), draw(20, 40, 2)
    expected = dense_sums(a.T.double(), k.T.double(), moments=(1.0,)).float()
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
    a, k, total = draw(37, 20, 1), draw(70, 20, 2), draw(37, 5, 3)
    y = labels(37, 5, 4), labels(70, 5, 5)
    number, weight = integers(37, 70, 6), torch.ones(5, device=DEVICE)

    def run() -> list[Tensor]:
        sums = fused.exponential_sums(a, k, moments=(1.5, 0.5))
        repulsion = fused.label_sums(a, k, *y, "hamming")
        loss = fused.pair_losses(a, k, total, *y, weight, number, "hamming")
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
    options: dict[str, Any] = {"moments": moments, "floor": 0.1, "anchor_tag": integers(37, 5, 3)}
    options["key_tag"] = integers(70, 5, 4)
    a, k = draw(37, 20, 1).detach(), draw(70, 20, 2).detach()
    own, of_keys = (draw(n, len(moments), n).detach() * 1e-9 for n in (37, 70))
    x, y = a.double(), k.double()
    logits = x @ y.T
    counted = (logits >= 0.1) & (options["anchor_tag"][:, None] != options["key_tag"])
    expected = torch.zeros_like(x)
    for r, m in enumerate(moments):
        if m:
            s = own[:, r, None].double() + of_keys[:, r].double()
            expected += (s * counted * torch.exp(m * logits)) @ y
    found = fused.mutual_gradient(a, k, own, of_keys, precision=precision, **options)
    assert (found - expected).abs().max() <= bound * expected.abs().max()
    most = (expected.new_tensor(2e-9) * torch.exp(2 * logits.max())).float()
    again = fused.mutual_gradient(a, k, own, of_keys, bound=most, precision=precision, **options)
    assert (again - expected).abs().max() <= 2 * bound * expected.abs().max()


@kernels
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
@pytest.mark.parametrize("span", [2.0, 25.0])
def test_fp16_holds_any_loss(size: float, span: float) -> None:
    """Exponentials up to e^25 and down to e^-25, of losses far below and above fp16's numbers."""
    a, k = draw(37, 20, 1).detach(), draw(70, 20, 2).detach()
    a *= span / float((a @ k.T).abs().max())
    y = labels(37, 5, 7), labels(70, 5, 8)
    number, tags = integers(37, 70, 9), (integers(37, 3, 3), integers(70, 3, 4))
    weight = torch.tensor([1.0, 1e-3, 1e-1, 1.0, 1e-2], device=DEVICE) * size
    bound = 2**-9 * max(1.0, span / 4)  # a logit of 25 is off by 25 x 2^-11

    def terms(sums: Callable[..., Tensor], repel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, z: size * (sums(x, z)[:, 0].log().sum() + repel(x, z).log().sum())[None]

    def repelled(x: Tensor, z: Tensor) -> Tensor:
        return (dense_distance(*y, "hamming") * torch.exp(x @ z.T)) @ (1 - y[1].double())

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
        terms(lambda x, z: dense_sums(x, z, moments=(1.0,), **of_tags), repelled),
    )
    close(
        lambda x, z, t: fused.pair_losses(x, z, t, *y, weight, number, "hamming", "fp16"),
        lambda x, z, t: dense_pairs(x, z, t, *y, weight, number, "hamming"),
        draw(37, 5, 3),
    )


@kernels
@pytest.mark.skipif(not INTERPRETED, reason="a GPU cuts its sums off by itself")
def test_long_sums_are_chains_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that cut sums off at 12 bits, as matrix units do at 24: chains limit the bias."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    exact = builder.create_dot

    def cut(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        done = exact(self, a, b, d, *options)
        if (d.data != 0).any():  # a sum that goes on
            done.data = (done.data.view("int32") & -0x1000).view("float32")
        return done

    n, m = 8, 32 * 64
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
    monkeypatch.setattr(layout, "CHAIN", 256)
    short = [float((x / y - 1).abs().mean()) for x, y in zip(run(), expected, strict=True)]
    for before, after in zip(long, short, strict=True):
        assert before > 4e-3 and after < before / 4, (long, short)
