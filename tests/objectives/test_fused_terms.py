"""Every term that has a fused path, by it and by strips; see `test_fused` for where kernels run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heron.losses import fused
from heron.losses.hard import debiased, hard
from heron.losses.mulco import mulco
from heron.losses.single_view import single_view_unsupervised
from heron.losses.supcon import supcon
from heron.losses.supervised import weighted_supervised
from heron.losses.unsupervised import (
    cmc,
    input_weighted_unsupervised,
    nt_xent,
    weighted_unsupervised,
)
from tests.objectives.kernel_cases import DEVICE, draw, integers, kernels, labels

BATCH, CLASSES = 21, 4
CLASS = integers(BATCH, CLASSES, 1).long()
Y = labels(BATCH, 5, 2)
OF_QUERY, OF_QUEUE = (draw(n, CLASSES, n).detach().softmax(1) for n in (BATCH, 30))
SETS = torch.nn.functional.one_hot((CLASS + 1) % CLASSES, CLASSES).float()
RAW = [draw(BATCH, 6, seed).detach() for seed in (8, 9)]

TERMS: dict[str, Callable[..., Tensor]] = {
    "nt_xent": lambda a, b: nt_xent([a, b], tau=0.2),
    "cmc": lambda a, b: cmc([a, b], tau=0.2),
    "L_u": lambda a, b: weighted_unsupervised([a, b], [b * b, a * a], tau=0.2),
    "L_u, cross view": lambda a, b: weighted_unsupervised(
        [a, b], [b * b, a * a], tau=0.2, anchors="first", negatives="cross_view"
    ),
    "HCL": lambda a, b: input_weighted_unsupervised([a, b], RAW, tau=0.2),
    "L_u of one view": lambda a, b: single_view_unsupervised([a], [b], [b * b], tau=0.2),
    "L_s": lambda a, b: weighted_supervised(torch.cat([a, b], 1), Y.to(a), tau=0.2),
    "L_s, indicator": lambda a, b: weighted_supervised(
        a + b, Y.to(a), tau=0.2, distance="indicator", self_pairs=True
    ),
    "L_u, a share": lambda a, b: weighted_unsupervised(
        [a, b], [b * b, a * a], tau=0.5, rows=slice(7, 18)
    ),
    "L_s, a share": lambda a, b: weighted_supervised(
        torch.cat([a, b], 1), Y.to(a), tau=0.5, rows=slice(7, 18)
    ),
    "supcon": lambda a, b: supcon([a, b], CLASS, tau=0.2),
    "debiased": lambda a, b: debiased([a, b], tau=0.2),
}
for hardening in ("none", "exp", "threshold"):
    options: dict[str, Any] = {"tau": 0.3, "hardening": hardening, "threshold": 1.5, "beta": 0.6}
    TERMS[f"H-UCL, {hardening}"] = lambda a, b, o=options: hard(
        [a, b], positives="augmentation", **o
    )
    TERMS[f"H-SCL, {hardening}"] = lambda a, b, o=options: hard([a, b], CLASS, **o)
    TERMS[f"H-SCL, {hardening}, detached"] = lambda a, b, o=options: hard(
        [a, b], CLASS, detach=True, **o
    )
for kind in ("standard", "sifted", "soft", "weighted", "debiased"):
    TERMS[f"MulCo, {kind}"] = lambda a, b, k=kind: mulco(
        a, b, torch.cat([b, b])[:30].detach(), OF_QUERY, OF_QUEUE, SETS, tau=0.2, kind=k
    )


@kernels
@pytest.mark.parametrize("name", TERMS)
def test_a_fused_term_is_that_of_the_strips(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value, and the gradients of both views and of one alone."""
    monkeypatch.setenv("HERON_PRECISION", "ieee")
    calls = []

    def counted(primitive: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            calls.append(primitive)
            return primitive(*args, **options)

        return call

    for primitive in ("exponential_sums", "mutual_operands", "label_sums"):
        monkeypatch.setattr(fused, primitive, counted(getattr(fused, primitive)))
    z = [draw(BATCH, 7, seed) for seed in (3, 4)]
    exact = [x.detach().double().requires_grad_() for x in z]
    found, expected = TERMS[name](*z), TERMS[name](*exact)
    assert calls, "the term did not take the fused path"
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    for inputs in ([0, 1], [0]):
        ours, theirs = (
            torch.autograd.grad(loss, [x[i] for i in inputs], retain_graph=True, allow_unused=True)
            for loss, x in ((found, z), (expected, exact))
        )
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)


def test_more_classes_than_a_tile_holds_take_the_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "exponential_sums", None)
    many = torch.ones(5, fused.WIDEST_SIDE + 1, device=DEVICE) / fused.WIDEST_SIDE
    q = torch.ones(5, 3, device=DEVICE)
    assert torch.isfinite(mulco(q, q, q, many, many, many, kind="soft"))


@kernels
def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERON_FUSED", "never")
    monkeypatch.setattr(fused, "exponential_sums", None)
    assert torch.isfinite(nt_xent([draw(5, 4, 1), draw(5, 4, 2)]))


def test_wide_vectors_take_the_strips_and_three_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 512 columns: the logits once, and one product for the gradient of either side."""
    for primitive in ("exponential_sums", "label_sums", "pair_losses"):
        monkeypatch.setattr(fused, primitive, None)
    monkeypatch.setattr(fused, "enabled", lambda device: True)
    wide = []

    class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "mm" in func.__name__ and any(520 in x.shape for x in args if torch.is_tensor(x)):
                wide.append(func.__name__)
            return func(*args, **(kwargs or {}))

    s, y = draw(12, 520, 1), labels(12, 3, 2)
    with Products():  # type: ignore[no-untyped-call]
        torch.autograd.grad(weighted_supervised(s, y), s)
    assert len(wide) == 3


def test_double_precision_takes_the_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "exponential_sums", None)
    z = torch.ones(4, 3, dtype=torch.float64, device=DEVICE)
    assert torch.isfinite(nt_xent([z, z]))
    assert torch.isfinite(nt_xent([z.float(), z.float()], tau=0.01))  # float64 inside
