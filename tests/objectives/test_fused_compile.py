"""What of the fused path needs no kernel to run: operands, tiles, the switch, messages."""

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from heron.base.errors import TrainingError
from heron.losses import fused
from heron.losses.fused import layout, switch
from tests.objectives.kernel_cases import DEVICE, INTERPRETED, draw, kernels


@kernels
def test_operands_are_rounded_to_nearest_in_whole_tiles() -> None:
    """Cut off, they would be 2 ** -11.5 too small on average, and so would every sum."""
    x = draw(300, 100, 1).detach().abs()
    for precision, bits in (("fp16", 11), ("bf16", 8)):
        rounded, other, power = layout.operands(x, x * 2**-9, precision, 3.0)  # type: ignore[arg-type]
        assert rounded.shape == other.shape == (384, 128)
        assert (rounded[:, 100:] == 0).all() and (rounded[300:] == 0).all()
        exact = 3 * x * power
        error = rounded[:300, :100].float() - exact
        assert (error.abs() <= (exact * 2**-bits).clamp(min=2**-25)).all()
        assert error.mean().abs() < exact.mean() * 2 ** (-bits - 4)
        assert power == (2**-5 if precision == "fp16" else 1)  # of 3 * 2^9, halfway
    odd = torch.tensor([[math.inf, -math.inf, math.nan]], device=DEVICE)
    for found in layout.operands(odd, odd, "fp16")[:2]:
        torch.testing.assert_close(found[:1, :3].float(), odd, equal_nan=True)


@pytest.mark.parametrize("bound", [1e-30, 1e-9, 1.0, 2.0**14, 1e12, 1e30])
def test_headroom_ends_below_what_fp16_holds(bound: float) -> None:
    scaled = bound * layout.headroom(torch.tensor(bound))
    assert 2**13 <= scaled <= 2**14
    for nothing in (0.0, math.inf, math.nan):
        assert 0 < layout.headroom(torch.tensor(nothing)) < math.inf


@kernels
def test_ranges_are_those_of_tiles() -> None:
    numbers = torch.tensor([5, 3, 9, 1, 7], dtype=torch.int32, device=DEVICE)
    assert layout.tile_ranges(numbers, 2).tolist() == [[3, 1, 7], [5, 9, 7]]


def test_every_kind_of_tile_is_in_the_table() -> None:
    cut = layout.Tiling(128, 64, 8, 3)
    parts, per_part = layout.splits(8192, 16384, cut)
    programs = layout.PROGRAMS_INTERPRETED if INTERPRETED else layout.PROGRAMS
    assert (parts - 1) * per_part < 16384 <= parts * per_part
    assert parts == max(1, programs // 64)
    assert layout.splits(10**6, 10**6, cut) == (1, 10**6)
    assert layout.splits(1, 1, cut) == (1, 64)
    for kind, tiles in layout.BLOCKS.items():
        for width, tile in zip((128, 256, 512), tiles, strict=True):
            assert INTERPRETED or layout.choose_tile(kind, "fp16", width) == tile
            for size in (tile.rows, tile.columns):
                assert layout.TALLEST % size == layout.CHAIN % size == 0


def test_the_precision_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERON_PRECISION", raising=False)
    x = torch.ones(1)
    assert layout.choose_precision(None, x) == "fp16"
    assert layout.choose_precision(None, x.bfloat16()) == "bf16"
    assert layout.choose_precision(None, x, x.bfloat16()) == "fp16"
    monkeypatch.setattr(layout, "_preferred", "fp16")
    fused.set_default_precision("bf16")
    assert layout.choose_precision(None, x) == "bf16"
    monkeypatch.setenv("HERON_PRECISION", "tf32")  # the same bits
    assert layout.choose_precision(None, x) == "fp16"
    monkeypatch.setenv("HERON_PRECISION", "fp8")
    with pytest.raises(ValueError, match="precision must be fp16, bf16 or ieee, got 'fp8'"):
        layout.choose_precision(None, x)


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("HERON_FUSED", raising=False)
    monkeypatch.setattr(switch, "_installed", lambda: True)
    assert not fused.available(cpu)
    assert not fused.enabled(cpu)
    monkeypatch.setenv("HERON_FUSED", "always")
    expected = (
        "HERON_FUSED is always, but the fused path cannot run on cpu: it is a cpu device, not "
        "CUDA; it needs Triton and a GPU with 227 KiB of shared memory (H100, H200, ...); set "
        "HERON_FUSED=auto to do without"
    )
    with pytest.raises(TrainingError) as error:
        fused.enabled(cpu)
    assert str(error.value) == expected
    small = types.SimpleNamespace(shared_memory_per_block_optin=163 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    with pytest.raises(
        TrainingError, match="cannot run on cuda: its shared memory is only 163 KiB"
    ):
        fused.enabled(torch.device("cuda"))
    small.shared_memory_per_block_optin = 227 << 10
    assert fused.enabled(torch.device("cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fused.enabled(cpu)
    monkeypatch.setenv("HERON_FUSED", "never")
    assert fused.available(cpu)
    assert not fused.enabled(cpu)
    monkeypatch.setenv("HERON_FUSED", "yes")
    with pytest.raises(ValueError, match="HERON_FUSED must be auto, never or always, got 'yes'"):
        fused.enabled(cpu)
    monkeypatch.setenv("HERON_FUSED", "always")
    monkeypatch.setattr(switch, "_installed", lambda: False)
    with pytest.raises(TrainingError, match="cannot run on cpu: triton is not installed; it needs"):
        fused.enabled(cpu)
    with pytest.raises(TrainingError, match="a fused term was called, but the fused path cannot"):
        fused.exponential_sums(torch.ones(2, 2), torch.ones(2, 2))


def test_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "require", lambda *args: None)
    x, y, tag = torch.ones(3, 4), torch.ones(3, 130), torch.ones(3).int()
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            ValueError,
            "anchors and keys must have the same number of columns, got 4 and 2",
            lambda: layout.check_vectors(x, x[:, :2]),
        ),
        (
            TypeError,
            "the fused path needs float32, bfloat16 or float16, got torch.float64; "
            "the block-wise engine takes float64",
            lambda: fused.exponential_sums(x.double(), x.double()),
        ),
        (
            ValueError,
            "moments must be one, or two with only one of 0, got (1.0, 2.0, 3.0)",
            lambda: fused.exponential_sums(x, x, moments=(1.0, 2.0, 3.0)),
        ),
        (
            ValueError,
            "moments must be one or two, the first above 0, got (0.0, 1.0)",
            lambda: fused.mutual_operands(x, x, moments=(0.0, 1.0)),
        ),
        (
            ValueError,
            "vectors must have at most 512 columns, got 513; the block-wise engine takes wider "
            "ones",
            lambda: layout.check_vectors(torch.ones(1, 513), torch.ones(1, 513)),
        ),
        (
            ValueError,
            "key_tag needs anchor_tag too",
            lambda: fused.exponential_sums(x, x, key_tag=tag),
        ),
        (
            ValueError,
            "anchor_weight and key_weight must have the same number of columns, at most 128, "
            "got 130 and 130",
            lambda: fused.exponential_sums(x, x, anchor_weight=y, key_weight=y),
        ),
        (
            ValueError,
            "anchor_y and key_y must have the same number of labels, at most 128, got 130 and 130: "
            "for classes of which a row has one, use tags",
            lambda: fused.label_sums(x, x, y, y, "hamming"),
        ),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind) as error:
            call()
        assert str(error.value) == message
