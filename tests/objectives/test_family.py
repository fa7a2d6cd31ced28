"""The terms of the other papers against their loop oracles, in their corners, share by share."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.losses import classification, engine
from heron.losses.hard import debiased, hard
from heron.losses.hierarchical import hierarchical
from heron.losses.mulco import mulco
from heron.losses.single_view import single_view_unsupervised
from heron.losses.supcon import supcon
from heron.losses.unsupervised import (
    cmc,
    input_weighted_unsupervised,
    nt_xent,
    weighted_unsupervised,
)
from tests import oracles
from tests.objectives.test_terms import assert_same, draw, gradients

BATCH, CLASSES = 7, 4
LABEL = torch.tensor([3, 0, 0, 8, 3, 0, 5])  # 5 and 8 have one sample each
LEVELS = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 1]])
COMPLEMENTARY = ("ub_log", "ub_exp", "mse", "gce", "l_uw", "mlcl")


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several strips a batch, so that their borders are tested."""
    monkeypatch.setitem(engine.STRIP_ELEMENTS, "cpu", 64)
    monkeypatch.setattr(engine, "MIN_STRIP_ROWS", 3)


def projections(views: int = 2, batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Any:
    return [draw(batch, 4, seed=20 + v, dtype=dtype) for v in range(views)]


def inputs(batch: int = BATCH) -> list[Tensor]:
    """Raw views of two widths."""
    return [draw(batch, width, seed=30 + width).detach() for width in (5, 5, 3)]


# Every term of whole views: projections and a share of the rows -> loss; with its oracle.
Term = Callable[..., Tensor]
OPTIONS: dict[str, tuple[Term, Term]] = {
    "nt_xent": (
        lambda z, **k: nt_xent(z, tau=0.3, **k),
        lambda z: oracles.nt_xent(z, 0.3),
    ),
    "cmc": (lambda z, **k: cmc(z, tau=0.3, **k), lambda z: oracles.cmc(z, 0.3)),
    "supcon": (
        lambda z, **k: supcon(z, LABEL, tau=0.3, **k),
        lambda z: oracles.supcon(z, LABEL, 0.3),
    ),
    "debiased": (
        lambda z, **k: debiased(z, tau=0.3, tau_plus=0.2, **k),
        lambda z: oracles.debiased(z, 0.3, 0.2),
    ),
}
for which in ("first", "all"):
    OPTIONS[f"input weighted, {which}"] = (
        lambda z, a=which, **k: input_weighted_unsupervised(
            z, inputs()[: len(z)], tau=0.3, anchors=a, **k
        ),
        lambda z, a=which: oracles.input_weighted_unsupervised(z, inputs()[: len(z)], 0.3, a),
    )
for label, hardening, kind, detach in itertools.product(
    (None, LABEL), ("none", "exp", "threshold"), ("augmentation", "label"), (False, True)
):
    if label is None and kind == "label":
        continue
    chosen = {"hardening": hardening, "beta": 0.7, "threshold": 1.2, "positives": kind}
    name = f"hard, {'UCL' if label is None else 'SCL'}, {hardening}, {kind}, detach {detach}"
    OPTIONS[name] = (
        lambda z, y=label, c=chosen, d=detach, **k: hard(z, y, tau=0.3, detach=d, **c, **k),
        lambda z, y=label, c=chosen, d=detach: oracles.hard(z, y, 0.3, detach=d, **c),
    )
for constrain, penalty in itertools.product((False, True), (None, "exp_inverse")):
    OPTIONS[f"hierarchical, constrain {constrain}, {penalty}"] = (
        lambda z, c=constrain, p=penalty, **k: hierarchical(
            z, LEVELS, tau=0.3, constrain=c, penalty=p, **k
        ),
        lambda z, c=constrain, p=penalty: oracles.hierarchical(z, LEVELS, 0.3, c, p),
    )


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_term_is_its_oracle_and_its_shares_add_up(name: str, views: int) -> None:
    term, oracle = OPTIONS[name]
    z = projections(views)
    whole = term(z)
    assert_same(whole, oracle(z), z)
    for cuts in ([0, 3, BATCH], [0, 0, 5, BATCH]):
        shares = [term(z, rows=slice(a, b)) for a, b in itertools.pairwise(cuts)]
        assert_same(torch.stack(shares).sum(), term(z), z)


@pytest.mark.parametrize("name", ["supcon", "hierarchical, constrain True, exp_inverse"])
def test_supervised_terms_take_one_view(name: str) -> None:
    term, oracle = OPTIONS[name]
    z = projections(1)
    assert_same(term(z), oracle(z), z)


@pytest.mark.parametrize("kind", ["standard", "sifted", "soft", "weighted", "debiased"])
def test_mulco_is_its_oracle(kind: Any) -> None:
    q, key, queue = draw(5, 4), draw(5, 4, seed=5).detach(), draw(9, 4, seed=9).detach()
    prob_q, prob_queue = (
        draw(5, CLASSES, seed=1).detach().softmax(1),
        draw(9, CLASSES, seed=2).detach().softmax(1),
    )
    ybar = sets(5)

    def whole() -> Tensor:
        return mulco(q, key, queue, prob_q, prob_queue, ybar, tau=0.3, kind=kind)

    assert_same(whole(), oracles.mulco(q, key, queue, prob_q, prob_queue, ybar, 0.3, kind), [q])
    halves = [
        mulco(q[r], key[r], queue, prob_q[r], prob_queue, ybar[r], tau=0.3, kind=kind, total=5)
        for r in (slice(0, 2), slice(2, 2), slice(2, 5))
    ]
    assert_same(torch.stack(halves).sum(), whole(), [q])


def test_an_empty_queue_is_no_loss_and_no_gradient() -> None:
    q, empty = draw(5, 4), torch.zeros(0, 4, dtype=torch.float64)
    prob = torch.full((5, CLASSES), 1 / CLASSES, dtype=torch.float64)
    loss = mulco(q, q, empty, prob, empty, sets(5), tau=0.1)
    assert loss == 0
    assert not gradients(loss, [q])[0].any()


def sets(batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Complementary labels of every size."""
    generator = torch.Generator().manual_seed(4)
    order = torch.rand(batch, CLASSES, generator=generator).argsort(1)
    return (order < 1 + torch.arange(batch)[:, None] % (CLASSES - 1)).to(dtype)


@pytest.mark.parametrize("name", COMPLEMENTARY)
def test_a_complementary_loss_is_its_oracle(name: str) -> None:
    logits, ybar = draw(BATCH, CLASSES), sets(BATCH)
    loss = getattr(classification, name)
    assert_same(
        loss(logits, ybar, total=BATCH), oracles.complementary(name, logits, ybar), [logits]
    )
    shares = [
        loss(logits[r], ybar[r], total=BATCH) for r in (slice(0, 2), slice(2, 2), slice(2, 7))
    ]
    assert_same(torch.stack(shares).sum(), loss(logits, ybar, total=BATCH), [logits])


@pytest.mark.parametrize("name", COMPLEMENTARY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sure_and_wrong_logits_are_finite(name: str, dtype: torch.dtype) -> None:
    wrong = 200 * sets(BATCH)  # all belief on classes that are known to be wrong
    for sign in (1, -1):
        logits = (sign * wrong).to(dtype).requires_grad_()
        loss = getattr(classification, name)(logits, sets(BATCH, torch.float32), total=BATCH)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradients(loss, [logits])[0]).all()


@pytest.mark.parametrize("name", COMPLEMENTARY)
def test_sets_that_say_nothing_or_everything_are_refused(name: str) -> None:
    for value, size in ((0, 0), (1, CLASSES)):
        ybar = sets(BATCH)
        ybar[3] = value
        with pytest.raises(
            ValueError, match=rf"row 3 has {size} complementary .* must have 1 to 3"
        ):
            getattr(classification, name)(draw(BATCH, CLASSES), ybar, total=BATCH)
    with pytest.raises(ValueError, match="row 0 must be 0 or 1, got"):
        getattr(classification, name)(draw(BATCH, CLASSES), sets(BATCH) / 2, total=BATCH)


def terms(tau: float, label: Tensor, batch: int, dtype: torch.dtype) -> dict[str, Term]:
    """Every contrastive term at a temperature, of projections alone."""
    levels = torch.stack([label // 2, label], 1)
    raw = [torch.ones(batch, 3), torch.zeros(batch, 3)]
    even = torch.full((batch, 3), 1 / 3)
    first = torch.tensor([1.0, 0, 0]).expand(batch, 3)
    made: dict[str, Term] = {
        "nt_xent": lambda z: nt_xent(z, tau=tau),
        "cmc": lambda z: cmc(z, tau=tau),
        "weighted": lambda z: weighted_unsupervised(z, z, tau=tau),
        "input weighted": lambda z: input_weighted_unsupervised(z, raw, tau=tau),
        "single view": lambda z: single_view_unsupervised(z[:1], z[1:], z[:1], tau=tau),
        "supcon": lambda z: supcon(z, label, tau=tau),
        "debiased": lambda z: debiased(z, tau=tau),
        "hierarchical": lambda z: hierarchical(z, levels, tau=tau),
        "HiMulCon": lambda z: hierarchical(z, levels, tau=tau, constrain=False),
    }
    for hardening in ("none", "exp", "threshold"):
        made[f"H-UCL {hardening}"] = lambda z, h=hardening: hard(
            z, tau=tau, hardening=h, threshold=1.01, positives="augmentation"
        )
        made[f"H-SCL {hardening}"] = lambda z, h=hardening: hard(
            z, label, tau=tau, hardening=h, threshold=1.01
        )
    for kind in ("standard", "sifted", "soft", "weighted", "debiased"):
        made[f"MulCo {kind}"] = lambda z, kind=kind: mulco(
            z[0], z[1], z[1].detach(), even, even, first, tau=tau, kind=kind
        )
    return made


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("rows", ["drawn", "same", "zero", "bf16", "one", "none"])
@pytest.mark.parametrize("classes", ["mixed", "one", "all"])
def test_corners_are_finite(tau: float, rows: str, classes: str) -> None:
    """No positives, no negatives, one class, identical rows, zero rows, bf16, one row, no row."""
    batch = {"one": 1, "none": 0}.get(rows, 6)
    dtype = torch.bfloat16 if rows == "bf16" else torch.float32
    label = {
        "mixed": torch.arange(batch) % 3,
        "one": torch.zeros(batch, dtype=torch.int64),
        "all": torch.arange(batch),
    }[classes]
    for name, term in terms(tau, label, batch, dtype).items():
        z = projections(2, batch, dtype)
        if rows in ("same", "zero"):
            value = 1.0 if rows == "same" else 0.0
            z = [torch.full((batch, 4), value).requires_grad_() for _ in range(2)]
        loss = term(z)
        assert torch.isfinite(loss), name
        assert loss.dtype in (torch.float32, torch.float64), name
        found = torch.autograd.grad(loss, z, allow_unused=True)
        assert all(torch.isfinite(g).all() for g in found if g is not None), name


@pytest.mark.parametrize("name", OPTIONS)
def test_the_order_of_the_batch_changes_nothing(name: str) -> None:
    term, _ = OPTIONS[name]
    if "weighted" in name or name == "supcon" or "hier" in name or "SCL" in name:
        pytest.skip("its labels or inputs are fixed to their rows")
    z = projections()
    turned = torch.randperm(BATCH, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(term([view[turned] for view in z]), term(z))


@pytest.mark.parametrize("name", terms(1.0, LABEL, BATCH, torch.float64))
@pytest.mark.parametrize("tau", [0.0, -1.0])
def test_a_temperature_must_be_positive(name: str, tau: float) -> None:
    with pytest.raises(ValueError, match=r"temperature tau must be above 0, e.g. 0.1, got"):
        terms(tau, LABEL, BATCH, torch.float64)[name](projections())


@pytest.mark.parametrize("name", terms(1.0, LABEL, BATCH, torch.float64))
def test_a_temperature_beyond_float64_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"temperature tau, .*, must be at least 0.003"):
        terms(0.001, LABEL, BATCH, torch.float64)[name](projections())


def test_bad_input_is_named() -> None:
    z = projections()
    cases: tuple[tuple[Callable[[], Tensor], str], ...] = (
        (lambda: nt_xent(z[:1]), "nt_xent needs at least 2 views, got 1"),
        (lambda: hard(z), "positives by label need labels; use augmentation"),
        (
            lambda: hard(z, LABEL, hardening="exp", beta=-1.0),
            r"beta must be at least 0, .*, got -1.0",
        ),
        (
            lambda: hard(z, LABEL, hardening="threshold", threshold=0.0),
            "threshold must be above 0, .*, got 0.0",
        ),
        (lambda: debiased(z, tau_plus=1.0), "tau_plus must be a probability below 1, .*, got 1.0"),
        (
            lambda: supcon(z, LABEL.float()),
            r"supcon: labels must be one .*, got torch.float32 \(7,\)",
        ),
        (lambda: supcon(z, LABEL[:3]), r"labels must be one .* \[7\], got torch.int64 \(3,\)"),
        (
            lambda: hierarchical(z, LABEL),
            r"levels must be whole numbers .*, got torch.int64 \(7,\)",
        ),
        (
            lambda: hierarchical(z, LEVELS[:, :0]),
            r"levels must be whole numbers .*, got torch.int64 \(7, 0\)",
        ),
        (
            lambda: classification.gce(z[0], sets(BATCH), total=BATCH, q=0.0),
            "q must be above 0 .*, got 0.0",
        ),
    )
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
