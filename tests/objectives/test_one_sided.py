"""Own rows' gradients are whole without that of others being sent: threads stand for processes."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from heron.losses import engine
from heron.losses.c2ae import c2ae
from heron.losses.clip import clip, siglip
from heron.losses.comco import comco
from heron.losses.hard import debiased, hard
from heron.losses.hierarchical import hierarchical
from heron.losses.mib import mib
from heron.losses.pairs import OwnRows, Rows, as_slice
from heron.losses.pico import pico
from heron.losses.single_view import single_view_unsupervised
from heron.losses.supcon import supcon
from heron.losses.supervised import weighted_supervised
from heron.losses.unsupervised import (
    cmc,
    input_weighted_unsupervised,
    nt_xent,
    weighted_unsupervised,
)

BATCH, VIEWS = 13, 3
SHARES = [5, 8], [4, 0, 9], [3, 4, 1, 5]
Term = Callable[[Sequence[Tensor], Rows], Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


torch.manual_seed(0)
Z, H = ([drawn(BATCH, 4) for _ in range(VIEWS)] for _ in range(2))
PRESENT = torch.rand(BATCH, VIEWS) < 0.7
PRESENT[0] = True
FEW = [torch.where(PRESENT[:, v, None], z, 0.0) for v, z in enumerate(Z)]
SCALE, BIAS = (torch.full((BATCH,), x, dtype=torch.float64) for x in (3.0, -1.0))
LABEL, PATHS = torch.randint(0, 3, (BATCH,)), torch.randint(0, 2, (BATCH, 3))
Y = (torch.rand(BATCH, 4) < 0.4).double()
SOME = torch.where(torch.rand(BATCH, 4) < 0.7, Y, torch.nan)
WEIGHTS = torch.rand(BATCH, 4, dtype=torch.float64)
INPUTS = [drawn(BATCH, width) for width in (5, 3, 5)]
V = slice(0, VIEWS)

# A term of vectors that are gathered, and of numbers of the own rows, which are the last ones.
TERMS: dict[str, tuple[Term, list[Tensor]]] = {
    "nt_xent": (lambda x, r: nt_xent(x, rows=r), Z),
    "debiased": (lambda x, r: debiased(x, rows=r), Z),
    "pico": (lambda x, r: pico(x[0], H[0], H[1], LABEL, LABEL, rows=r), Z[:1]),
    "mib": (
        lambda x, r: mib(x, [h[as_slice(r)] for h in H], [h[as_slice(r)].exp() for h in H], rows=r),
        Z,
    ),
    "L_s": (lambda x, r: weighted_supervised(x[0], Y, rows=r), Z[:1]),
    "L_s, unknown": (lambda x, r: weighted_supervised(x[0], SOME, rows=r), Z[:1]),
    "L_s, weights": (
        lambda x, r: weighted_supervised(x[0], SOME, rows=r, label_weights=WEIGHTS),
        Z[:1],
    ),
    "L_s, indicator": (
        lambda x, r: weighted_supervised(x[0], Y, distance="indicator", self_pairs=True, rows=r),
        Z[:1],
    ),
    "hard, detached": (
        lambda x, r: hard(x, LABEL, hardening="exp", detach=True, rows=r),
        Z,
    ),
    "hard, threshold": (
        lambda x, r: hard(x, LABEL, hardening="threshold", threshold=1.1, rows=r),
        Z,
    ),
    "h_ucl": (
        lambda x, r: hard(x, None, hardening="exp", positives="augmentation", rows=r),
        Z,
    ),
    "cmc": (lambda x, r: cmc(x, rows=r, present=PRESENT), FEW),
    "clip": (
        lambda x, r: clip(x[V], x[-1][as_slice(r)], rows=r, present=PRESENT),
        [*FEW, SCALE],
    ),
    "siglip": (
        lambda x, r: siglip(x[V], *(n[as_slice(r)] for n in x[-2:]), rows=r, present=PRESENT),
        [*FEW, SCALE, BIAS],
    ),
    "supcon": (lambda x, r: supcon(x, LABEL, rows=r, present=PRESENT), FEW),
    "hard": (lambda x, r: hard(x, LABEL, hardening="exp", rows=r, present=PRESENT), FEW),
    "hierarchical": (lambda x, r: hierarchical(x, PATHS, rows=r, present=PRESENT), FEW),
    "HiMulCon": (lambda x, r: hierarchical(x, PATHS, constrain=False, rows=r), Z),
    "c2ae": (lambda x, r: c2ae(x[0], x[1], x[2][as_slice(r)], Y, rows=r), [*Z[:2], H[0]]),
    "comco": (
        lambda x, r: comco(x[0], H[0], H[1], LABEL, LABEL, Y, Y, neighbours=3, rows=r),
        Z[:1],
    ),
    "comco, others": (
        lambda x, r: comco(x[0], H[0], H[1], LABEL, LABEL, Y, Y, select=False, rows=r),
        Z[:1],
    ),
    "HCL": (lambda x, r: input_weighted_unsupervised(x, H, rows=r), Z),
    "HCL, first": (lambda x, r: input_weighted_unsupervised(x, H, anchors="first", rows=r), Z),
    "HCL, other widths": (lambda x, r: input_weighted_unsupervised(x, INPUTS, rows=r), Z),
    "L_u of one view": (
        lambda x, r: single_view_unsupervised(x[:1], x[1:2], x[2:], rows=r),
        [*Z[:2], H[0]],
    ),
    "L_u": (
        lambda x, r: weighted_unsupervised(x[V], x[VIEWS:], rows=r, present=PRESENT),
        FEW + H,
    ),
    "L_u, first": (
        lambda x, r: weighted_unsupervised(
            x[V], x[VIEWS:], anchors="first", rows=r, present=PRESENT
        ),
        FEW + H,
    ),
    "L_u, cross view": (
        lambda x, r: weighted_unsupervised(
            x[V], x[VIEWS:], negatives="cross_view", rows=r, present=PRESENT
        ),
        FEW + H,
    ),
}


def shared(term: Term, known: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """The share of the loss, and the gradients of own rows, of each process."""
    told: list[Tensor] = [torch.empty(0)] * len(sizes)
    meet = threading.Barrier(len(sizes), timeout=60)
    found: list[list[Tensor]] = [[] for _ in sizes]

    def process(rank: int) -> None:
        def gather(x: Tensor) -> Tensor:
            told[rank] = x.detach()
            meet.wait()
            whole = torch.cat(told)
            meet.wait()
            return whole

        try:
            start = sum(sizes[:rank])
            own = slice(start, start + sizes[rank])
            mine = [x[own].clone().requires_grad_() for x in known]
            parts = zip(known, mine, strict=True)
            whole = [torch.cat([x[:start], part, x[own.stop :]]) for x, part in parts]
            loss = term(whole, OwnRows(own, gather))
            slopes = torch.autograd.grad(0.7 * loss, mine, materialize_grads=True)
            found[rank] = [loss.detach(), *slopes]
        finally:
            if not found[rank]:
                meet.abort()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("strip", [1 << 21, 64])
@pytest.mark.parametrize("name", TERMS)
def test_processes_are_one(name: str, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, with uneven shares of which one is empty, in one strip and in many."""
    monkeypatch.setitem(engine.STRIP_ELEMENTS, "cpu", strip)
    monkeypatch.setattr(engine, "MIN_STRIP_ROWS", 3)
    term, known = TERMS[name]
    leaves = [x.clone().requires_grad_() for x in known]
    value = term(leaves, slice(None))
    slopes = torch.autograd.grad(0.7 * value, leaves, materialize_grads=True)
    for sizes in SHARES:
        found = shared(term, known, sizes)
        total = torch.stack([share for share, *_ in found]).sum()
        torch.testing.assert_close(total, value.detach(), rtol=1e-10, atol=1e-12)
        for at, slope in enumerate(slopes, start=1):
            got = torch.cat([parts[at] for parts in found])
            if slope.dim() == 1:  # scale and bias are one number, which every row is shown
                got, slope = got.sum(), slope.sum()
            torch.testing.assert_close(got, slope, rtol=1e-9, atol=1e-12)
