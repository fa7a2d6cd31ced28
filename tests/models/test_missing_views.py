"""A model of rows that lack views: what encoders and batch norm see, and what is made of it."""

import pytest
import torch

from heron.base.errors import TrainingError
from heron.data.batches import Batch
from heron.losses.named_terms import Terms
from heron.losses.objective import build_losses
from heron.models.heterogeneous import Heterogeneous
from heron.models.options import Mlp, ModelConfig
from heron.training.strategy import MicroBatch, refuse_lonely_rows

PRESENT = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1], [1, 0], [1, 1], [0, 1]]).bool()
SIZES = [4, 3]


def model() -> Heterogeneous:
    torch.manual_seed(0)
    config = ModelConfig(encoder=Mlp(widths=[5], dropout=0.4), projection_width=4)
    terms = build_losses(Terms.model_validate({"bce": {}, "nt_xent": {}}))
    return Heterogeneous(config, [[6], [3]], 2, terms).double()


def test_encoders_see_the_rows_that_have_the_view() -> None:
    made, keys = model(), torch.arange(7)
    x = [torch.randn(7, width, dtype=torch.float64) for width in (6, 3)]
    nothing = [view.where(PRESENT[:, [v]], torch.nan) for v, view in enumerate(x)]
    found = made(nothing, keys, SIZES, present=PRESENT)
    other = model()
    hidden, projections = [], []
    for v in range(2):
        encoder, projector = other.branch(v)
        parts = [torch.zeros(7, 5, dtype=torch.float64), torch.zeros(7, 4, dtype=torch.float64)]
        for rows in (torch.arange(4), torch.arange(4, 7)):  # batch norm sees a stream alone
            there = rows[PRESENT[rows, v]]
            seen = encoder(x[v][there], keys[there])
            parts[0][there], parts[1][there] = seen, projector(seen)
        hidden.append(parts[0])
        projections.append(parts[1])
    s = torch.cat(hidden, 1) * (2 / PRESENT.sum(1, keepdim=True))
    torch.testing.assert_close(found["hidden"][0], s)
    torch.testing.assert_close(found["projections"], projections)
    torch.testing.assert_close(found["logits"][0], other.classifier(s))  # type: ignore[misc]
    for name, buffer in made.named_buffers():
        torch.testing.assert_close(buffer, dict(other.named_buffers())[name])
    loss = found["projections"][0].square().sum() + found["logits"][0].square().sum()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


def test_whole_rows_are_as_without_a_mask() -> None:
    x, keys = [torch.randn(7, width, dtype=torch.float64) for width in (6, 3)], torch.arange(7)
    masked = model()(x, keys, SIZES, present=torch.ones(7, 2, dtype=torch.bool))
    for name, tensors in model()(x, keys, SIZES).items():
        torch.testing.assert_close(masked[name], tensors, rtol=0, atol=0)


def test_a_view_that_no_row_has() -> None:
    present = torch.tensor([[1, 0]] * 7).bool()
    x = [torch.randn(7, width, dtype=torch.float64) for width in (6, 3)]
    made = model()
    found = made(x, torch.arange(7), SIZES, present=present)
    assert not found["projections"][1].any() and found["logits"][0].isfinite().all()
    assert not made.encoders[1].layers[2].running_mean.any()  # type: ignore[union-attr, index]


def test_one_row_alone_is_refused() -> None:
    def look(present: torch.Tensor, parts: list[MicroBatch]) -> None:
        keys = torch.arange(7)
        batch = Batch({}, torch.zeros(4, 2), keys, keys, SIZES, present=present)
        refuse_lonely_rows(batch, parts, ["first", "second"])

    one = PRESENT.clone()
    one[:3, 1] = False
    whole = [MicroBatch(torch.arange(7), SIZES)]
    look(PRESENT, whole)
    with pytest.raises(TrainingError, match="only one row of a stream's batch has view 'second'"):
        look(one, whole)
    halves = [
        MicroBatch(torch.tensor(rows), [2, n]) for rows, n in (([0, 1, 4, 6], 2), ([2, 3, 5], 1))
    ]
    with pytest.raises(TrainingError, match="only one row of a stream's batch has view 'first'"):
        look(PRESENT, halves)
