"""Labels that count less than 1: by the definitions in loops, on one process and on three."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heron.base.errors import ConfigError
from heron.distributed import collectives
from heron.losses import Bce, CrossEntropy, LossError, Supcon, WeightedSupervised
from heron.losses.classification import bce
from heron.losses.objective import Objective
from heron.losses.supervised import weighted_supervised
from tests import ranks
from tests.distributed.terms import named
from tests.oracles import cos

ROWS, LABELS = 9, 4


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels, and weights of these, some of them 0 and some 1."""
    torch.manual_seed(seed)
    y = (torch.rand(ROWS, LABELS) < 0.5).double()
    weights = torch.rand(ROWS, LABELS, dtype=torch.float64)
    weights[weights < 0.2], weights[weights > 0.8] = 0, 1
    return torch.randn(ROWS, 5, dtype=torch.float64, requires_grad=True), y, weights


def oracle(s: Tensor, y: Tensor, w: Tensor, tau: float, distance: str, self_pairs: bool) -> Tensor:
    """Eq. 7 with weights: pairs, negatives, and labels in the distance count by theirs."""

    def dist(i: int, k: int) -> float:
        both = w[i] * w[k]
        differ = float((both * (y[i] != y[k])).sum())
        if distance == "indicator":
            return float(differ > 0)
        return LABELS * differ / float(both.sum()) if both.sum() else 0.0

    total = (s * 0).sum()
    for a in range(LABELS):
        has = [i for i in range(ROWS) if y[i, a] == 1 and w[i, a] > 0]
        lacks = [i for i in range(ROWS) if y[i, a] == 0]
        pairs = [(i, j) for i in has for j in has if self_pairs or i != j]
        count = sum(float(w[i, a] * w[j, a]) for i, j in pairs)
        for i, j in pairs:
            sigma = 1 - dist(i, j) / LABELS if distance == "hamming" else 1.0
            attract = sigma * torch.exp(cos(s[i], s[j]) / tau)
            repel = sum(
                (w[k, a] * dist(i, k) * torch.exp(cos(s[i], s[k]) / tau) for k in lacks),
                s.new_zeros(()),
            )
            share = w[i, a] * w[j, a] / count
            total = total + share * (torch.log(attract + repel) - torch.log(attract))
    return total / LABELS


def assert_same(found: Tensor, expected: Tensor, s: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    (one,), (two,) = (torch.autograd.grad(x, [s], retain_graph=True) for x in (found, expected))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("self_pairs", [False, True])
@pytest.mark.parametrize("distance", ["hamming", "indicator"])
@pytest.mark.parametrize("seed", range(4))
def test_l_s_is_the_equation_in_loops(seed: int, distance: Any, self_pairs: bool) -> None:
    s, y, w = drawn(seed)
    options: dict[str, Any] = {"tau": 0.3, "distance": distance, "self_pairs": self_pairs}
    found = weighted_supervised(s, y, label_weights=w, **options)
    assert_same(found, oracle(s, y, w, **options), s)


@pytest.mark.parametrize("distance", ["hamming", "indicator"])
def test_weights_of_one_change_nothing_and_zero_is_unknown(distance: Any) -> None:
    s, y, w = drawn()
    ones = torch.ones_like(w)
    whole = weighted_supervised(s, y, distance=distance)
    assert_same(weighted_supervised(s, y, distance=distance, label_weights=ones), whole, s)
    hidden = w < 0.5
    unknown = weighted_supervised(s, y.masked_fill(hidden, math.nan), distance=distance)
    zeros = (~hidden).double()
    assert_same(weighted_supervised(s, y, distance=distance, label_weights=zeros), unknown, s)
    both = weighted_supervised(
        s, y.masked_fill(hidden, math.nan), distance=distance, label_weights=w
    )
    assert_same(weighted_supervised(s, y, distance=distance, label_weights=w * zeros), both, s)


def test_a_label_of_one_sample_has_no_pair_whatever_its_weight() -> None:
    s, y, w = drawn()
    y[:, 0] = 0
    y[3, 0], w[3, 0] = 1, 0.3
    for dtype in (torch.float32, torch.float64):
        x = s.detach().to(dtype).requires_grad_()
        loss = weighted_supervised(x, y.to(dtype), label_weights=w.to(dtype))
        torch.testing.assert_close(loss.double(), oracle(s, y, w, 1.0, "hamming", False))


def test_small_weights_beside_large_ones_lose_no_digits() -> None:
    """In float32 sums of 1 and 1e-8 left nothing of the second, or a loss below 0."""
    s, y, w = drawn()
    y[:, 0], w[:, 0] = 0, 1
    y[[2, 3], 0] = 1
    for one, two in ((1, 1e-4), (0.7, 1e-6), (0.9, 2e-8), (0.36, 1.03e-8)):
        w[2, 0], w[3, 0] = one, two
        exact = oracle(s, y, w, 0.3, "hamming", False)
        x = s.detach().float()
        loss = weighted_supervised(x, y.float(), tau=0.3, label_weights=w.float())
        torch.testing.assert_close(loss.double(), exact.detach(), rtol=1e-4, atol=0)


def test_the_classifiers_losses_are_weighted_means() -> None:
    s, y, w = drawn()
    logits = s[:, :LABELS]
    each = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    assert_same(Bce()(logits, y, label_weights=w), (w * each).sum() / w.sum(), s)
    some = y.masked_fill(w < 0.5, math.nan)
    kept = w * (w >= 0.5)
    found = bce(logits, some, total=ROWS, weights=kept, weight=kept.sum())
    assert_same(found, (kept * each).sum() / kept.sum(), s)
    assert Bce()(logits, y, label_weights=0 * w).item() == 0
    classes = torch.arange(ROWS) % LABELS
    row = w[:, 0]
    expected = (row * F.cross_entropy(logits, classes, reduction="none")).sum() / row.sum()
    assert_same(CrossEntropy()(logits, classes, label_weights=row), expected, s)


def shares(sizes: list[int]) -> list[Tensor]:
    """Losses of this process's rows, and their gradients times the number of processes."""
    s, y, w = drawn()
    first = sum(sizes[: collectives.rank()])
    own = slice(first, first + sizes[collectives.rank()])
    x = s.detach()[own].requires_grad_()
    found = []
    for loss, features, labels in (
        (WeightedSupervised(tau=0.3), x, y),
        (WeightedSupervised(tau=0.3, distance="indicator"), x, y),
        (Bce(), x[:, :LABELS], y),
        (CrossEntropy(), x[:, :LABELS], F.one_hot(torch.arange(ROWS) % LABELS).double()),
    ):
        value = loss(features, labels[own], label_weights=w[own])
        (gradient,) = torch.autograd.grad(value, [x])
        found += [value.detach(), gradient / len(sizes)]
    return found


def test_three_processes_with_uneven_rows_are_one() -> None:
    """Also one without rows; gradients are those of one process."""
    (one,) = ranks.run(1, shares, [ROWS])
    for sizes in ([4, 0, 5], [2, 7]):
        several = ranks.run(len(sizes), shares, sizes)
        for number in range(0, len(one), 2):
            for process in several:
                torch.testing.assert_close(process[number], one[number], rtol=1e-10, atol=1e-12)
            whole = torch.cat([process[number + 1] for process in several])
            torch.testing.assert_close(whole, one[number + 1], rtol=1e-9, atol=1e-12)


def test_what_is_refused() -> None:
    s, y, w = drawn()
    with pytest.raises(LossError, match="Supcon: it cannot weigh labels; pass label_weights=None"):
        Supcon()(s, y[:, 0].long(), label_weights=w[:, 0])
    for bad in (w[:3], w - 1, w + 1, w * math.nan):
        with pytest.raises(LossError, match=r"label_weights must be 0 to 1, of the shape of the"):
            Bce()(s[:, :LABELS], y, label_weights=bad)
    objective = Objective.__new__(Objective)
    terms = named(bce={}, supcon={})
    objective.terms = {name: section.build_loss() for name, section in terms.items()}
    objective.refuse_partial_rows(False, False)
    with pytest.raises(ConfigError, match=r"objective.supcon cannot weigh labels, as data.protoco"):
        objective.refuse_partial_rows(False, False, True)
