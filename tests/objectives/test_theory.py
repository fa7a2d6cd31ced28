"""The papers' theory: terms that are special cases of others, and bounds on mutual information.

What the papers say about which negatives count is in `test_theory_negatives.py`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from heron.losses.hard import debiased, hard
from heron.losses.hierarchical import hierarchical
from heron.losses.mulco import mulco
from heron.losses.supcon import supcon
from heron.losses.supervised import weighted_supervised
from heron.losses.unsupervised import (
    cmc,
    input_weighted_unsupervised,
    nt_xent,
    weighted_unsupervised,
)
from tests.objectives.test_terms import assert_same, draw, labels

indicated = partial(weighted_supervised, distance="indicator")
LABEL = torch.tensor([3, 0, 0, 8, 3, 0, 5])  # 5 and 8 have one sample each


def views(count: int, batch: int = 7) -> list[Tensor]:
    return [draw(batch, 4, seed=40 + v) for v in range(count)]


# Terms that are other terms, values and gradients.


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_hardening_nothing_is_nt_xent(count: int, tau: float) -> None:
    """H-SCL, Eq. 3 and 4: eta = 1, beta = 0 and a threshold below every e^g all make UCL."""
    z = views(count)
    kinds: tuple[dict[str, Any], ...] = (
        {"hardening": "none"},
        {"hardening": "exp", "beta": 0.0},
        {"hardening": "threshold", "threshold": 0.99 * math.exp(-1 / tau)},
        {"hardening": "threshold", "threshold": 1e-300},
    )
    for kind in kinds:
        found = hard(z, tau=tau, positives="augmentation", **kind)
        assert_same(found, nt_xent(z, tau=tau), z)
    # A class a sample: other classes are other samples, and the class's views are the sample's.
    assert_same(hard(z, torch.arange(7), tau=tau), nt_xent(z, tau=tau), z)


def test_beta_to_zero_goes_to_ucl() -> None:
    """H-SCL, Section III-C: the distance of H-UCL to UCL is linear in a small beta."""
    z = [view.detach() for view in views(2)]
    gaps = [
        float(hard(z, tau=0.5, hardening="exp", beta=beta, positives="augmentation"))
        - float(nt_xent(z, tau=0.5))
        for beta in (1e-2, 1e-3, 1e-4)
    ]
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.05)
    assert gaps[1] / gaps[2] == pytest.approx(10, rel=0.005)


@pytest.mark.parametrize("count", [2, 3])
def test_no_prior_debiases_nothing(count: int) -> None:
    """Chuang et al. 2020, Eq. 7 and 8: tau_plus = 0 is NT-Xent; f >= e^(-1/tau) frees the clamp."""
    z = views(count)
    assert_same(debiased(z, tau=0.3, tau_plus=0.0), nt_xent(z, tau=0.3), z)


def test_supcon_of_a_class_a_sample_is_nt_xent_of_two_views() -> None:
    """SupCon, Eq. 2: with three views the third, a positive, stays in L_out's denominator."""
    alone = torch.arange(7)
    z = views(2)
    assert_same(supcon(z, alone, tau=0.3), nt_xent(z, tau=0.3), z)
    assert supcon(views(3), alone, tau=0.3) > nt_xent(views(3), tau=0.3)


@pytest.mark.parametrize(("count", "having"), [(1, 5), (2, 7), (3, 7)])
def test_a_hierarchy_of_one_level_is_supcon(count: int, having: int) -> None:
    """HiMulConE, Eq. 3: the mean is over anchors with a positive, SupCon's over all of them."""
    z, path = views(count), LABEL[:, None]
    for constrain in (False, True):  # no level is finer
        found = hierarchical(z, path, tau=0.3, penalty=None, constrain=constrain)
        assert_same(found, supcon(z, LABEL, tau=0.3) * (7 / having), z)
    doubled = hierarchical(z, path, tau=0.3)  # by the finest level's 2^(1/1)
    assert_same(doubled, 2 * supcon(z, LABEL, tau=0.3) * (7 / having), z)


def test_mulco_with_the_batch_as_queue_is_infonce() -> None:
    """MulCo, Eq. 4: queries against the batch's keys are half of CMC's two directions."""
    z = [view.detach() for view in views(2)]
    prob = torch.full((7, 3), 1 / 3, dtype=torch.float64)

    def direction(q: Tensor, key: Tensor) -> Tensor:
        share = partial(mulco, tau=0.3, kind="standard", total=7)
        shares = []
        for i in range(7):
            own, others = slice(i, i + 1), torch.arange(7) != i
            pair = q[own], key[own], key[others]
            shares.append(share(*pair, prob[own], prob[others], prob[own]))
        return torch.stack(shares).sum()

    logits = normalize(z[0]) @ normalize(z[1]).T / 0.3
    there, back = (cross_entropy(side, torch.arange(7)) for side in (logits, logits.T))
    torch.testing.assert_close(direction(z[0], z[1]), there)
    torch.testing.assert_close(direction(z[1], z[0]), back)
    torch.testing.assert_close((there + back) / 2, cmc(z, tau=0.3))


# HeroCon, Sections 3.2 and 3.3: what the weights do to SimCLR and SupCon.


@pytest.mark.parametrize("count", [2, 3])
def test_inputs_all_alike_make_simclr(count: int) -> None:
    """HeroCon, Section 3.3, through HCL's weights: cos(x_i, x_k) = 1 makes every g exactly 1.

    The last view is of another width. Orthogonal inputs make every g = e, which adds less than 1.
    """
    z = views(count)
    same = [torch.ones(7, 3 + (v == count - 1)).double().cumsum(1) for v in range(count)]
    found = input_weighted_unsupervised(z, same, tau=0.4)
    assert_same(found, nt_xent(z, tau=0.4), z)
    alone = [torch.eye(7, dtype=torch.float64)] * count
    assert 0 < input_weighted_unsupervised(z, alone, tau=0.4) - found < 1


def test_the_weights_of_l_u_lie_between_one_and_e_squared() -> None:
    """HeroCon, Lemma 3.3's proof: g is in [1, e^2], so NT-Xent <= L_u <= NT-Xent + 2.

    No g is below 1, whatever H. So L_u is SimCLR (Section 3.3) only where all z and all H(z) are
    one direction, which attains the lower end; H(z) = -z there attains e^2.
    """
    for seed in range(8):
        z, h = ([draw(8, 3, seed=seed + first + v) for v in (0, 50)] for first in (0, 100))
        plain = nt_xent(z, tau=0.5)
        assert plain < weighted_unsupervised(z, h, tau=0.5) < plain + 2
    one = [torch.ones(8, 3, dtype=torch.float64)] * 2
    plain = nt_xent(one, tau=0.5)
    torch.testing.assert_close(weighted_unsupervised(one, one, tau=0.5), plain)
    furthest = weighted_unsupervised(one, [-v for v in one], tau=0.5)
    assert furthest.item() == pytest.approx(math.log(1 + math.exp(2) * 14))


def test_one_false_negative_keeps_the_loss_from_its_infimum() -> None:
    """HeroCon, Lemma 3.1: with a false negative, a sample equal to another, no solution is optimal.

    Without one the loss goes to 0 with tau; with one, log 2 of each of the two samples stays, and
    the weights of L_u never lower it, since g >= 1. The printed proof sets the gradient of Eq. 8 to
    zero, which needs e^x = 0 and so has no solution without a false negative either.
    """
    z = torch.eye(6, dtype=torch.float64)
    twins = z[[0, 0, 2, 3, 4, 5]]
    assert cmc([z, z], tau=0.02) < 1e-15
    assert cmc([twins, twins], tau=0.02).item() == pytest.approx(math.log(2) * 2 / 6)
    weighted = weighted_unsupervised([twins] * 2, [twins] * 2, tau=0.02, negatives="cross_view")
    assert weighted.item() == pytest.approx(math.log(2) * 2 / 6)


def supervised_by_pairs(s: Tensor, y: Tensor, tau: float, gamma: float) -> Tensor:
    """HeroCon, Eq. 6, its mean over labels; gamma before the negatives."""
    vectors = normalize(s)
    f = torch.exp(vectors @ vectors.T / tau)
    losses = []
    for column in y.T:
        inside = column.nonzero()[:, 0].tolist()
        pairs = [
            torch.log(f[i, j] + gamma * f[i, column == 0].sum()) - torch.log(f[i, j])
            for i in inside
            for j in inside
            if i != j
        ]
        losses.append(torch.stack(pairs).mean() if pairs else s.new_zeros(()))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_indicator_weights_make_eq_6(tau: float) -> None:
    """HeroCon, Section 3.3: the indicator distance on classes is Eq. 6; so is either on one label.

    The Hamming distance is not: one-hot vectors of two classes differ in two places, so it counts
    every negative twice (gamma = 2, sigma = 1).
    """
    s, one_hot = draw(9, 5), torch.eye(4, dtype=torch.float64)[[0, 0, 0, 1, 1, 2, 2, 2, 3]]
    found = indicated(s, one_hot, tau=tau)
    assert_same(found, supervised_by_pairs(s, one_hot, tau, 1.0), [s])
    doubled = weighted_supervised(s, one_hot, tau=tau, distance="hamming")
    assert_same(doubled, supervised_by_pairs(s, one_hot, tau, 2.0), [s])
    binary = labels(9, 1)
    for term in (indicated, weighted_supervised):
        assert_same(term(s, binary, tau=tau), supervised_by_pairs(s, binary, tau, 1.0), [s])


def test_eq_6_is_supcon_when_a_class_has_one_pair() -> None:
    """HeroCon, Section 3.3 says Eq. 7 becomes "exactly" SupCon; that is so for classes of two.

    A larger class has other positives, which L_out (Khosla et al. 2020, Eq. 2) keeps in the
    denominator and Eq. 6 does not. The means differ too: over anchors there, over labels here, so
    that with one class more, of a single sample, they are sums over 5 anchors and over 3 labels.
    """
    s = draw(5, 4)
    label = torch.tensor([0, 1, 0, 2, 1])
    found = indicated(s, torch.eye(3, dtype=torch.float64)[label], tau=0.3)
    assert_same(found, supcon([s], label, tau=0.3) * (5 / 6), [s])
    s, label = s[[0, 1, 2, 4]], label[[0, 1, 2, 4]]
    found = indicated(s, torch.eye(2, dtype=torch.float64)[label], tau=0.3)
    torch.testing.assert_close(found, supcon([s], label, tau=0.3))


def test_supcon_is_above_eq_6_and_both_rest_at_the_simplex_of_classes() -> None:
    """HeroCon, Section 3.3: L_out >= Eq. 6 for equal classes, by other positives alone.

    Where every class is one corner of a regular simplex both have gradient 0; there, as tau falls,
    Eq. 6 goes to 0 and L_out to log(positives of an anchor).
    """
    label = torch.arange(12) % 3
    one_hot = torch.eye(3, dtype=torch.float64)[label]
    for seed in range(10):
        s = draw(12, 4, seed=seed)
        above = supcon([s], label, tau=0.5) - indicated(s, one_hot, tau=0.5)
        assert 0 < above < math.log(3) + 2 / 0.5  # f of the others is at most e^(2/tau) f_ij each
    corners = (one_hot - 1 / 3).requires_grad_()
    for tau in (0.05, 0.5):
        for loss in (supcon([corners], label, tau=tau), indicated(corners, one_hot, tau=tau)):
            assert torch.autograd.grad(loss, corners)[0].abs().max() < 1e-14
    assert indicated(corners, one_hot, tau=0.05) < 1e-10
    assert supcon([corners], label, tau=0.05).item() == pytest.approx(math.log(3))


# Mirroring information, in nats. Views x_2 = rho x_1 + sqrt(1 - rho^2) noise have
# I = -d/2 log(1 - rho^2). A bound holds for the mean over batches: it shall stay under I by three
# standard errors of that mean, and not be empty.

DIM, RHO = 6, 0.9
KNOWN = -DIM / 2 * math.log(1 - RHO**2)  # 4.98
SHARP = 8.0**-2 * (1 - RHO**2) / RHO  # tau at which f of `lift` is near the density's ratio


def gaussian_views(batch: int, rho: float, generator: torch.Generator) -> list[Tensor]:
    first, noise = torch.randn(2, batch, DIM, generator=generator, dtype=torch.float64)
    return [first, rho * first + math.sqrt(1 - rho**2) * noise]


def lift(x: Tensor) -> Tensor:
    """Onto a cap of the sphere, where cos falls with the squared distance: 1 - |x - x'|^2 / 128."""
    x = x / 8
    return torch.cat([x, (1 - x.square().sum(1, keepdim=True)).clamp(min=0).sqrt()], 1)


def hidden_relu(x: Tensor) -> Tensor:
    return torch.relu(x @ draw(DIM, 32, seed=5).detach())


def bound(
    loss: Callable[[list[Tensor]], Tensor],
    size: int,
    embed: Callable[[Tensor], Tensor] = lift,
    rho: float = RHO,
    batch: int = 256,
    batches: int = 8,
) -> tuple[float, float]:
    """log(size) - loss, its mean over batches and three standard errors of it."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        math.log(size) - loss([embed(x) for x in gaussian_views(batch, rho, generator)])
        for _ in range(batches)
    ]
    return mean_and_margin(drawn)


def mean_and_margin(drawn: Sequence[Tensor]) -> tuple[float, float]:
    values = torch.stack(list(drawn)).detach()
    return float(values.mean()), float(3 * values.std() / math.sqrt(len(values)))


@pytest.mark.parametrize("embed", [lift, torch.tanh, hidden_relu, lambda x: x[:, :1]])
@pytest.mark.parametrize("tau", [SHARP, 0.05, 0.5])
def test_infonce_bounds_mutual_information(embed: Any, tau: float) -> None:
    """van den Oord et al. 2018, Section 2.3 (HeroCon, Lemma 3.3 with g = 1): I >= log N - L.

    True for any embedding. N counts an anchor's keys, its positive too; the lemma's |N_i| does not.
    """
    estimate, margin = bound(partial(cmc, tau=tau), 256, embed)
    assert estimate + margin < KNOWN
    if embed is lift and tau == SHARP:
        assert estimate > 0.8 * KNOWN


def test_independent_views_bound_nothing() -> None:
    """van den Oord et al. 2018, Section 2.3: at rho = 0, I = 0 and no bound is above it."""
    for embed, tau in ((lift, SHARP), (torch.tanh, 0.5)):
        estimate, margin = bound(partial(cmc, tau=tau), 256, embed, rho=0.0)
        assert estimate + margin < 0


def l_u(z: list[Tensor], negatives: Any = "all_views") -> Tensor:
    """With H linear and sigmoid."""
    linear = draw(DIM + 1, DIM + 1, seed=9).detach()
    h = [torch.sigmoid(v @ linear) for v in z]
    return weighted_unsupervised(z, h, tau=SHARP, negatives=negatives)


def test_l_u_bounds_mutual_information() -> None:
    """HeroCon, Lemma 3.3: I >= log |N_i| - L_u, with |N_i| = B - 1 samples, as printed.

    True for any encoder and H, not only for the f that the proof puts in: without the anchor's own
    view among the negatives, and with g >= 1 set to 1, L_u becomes InfoNCE's loss and does not
    grow. CMC > NT-Xent > L_u show what that costs; with the positive weighed too (`cross_view`)
    log B - L_u is a bound for the same reason.
    """
    infonce, _ = bound(partial(cmc, tau=SHARP), 256)
    plain, _ = bound(partial(nt_xent, tau=SHARP), 255)
    weighted, margin = bound(l_u, 255)
    assert KNOWN > infonce > plain > weighted > 0.5 * KNOWN
    assert weighted + margin < KNOWN
    crossed, margin = bound(lambda z: l_u(z, "cross_view"), 256)
    assert KNOWN - margin > crossed > 0.5 * KNOWN


@pytest.mark.parametrize(("loss", "own"), [(partial(cmc, tau=SHARP), 1), (l_u, 0)])
def test_more_negatives_tighten_the_bound(loss: Any, own: int) -> None:
    """HeroCon, Section 3.4: "as the size of the data set becomes larger", up to log N at most."""
    sizes = (4, 16, 64, 256)
    found = [bound(loss, n - 1 + own, batch=n, batches=max(8, 128 // n))[0] for n in sizes]
    assert found == sorted(found)
    assert all(value < min(KNOWN, math.log(n)) for value, n in zip(found, sizes, strict=True))
    assert found[-1] > found[0] + 2


@pytest.mark.parametrize("distance", ["indicator", "hamming"])
def test_l_s_bounds_the_divergence_of_classes_not_mutual_information(distance: Any) -> None:
    """HeroCon, Lemma 3.2: I(X_i, X_j) >= (N - L_s) / sigma, N the mean of log |N(a)|, is false.

    Its proof sets E_k [P(x_k | x_i) / P(x_k)] = 1, which holds for k drawn from P; but the
    negatives of label a are drawn from P(x | not a). For a perfect classifier's features the left
    side is at most log c and the right side grows with log |N(a)|. Here, two classes that flip
    with 2 %: I = 0.53, and N - L_s = 3.3 (2.7 with Hamming's gamma = 2), sigma = 1.

    What the same steps prove is KL(P(. | a), P(. | not a)) >= N - L_s, which is 3.74 here. The
    factor 1 / sigma is not proven either: the last step puts it before I unasked, and outside the
    mean over the pairs that it belongs to. So sigma = 1 is all that is tested.
    """
    flip = 0.02
    apart = 2 * flip * (1 - flip)  # how often two samples of a class differ
    known = math.log(2) + apart * math.log(apart) + (1 - apart) * math.log(1 - apart)
    divergence = (1 - 2 * flip) * math.log((1 - flip) / flip)
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(800) % 2
    one_hot = torch.eye(2, dtype=torch.float64)[label]
    tau = 1.5 / math.log((1 - flip) / flip)
    drawn = []
    for _ in range(8):
        kept = torch.rand(800, generator=generator, dtype=torch.float64) >= flip
        sign = torch.where(kept, 1.0, -1.0) * (1 - 2 * label)
        s = torch.stack([sign, torch.zeros(800)], 1).double()
        drawn.append(math.log(400) - weighted_supervised(s, one_hot, tau=tau, distance=distance))
    estimate, margin = mean_and_margin(drawn)
    assert estimate - margin > 4 * known  # the lemma as printed
    assert 0.6 * divergence < estimate < divergence - margin


def test_infonce_of_two_samples_of_a_class_bounds_their_mutual_information() -> None:
    """HeroCon, Lemma 3.2 with negatives from the whole set: I(X_i, X_j) >= log N - L, and <= log c.

    Classes that never overlap have I = log c; the views are two samples of one class.
    """
    generator = torch.Generator().manual_seed(0)
    corners = torch.eye(8, dtype=torch.float64)

    def sample(label: Tensor) -> Tensor:
        noise = torch.randn(len(label), 8, generator=generator, dtype=torch.float64)
        return corners[label] + 0.1 * noise

    drawn = []
    for _ in range(8):
        label = torch.randint(8, (256,), generator=generator)
        drawn.append(math.log(256) - cmc([sample(label), sample(label)], tau=0.15))
    estimate, margin = mean_and_margin(drawn)
    assert 0.85 * math.log(8) < estimate < math.log(8) - margin


def test_hamming_weights_only_raise_l_s() -> None:
    """HeroCon, Lemma 3.2's first step: sigma in [1/c, 1] and gamma in [1, c], so L_s is raised."""
    for seed in range(8):
        s, y = draw(12, 5, seed=seed), labels(12, 4, seed=seed)
        apart = torch.cdist(y, y, p=1)
        for column in y.T:
            inside = column == 1
            assert (apart[inside][:, inside] <= 3).all()
            assert (apart[inside][:, ~inside] >= 1).all()
        weighted = weighted_supervised(s, y, tau=0.5)
        assert weighted > indicated(s, y, tau=0.5)
