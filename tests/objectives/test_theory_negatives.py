"""The papers' theory of which negatives count: H-SCL's under H-UCL's, MulCo's around the ideal.

Means over a batch or a queue stand for the papers' expectations: for that distribution, with the
limit of many negatives taken, a theorem holds to rounding or it does not hold.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from heron.losses.hard import hard
from heron.losses.mulco import mulco
from tests.objectives.test_terms import draw

TAU = 0.5
GROUP = torch.arange(24) % 4  # the cluster that a sample lies in
PLACE = torch.arange(24) // 4  # its place in there: the same labels, against the clusters
SHUFFLED = GROUP[torch.randperm(24, generator=torch.Generator().manual_seed(1))]
HARDENINGS: tuple[dict[str, Any], ...] = (
    {"hardening": "none"},
    *({"hardening": "exp", "beta": beta} for beta in (0.5, 1.0, 5.0)),
    *({"hardening": "threshold", "threshold": math.exp(cos / TAU)} for cos in (-0.5, -0.3)),
)


def clusters(spread: float = 0.2) -> list[Tensor]:
    """Two views of 24 samples around four orthogonal centres."""
    centres = torch.eye(4, 8, dtype=torch.float64)[GROUP]
    return [centres + spread * draw(24, 8, seed=v).detach() for v in (0, 1)]


@dataclass
class Tilted:
    """Of each anchor: its positive's g, the alphas, and E[e^g] under the tilted negatives."""

    positive: Tensor
    alpha: dict[str, Tensor]
    mean: dict[str, Tensor]

    @property
    def assumed(self) -> Tensor:
        """Whether H-SCL's Assumption 1 holds for each anchor."""
        return self.mean["Hcol"] >= self.mean["H-SCL"]

    def loss(self, kind: str) -> Tensor:
        """Eq. 3 with M = 46 views of other samples, of each anchor."""
        return torch.log(1 + 46 * torch.exp(-self.positive) * self.mean[kind])


def tilted(
    z: list[Tensor],
    label: Tensor,
    hardening: str,
    beta: float = 0.0,
    threshold: float = 0.0,
) -> Tilted:
    """H-SCL, Section III-C, with q_UCL even over the views of other samples."""
    vectors, of_row = normalize(torch.cat(z)), label.repeat(2)
    g = vectors @ vectors.T / TAU
    sample = torch.arange(24).repeat(2)
    other = (sample[:, None] != sample).double()
    same = (of_row[:, None] == of_row).double()
    eta = (g.exp() >= threshold).double() if hardening == "threshold" else torch.exp(beta * g)
    alpha, mean = {}, {}
    for kind, chosen in (("H-UCL", other), ("H-SCL", other * (1 - same)), ("Hcol", other * same)):
        alpha[kind] = (chosen * eta).sum(1) / 46
        mean[kind] = (chosen * eta * g.exp()).sum(1) / 46 / alpha[kind]
    return Tilted(g[torch.arange(48), torch.arange(48).roll(24)], alpha, mean)


def h_ucl(z: list[Tensor], **options: Any) -> Tensor:
    return hard(z, tau=TAU, positives="augmentation", **options)


def h_scl(z: list[Tensor], label: Tensor, **options: Any) -> Tensor:
    return hard(z, label, tau=TAU, positives="augmentation", **options)


@pytest.mark.parametrize("label", [GROUP, SHUFFLED], ids=["clusters", "shuffled"])
@pytest.mark.parametrize("kind", HARDENINGS)
def test_h_ucl_mixes_h_scl_and_collisions(kind: dict[str, Any], label: Tensor) -> None:
    """H-SCL, Proposition 2: alpha_H-UCL = alpha_H-SCL + alpha_Hcol, in a finite batch too.

    A collision is a view of another sample of the anchor's class; its own views are nobody's
    negatives. So E_H-UCL[e^g] is the mean of the two others by their alphas, and both losses that
    are put together from these numbers are the term's.
    """
    z = clusters()
    found = tilted(z, label, **kind)
    total, (scl, col) = found.alpha["H-UCL"], (found.alpha["H-SCL"], found.alpha["Hcol"])
    assert (scl > 0).all() and (col > 0).all()
    torch.testing.assert_close(scl + col, total)
    mixed = (scl * found.mean["H-SCL"] + col * found.mean["Hcol"]) / total
    torch.testing.assert_close(mixed, found.mean["H-UCL"])
    torch.testing.assert_close(h_ucl(z, **kind), found.loss("H-UCL").mean())
    torch.testing.assert_close(h_scl(z, label, **kind), found.loss("H-SCL").mean())


@pytest.mark.parametrize("kind", HARDENINGS)
def test_h_ucl_is_above_h_scl_under_assumption_1(kind: dict[str, Any]) -> None:
    """H-SCL, Lemma 1: all anchors of clustered classes satisfy Assumption 1; the losses follow.

    Labels that cut across the clusters violate it at every anchor and turn the inequality round.
    """
    z = clusters()
    assert tilted(z, GROUP, **kind).assumed.double().mean() == 1
    assert h_ucl(z, **kind) > h_scl(z, GROUP, **kind) + 0.1
    assert tilted(z, PLACE, **kind).assumed.double().mean() == 0
    assert h_ucl(z, **kind) < h_scl(z, PLACE, **kind)


@pytest.mark.parametrize("kind", HARDENINGS[::2])
def test_assumption_1_is_also_necessary_anchor_by_anchor(kind: dict[str, Any]) -> None:
    """H-SCL, Lemma 1 and its converse: E_H-UCL lies between E_Hcol and E_H-SCL by Proposition 2.

    Of shuffled labels some anchors satisfy the assumption; a sample whose two views both do has the
    larger H-UCL loss, one whose views both do not has the smaller.
    """
    z = clusters()
    assumed = tilted(z, SHUFFLED, **kind).assumed
    assert 0.2 < assumed.double().mean() < 0.8
    seen = set()
    for i in range(24):
        rows = slice(i, i + 1)
        share = h_ucl(z, rows=rows, **kind) - h_scl(z, SHUFFLED, rows=rows, **kind)
        if assumed[i] == assumed[i + 24]:
            assert (share >= 0) == assumed[i]
            seen.add(bool(assumed[i]))
    assert seen == {True, False}


def test_no_hard_negative_of_another_class_is_no_h_scl_loss() -> None:
    """H-SCL, Lemma 1 assumes both alphas > 0; a threshold may leave either empty.

    Without a collision the two losses are equal; without another class's negative `hard` adds 0,
    so that the inequality stays.
    """
    z = clusters(spread=0.1)
    kind = {"hardening": "threshold", "threshold": math.exp(0.7 / TAU)}
    assert (tilted(z, GROUP, **kind).alpha["H-SCL"] == 0).all()  # type: ignore[arg-type]
    assert h_ucl(z, **kind) > h_scl(z, GROUP, **kind) == 0
    assert (tilted(z, PLACE, **kind).alpha["Hcol"] == 0).all()  # type: ignore[arg-type]
    torch.testing.assert_close(h_ucl(z, **kind), h_scl(z, PLACE, **kind))


def test_hardening_raises_both_losses_and_ucl_bounds_neither() -> None:
    """H-SCL, Sections II and IV: UCL <= H-UCL and SCL <= H-SCL, by Chebyshev's sum inequality.

    UCL >= H-SCL does not follow from Assumption 1, which holds here for every beta: it holds for a
    small beta and fails for a large one, while H-UCL >= H-SCL throughout.
    """
    z = clusters(spread=0.45)
    betas = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
    ucl = [h_ucl(z, hardening="exp", beta=beta) for beta in betas]
    scl = [h_scl(z, GROUP, hardening="exp", beta=beta) for beta in betas]
    assert ucl == sorted(ucl) and scl == sorted(scl)
    assert scl[0] < ucl[0] < scl[-1]
    assert all(above > below for above, below in zip(ucl, scl, strict=True))
    shuffled = [h_scl(z, SHUFFLED, hardening="exp", beta=beta) for beta in betas]
    assert shuffled == sorted(shuffled)


# MulCo. A queue with each class equally often makes Eq. 8 exact for every anchor; its means are the
# expectations that the proofs' N -> infinity leaves.

CLASSES, EACH = 5, 12
SIZE = CLASSES * EACH  # N of the queue
FULL = SIZE * (CLASSES - 1) / CLASSES  # the proofs' Q


@dataclass
class Scene:
    """Queries, their positives and a queue, with the true classes of queries and queue."""

    q: Tensor
    key: Tensor
    queue: Tensor
    of_q: Tensor
    of_queue: Tensor
    classes: int = CLASSES

    def loss(
        self,
        kind: Any,
        ybar: Tensor | None = None,
        tau: float = 1.0,
        posterior: Tensor | None = None,
    ) -> Tensor:
        """The term, by default with a perfect classifier and all wrong classes known."""
        sure = torch.eye(self.classes, dtype=torch.float64) if posterior is None else posterior
        wrong = 1 - one_hot(self.of_q, self.classes).double() if ybar is None else ybar
        probabilities = sure[self.of_q], sure[self.of_queue]
        return mulco(self.q, self.key, self.queue, *probabilities, wrong, tau=tau, kind=kind)

    def ideal(self, weight: float) -> Tensor:
        """Eq. 7 with Q = `weight`, its negatives those of the queue that are of other classes."""
        q, queue = normalize(self.q), normalize(self.queue)
        positive = torch.exp((q * normalize(self.key)).sum(1))
        other = (self.of_q[:, None] != self.of_queue).double()
        mean = (torch.exp(q @ queue.T) * other).sum(1) / other.sum(1)
        return -torch.log(positive / (positive + weight * mean)).mean()


def scene(layout: str) -> Scene:
    """Embeddings drawn, with classes as clusters, or with the query's class furthest from it."""
    of_q, of_queue = torch.arange(10) % CLASSES, torch.arange(SIZE) % CLASSES
    generator = torch.Generator().manual_seed(3)
    q, key = torch.randn(2, 10, 6, generator=generator, dtype=torch.float64)
    queue = torch.randn(SIZE, 6, generator=generator, dtype=torch.float64)
    if layout != "random":
        sign = 1 if layout == "clusters" else -1
        centres = 4 * torch.eye(CLASSES, 6, dtype=torch.float64)
        q, key, queue = q + centres[of_q], key + centres[of_q], queue + sign * centres[of_queue]
    return Scene(q, key, queue, of_q, of_queue)


def orthogonal(of_queue: Tensor, classes: int) -> Scene:
    """One query of class 0; every key at cos = 0, so that only weights matter."""
    east, north = torch.eye(2, dtype=torch.float64)[:, None]
    keys = north.expand(len(of_queue), 2)
    return Scene(east, north, keys, torch.zeros(1, dtype=torch.int64), of_queue, classes)


LAYOUTS = pytest.mark.parametrize("layout", ["random", "clusters", "opposed"])


@LAYOUTS
def test_sifted_is_the_ideal_loss(layout: str) -> None:
    """MulCo, Theorem 2: sifted >= ideal. With the proof's Q = N (K - 1) / K they are equal.

    What its inequality drops is 0 for a perfect classifier. The theorem says "fixed Q and
    N -> infinity", the proof lets Q grow with N; for a fixed Q the sifted loss is above once
    N > Q K / (K - 1), by more and more, and below before.
    """
    s = scene(layout)
    torch.testing.assert_close(s.loss("sifted"), s.ideal(FULL))
    assert s.loss("sifted") > s.ideal(0.9 * FULL)
    assert s.loss("sifted") < s.ideal(1.1 * FULL)
    gaps = []
    for times in (1, 10, 100):
        larger = Scene(s.q, s.key, s.queue.repeat(times, 1), s.of_q, s.of_queue.repeat(times))
        gaps.append(float(larger.loss("sifted") - s.ideal(FULL / 2)))
    assert gaps == sorted(gaps) and gaps[2] > gaps[1] + 2


def test_sifted_is_below_ideal_for_a_short_queue() -> None:
    """MulCo, Theorem 2 needs N -> infinity: for a finite N sifted is the smaller, on average.

    The number of negatives that pass is random, and the logarithm concave. Exactly, for K = 3,
    N = 2 and all keys at cos = 0: 4/9 log 2 + 4/9 log 3 = 0.796 < log(1 + 4/3) = 0.847.
    """
    drawn = [
        orthogonal(torch.tensor(queue), 3).loss("sifted")
        for queue in itertools.product(range(3), repeat=2)
    ]
    expected = 4 / 9 * math.log(2) + 4 / 9 * math.log(3)
    assert float(torch.stack(drawn).mean()) == pytest.approx(expected)
    ideal = float(orthogonal(torch.arange(3), 3).ideal(2 * 2 / 3))
    assert expected < ideal == pytest.approx(math.log(7 / 3))
    s, generator = scene("clusters"), torch.Generator().manual_seed(7)
    gaps = []
    for size in (20, 20000):
        of_row = torch.randint(SIZE, (size,), generator=generator)
        longer = Scene(s.q, s.key, s.queue[of_row], s.of_q, s.of_queue[of_row])
        gaps.append(abs(float(longer.loss("sifted") - s.ideal(size * (CLASSES - 1) / CLASSES))))
    assert gaps[1] < 0.01 < gaps[0]


@LAYOUTS
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_sifted_is_below_standard_by_a_margin(layout: str, tau: float) -> None:
    """MulCo, Theorem 3: sifted < std - log(1 + e^-2 / (K - 1 + K / N)), at tau = 1.

    It holds for every N, given even classes. At another temperature the constant is e^(-2 / tau),
    which is 4e-18 at the term's own tau = 0.05: there the theorem says no more than sifted < std.
    """
    s = scene(layout)
    for size in (CLASSES, SIZE):
        shorter = Scene(s.q, s.key, s.queue[:size], s.of_q, s.of_queue[:size])
        margin = math.log(1 + math.exp(-2 / tau) / (CLASSES - 1 + CLASSES / size))
        assert shorter.loss("sifted", tau=tau) < shorter.loss("standard", tau=tau) - margin


def test_the_margin_is_met_with_equality_by_an_augmentation() -> None:
    """MulCo, Theorem 3 is strict for x+ ~ p_x^+ and not for the augmentations that training uses.

    Worst case: the query's class opposite to it, all others upon it. A positive of the query's
    class lies opposite as well, and the margin is not met; an augmentation lies upon the query,
    and it is met exactly, so that "<" must read "<=" and the constant cannot be improved. With
    tau = 0.05 the same scene has std - sifted < 1e-16, far below the printed constant's 0.033.
    """
    east = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    of_queue = torch.arange(SIZE) % CLASSES
    queue = torch.where(of_queue[:, None] == 0, -east, east)
    margin = math.log(1 + math.exp(-2) / (CLASSES - 1 + CLASSES / SIZE))
    of_q = torch.zeros(1, dtype=torch.int64)
    augmented = Scene(east, east, queue, of_q, of_queue)
    gap = augmented.loss("standard") - augmented.loss("sifted")
    assert float(gap) == pytest.approx(margin, rel=1e-12)
    drawn = Scene(east, -east, queue, of_q, of_queue)
    assert drawn.loss("standard") - drawn.loss("sifted") > margin * 1.01
    cold = augmented.loss("standard", tau=0.05) - augmented.loss("sifted", tau=0.05)
    assert abs(cold) < 1e-16 and margin > 0.032


@LAYOUTS
def test_sifted_soft_and_weighted_are_one_for_a_perfect_classifier(layout: str) -> None:
    """MulCo, Theorems 4 and 5: ideal <= soft <= std and ideal <= weighted <= std.

    With one-hot posteriors and all K - 1 wrong classes known the lower ends are equalities: the
    three losses are the same number.
    """
    s = scene(layout)
    for kind in ("soft", "weighted"):
        torch.testing.assert_close(s.loss(kind), s.loss("sifted"), rtol=0, atol=0)
        torch.testing.assert_close(s.loss(kind), s.ideal(FULL))
        assert s.loss(kind) < s.loss("standard")


def unsure(sure: float) -> Tensor:
    """Posteriors by true class: `sure` for it, even over the others."""
    rest = (1 - sure) / (CLASSES - 1)
    return rest + (sure - rest) * torch.eye(CLASSES, dtype=torch.float64)


@LAYOUTS
def test_standard_is_above_all_whatever_the_classifier(layout: str) -> None:
    """MulCo, Theorems 3 to 5, upper ends: weights are in [0, 1], for any posteriors and any N."""
    s, ybar = scene(layout), torch.zeros(10, CLASSES, dtype=torch.float64)
    ybar[torch.arange(10), (torch.arange(10) + 1) % CLASSES] = 1
    for posterior in (unsure(0.6), draw(CLASSES, CLASSES, seed=8).detach().softmax(1)):
        for kind in ("sifted", "soft", "weighted"):
            assert s.loss(kind, ybar, posterior=posterior) < s.loss("standard")


def test_soft_is_above_ideal_when_own_class_is_nearer() -> None:
    """MulCo, Theorem 4's lower end needs one-hot posteriors, not only a right argmax.

    Its last step sets 1 - f_h(x)(x^-) = 1 for other classes. With f = 0.6 for the true class and
    0.1 for each other, the weights' sum is N (K - 1) / K E^- + 0.4 N / K (E^+ - E^-): above ideal
    where the query's class is nearer than the others (as in H-SCL's Assumption 1), below else.
    """
    near, far = scene("clusters"), scene("opposed")
    assert near.loss("soft", posterior=unsure(0.6)) > near.ideal(FULL) + 0.01
    assert far.loss("soft", posterior=unsure(0.6)) < far.ideal(FULL) - 0.01


@LAYOUTS
@pytest.mark.parametrize("known", [1, 2, 3])
def test_weighted_is_below_ideal_unless_all_wrong_classes_are_known(
    layout: str, known: int
) -> None:
    """MulCo, Theorem 5's lower end, ideal <= weighted, is false for s < K - 1 complementary labels.

    The proof's last step replaces 1[h(x^-) in Ybar] by 1 for all x^- of other classes, which is so
    for s = K - 1 only. A perfect classifier gives the other negatives weight 0, so that
    ideal - log(1 + e^2 (K - 1 - s) / s) <= weighted < ideal, and the mean over all sets of s wrong
    classes is at most the ideal loss with Q = N s / K.
    """
    s = scene(layout)
    slack = math.log(1 + math.exp(2) * (CLASSES - 1 - known) / known)
    found = []
    for steps in itertools.combinations(range(1, CLASSES), known):
        wrong = (s.of_q[:, None] + torch.tensor(steps)) % CLASSES
        ybar = torch.zeros(10, CLASSES, dtype=torch.float64).scatter_(1, wrong, 1.0)
        found.append(s.loss("weighted", ybar))
        assert s.ideal(FULL) - slack < found[-1] < s.ideal(FULL) < s.loss("standard")
    assert torch.stack(found).mean() <= s.ideal(SIZE * known / CLASSES)


def test_one_of_nine_wrong_classes_is_far_below_ideal() -> None:
    """MulCo, Theorem 5, in numbers: K = 10, N = 1000, all keys at cos = 0, one label of nine known.

    ideal = log(1 + 900) = 6.80, weighted = log(1 + 100) = 4.62.
    """
    s = orthogonal(torch.arange(1000) % 10, 10)
    ybar = torch.zeros(1, 10, dtype=torch.float64)
    ybar[0, 4] = 1
    assert float(s.ideal(900)) == pytest.approx(math.log(901))
    assert float(s.loss("weighted", ybar)) == pytest.approx(math.log(101))
    assert float(s.loss("weighted")) == pytest.approx(math.log(901))
