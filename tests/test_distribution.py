"""P processes are one: loss and gradient of every parameter, shares uneven, in float64."""

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pipeline import collectives
from pipeline.config import Cnn, Mlp, Model
from pipeline.data.plan import share, shares
from pipeline.draws import keys
from pipeline.exchange import Split, globalise
from pipeline.models.heterogeneous import Heterogeneous
from pipeline.models.normalisation import synchronise
from pipeline.objectives.objective import Objective
from pipeline.terms import Term, WeightedSupervised, WeightedUnsupervised
from tests import ranks

UNLABELLED, LABELS = 8, 3
TERMS: dict[str, Term] = {
    "bce": Term(),
    "weighted_unsupervised": WeightedUnsupervised(weight=0.7, tau=0.5),
    "weighted_supervised": WeightedSupervised(weight=0.3, tau=0.5),
}


def step(encoder: str, shared: bool, count: int = 11) -> dict[str, Tensor]:
    """Forward and backward over this process's share of one batch of `count` labelled rows."""
    world, rank = collectives.world_size(), collectives.rank()
    torch.manual_seed(0)
    image = encoder == "cnn"
    shape = [8, 8, 3] if image else [6]
    config = Model(
        encoder=Cnn(channels=[4, 5]) if image else Mlp(widths=[7, 5], dropout=0.4),
        projection_width=4,
        shared_encoder=shared,
    )
    model = Heterogeneous(
        config, [shape, shape], LABELS, classify=True, project=True, weigh=True
    ).double()
    synchronise(model)
    wrapped = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(1)
    rows = count + UNLABELLED
    size = [3, 8, 8] if image else [6]
    views = [torch.randn(rows, *size, generator=generator).double() for _ in range(2)]
    targets = (torch.rand(count, LABELS, generator=generator) < 0.4).double()

    # Dropout keeps this exact, too: its masks follow the rows.
    labelled, unlabelled = share(count, rank, world), share(UNLABELLED, rank, world)
    own = [torch.cat([view[:count][labelled], view[count:][unlabelled]]) for view in views]
    split = Split(shares(count, world), shares(UNLABELLED, world))
    objective = Objective(TERMS)
    numbers = torch.arange(rows)
    mine = torch.cat([numbers[:count][labelled], numbers[count:][unlabelled]])
    parts = (labelled, unlabelled) if count else (unlabelled,)  # a stream that is not there
    here = [part.stop - part.start for part in parts]
    features = wrapped(own, keys(0, torch.zeros_like(mine), mine), here)
    whole = globalise(features, targets[labelled], split, objective)
    loss, terms = objective(whole, epoch=1.0)
    (loss * world).backward()  # type: ignore[no-untyped-call]
    result = {f"loss/{name}": collectives.sum_over_processes(v) for name, v in terms.items()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        result[name] = parameter.grad
    return result | {name: buffer for name, buffer in model.named_buffers() if "running" in name}


def steps() -> dict[str, dict[str, Tensor]]:
    """Vectors, images with a shared encoder, and fewer labelled rows than processes."""
    gather_shares()
    return {
        "vectors": step("mlp", shared=False),
        "images": step("cnn", shared=True),
        "two labelled": step("mlp", shared=False, count=2),
        "none labelled": step("cnn", shared=False, count=0),
    }


def gather_shares() -> None:
    """Rank r holds r + 1 rows; the gradient of a row is the sum of what all ranks put on it."""
    rank, world = collectives.rank(), collectives.world_size()
    x = torch.full((rank + 1, 2), float(rank)).requires_grad_()
    whole = collectives.gather(x, [r + 1 for r in range(world)])
    expected = torch.cat([torch.full((r + 1, 2), float(r)) for r in range(world)])
    torch.testing.assert_close(whole.detach(), expected)
    (whole * (rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, torch.full_like(x, world * (world + 1) / 2))


@cache
def alone() -> dict[str, dict[str, Tensor]]:
    (result,) = ranks.run(1, steps)
    return dict(result)


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_those_of_one_process(world: int) -> None:
    for result in ranks.run(world, steps):
        for case, expected in alone().items():
            assert expected["loss/weighted_unsupervised"] > 0
            assert result[case].keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(
                    result[case][name], value, rtol=1e-8, atol=1e-11, msg=f"{case} {name}"
                )
