"""Terms of rows that lack views, or single labels, against loops over what there is."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.base.errors import ConfigError
from heron.losses import engine
from heron.losses.classification import bce
from heron.losses.clip import clip, siglip
from heron.losses.hard import hard
from heron.losses.hierarchical import hierarchical
from heron.losses.named_terms import Terms
from heron.losses.objective import Objective
from heron.losses.supcon import supcon
from heron.losses.supervised import weighted_supervised
from heron.losses.unsupervised import cmc, nt_xent, weighted_unsupervised
from tests.oracles import cos

B, V, TAU = 7, 3, 0.5
PRESENT = torch.tensor(
    [[1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1]]
).bool()
LABEL = torch.tensor([0, 1, 0, 0, 1, 1, 2])
LEVELS = torch.tensor([[0, 0], [0, 1], [0, 0], [0, 0], [0, 1], [1, 2], [1, 2]])


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine.STRIP_ELEMENTS, "cpu", 64)
    monkeypatch.setattr(engine, "MIN_STRIP_ROWS", 3)


def draw(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, 4, generator=generator, dtype=torch.float64).requires_grad_()


Z, H = [draw(v) for v in range(V)], [draw(10 + v) for v in range(V)]
SCALE, BIAS = torch.linspace(1, 2, B).double(), torch.linspace(-1, 0, B).double()
SCALE.requires_grad_()
BIAS.requires_grad_()
HERE = [(i, u) for u in range(V) for i in range(B) if PRESENT[i, u]]  # what there is
TRIPLES = [(i, u, v) for i, u in HERE for v in range(V) if v != u and PRESENT[i, v]]


def f(a: tuple[int, int], b: tuple[int, int], tau: float = TAU) -> Tensor:
    return torch.exp(cos(Z[a[1]][a[0]], Z[b[1]][b[0]]) / tau)


def g(a: tuple[int, int], b: tuple[int, int]) -> Tensor:
    """HeroCon's weight of a negative."""
    (i, u), (k, j) = a, b
    one, other = cos(Z[u][i], H[j][k]), cos(Z[j][k], H[u][i])
    return (torch.exp(1 - one) + torch.exp(1 - other)) / 2


def mean(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def nt_xent_loop(
    among: Sequence[int] = range(V), weight: Callable[..., Any] = lambda a, b: 1.0
) -> Tensor:
    losses = []
    for i, u, v in TRIPLES:
        if u in among:
            a, positive = (i, u), f((i, u), (i, v))
            rest = torch.stack([weight(a, b) * f(a, b) for b in HERE if b[0] != i]).sum()
            losses.append(torch.log(positive + rest) - torch.log(positive))
    return mean(losses)


def cmc_loop(
    among: Sequence[int] = range(V), weight: Callable[..., Any] = lambda a, b: 1.0
) -> Tensor:
    losses = []
    for i, u, v in TRIPLES:
        if u in among:
            a = i, u
            inside = torch.stack([weight(a, b) * f(a, b) for b in HERE if b[1] == v]).sum()
            losses.append(torch.log(inside) - torch.log(f(a, (i, v))))
    return mean(losses)


def clip_loop() -> Tensor:
    losses = []
    for i, u, v in TRIPLES:
        s = SCALE[i]
        inside = [torch.exp(s * cos(Z[u][i], Z[v][k])) for k, j in HERE if j == v]
        losses.append(torch.log(torch.stack(inside).sum()) - s * cos(Z[u][i], Z[v][i]))
    return mean(losses)


def siglip_loop() -> Tensor:
    losses, anchors = [], 0
    for u, v in itertools.combinations(range(V), 2):
        for i, j in HERE:
            if j == u:
                anchors += 1
                for k, w in HERE:
                    if w == v:
                        y = 1 if i == k else -1
                        logit = SCALE[i] * cos(Z[u][i], Z[v][k]) + BIAS[i]
                        losses.append(torch.log1p(torch.exp(-y * logit)))
    return torch.stack(losses).sum() / anchors


def supcon_loop() -> Tensor:
    losses = []
    for a in HERE:
        others = [b for b in HERE if b != a]
        positives = [b for b in others if LABEL[b[0]] == LABEL[a[0]]]
        total = torch.stack([f(a, b) for b in others]).sum()
        found = [torch.log(total) - torch.log(f(a, b)) for b in positives]
        losses.append(mean(found) if found else Z[0].sum() * 0)
    return mean(losses)


def hard_loop(label: bool, by_class: bool, beta: float) -> Tensor:
    losses = []
    for a in HERE:
        i, u = a
        negatives = [b for b in HERE if (LABEL[b[0]] != LABEL[i] if label else b[0] != i)]
        if by_class:
            positives = [b for b in HERE if b != a and LABEL[b[0]] == LABEL[i]]
        else:
            positives = [b for b in HERE if b[0] == i and b != a]
        eta = torch.stack([f(a, b) ** beta for b in negatives])
        tilted = (eta * torch.stack([f(a, b) for b in negatives])).sum() / eta.sum()
        count = sum(b[0] != i for b in HERE)
        losses += [torch.log1p(count * tilted / f(a, b)) for b in positives]
    return mean(losses)


def hierarchical_loop() -> Tensor:
    """HiMulCon: no constraint, with the penalty of the authors' code."""
    total = Z[0].sum() * 0
    for level in range(2):
        losses = []
        for a in HERE:

            def agree(b: tuple[int, int], a: tuple[int, int] = a) -> int:
                return int((LEVELS[a[0]] == LEVELS[b[0]]).long().cumprod(0).sum()) - 1

            others = [b for b in HERE if b != a]
            inside = torch.log(torch.stack([f(a, b) for b in others]).sum())
            if found := [inside - torch.log(f(a, b)) for b in others if agree(b) == level]:
                losses.append(mean(found))
        if losses:
            total = total + 2 ** (1 / (2 - level)) * mean(losses) / 2
    return total


PART: dict[str, Any] = {"tau": TAU, "present": PRESENT}
CASES: dict[str, tuple[Callable[[slice], Tensor], Callable[[], Tensor]]] = {
    "nt_xent": (lambda rows: nt_xent(Z, rows=rows, **PART), nt_xent_loop),
    "cmc": (lambda rows: cmc(Z, rows=rows, **PART), cmc_loop),
    "clip": (lambda rows: clip(Z, SCALE[rows], rows=rows, present=PRESENT), clip_loop),
    "siglip": (
        lambda rows: siglip(Z, SCALE[rows], BIAS[rows], rows=rows, present=PRESENT),
        siglip_loop,
    ),
    "supcon": (lambda rows: supcon(Z, LABEL, rows=rows, **PART), supcon_loop),
    "hierarchical": (
        lambda rows: hierarchical(Z, LEVELS, constrain=False, rows=rows, **PART),
        hierarchical_loop,
    ),
    "L_u": (
        lambda rows: weighted_unsupervised(Z, H, rows=rows, **PART),
        lambda: nt_xent_loop(weight=g),
    ),
    "L_u, first": (
        lambda rows: weighted_unsupervised(Z, H, anchors="first", rows=rows, **PART),
        lambda: nt_xent_loop([0], g),
    ),
    "L_u, cross view, first": (
        lambda rows: weighted_unsupervised(
            Z, H, anchors="first", negatives="cross_view", rows=rows, **PART
        ),
        lambda: cmc_loop([0], g),
    ),
    "ucl": (
        lambda rows: hard(Z, None, positives="augmentation", rows=rows, **PART),
        lambda: hard_loop(False, False, 0.0),
    ),
    "h-ucl": (
        lambda rows: hard(
            Z, None, positives="augmentation", hardening="exp", beta=0.7, rows=rows, **PART
        ),
        lambda: hard_loop(False, False, 0.7),
    ),
    "h-scl": (
        lambda rows: hard(Z, LABEL, hardening="exp", beta=0.7, rows=rows, **PART),
        lambda: hard_loop(True, True, 0.7),
    ),
    "scl": (lambda rows: hard(Z, LABEL, rows=rows, **PART), lambda: hard_loop(True, True, 0.0)),
}  # fmt: skip
LEAVES = [*Z, *H, SCALE, BIAS]


def assert_same(found: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    options: dict[str, Any] = {
        "allow_unused": True,
        "materialize_grads": True,
        "retain_graph": True,
    }
    ours = torch.autograd.grad(found, leaves, **options)
    theirs = torch.autograd.grad(expected, leaves, **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_term_is_a_loop_over_the_views_that_there_are(case: str) -> None:
    ours, loop = CASES[case]
    expected = loop()
    assert_same(ours(slice(0, B)), expected, LEAVES)
    parts = [ours(slice(a, b)) for a, b in ((0, 2), (2, 3), (3, B))]  # 2 alone has one view
    assert_same(torch.stack(parts).sum(), expected, LEAVES)


@pytest.mark.parametrize("case", CASES)
def test_all_views_present_is_the_term_of_whole_rows(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = CASES[case][0]
    monkeypatch.setitem(PART, "present", torch.ones_like(PRESENT))
    monkeypatch.setitem(globals(), "PRESENT", torch.ones_like(PRESENT))
    partial = ours(slice(1, 5))
    monkeypatch.setitem(PART, "present", None)
    monkeypatch.setitem(globals(), "PRESENT", None)
    assert_same(partial, ours(slice(1, 5)), LEAVES)


KNOWN = torch.tensor(
    [[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 1],
     [1, 1, 1, 0], [0, 1, 0, 0], [1, 1, 1, 1]]
).bool()  # fmt: skip
Y = torch.tensor(
    [[1, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1],
     [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]]
).double()  # fmt: skip
PARTLY = torch.where(KNOWN, Y, torch.nan)


@pytest.mark.parametrize("distance", ["hamming", "indicator"])
@pytest.mark.parametrize("self_pairs", [False, True])
def test_supervised_loss_of_labels_that_are_known(distance: Any, self_pairs: bool) -> None:
    s = draw(3)

    def e(i: int, k: int) -> Tensor:
        return torch.exp(cos(s[i], s[k]) / TAU)

    def unlike(i: int, k: int) -> float:
        """The share of unequal labels among those known of both."""
        both = KNOWN[i] & KNOWN[k]
        return float((Y[i] != Y[k])[both].double().mean())

    total = s.sum() * 0
    for a in range(4):
        has = [i for i in range(B) if KNOWN[i, a] and Y[i, a] == 1]
        lacks = [i for i in range(B) if KNOWN[i, a] and Y[i, a] == 0]
        pairs = [(i, j) for i in has for j in has if self_pairs or i != j]
        for i, j in pairs:
            if distance == "hamming":
                attract = (1 - unlike(i, j)) * e(i, j)
                repel = [4 * unlike(i, k) * e(i, k) for k in lacks]
            else:
                attract, repel = e(i, j), [e(i, k) for k in lacks]
            inside = torch.stack([attract, *repel]).sum()
            total = total + (torch.log(inside) - torch.log(attract)) / len(pairs)

    def ours(rows: slice) -> Tensor:
        options: dict[str, Any] = {"tau": TAU, "distance": distance, "self_pairs": self_pairs}
        return weighted_supervised(s, PARTLY, rows=rows, **options)

    assert_same(ours(slice(None)), total / 4, [s])
    assert_same(ours(slice(0, 3)) + ours(slice(3, B)), total / 4, [s])


def test_bce_of_labels_that_are_known() -> None:
    logits = draw(5)
    losses = [
        -torch.log(torch.sigmoid(logits[i, a] if Y[i, a] == 1 else -logits[i, a]))
        for i in range(B)
        for a in range(4)
        if KNOWN[i, a]
    ]
    parts = [bce(logits[r], PARTLY[r], total=B, known=len(losses)) for r in (slice(2), slice(2, B))]
    assert_same(torch.stack(parts).sum(), mean(losses), [logits])


def test_terms_that_are_not_defined_are_refused_by_name() -> None:
    made = Objective(Terms.model_validate({"bce": {}, "mib": {}}))
    made.refuse_partial_rows(False, False)
    with pytest.raises(ConfigError, match="objective.mib cannot use rows without all views"):
        made.refuse_partial_rows(True, False)
    with pytest.raises(ConfigError, match="partial_rows=drop"):
        Objective(Terms.model_validate({"c2ae": {}})).refuse_partial_rows(False, True)
    Objective(Terms.model_validate({"bce": {}, "nt_xent": {}})).refuse_partial_rows(True, True)
