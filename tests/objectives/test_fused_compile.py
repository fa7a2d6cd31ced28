"""What of the fused path needs no kernel to run: compilation, tiles, the switch, messages."""

import importlib
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.pipeline.config.errors import TrainingError
from heron.pipeline.objectives import fused
from heron.pipeline.objectives.fused import layout, switch
from tests.objectives.test_fused import DEVICE, INTERPRETED, complete, draw, with_triton


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
        kernel: Any, grid: Any, cut: layout.Tiling, tensor: Tensor, *args: Any, **constants: Any
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
    monkeypatch.setattr(layout, "blocks", lambda *args: layout.Tiling(64, 32, 4, 2))
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
    cut = layout.Tiling(128, 64, 8, 3)
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
