"""P processes are one: loss and gradient of every parameter, shares uneven, in float64."""

import copy
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from heron.base.errors import TrainingError
from heron.data.batches import Batch
from heron.data.plan import even_sizes, even_slice
from heron.data.random_keys import rng_keys
from heron.distributed import collectives, sync_batchnorm
from heron.distributed.sync_batchnorm import (
    GlobalBatchNorm,
    has_norm,
    synchronise,
)
from heron.losses.exchange import ShardSizes
from heron.losses.named_terms import Terms
from heron.losses.objective import Objective, build_losses, gather_batch
from heron.losses.run import RunSpec, StepEnd
from heron.losses.terms import TermSection
from heron.models.heterogeneous import Heterogeneous
from heron.models.options import Cnn, Convnet, Mlp, ModelConfig, Resnet
from heron.training.strategy import (
    Strategy,
    micro_batches,
    refuse_lonely_rows,
)
from tests import ranks
from tests.distributed.terms import (
    BOTTLENECKS,
    CODES,
    GROUPS,
    HEROCON,
    HEROCON_CLIP,
    MISSING,
    NETWORKS,
    OTHERS,
    SINGLE,
)

UNLABELLED, LABELS = 8, 3


ENCODERS: dict[str, tuple[ModelConfig, list[int]]] = {  # and the shape of a sample as stored
    "mlp": (ModelConfig(encoder=Mlp(widths=[7, 5], dropout=0.4), projection_width=4), [6]),
    "plain": (ModelConfig(encoder=Mlp(widths=[7, 5], norm=False), projector="mlp"), [6]),
    "no dropout": (ModelConfig(encoder=Mlp(widths=[7, 5]), projection_width=4), [6]),
    "cnn": (ModelConfig(encoder=Cnn(channels=[4, 5]), projection_width=4), [8, 8, 3]),
    "convnet": (
        ModelConfig(
            encoder=Convnet(channels=[3, 4], widths=[6], shape=[1, 4, 6]), projection_width=4
        ),
        [24],
    ),
    "resnet": (
        ModelConfig(
            encoder=Resnet(widths=[4, 6], depths=[1, 2]),
            projection_width=4,
            projector="mlp",
            classify_on="first_view",
        ),
        [8, 8, 3],
    ),
}


def step(
    encoder: str,
    shared: bool,
    count: int = 11,
    chosen: dict[str, TermSection] = HEROCON,
    rounds: int = 1,
    pieces: int = 1,
    matryoshka: Sequence[int] = (),
    missing: bool = False,
) -> dict[str, Tensor]:
    """Forward and backward over this process's share of batches of `count` labelled rows.

    The gradients are those of the last round; a momentum encoder has seen the rounds before.
    """
    world, rank = collectives.world_size(), collectives.rank()
    torch.manual_seed(0)
    base, shape = ENCODERS[encoder]
    objective = Objective(Terms.model_validate(chosen), matryoshka)
    config = base.model_copy(
        update={
            "shared_encoder": shared,
            "shared_projector": shared,
            "matryoshka": list(matryoshka),
        }
    )
    model = Heterogeneous(config, [shape, shape], LABELS, objective.terms).double()
    wrong = torch.eye(LABELS)[torch.arange(count) % LABELS]
    run = RunSpec(model, torch.arange(count), LABELS, lambda: wrong, objective.terms)
    objective.build_memories(run)
    for memory in objective.memories.values():
        synchronise(memory.double())
    synchronise(model)
    strategy = Strategy(model, DistributedDataParallel(model), SGD(model.parameters()))
    generator = torch.Generator().manual_seed(1)
    planes = [shape[2], *shape[:2]] if len(shape) == 3 else shape

    # Dropout keeps this exact, too: its masks follow the rows.
    labelled, unlabelled = even_slice(count, rank, world), even_slice(UNLABELLED, rank, world)
    sizes = ShardSizes(even_sizes(count, world), even_sizes(UNLABELLED, world))
    numbers = torch.arange(count + UNLABELLED)
    mine = torch.cat([numbers[:count][labelled], numbers[count:][unlabelled]])
    streams = (labelled, unlabelled) if count else (unlabelled,)  # a stream that is not there
    here = [part.stop - part.start for part in streams]
    for turn in range(rounds):
        x = [torch.randn(len(numbers), *planes, generator=generator).double() for _ in range(2)]
        own = [torch.cat([view[:count][labelled], view[count:][unlabelled]]) for view in x]
        y = (torch.rand(count, LABELS, generator=generator) < 0.4).double()
        y[:, 0] = 1 - y[:, 1:].amax(1)  # of complementary labels: some class, and not all
        paths = torch.randint(0, 2, (count, 3), generator=generator)
        row_keys, present = rng_keys(0, torch.zeros_like(mine), mine), None
        if missing:  # row 0 lacks the first view, and so on; half of the labels are unknown
            present = torch.stack([mine % 3 != 0, mine % 3 != 1], 1)
            y = torch.where(torch.rand(count, LABELS, generator=generator) < 0.5, y, torch.nan)
        batch = Batch({}, y[labelled], mine, row_keys, here, paths[labelled], present=present)
        model.zero_grad()
        micro = micro_batches(here, sizes.offsets(), pieces)
        refuse_lonely_rows(batch, micro, ["one", "two"])
        features, backward = strategy.embed(own, batch, micro)
        epoch = 1.0 + turn if "plnl" in chosen else 1.0
        whole = gather_batch(features, batch, own, sizes, objective, epoch)
        loss, terms = objective(whole)
        backward(loss)
        objective.update_memories(
            StepEnd(0, 1, strategy.gathered_parameters, collectives.broadcast_object)
        )
    result = {f"loss/{name}": collectives.sum_over_processes(v) for name, v in terms.items()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        result[name] = parameter.grad
    remembered = objective.memory_state()
    assert "plnl" not in chosen or (remembered["plnl/guesses"] >= 0).any()
    result |= remembered
    kept = "running", "groups", "margins", "agreement"
    return result | {n: buffer for n, buffer in model.named_buffers() if any(k in n for k in kept)}


def steps() -> dict[str, dict[str, Tensor]]:
    """Vectors, images with a shared encoder, and fewer labelled rows than processes."""
    gather_shares()
    return (
        {
            "vectors": step("mlp", shared=False),
            "images": step("cnn", shared=True),
            "two networks": step("resnet", shared=True, chosen=NETWORKS, rounds=3),
            "two networks, in pieces": step(
                "resnet", shared=True, chosen=NETWORKS, rounds=3, pieces=2
            ),
            "task groups": step("no dropout", shared=False, chosen=GROUPS, rounds=3),
            "task groups, few labelled, in pieces": step(
                "no dropout", shared=False, chosen=GROUPS, rounds=3, count=4, pieces=2
            ),
            "two labelled": step("mlp", shared=False, count=2),
            "none labelled": step("cnn", shared=False, count=0),
            "vectors as planes": step("convnet", shared=False),
            "residual": step("resnet", shared=True, count=2),
            "vectors in pieces": step("mlp", shared=False, pieces=2),
            "images in pieces": step("cnn", shared=True, pieces=3),
            "residual in pieces": step("resnet", shared=True, count=4, pieces=2),
            "plain": step("plain", shared=False),
            "plain in pieces": step("plain", shared=False, pieces=5),
            "queue in pieces": step(
                "plain", shared=True, chosen=OTHERS["complementary labels"], rounds=2, pieces=4
            ),
            "label codes, two labelled": step("plain", shared=False, count=2, chosen=CODES),
            "bottlenecks in pieces": step("plain", shared=False, chosen=BOTTLENECKS, pieces=4),
            "inputs in pieces": step("cnn", shared=False, chosen=SINGLE, pieces=2),
            "prefixes": step(
                "mlp", True, chosen=OTHERS["contrast of all rows"], matryoshka=[2, 3, 4]
            ),
            "prefixes in pieces": step(
                "mlp", True, chosen=OTHERS["contrast of labelled rows"], pieces=2, matryoshka=[2, 4]
            ),
            "prefixes of codes": step("no dropout", True, chosen=BOTTLENECKS, matryoshka=[2, 4]),
            "missing views": step("mlp", shared=False, chosen=MISSING, missing=True),
            "missing views, few labelled, in pieces": step(
                "convnet", shared=False, count=10, chosen=MISSING, pieces=2, missing=True
            ),
            "missing views of images": step("cnn", shared=True, chosen=HEROCON_CLIP, missing=True),
            "label codes in pieces": step("plain", shared=False, chosen=CODES, pieces=4),
        }
        | {
            name: step(
                "mlp",
                shared=True,
                chosen=chosen,
                rounds=2 if {"mulco", "pico", "comco"} & chosen.keys() else 1,
            )
            for name, chosen in OTHERS.items()
        }
        | {
            f"prefixes, {name}": step("mlp", True, chosen=OTHERS[name], rounds=2, matryoshka=[2, 4])
            for name in ("complementary labels", "pseudo-labels", "far complementary labels")
        }
    )


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
            losses = [float(value) for name, value in expected.items() if "loss/" in name]
            assert max(losses) > 0
            assert result[case].keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(
                    result[case][name], value, rtol=1e-8, atol=1e-11, msg=f"{case} {name}"
                )


def gather_chunks() -> list[Tensor]:
    """What rank 0 gets of tensors that `torch.chunk` cuts; the last process may have no row."""
    group, full = collectives.background_group(), list[Tensor]()
    backend = group._get_backend(torch.device("cpu"))  # as patient as the group of training
    assert backend.options._timeout == timedelta(days=1)
    for rows in (1, 2, 3, 4, 7, 9):
        whole = torch.arange(rows * 2.0).view(rows, 2)
        chunks = [*whole.chunk(collectives.world_size()), *[whole[:0]] * 3]
        share = chunks[collectives.rank()]
        found = collectives.gather_on_main(share, rows, group)
        full.append(found - (whole if collectives.rank() == 0 else share))
    return full


@pytest.mark.parametrize("world", [1, 3])
def test_shares_of_any_number_of_rows_are_gathered_on_the_main_process(world: int) -> None:
    for differences in ranks.run(world, gather_chunks):
        assert all(x.eq(0).all() for x in differences)
        lengths = [len(x) for x in differences]
        assert lengths in ([1, 2, 3, 4, 7, 9], [0, 1, 1, 2, 3, 3], [0, 0, 1, 0, 1, 3])


def test_without_batch_norm_pieces_are_the_whole() -> None:
    """The gradient of a step in micro-batches is that of the step, with dropout too."""
    for name, value in alone()["plain"].items():
        torch.testing.assert_close(
            alone()["plain in pieces"][name], value, rtol=1e-9, atol=1e-12, msg=name
        )


def normalised(kind: str) -> list[Tensor]:
    """A batch norm without weights on this process's rows; its output, gradient and statistics."""
    world, rank = collectives.world_size(), collectives.rank()
    x = torch.randn(11, 3, generator=torch.Generator().manual_seed(2)).double()
    own = x[even_slice(11, rank, world)].clone().requires_grad_()
    module = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3, affine=kind == "affine").double())
    synchronise(module)
    assert isinstance(module[0], GlobalBatchNorm) == (world > 1)
    y = module(own)
    (y * torch.arange(11)[even_slice(11, rank, world), None] ** 2).sum().backward()
    norm, sizes = module[0], even_sizes(11, world)
    assert own.grad is not None and isinstance(norm, nn.modules.batchnorm._BatchNorm)
    whole = [collectives.gather(part.detach(), sizes) for part in (y, own.grad)]
    return whole + [buffer for buffer in norm.buffers()]


@pytest.mark.parametrize("kind", ["affine", "without weights"])
def test_any_batch_norm_is_synchronised(kind: str) -> None:
    (alone,) = ranks.run(1, normalised, kind)
    for several in ranks.run(3, normalised, kind):
        torch.testing.assert_close(several, alone, rtol=1e-9, atol=1e-11)


def test_a_synchronised_batch_norm_keeps_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen one stays frozen and keeps its rate; one that stands in two places stays one."""
    monkeypatch.setattr(sync_batchnorm, "world_size", lambda: 2)
    norm: Any = nn.BatchNorm1d(3).requires_grad_(False)
    norm.weight.rate_share = 0.5
    norm.running_mean += 1
    one, two = nn.Sequential(norm), nn.Sequential(nn.BatchNorm1d(2), norm)
    model = nn.ModuleList([one, two])
    synchronise(model)
    synchronised: Any = one[0]
    assert isinstance(synchronised, GlobalBatchNorm) and synchronised is two[1]
    assert not norm.weight.requires_grad and norm.weight.rate_share == 0.5
    assert synchronised.weight is norm.weight and synchronised.bias is norm.bias
    assert torch.equal(synchronised.state_dict()["running_mean"], norm.running_mean)
    assert len(dict(model.named_parameters())) == 4


def test_a_frozen_batch_norm_sees_each_row_alone() -> None:
    """So that no step is refused for a micro-batch or a view with a single row."""
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    assert not has_norm(frozen) and has_norm(nn.ModuleList([frozen, nn.BatchNorm1d(3)]))


@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"momentum": None}])
def test_a_batch_norm_that_cannot_be_is_named(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_batchnorm, "world_size", lambda: 2)
    with pytest.raises(TrainingError, match="0 is BatchNorm1d.*; it needs running statistics and"):
        synchronise(nn.Sequential(nn.BatchNorm1d(3, **options)))


def test_running_statistics_move_once_a_micro_batch() -> None:
    """As they do where each micro-batch is passed forward once: not in both passes over it."""
    torch.manual_seed(0)
    shapes, rows = [[6], [6]], 9
    losses = build_losses(Terms.model_validate(HEROCON))
    model = Heterogeneous(ENCODERS["mlp"][0], shapes, LABELS, losses).double()
    straight = copy.deepcopy(model)
    x = [torch.randn(rows, 6).double() for _ in shapes]
    batch = Batch(
        {}, torch.zeros(4, LABELS).double(), torch.arange(rows), torch.arange(rows), [4, 5]
    )
    pieces = micro_batches([4, 5], [0, 0], 2)
    for one in pieces:
        straight([view[one.indices] for view in x], one.indices, one.sizes, torch.zeros(0, LABELS))
    strategy = Strategy(model, model, SGD(model.parameters()))
    features, backward = strategy.embed(x, batch, pieces)
    backward(
        torch.stack([part.square().sum() for parts in features.values() for part in parts]).sum()
    )
    found, expected = dict(model.named_buffers()), dict(straight.named_buffers())
    moved = [name for name in expected if "running" in name]
    assert len(moved) > 4 and not torch.equal(expected[moved[0]], torch.zeros(7).double())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0, msg=name)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_row_is_in_the_same_micro_batch_on_any_number_of_processes(
    world: int, number: int
) -> None:
    labelled, unlabelled = 13, 30
    sizes = ShardSizes(even_sizes(labelled, world), even_sizes(unlabelled, world))
    found: list[set[tuple[str, int]]] = [set() for _ in range(number)]
    for rank in range(world):
        here = [sizes.labelled[rank], sizes.unlabelled[rank]]
        offsets = [sum(sizes.labelled[:rank]), sum(sizes.unlabelled[:rank])]
        mine = [("labelled", offsets[0] + i) for i in range(here[0])]
        mine += [("unlabelled", offsets[1] + i) for i in range(here[1])]
        pieces = micro_batches(here, offsets, number)
        assert torch.cat([piece.indices for piece in pieces]).sort().values.tolist() == list(
            range(len(mine))
        )
        for place, piece in enumerate(pieces):
            assert len(piece.indices) == sum(piece.sizes)
            found[place] |= {mine[row] for row in piece.indices.tolist()}
    for place, rows in enumerate(found):
        expected = {("labelled", i) for i in range(place, labelled, number)}
        assert rows == expected | {("unlabelled", i) for i in range(place, unlabelled, number)}
