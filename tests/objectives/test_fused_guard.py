"""A kernel that is wrong is not used: planted faults, and the terms by strips instead."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.base.errors import TrainingError
from heron.distributed import collectives
from heron.losses import functional as f
from heron.losses import fused
from heron.losses.fused import guard, sums
from heron.losses.products import describe_path
from heron.training.launch import prepare_products
from tests.objectives.kernel_cases import DEVICE, draw, kernels


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of any kernel, and terms are compared in float32's own precision."""
    monkeypatch.setattr(guard, "_verdicts", {})
    monkeypatch.setenv("HERON_PRECISION", "ieee")
    yield


def raises(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("PTX assembly\n aborted due to errors")


def scaled(sums: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    return lambda *args, **options: sums(*args, **options) * factor


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (lambda real: raises, "RuntimeError: PTX assembly aborted due to errors"),
    "off by one in a hundred": (lambda real: scaled(real, 1.01), "its value is off by 1.0%"),
    "not a number": (lambda real: scaled(real, float("nan")), "its value is not finite"),
}


@kernels
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_not_used_and_the_reason_is_said_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    z = [draw(11, 6, seed) for seed in (1, 2)]
    monkeypatch.setenv("HERON_FUSED", "never")
    expected = f.nt_xent(z)
    monkeypatch.setenv("HERON_FUSED", "auto")
    plant, reason = FAULTS[name]
    monkeypatch.setattr(sums, "_sums", plant(sums._sums))
    with pytest.warns(RuntimeWarning, match=f"'sums' is not used on cpu .*{reason}.*in strips"):
        found = f.nt_xent(z)
    assert torch.equal(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(f.nt_xent(z), expected)
    assert guard.reasons(DEVICE) == {"sums": reason}
    assert describe_path({"nt_xent": {"strips, float32"}}, DEVICE) == (
        f"nt_xent: strips, float32; not sums: {reason}"
    )
    monkeypatch.setenv("HERON_FUSED", "always")
    with pytest.raises(TrainingError, match=f"always, but the kernel 'sums' .*{reason}"):
        f.nt_xent(z)


@kernels
@pytest.mark.parametrize("precision", ["fp16", "bf16", "ieee"])
def test_right_kernels_are_trusted_in_every_precision(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERON_PRECISION", precision)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused.check_all(DEVICE) == {}
    # Each is found wrong if its results are scaled by one in a hundred.
    for kernel, case in guard.CASES.items():
        found, expected = case(DEVICE, precision)
        wrong = lambda *_, a=found, b=expected: ([x * 1.01 for x in a], b)  # noqa: E731
        assert "off by" in guard._compare(wrong, DEVICE, precision), kernel  # type: ignore[arg-type]


@kernels
def test_what_was_right_is_remembered_and_a_broken_record_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    record = tmp_path / "kernels" / "card.json"
    monkeypatch.setattr(guard, "_record", lambda device: record)

    def counted(*args: Any) -> Any:
        calls.append(args)
        return guard._sums(*args)

    monkeypatch.setattr(guard, "CASES", {"sums": counted})
    for text in (None, '{"sums ieee": 1}', "[1, nothing"):
        if text is not None:
            record.write_text(text)
        before = len(calls)
        for _ in range(2):
            guard._verdicts.clear()
            assert fused.trusted("sums", DEVICE)
        assert len(calls) == before + 1 and json.loads(record.read_text()) == ["sums ieee"]


@kernels
def test_a_kernel_that_is_wrong_on_another_process_is_used_on_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = {"labels": "its gradient is off by 3.0%"}
    monkeypatch.setattr(collectives, "gather_objects", lambda own: [own, theirs])
    with pytest.warns(RuntimeWarning, match="'labels' is not used .*on another process: its grad"):
        prepare_products(DEVICE, "fp32")
    assert fused.trusted("sums", DEVICE) and not fused.trusted("labels", DEVICE)
