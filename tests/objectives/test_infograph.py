"""InfoGraph's loss against a loop over its equation."""

import math

import pytest
import torch
from torch import Tensor

from heron.base.errors import ConfigError
from heron.losses.infograph import Infograph, infograph
from heron.models.heterogeneous import ModelSpec
from heron.models.options import ModelConfig

GRAPHS, NODES, DIM = 5, 4, 3


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    local = torch.randn(GRAPHS, NODES, DIM, dtype=torch.float64, requires_grad=True)
    graphs = torch.randn(GRAPHS, DIM, dtype=torch.float64, requires_grad=True)
    there = torch.arange(NODES) < torch.tensor([[1], [4], [2], [3], [4]])
    return local, graphs, there


def loop(local: Tensor, graphs: Tensor, there: Tensor) -> Tensor:
    """Sun et al. 2020, Eq. 3 and 4; the expectations of their code, get_positive_expectation."""
    positive, negative, total = [], [], int(there.sum())
    for i in range(GRAPHS):
        for n in range(NODES):
            for j in range(GRAPHS) if there[i, n] else ():
                score = local[i, n] @ graphs[j]
                if i == j:
                    positive.append(math.log(2) - torch.log(1 + torch.exp(-score)))
                else:
                    negative.append(torch.log(1 + torch.exp(-score)) + score - math.log(2))
    e_pos, e_neg = torch.stack(positive).sum(), torch.stack(negative).sum()
    return e_neg / (total * (GRAPHS - 1)) - e_pos / total


def test_it_is_its_equation_and_its_shares_add_up() -> None:
    local, graphs, there = drawn()
    wanted, total = loop(local, graphs, there), int(there.sum())
    slopes = torch.autograd.grad(wanted, [local, graphs])
    cut = slice(0, 2), slice(2, 2), slice(2, GRAPHS)
    shares = [infograph(local[rows], graphs, there[rows], total, rows) for rows in cut]
    for value in (infograph(local, graphs, there, total), torch.stack(shares).sum()):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(value, [local, graphs])
        for got, slope in zip(found, slopes, strict=True):
            torch.testing.assert_close(got, slope, rtol=1e-10, atol=1e-12)


def test_networks_that_know_nothing_lose_nothing() -> None:
    local, graphs, there = drawn()
    assert infograph(local * 0, graphs, there, int(there.sum())).item() == pytest.approx(0)


def test_graphs_without_nodes_lose_nothing() -> None:
    local, graphs, there = drawn()
    assert infograph(local, graphs, there & False, 0).item() == 0


def test_what_cannot_be_compared() -> None:
    local, graphs, there = drawn()
    with pytest.raises(ValueError, match="needs at least 2 graphs in a batch, got 1"):
        infograph(local[:1], graphs[:1], there[:1], 1)
    spec = ModelSpec(ModelConfig(), [[8, 8, 2, 3], [6]], 2, [4, 4], 2)
    with pytest.raises(
        ConfigError, match=r"graphs of one width, got views of shapes \[\(8, 8, 2, 3\), \(6,\)\]"
    ):
        Infograph().build_parts(spec)
