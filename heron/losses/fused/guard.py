"""Compares each kernel with plain torch before a process uses its numbers.

The first time that a process wants a kernel on a device, its value and gradients of a small random
case are compared with plain torch in float64, of operands rounded as the kernel rounds them. Where
it does not compile, raises or differs, strips are used instead, and one line says why. What was
right is remembered in Heron's cache, by device, versions and precision.
"""

import json
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from heron.base.atomic import save_json
from heron.base.errors import ShardError, TrainingError
from heron.base.shipped import __version__
from heron.losses.fused import layout, switch
from heron.losses.fused.labels import label_sums
from heron.losses.fused.layout import unit_gradient, unit_rows
from heron.losses.fused.pairs import pair_losses, tagged_pair_losses
from heron.losses.fused.sums import exponential_sums, mutual_operands

Kernel = Literal["sums", "mutual", "labels", "tags", "unit"]
KERNELS: tuple[Kernel, ...] = ("sums", "mutual", "labels", "tags", "unit")
ROWS, KEYS, DIM, LABELS = 40, 36, 24, 5
# Largest errors, in multiples of the largest number, of values and of gradients, whose coefficients
# are rounded too; and how far a result as a whole may be scaled.
BOUNDS: dict[layout.Precision, tuple[float, float]] = {
    "ieee": (1e-5, 1e-5),
    "fp16": (1e-3, 3e-3),
    "bf16": (4e-3, 2e-2),
}
SCALE = 4e-3

_verdicts: dict[tuple[Kernel, str, layout.Precision], str] = {}  # "": right; else why not


def trusted(kernel: Kernel, device: torch.device) -> bool:
    """Whether a kernel gives right numbers on a device; the first call finds out.

    Raises TrainingError if it does not, and HERON_FUSED is `always`.
    """
    precision = layout.choose_precision(None)
    key = kernel, str(device), precision
    if key not in _verdicts:
        distrust(kernel, device, precision, _verdict(kernel, device, precision))
    if _verdicts[key] and os.environ.get(switch.SWITCH) == "always":
        raise TrainingError(
            f"{switch.SWITCH} is always, but the kernel '{kernel}' cannot be trusted on {device}: "
            f"{_verdicts[key]}; set {switch.SWITCH}=auto to compute its terms in strips"
        )
    return not _verdicts[key]


def distrust(
    kernel: Kernel, device: torch.device, precision: layout.Precision, reason: str
) -> None:
    """Notes why a kernel is not used, and warns once; "" if there is no reason."""
    _verdicts[kernel, str(device), precision] = reason
    if reason:
        warnings.warn(
            f"the fused kernel '{kernel}' is not used on {device} ({reason}): its terms are "
            "computed in strips, which is correct but slower",
            RuntimeWarning,
            stacklevel=2,
        )


def reasons(device: torch.device) -> dict[str, str]:
    """Returns why kernels are not used on a device, by kernel, of those that were asked for."""
    precision = layout.choose_precision(None)
    return {
        kernel: reason
        for (kernel, name, p), reason in _verdicts.items()
        if reason and (name, p) == (str(device), precision)
    }


def check_all(device: torch.device) -> dict[str, str]:
    """Finds out about every kernel at once; returns `reasons`."""
    for kernel in KERNELS:
        trusted(kernel, device)
    return reasons(device)


def _verdict(kernel: Kernel, device: torch.device, precision: layout.Precision) -> str:
    """Returns "" for a kernel that was right before or is now, else why not."""
    record = _record(device)
    name = f"{kernel} {precision}"
    if record and name in _read(record):
        return ""
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            fault = _compare(CASES[kernel], device, precision)
    except Exception as error:  # a compiler's, a driver's
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
    if record and not fault:
        with suppress(OSError, ShardError):  # a cache that cannot be written is found out again
            record.parent.mkdir(parents=True, exist_ok=True)
            save_json(record, [*_read(record), name], several=True)
    return fault


def _record(device: torch.device) -> Path | None:
    """Returns the file of what was right on a device; None for the interpreter's."""
    if switch.interpreted():
        return None
    cache = Path(os.environ.get("HERON_CACHE") or Path.home() / ".cache" / "heron")
    card = torch.cuda.get_device_name(device)
    words = [card, torch.__version__, version("triton"), __version__, torch.version.cuda or ""]
    name = "".join(c if c.isalnum() or c in ".-" else "_" for c in "-".join(words))
    return cache / "kernels" / f"{name}.json"


def _read(path: Path) -> list[str]:
    try:
        names = json.loads(path.read_text()[:10_000])
    except (OSError, ValueError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


Case = Callable[[torch.device, layout.Precision], tuple[Sequence[Tensor], Sequence[Tensor]]]


def _compare(case: Case, device: torch.device, precision: layout.Precision) -> str:
    """Returns how a kernel's results differ from the expected ones, or ""."""
    found, expected = case(device, precision)
    value_bound, gradient_bound = BOUNDS[precision]
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        what, bound = ("gradient", gradient_bound) if number else ("value", value_bound)
        a, b = a.detach().double().flatten(), b.detach().double().flatten()
        if not bool(a.isfinite().all()):
            return f"its {what} is not finite"
        error = float((a - b).abs().max() / b.abs().max())
        scale = float(a @ b / (b @ b)) - 1
        if error > bound or abs(scale) > max(SCALE, bound / 10):
            return f"its {what} is off by {max(error, abs(scale)):.1%}"
    return ""


def _draw(device: torch.device, precision: layout.Precision) -> list[Tensor]:
    """Returns anchors and keys, of numbers that the precision holds exactly."""
    generator = torch.Generator().manual_seed(0)
    dtype = {"fp16": torch.half, "bf16": torch.bfloat16, "ieee": torch.float32}[precision]
    x = [torch.randn(n, DIM, generator=generator) / DIM**0.25 for n in (ROWS, KEYS)]
    return [v.to(dtype).float().to(device).requires_grad_() for v in x]


def _double(x: Sequence[Tensor]) -> list[Tensor]:
    return [v.detach().double().requires_grad_() for v in x]


def _with_gradients(value: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns a value and its gradients, of a sum with weights that differ."""
    weights = torch.linspace(0.5, 1.5, value.numel(), device=value.device).view(value.shape)
    gradients = torch.autograd.grad(value, inputs, weights.to(value.dtype))
    return [value, *gradients]


def _tags(device: torch.device) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(max(ROWS, KEYS), dtype=torch.int32, device=device)
    return numbers[:ROWS] % 7, numbers[:KEYS] % 7


def _sums(device: torch.device, precision: layout.Precision) -> tuple[list[Tensor], list[Tensor]]:
    inputs, (t, u) = _draw(device, precision), _tags(device)
    found = exponential_sums(*inputs, anchor_tag=t, key_tag=u, precision=precision)
    exact = _double(inputs)
    f = (exact[0] @ exact[1].T).exp() * (t[:, None] != u)
    return _with_gradients(found, inputs), _with_gradients(f.sum(1, keepdim=True), exact)


def _mutual(device: torch.device, precision: layout.Precision) -> tuple[list[Tensor], list[Tensor]]:
    (a, k), (t, u) = _draw(device, precision), _tags(device)
    s, r = torch.linspace(0.5, 1, ROWS), torch.linspace(1, 0.25, KEYS)
    slopes = s[:, None].to(device), r[:, None].to(device)
    operands = mutual_operands(a, k, anchor_tag=t, key_tag=u, precision=precision)
    found = operands.gradient(slopes)
    x, y = (v.double() for v in (a, k))
    f = (x @ y.T).exp() * (t[:, None] != u)
    expected = (f * (slopes[0].double() + slopes[1].double().T)) @ y
    return [found[:1], found], [expected[:1], expected]


def _labels(device: torch.device, precision: layout.Precision) -> tuple[list[Tensor], list[Tensor]]:
    inputs = _draw(device, precision)
    drawn = torch.rand(ROWS, LABELS, generator=torch.Generator().manual_seed(1)) < 0.4
    y = drawn.float().to(device)
    own, weight = torch.arange(ROWS, dtype=torch.int32, device=device), torch.ones(LABELS)
    weight = weight.to(device)

    def by_kernel(a: Tensor, k: Tensor) -> Tensor:
        total = label_sums(a, k, y, y[:KEYS], "hamming", precision)
        return pair_losses(a, k, total, y, y[:KEYS], weight, own, "hamming", precision)

    def dense(a: Tensor, k: Tensor) -> Tensor:
        exact = y.double()
        logits = a @ k.T
        distance = (exact[:, None] != exact[None, :KEYS]).double().sum(2)
        total = ((distance * logits.exp()) @ (1 - exact[:KEYS])).log()
        sigma = 1 - distance / LABELS
        other = own[:, None] != own[:KEYS]
        loss = logits.new_zeros(())
        for label in range(LABELS):
            pair = (exact[:, label, None] * exact[:KEYS, label] > 0) & other
            margin = total[:, label, None] - logits - torch.where(pair, sigma, 1.0).log()
            loss = loss + torch.nn.functional.softplus(margin)[pair].sum()
        return loss

    exact = _double(inputs)
    return _with_gradients(by_kernel(*inputs), inputs), _with_gradients(dense(*exact), exact)


def _tagged(device: torch.device, precision: layout.Precision) -> tuple[list[Tensor], list[Tensor]]:
    inputs, (t, u) = _draw(device, precision), _tags(device)
    own = torch.arange(ROWS, dtype=torch.int32, device=device)
    weight = torch.linspace(0.5, 1, ROWS, device=device)
    total = torch.linspace(0, 2, ROWS, device=device)
    found = tagged_pair_losses(inputs[0], inputs[1], total, t, u, own, weight, precision)
    exact = _double(inputs)
    pair = (t[:, None] == u) & (own[:, None] != own[:KEYS])
    margin = total.double()[:, None] - exact[0] @ exact[1].T
    losses = torch.nn.functional.softplus(margin) * weight.double()[:, None]
    expected = losses[pair].sum()
    return _with_gradients(found, inputs), _with_gradients(expected, exact)


def _unit(device: torch.device, precision: layout.Precision) -> tuple[list[Tensor], list[Tensor]]:
    x, tau = _draw(device, "ieee")[0].detach(), 0.3
    x[1] = 0.0
    vectors, scaled, length = unit_rows(x, tau)
    up = torch.linspace(-1, 1, x.numel(), device=device).view_as(x)
    found = torch.stack([unit_gradient(g, vectors, length, tau) for g in ((up, up), (up, None))])
    exact = x.double().requires_grad_()
    norm = exact.norm(dim=1, keepdim=True)
    expected = exact / torch.where(norm > 0, norm, 1.0)
    weights = torch.stack([up + up / tau, up]).double()
    gradients = [torch.autograd.grad(expected, exact, w, retain_graph=True)[0] for w in weights]
    both = torch.cat([vectors, scaled]), torch.cat([expected, expected / tau])
    return [both[0], found], [both[1], torch.stack(gradients)]


CASES: dict[Kernel, Any] = {
    "sums": _sums,
    "mutual": _mutual,
    "labels": _labels,
    "tags": _tagged,
    "unit": _unit,
}
