"""Losses without negatives: by their definitions in loops and in other code's words."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heron import losses as h
from heron.losses.functional import barlow_twins, vicreg

ROWS, DIM = 7, 5
Term = Callable[..., Tensor]


def drawn(views: int, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(ROWS, DIM, dtype=torch.float64, requires_grad=True) for _ in range(views)]


def looped_barlow(z: list[Tensor], redundancy: float) -> Tensor:
    """Eq. 1 and 2, one correlation at a time."""
    found = []
    for one, two in itertools.combinations(z, 2):
        total, width = one.new_zeros(()), one.shape[1]
        for i in range(width):
            for j in range(width):
                a, b = one[:, i] - one[:, i].mean(), two[:, j] - two[:, j].mean()
                spread = (a.square().mean() + 1e-5).sqrt() * (b.square().mean() + 1e-5).sqrt()
                c = (a * b).mean() / spread
                total = total + ((1 - c) ** 2 if i == j else redundancy * c**2)
        found.append(total)
    return sum(found, z[0].new_zeros(())) / len(found)


def authors_vicreg(x: Tensor, y: Tensor, s: float, v: float, c: float) -> Tensor:
    """The published code's lines, for two views."""

    def off_diagonal(m: Tensor) -> Tensor:
        return m.flatten()[:-1].view(DIM - 1, DIM + 1)[:, 1:].flatten()

    near = F.mse_loss(x, y)
    x, y = x - x.mean(0), y - y.mean(0)
    stds = [torch.sqrt(one.var(0) + 0.0001) for one in (x, y)]
    spread = sum(torch.mean(F.relu(1 - std)) / 2 for std in stds)
    covs = [one.T @ one / (ROWS - 1) for one in (x, y)]
    shared = sum(off_diagonal(cov).pow(2).sum() / DIM for cov in covs)
    return s * near + v * spread + c * shared


def looped_vicreg(z: list[Tensor], s: float, v: float, c: float) -> Tensor:
    """Eq. 1 to 6 for any number of views."""
    pairs = list(itertools.combinations(z, 2))
    near = sum((one - two).square().mean() for one, two in pairs) / len(pairs)
    spread, shared = [], []
    for one in z:
        a, (rows, width) = one - one.mean(0), one.shape
        for j in range(width):
            own = (a[:, j].square().sum() / (rows - 1) + 1e-4).sqrt()
            spread.append(torch.clamp(1 - own, min=0) / width)
            for k in range(width):
                if k != j:
                    shared.append(((a[:, j] * a[:, k]).sum() / (rows - 1)) ** 2 / width)
    views = len(z)
    return (
        s * near + v * torch.stack(spread).sum() / views + c * 2 * torch.stack(shared).sum() / views
    )


def assert_same(found: Tensor, expected: Tensor, z: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, two in zip(*(torch.autograd.grad(x, z) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("views", [2, 3])
def test_they_are_the_equations_in_loops(views: int) -> None:
    z = drawn(views)
    assert_same(h.BarlowTwins(redundancy=0.3)(z), looped_barlow(z, 0.3), z)
    own = h.Vicreg(invariance=3, variance=2, covariance=0.7)(z)
    assert_same(own, looped_vicreg(z, 3, 2, 0.7), z)


def test_vicreg_is_the_authors_code() -> None:
    z = drawn(2)
    assert_same(h.Vicreg()(z), authors_vicreg(z[0], z[1], 25, 25, 1), z)


@pytest.mark.parametrize("term", [barlow_twins, vicreg])
def test_shares_of_columns_add_up_with_their_gradients(term: Term) -> None:
    z = drawn(3)
    for ends in ([0, 2, 5], [0, 0, 1, 4, 5]):
        shares = [term(z, columns=slice(*two)) for two in itertools.pairwise(ends)]
        assert_same(torch.stack(shares).sum(), term(z), z)


@pytest.mark.parametrize("term", [barlow_twins, vicreg])
def test_odd_batches_and_columns_have_finite_gradients(term: Term) -> None:
    """A single row, none, a column that is constant, and half precision."""
    constant = torch.randn(ROWS, DIM)
    constant[:, 2] = 3
    for x in (torch.randn(1, DIM), torch.zeros(0, DIM), constant):
        z = [x.clone().requires_grad_() for _ in range(2)]
        loss = term(z)
        torch.autograd.backward(loss)
        assert loss.isfinite() and all(one.grad is not None for one in z)
        assert all(one.grad.isfinite().all() for one in z if one.grad is not None)
    z = drawn(2)
    kind = h.BarlowTwins() if term is barlow_twins else h.Vicreg()
    exact = kind([one.detach().bfloat16().float() for one in z])
    torch.testing.assert_close(kind([one.detach().bfloat16() for one in z]), exact)


@pytest.mark.parametrize("term", [barlow_twins, vicreg])
def test_one_view_is_refused(term: Term) -> None:
    with pytest.raises(
        ValueError, match=f"{term.__name__} needs at least 2 views, got 1; a single"
    ):
        term(drawn(1))
