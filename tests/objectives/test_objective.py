"""The weighted sum of terms: every weight counts, ramped over epochs, and memories by name."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from heron.pipeline.config.errors import TrainingError
from heron.pipeline.config.terms import Needs, Term
from heron.pipeline.objectives.batch import ByName, GlobalBatch
from heron.pipeline.objectives.objective import Objective


class Square(Term):
    """The square of a number that is known."""

    needs: ClassVar[Needs] = Needs(own=("projections",))
    value: float

    def loss(self, batch: Any, memory: Any) -> Tensor:
        z: Tensor = batch.own["projections"][0]
        return self.value * z.square().sum()


def batch(z: Tensor, epoch: float) -> GlobalBatch:
    nothing: dict[str, list[Tensor]] = {}
    return GlobalBatch(
        own=ByName("own", {"projections": [z]}),
        gathered=ByName("gathered", nothing),
        gathered_labelled=ByName("labelled", nothing),
        targets=torch.zeros(0, 2),
        rows=slice(0, 1),
        labelled=slice(0, 0),
        labelled_at=torch.zeros(0, dtype=torch.int64),
        inputs=[z],
        indices=torch.zeros(1, dtype=torch.int64),
        rng_keys=torch.zeros(1, dtype=torch.int64),
        epoch=epoch,
        gather_labelled=lambda x: x,
    )


@pytest.mark.parametrize(
    ("epoch", "share"), [(0.0, 0.0), (1.0, 0.25), (3.5, 0.875), (4.0, 1.0), (9.0, 1.0)]
)
def test_value_and_gradient_are_the_weighted_sum(epoch: float, share: float) -> None:
    """One weight is constant, one rises from 0 over four epochs; the terms are told unweighted."""
    terms = {"one": Square(weight=0.5, value=3), "two": Square(weight=2, value=7, ramp_epochs=4)}
    z = torch.tensor([2.0], requires_grad=True)
    loss, told = Objective(terms)(batch(z, epoch))
    assert loss.item() == pytest.approx(0.5 * 12 + share * 2 * 28)
    (slope,) = torch.autograd.grad(loss, z)
    assert slope.item() == pytest.approx(0.5 * 12 + share * 2 * 28)  # d/dz z^2 = 4 = z^2 at 2
    assert {name: value.item() for name, value in told.items()} == {"one": 12, "two": 28}
    assert not any(value.requires_grad for value in told.values())


def test_a_term_that_gives_none_is_left_out_of_the_sum() -> None:
    class Idle(Square):
        def loss(self, batch: Any, memory: Any) -> Any:
            return None

    z = torch.tensor([2.0], requires_grad=True)
    both = {"idle": Idle(weight=3, value=1), "one": Square(weight=0.5, value=3)}
    loss, told = Objective(both)(batch(z, 0.0))
    assert loss.item() == 6 and set(told) == {"one"}
    with pytest.raises(TrainingError, match="objective: idle gave no loss; expected one that does"):
        Objective({"idle": both["idle"]})(batch(z, 0.0))
