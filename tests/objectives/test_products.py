"""Strips' products in the precision of a run: their errors, their types on a GPU, what is said."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from heron.losses import fused, products
from heron.losses.clip import clip, siglip
from heron.losses.fused import layout, switch
from heron.losses.hard import hard
from heron.losses.hierarchical import hierarchical
from heron.losses.supcon import supcon
from heron.losses.supervised import weighted_supervised
from heron.losses.unsupervised import nt_xent, weighted_unsupervised

BATCH, DIM = 48, 768


def draw(seed: int, dim: int = DIM) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, dim, generator=generator).requires_grad_()


CLASS = torch.arange(BATCH) % 5
Y = torch.rand(BATCH, 6, generator=torch.Generator().manual_seed(9)) < 0.4
PATHS = torch.stack([CLASS % 2, CLASS], 1)
TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nt_xent": lambda a, b: nt_xent([a, b], tau=0.1),
    "nt_xent, a share": lambda a, b: nt_xent([a, b], tau=0.1, rows=slice(5, 30)),
    "L_u": lambda a, b: weighted_unsupervised([a, b], [b * b, a * a], tau=0.2),
    "L_s": lambda a, b: weighted_supervised(a + b, Y.to(a), tau=0.2),
    "supcon": lambda a, b: supcon([a, b], CLASS, tau=0.1),
    "hierarchical": lambda a, b: hierarchical([a, b], PATHS, tau=0.2),
    "H-SCL": lambda a, b: hard([a, b], CLASS, tau=0.3),
    "clip": lambda a, b: clip([a, b], a.new_full((BATCH,), 50.0)),
    "siglip": lambda a, b: siglip([a, b], a.new_full((BATCH,), 10.0), a.new_full((BATCH,), -5.0)),
}


@pytest.fixture(autouse=True)
def of_no_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("HERON_PRECISION", raising=False)
    monkeypatch.setattr(products, "_of_strips", "ieee")
    monkeypatch.setattr(products, "_exact", False)
    monkeypatch.setattr(layout, "_preferred", "fp16")
    yield


def value_and_gradients(name: str, dtype: torch.dtype) -> list[Tensor]:
    z = [draw(seed).detach().to(dtype).requires_grad_() for seed in (3, 4)]
    loss = TERMS[name](*z)
    return [loss.detach().double(), *(x.double() for x in torch.autograd.grad(loss, z))]


# Relative to the largest element: (at least, at most), of values and of gradients. The products of
# "ieee" are those of float32, and rounding shows in the others.
BOUNDS = {
    "ieee": ((0, 1e-6), (0, 1e-6)),
    "fp16": ((0, 2e-5), (1.2e-6, 2e-3)),
    "bf16": ((0, 2e-4), (1e-5, 2e-2)),
}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", TERMS)
def test_errors_of_wide_vectors(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, which has its own products but where a run's temperature asks for it.

    The scale of `clip` does: its exponentials are float64, its vectors are the run's.
    """
    monkeypatch.setenv("HERON_PRECISION", precision)
    exact = value_and_gradients(name, torch.float64)
    with products.recording(set()):
        found = value_and_gradients(name, torch.float32)
    for number, (a, b) in enumerate(zip(found, exact, strict=True)):
        error = float((a - b).abs().max() / b.abs().max())
        least, most = BOUNDS[precision][number > 0]
        assert least <= error <= most, f"{number}: {error:.1e}"


class Matrices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The types of the factors and of the result of every product."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: set[tuple[torch.dtype, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith(("mm", "addmm", "bmm")):
            self.types.add(
                (args[-1 if func.__name__.startswith("addmm") else 0].dtype, result.dtype)
            )
        return result


@pytest.mark.parametrize(
    ("run", "factor"),
    [("bf16", torch.bfloat16), ("tf32", torch.half), ("fp32", torch.float32)],
)
def test_types_of_products_on_a_gpu(run: Any, factor: torch.dtype) -> None:
    """Of tensors that only have shapes and a device: which products a GPU would be asked for."""
    products.set_run_precision(run)
    with torch.no_grad(), FakeTensorMode(), Matrices() as seen:
        x, k = (torch.empty(40, DIM, device="cuda") for _ in range(2))
        a, b = products.factors(x, k)
        strip = products.logits(a, b, out=torch.empty(40, 40, device="cuda"))
        d = products.coefficients(strip, b)
        products.multiply(d, b, out=x)
        products.add_product(k, d.T, a)
        assert products.multiply(d, b).dtype == torch.float32
    assert seen.types == {(factor, torch.float32)}


def test_a_cpu_keeps_float32_and_a_run_in_float64_its_own_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products.set_run_precision("bf16")
    assert products.strip_precision(draw(1)) == "ieee"
    assert layout.choose_precision(None, draw(1)) == "bf16"
    monkeypatch.setenv("HERON_PRECISION", "bf16")
    double = draw(1).double()
    assert products.strip_precision(double) == "ieee"  # no run computes it
    with products.recording(set()):
        assert products.strip_precision(double) == "bf16"
        products.set_run_precision("fp64")
        assert products.strip_precision(double) == "ieee"


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_float16_holds_large_and_small_numbers(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of very different lengths, and gradients beyond 65,504 or below 6e-8."""
    monkeypatch.setenv("HERON_PRECISION", "fp16")
    x, y = draw(1).detach() * scale, draw(2).detach() / scale
    a, b = products.factors(x, y)
    exact = x.double() @ y.double().T
    assert float((products.logits(a, b) - exact).abs().max() / exact.abs().max()) < 1e-3
    d_logits = exact.float() * scale**2
    d = products.coefficients(d_logits, b)
    for found, expected in (
        (products.multiply(d, b), d_logits.double() @ y.double()),
        (products.multiply(d.T, a), d_logits.double().T @ x.double()),
    ):
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("dim", "path"),
    [(512, "fused kernels, bf16"), (513, "strips, bf16")],
)
def test_the_path_of_a_term_is_what_it_took(
    dim: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: kernels up to 512 columns, and beyond them strips of the same precision."""
    monkeypatch.setenv("HERON_PRECISION", "bf16")
    monkeypatch.setattr(fused, "enabled", lambda device: True)
    monkeypatch.setattr(fused, "trusted", lambda kernel, device: kernel != "unit")
    monkeypatch.setattr(layout, "launch", lambda *_, **__: None)
    monkeypatch.setattr(layout, "require", lambda *_: None)
    paths: dict[str, set[str]] = {"nt_xent": set(), "bce": set()}
    with products.recording(paths["nt_xent"]):
        nt_xent([draw(1, dim), draw(2, dim)], tau=0.1)
    nt_xent([draw(1, dim), draw(2, dim)], tau=0.01)  # no one records it
    cpu = torch.device("cpu")
    assert products.describe_path(paths, cpu) == f"nt_xent: {path}"
    monkeypatch.setenv("HERON_PRECISION", "ieee")
    with products.recording(paths["bce"]):
        nt_xent([draw(1, dim), draw(2, dim)], tau=0.01)  # its exponentials need float64
    said = f"nt_xent: {path}; bce: strips, float64"
    assert products.describe_path(paths, cpu) == said
    monkeypatch.delenv("HERON_PRECISION")
    torch.set_default_dtype(torch.float64)  # as a run in fp64 may have it
    try:
        assert products.describe_path({"bce": set()}, cpu) == "no pairs"
    finally:
        torch.set_default_dtype(torch.float32)
    assert not switch.interpreted() or fused.reasons(cpu) == {}
