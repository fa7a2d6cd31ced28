"""Terms of the baselines against their loop oracles: value, gradient, shares, corners."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from heron.losses import engine
from heron.losses.c2ae import c2ae
from heron.losses.comco import comco, scl_nl
from heron.losses.engine import unit
from heron.losses.mib import mib
from heron.losses.pairs import OwnRows
from heron.losses.pico import Disambiguation, pico, pseudo_target_loss
from tests import baseline_oracles, oracles
from tests.objectives.test_family import sets
from tests.objectives.test_terms import assert_same, draw, gradients, labels

BATCH = 7
C2AE: Callable[..., Tensor] = c2ae  # which takes its codes as a list here


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several strips a batch, so that their borders are tested."""
    monkeypatch.setitem(engine.STRIP_ELEMENTS, "cpu", 16)
    monkeypatch.setattr(engine, "MIN_STRIP_ROWS", 2)


def cuts() -> Iterator[list[slice]]:
    """Ways in which processes may share the batch; one may have nothing."""
    for borders in ([0, 3, BATCH], [0, 0, 5, BATCH]):
        yield [slice(a, b) for a, b in itertools.pairwise(borders)]


def coded() -> tuple[Any, Tensor]:
    """Codes of features and of labels, decoded labels, and labels; a row has all, another none."""
    y = labels(BATCH, 4)
    y[2], y[5] = 1, 0
    return [draw(BATCH, 3), draw(BATCH, 3, seed=1), draw(BATCH, 4, seed=2)], y


@pytest.mark.parametrize("options", [(1.0, 0.5, 1.0), (0.5, 0.5, 5.0), (2.0, 0.0, 3.0)])
def test_c2ae_is_its_oracle_and_its_shares_add_up(options: tuple[float, float, float]) -> None:
    parts, y = coded()
    named: Any = dict(zip(("alpha", "penalty", "scale"), options, strict=True))
    x, e, decoded = parts
    assert_same(C2AE(*parts, y, **named), baseline_oracles.c2ae(x, e, decoded, y, **named), parts)
    for rows in cuts():
        shares = [C2AE(x, e, decoded[part], y, rows=part, **named) for part in rows]
        assert_same(torch.stack(shares).sum(), C2AE(*parts, y, **named), parts)


def test_c2ae_of_orthonormal_codes_that_agree_is_its_labels_loss() -> None:
    """Scores of 1 and 0 leave e^-s a pair, whichever the pairs."""
    code = torch.linalg.qr(draw(BATCH, 3).detach())[0]
    y = labels(BATCH, 4)
    y[:, 0], y[:, 3] = 1, 0
    found = c2ae(code, code, 1e3 * (2 * y - 1), y, alpha=1.0, scale=2.0)
    torch.testing.assert_close(found, torch.exp(torch.tensor(-2.0)).double())


def test_c2ae_corners() -> None:
    empty: Any = [draw(0, 3), draw(0, 3, seed=1), draw(0, 4)]
    loss = C2AE(*empty, torch.zeros(0, 4, dtype=torch.float64))
    assert loss == 0
    assert all(torch.isfinite(g).all() for g in gradients(loss, empty))
    parts, y = coded()
    y[3, 1] = 0.5
    with pytest.raises(ValueError, match=r"c2ae: labels of row 3 must be 0 or 1, got"):
        C2AE(*parts, y)


def narrowed(views: int, batch: int = BATCH) -> list[list[Tensor]]:
    """What the critic makes of draws, means, and standard deviations."""
    deviations = [draw(batch, 2, seed=20 + v).detach().exp().requires_grad_() for v in range(views)]
    return [
        [draw(batch, 3, seed=v) for v in range(views)],
        [draw(batch, 2, seed=10 + v) for v in range(views)],
        deviations,
    ]


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("beta", [1.0, 0.01])
def test_mib_is_its_oracle_and_its_shares_add_up(views: int, beta: float) -> None:
    critics, means, deviations = narrowed(views)
    inputs = [*critics, *means, *deviations]
    whole = mib(critics, means, deviations, beta=beta)
    assert_same(whole, baseline_oracles.mib(critics, means, deviations, beta), inputs)
    for rows in cuts():
        shares = [
            mib(critics, [m[r] for m in means], [d[r] for d in deviations], beta=beta, rows=r)
            for r in rows
        ]
        assert_same(torch.stack(shares).sum(), mib(critics, means, deviations, beta=beta), inputs)


def test_mib_s_divergence_is_torch_s() -> None:
    critics, (m, n), (s, t) = narrowed(2)
    p, q = Normal(m, s), Normal(n, t)
    expected = (kl_divergence(p, q) + kl_divergence(q, p)).sum(1).mean() / 2
    far = mib(critics, [m, n], [s, t], beta=3.0) - mib(critics, [m, n], [s, t], beta=1.0)
    torch.testing.assert_close(far, 2 * expected)


@pytest.mark.parametrize("batch", [0, 1])
def test_mib_of_one_row_and_of_none(batch: int) -> None:
    critics, means, deviations = narrowed(2, batch)
    loss = mib(critics, means, deviations)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(g).all() for g in gradients(loss, [*critics, *means, *deviations]))


def test_mib_of_one_view_is_refused() -> None:
    critics, means, deviations = narrowed(1)
    with pytest.raises(ValueError, match="mib needs at least 2 views, got 1"):
        mib(critics, means, deviations)


CLASSES = torch.tensor([1, 0, 0, 3, 1, 0, 2])  # 2 and 3 are of one sample each


@pytest.mark.parametrize("queued", [0, 5])
@pytest.mark.parametrize("tau", [0.07, 0.5])
def test_pico_is_its_oracle_and_its_shares_add_up(queued: int, tau: float) -> None:
    q, keys, queue = draw(BATCH, 4), draw(BATCH, 4, seed=1).detach(), draw(queued, 4).detach()
    of_queue = torch.arange(queued) % 5  # class 4 is in the queue alone

    def whole(rows: slice = slice(None)) -> Tensor:
        return pico(q, keys, queue, CLASSES, of_queue, tau=tau, rows=rows)

    assert_same(whole(), baseline_oracles.pico(q, keys, queue, CLASSES, of_queue, tau), [q])
    for rows in cuts():
        assert_same(torch.stack([whole(part) for part in rows]).sum(), whole(), [q])


def test_pseudo_target_loss_is_its_oracle_and_its_shares_add_up() -> None:
    logits, s = draw(BATCH, 4), draw(BATCH, 4, seed=1).detach().softmax(1)
    expected = baseline_oracles.pseudo_target_loss(logits, s)
    assert_same(pseudo_target_loss(logits, s, total=BATCH), expected, [logits])
    shares = [pseudo_target_loss(logits[r], s[r], total=BATCH) for r in next(cuts())]
    assert_same(torch.stack(shares).sum(), baseline_oracles.pseudo_target_loss(logits, s), [logits])
    assert pseudo_target_loss(logits[:0], s[:0], total=0) == 0


@pytest.mark.parametrize("places", [1, 1 << 18])  # looked up at a time: of a round, or of all
def test_disambiguation_is_its_oracle_and_stays_within_the_candidates(
    places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heron.losses.pico.PLACES", places)
    ybar = torch.zeros(BATCH, 4, dtype=torch.float64)
    ybar[torch.arange(BATCH), (CLASSES + 1) % 4] = 1
    ybar[0, (CLASSES[0] + 2) % 4] = 1
    numbers = torch.tensor([40, 7, 9, 31, 12, 3, 25])  # in no order
    memory = Disambiguation(numbers, ybar, 3, gamma=0.9).double()
    torch.testing.assert_close(memory.pseudo_targets(numbers)[0].sum(), torch.tensor(1.0).double())
    assert sorted(memory.pseudo_targets(numbers)[0].tolist()) == [0, 0, 0.5, 0.5]
    for step in range(3):
        q = unit(draw(BATCH, 3, seed=step).detach())
        mu, s = memory.prototypes.clone(), memory.pseudo_targets(numbers)
        mu, s = baseline_oracles.disambiguated(mu, s, q, CLASSES, ybar, 0.9, 0.8)
        memory.update_prototypes(q, CLASSES)
        memory.update_targets(numbers, q, ybar, 0.8)
        torch.testing.assert_close(memory.prototypes, mu, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(memory.pseudo_targets(numbers), s, rtol=1e-12, atol=1e-12)
    assert not memory.pseudo_targets(numbers)[ybar == 1].any()
    torch.testing.assert_close(memory.targets.sum(1), torch.ones(BATCH).double())


@pytest.mark.parametrize("queued", [0, 6])
@pytest.mark.parametrize(("neighbours", "select"), [(0, False), (0, True), (1, True), (3, True)])
def test_comco_is_its_oracle_and_its_shares_add_up(
    queued: int, neighbours: int, select: bool
) -> None:
    q, keys, queue = draw(BATCH, 3), draw(BATCH, 3, seed=1).detach(), draw(queued, 3).detach()
    of_queue = torch.arange(queued) % 4
    ybar, queue_ybar = sets(BATCH), sets(6).flip(0)[:queued]
    ybar[:, 3], queue_ybar[:, 3] = 0, 0  # a class that nobody excludes
    ybar[:, 0] = torch.maximum(ybar[:, 0], (ybar.sum(1) == 0).double())

    def whole(rows: slice = slice(None)) -> Tensor:
        options: Any = {"tau": 0.17, "neighbours": neighbours, "select": select, "rows": rows}
        return comco(q, keys, queue, CLASSES, of_queue, ybar, queue_ybar, **options)

    taken = [*CLASSES.tolist() * 2, *of_queue.tolist()]
    wrong = [row.nonzero()[:, 0].tolist() for row in (*ybar, *ybar, *queue_ybar)]
    expected = baseline_oracles.comco(q, keys, queue, taken, wrong, 4, 0.17, neighbours, select)
    assert_same(whole(), expected, [q])
    for rows in cuts():
        assert_same(torch.stack([whole(part) for part in rows]).sum(), whole(), [q])


def test_comco_of_a_frozen_encoder_has_no_slope() -> None:
    """Its rows take part on several processes, as one's among others do."""
    q, none = draw(BATCH, 3).detach(), torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0, 4, dtype=torch.float64)
    told: list[Tensor] = []

    def gather(x: Tensor) -> Tensor:
        told.append(x)
        return x

    for own in (slice(None), OwnRows(slice(0, BATCH), gather)):
        loss = comco(q, q, empty[:, :3], CLASSES, none, sets(BATCH), empty, rows=own)
        assert torch.isfinite(loss) and not loss.requires_grad
    assert len(told) == 1 and not told[0][:, 0].any()


def test_comco_of_few_rows_is_finite() -> None:
    for batch in (0, 1):
        q, none = draw(batch, 3), torch.zeros(0, dtype=torch.int64)
        empty = torch.zeros(0, 4, dtype=torch.float64)
        loss = comco(q, q, empty[:, :3], CLASSES[:batch], none, sets(7)[:batch], empty)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradients(loss, [q])[0]).all()


def test_scl_nl_is_its_oracle_and_its_shares_add_up() -> None:
    logits, ybar = draw(BATCH, 4), sets(BATCH)
    expected = oracles.complementary("scl_nl", logits, ybar)
    assert_same(scl_nl(logits, ybar, total=BATCH), expected, [logits])
    shares = [scl_nl(logits[r], ybar[r], total=BATCH) for r in next(cuts())]
    assert_same(torch.stack(shares).sum(), oracles.complementary("scl_nl", logits, ybar), [logits])
    with pytest.raises(ValueError, match="row 3 has 0 complementary"):
        scl_nl(logits, ybar * (torch.arange(BATCH) != 3)[:, None], total=BATCH)
