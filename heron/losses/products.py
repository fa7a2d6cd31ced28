"""The products of strips: factors rounded to the precision of a run, sums in float32.

A strip's logits and its two gradients are three products. On a GPU those of bfloat16 or float16
run ten times as fast as those of float32, so strips take the precision of the run, as the kernels
do. What is outside the products (exponentials, sums, losses) stays float32. On a CPU a run's
products stay float32, which is no slower there; HERON_PRECISION has them rounded as on a GPU.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from heron.losses import fused

TYPES: dict[fused.Precision, torch.dtype] = {"fp16": torch.half, "bf16": torch.bfloat16}
RunPrecision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]

_of_strips: fused.Precision = "ieee"  # of this process's run; see `set_run_precision`
_exact = False  # whether the run is one in float64
_taken: ContextVar[set[str] | None] = ContextVar("taken", default=None)


def set_run_precision(precision: RunPrecision) -> None:
    """Sets the precision of the products of contrastive terms, in kernels and strips alike.

    bf16 rounds their factors to bfloat16, fp16 and tf32 to float16, which has the 11 bits of TF32
    at twice its rate, also on GPUs without TF32. fp32 rounds those of kernels to float16 and takes
    strips in float32; fp64 rounds nothing.
    """
    global _of_strips, _exact
    _exact = precision == "fp64"
    fused.set_default_precision("bf16" if precision == "bf16" else "fp16")
    of_run: dict[RunPrecision, fused.Precision] = {"bf16": "bf16", "fp16": "fp16", "tf32": "fp16"}
    _of_strips = of_run.get(precision, "ieee")


def strip_precision(vectors: Tensor) -> fused.Precision:
    """Returns the precision of the strips of some vectors; `ieee` is that of the vectors.

    Vectors in float64 are those of a caller who wants it, or, in a run of less, of a temperature
    whose exponentials need its range: their products need no more digits than others.
    """
    if vectors.dtype == torch.float64 and (_exact or not in_run()):
        return "ieee"
    if os.environ.get(fused.PRECISION):
        return fused.choose_precision(None)
    return _of_strips if vectors.device.type == "cuda" else "ieee"


@dataclass(frozen=True)
class Factor:
    """A matrix of a product.

    Attributes:
        values: the matrix times `power`, in the type of the products.
        dtype: the type of the matrix, and of what products with it give.
        power: a power of two that keeps the matrix in float16's range; None: 1.
    """

    values: Float[Tensor, "_ _"]
    dtype: torch.dtype
    power: Float[Tensor, ""] | None = None

    def __getitem__(self, rows: slice | Tensor) -> "Factor":
        """Returns some rows; all of them are the factor itself."""
        count = self.values.shape[0]
        if isinstance(rows, slice) and rows.indices(count) == (0, count, 1):
            return self
        return Factor(self.values[rows], self.dtype, self.power)

    @property
    def T(self) -> "Factor":
        """The transposed matrix."""
        return Factor(self.values.T, self.dtype, self.power)


def factors(
    x: Float[Tensor, "_ dim"], y: Float[Tensor, "_ dim"], precision: fused.Precision | None = None
) -> tuple[Factor, Factor]:
    """Rounds two sides of vectors to `strip_precision`, and notes it as the path of the term.

    In float16 x is multiplied, and y divided, by a power of two, as `fused` does: x @ y.T stays. A
    pass of backward gives the `precision` of the pass before it.
    """
    precision = precision or strip_precision(x)
    note(f"strips, {describe(precision, x.dtype)}")
    if precision == "ieee":
        return Factor(x, x.dtype), Factor(y, y.dtype)
    power = fused.balance(x, y) if precision == "fp16" else None
    sides = (x, y) if power is None else (x * power, y / power)
    a, k = (side.to(TYPES[precision]) for side in sides)
    return Factor(a, x.dtype, power), Factor(k, y.dtype, None if power is None else 1 / power)


def coefficients(d_logits: Float[Tensor, "_ _"], like: Factor) -> Factor:
    """Rounds the gradient of logits to the type of a factor, scaled into float16's range."""
    kind = like.values.dtype
    if kind == torch.half:
        power = fused.headroom(torch.linalg.vector_norm(d_logits, ord=torch.inf))
        return Factor((d_logits * power).to(kind), like.dtype, power)
    return Factor(d_logits.to(kind), like.dtype)


def logits(x: Factor, y: Factor, out: Tensor | None = None) -> Float[Tensor, "_ _"]:
    """Returns x @ y.T of both sides of `factors`, in the type of the vectors, into `out`."""
    return _product(x, y.T, out)


def add_product(total: Tensor, left: Factor, right: Factor) -> None:
    """Adds left @ right to a matrix of the vectors' type."""
    if left.values.dtype == total.dtype:
        total.addmm_(left.values, right.values)
    else:
        total.add_(multiply(left, right))


def accumulated(
    total: Tensor | None, vectors: Tensor, rows: slice, left: Factor, right: Factor
) -> Tensor:
    """Adds left @ right to the gradient of some rows of vectors, which may have none so far."""
    count = vectors.shape[0]
    if total is None and rows.indices(count) == (0, count, 1):
        return multiply(left, right)
    total = torch.zeros_like(vectors) if total is None else total
    add_product(total[rows], left, right)
    return total


def multiply(left: Factor, right: Factor, out: Tensor | None = None) -> Float[Tensor, "_ _"]:
    """Returns left @ right of factors with powers of their own, in the type of the vectors."""
    product = _product(left, right, out)
    for factor in (left, right):
        if factor.power is not None:
            product /= factor.power
    return product


def _product(left: Factor, right: Factor, out: Tensor | None = None) -> Tensor:
    """Returns the product of the values, whose sums are float32 at least."""
    x, y = left.values, right.values
    if x.dtype == left.dtype:
        return torch.mm(x, y, out=out)
    if x.device.type != "cuda":  # which alone has sums in float32 of products of a half
        product = torch.mm(x.float(), y.float())
    elif out is not None and out.dtype == torch.float32:
        return torch.mm(x, y, out_dtype=torch.float32, out=out)
    else:
        product = torch.mm(x, y, out_dtype=torch.float32)
    return product.to(left.dtype) if out is None else out.copy_(product)


def describe(precision: fused.Precision, dtype: torch.dtype = torch.float32) -> str:
    """Returns the name of a precision of products; `ieee` is named after the vectors' type."""
    return str(dtype).removeprefix("torch.") if precision == "ieee" else precision


def note(path: str) -> None:
    """Notes a path that the current term takes; see `recording`."""
    taken = _taken.get()
    if taken is not None:
        taken.add(path)


def in_run() -> bool:
    """Whether a run's objective computes the current term."""
    return _taken.get() is not None


@contextmanager
def recording(paths: set[str]) -> Iterator[None]:
    """While it is open, adds the path that each comparison of pairs takes."""
    token = _taken.set(paths)
    try:
        yield
    finally:
        _taken.reset(token)


def describe_path(paths: Mapping[str, Collection[str]], device: torch.device) -> str:
    """Describes how each term compared its pairs, by kernels or strips, and why a kernel did not.

    `paths` are what `recording` noted, by the term's name; terms without pairs have nothing.
    """
    terms: dict[str, list[str]] = {}
    for name, path in paths.items():
        if path:
            terms.setdefault(" and ".join(sorted(path)), []).append(name)
    parts = [f"{', '.join(names)}: {path}" for path, names in terms.items()]
    parts += [f"not {kernel}: {why}" for kernel, why in fused.reasons(device).items()]
    return "; ".join(parts) or "no pairs"
