"""The fused terms against dense float64, and the switch.

The kernels run on a GPU if there is one. Where there is none they run in Triton's interpreter,
which has to be asked for before Triton is imported, and for a whole process: so one test runs this
file again in a process of its own, and there the others no longer skip.
"""

import importlib
import math
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.objectives import fused
from pipeline.objectives.fused import layout, switch
from pipeline.objectives.supervised import weighted_supervised
from pipeline.objectives.unsupervised import weighted_unsupervised

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
@pytest.mark.parametrize("moments", [(1.0,), (1.5, 0.5)])
def test_sums_at_any_size(n: int, m: int, d: int, moments: tuple[float, ...]) -> None:
    options = complete(n, m, {"moments": moments, "weights": 2})
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
@pytest.mark.parametrize("distance", ["hamming", "indicator"])
def test_supervised_term(distance: Any) -> None:
    """L_s of the block-wise engine, on the rows of one process."""
    s, y, tau = draw(40, 12, 1), labels(40, 4, 2), 0.5
    rows = slice(7, 31)
    count = y.sum(0)
    weight = 1 / (4 * count * (count - 1))

    def ours(s: Tensor) -> Tensor:
        unit = torch.nn.functional.normalize(s)
        pairs = unit[rows] / tau, unit
        total = fused.label_sums(*pairs, y[rows], y, distance, "ieee")
        number = torch.arange(40, dtype=torch.int32, device=DEVICE)[rows]
        return fused.pair_losses(
            *pairs, fused.log_sums(total), y[rows], y, weight, number, distance, "ieee"
        )

    assert_same(
        ours, lambda s: weighted_supervised(s, y, tau=tau, distance=distance, rows=rows), [s]
    )


@kernels
def test_unsupervised_term() -> None:
    """L_u of the block-wise engine, by two sums."""
    tau, batch = 0.5, 20
    tag = torch.arange(batch, dtype=torch.int32, device=DEVICE).repeat(2)

    def ours(*views: Tensor) -> Tensor:
        z = [torch.nn.functional.normalize(x) for x in views[:2]]
        h = [torch.nn.functional.normalize(x) for x in views[2:]]
        every_z = torch.cat(z)
        p = every_z / tau - torch.cat(h)
        total = torch.cat(
            [
                fused.exponential_sums(a, k, anchor_tag=tag, key_tag=tag, precision="ieee")
                for a, k in ((every_z, p), (p, every_z))
            ],
            1,
        ).sum(1)
        positive = (z[0] * z[1]).sum(1).repeat(2) / tau
        return torch.nn.functional.softplus((total * (math.e / 2)).log() - positive).mean()

    assert_same(
        ours,
        lambda *views: weighted_unsupervised(views[:2], views[2:], tau=tau),
        [draw(batch, 6, seed) for seed in range(4)],
    )


@kernels
@pytest.mark.parametrize(("precision", "bound"), [("tf32", 1e-2), ("bf16", 6e-2)])
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


@with_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_kernels_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes what the compiler refuses; the compiler needs no GPU."""
    triton = pytest.importorskip("triton")
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names_of = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32"}
    compiled = set()

    def compile_only(
        kernel: Any, grid: Any, cut: layout.Blocks, tensor: Tensor, *args: Any, **constants: Any
    ) -> None:
        names, fixed = kernel.arg_names, dict(constants)
        signature = dict.fromkeys(constants, "constexpr")
        for name, value in zip(names, args, strict=False):
            if isinstance(value, Tensor):
                signature[name] = names_of[value.dtype]
            elif value is None:
                signature[name], fixed[name] = "constexpr", None
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        source = compiler.ASTSource(
            kernel,
            {name: signature[name] for name in names},
            {(names.index(name),): value for name, value in fixed.items()},
        )
        options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
        result = triton.compile(source, target=target, options=options)
        assert result.asm["cubin"]
        compiled.add(kernel.__name__)

    monkeypatch.setattr(layout, "launch", compile_only)
    monkeypatch.setattr(layout, "require", lambda *args: None)
    monkeypatch.setattr(layout, "blocks", lambda *args: layout.Blocks(64, 32, 4, 2))
    a, k, y = draw(8, 16, 1), draw(8, 16, 2), torch.ones(8, 3)
    tag = torch.zeros(8, dtype=torch.int32)
    options = complete(8, 8, {"moments": (1.5, 1.0), "floor": 0.0, "tags": True, "weights": 3})
    sums = fused.exponential_sums(a, k, **options, precision="tf32")
    repulsion = fused.label_sums(a, k, y, y, "hamming", "bf16")
    torch.autograd.grad(sums.sum() + repulsion.sum(), [a])
    fused.pair_losses(a, k, y, y, y, y[0], tag, "hamming", "bf16")
    assert compiled == {
        "sum_kernel",
        "sum_gradient_kernel",
        "label_sum_kernel",
        "label_gradient_kernel",
        "pair_kernel",
        "collect_kernel",
    }


def test_operands_are_rounded_to_nearest() -> None:
    """Cut off, tf32 would be 2 ** -11.5 too small on average, and so would every sum."""
    x = draw(300, 100, 1).detach().abs()
    rounded = layout.operand(x, "tf32")
    assert rounded.shape == (300, 128)
    assert (rounded[:, 100:] == 0).all()
    error = rounded[:, :100] / x - 1
    assert error.abs().max() <= 2**-11
    assert error.mean().abs() < 2**-15
    odd = torch.tensor([[math.inf, -math.inf, math.nan]], device=DEVICE)
    torch.testing.assert_close(layout.operand(odd, "tf32")[:, :3], odd, equal_nan=True)


def test_every_kind_of_tile_is_in_the_table() -> None:
    cut = layout.Blocks(128, 64, 8, 3)
    parts, per_part = layout.splits(8192, 16384, cut)
    programs = layout.PROGRAMS_INTERPRETED if INTERPRETED else layout.PROGRAMS
    assert (parts - 1) * per_part < 16384 <= parts * per_part
    assert parts == max(1, programs // 64)
    assert layout.splits(10**6, 10**6, cut) == (1, 10**6)
    assert layout.splits(1, 1, cut) == (1, 64)
    for width in (16, 128, 129, 256, 512):
        for kind, precision in layout.BLOCKS:
            assert layout.blocks(kind, precision, width).rows >= 16


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("HERON_FUSED", raising=False)
    monkeypatch.setattr(switch, "_installed", lambda: True)
    assert not fused.available(cpu)
    assert not fused.enabled(cpu)
    monkeypatch.setenv("HERON_FUSED", "always")
    expected = (
        "HERON_FUSED is always, but the fused path cannot run on cpu: it is no CUDA device but "
        "cpu; expected Triton and a GPU with 227 KiB of shared memory (H100, H200, ...); set "
        "HERON_FUSED=auto to do without"
    )
    with pytest.raises(TrainingError) as error:
        fused.enabled(cpu)
    assert str(error.value) == expected
    small = types.SimpleNamespace(shared_memory_per_block_optin=163 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    with pytest.raises(TrainingError, match="cannot run on cuda: its shared memory is 163 KiB"):
        fused.enabled(torch.device("cuda"))
    small.shared_memory_per_block_optin = 227 << 10
    assert fused.enabled(torch.device("cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fused.enabled(cpu)
    monkeypatch.setenv("HERON_FUSED", "never")
    assert fused.available(cpu)
    assert not fused.enabled(cpu)
    monkeypatch.setenv("HERON_FUSED", "yes")
    with pytest.raises(ValueError, match="HERON_FUSED is 'yes'; expected auto, never or always"):
        fused.enabled(cpu)
    monkeypatch.setenv("HERON_FUSED", "always")
    monkeypatch.setattr(switch, "_installed", lambda: False)
    with pytest.raises(TrainingError, match="cannot run on cpu: triton is not installed; expected"):
        fused.enabled(cpu)
    with pytest.raises(TrainingError, match="a fused term was called, but the fused path cannot"):
        fused.exponential_sums(torch.ones(2, 2), torch.ones(2, 2))


def test_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "require", lambda *args: None)
    x, y, tag = torch.ones(3, 4), torch.ones(3, 130), torch.ones(3).int()
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            ValueError,
            "anchors have 4 columns and keys 2; expected as many",
            lambda: layout.check(x, x[:, :2]),
        ),
        (
            TypeError,
            "the fused path has vectors of torch.float64; expected float32, bfloat16 or float16; "
            "the block-wise engine takes float64",
            lambda: fused.exponential_sums(x.double(), x.double()),
        ),
        (
            ValueError,
            "moments are (1.0, 2.0, 3.0); expected one or two numbers",
            lambda: fused.exponential_sums(x, x, moments=(1.0, 2.0, 3.0)),
        ),
        (
            ValueError,
            "key_tag is given without anchor_tag; expected both",
            lambda: fused.exponential_sums(x, x, key_tag=tag),
        ),
        (
            ValueError,
            "anchor_weight has 130 columns and key_weight 130; expected as many, at most 128",
            lambda: fused.exponential_sums(x, x, anchor_weight=y, key_weight=y),
        ),
        (
            ValueError,
            "anchor_y has 130 labels and key_y 130; expected as many, at most 128: for classes of "
            "which a row has one, use tags",
            lambda: fused.label_sums(x, x, y, y, "hamming"),
        ),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind) as error:
            call()
        assert str(error.value) == message
