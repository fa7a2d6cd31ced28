"""The weighted sum of terms: every weight counts, ramped over epochs, and memories by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heron.base.errors import TrainingError
from heron.losses.batch import FeatureMap, GlobalBatch
from heron.losses.loss import Loss
from heron.losses.named_terms import Terms, named_terms
from heron.losses.objective import Objective
from heron.losses.terms import Needs, section_of


class Square(Loss):
    """The square of a number that is known."""

    needs = Needs(own=("projections",))

    def __init__(self, *, value: float) -> None:
        super().__init__()
        self.value = value

    def share(self, batch: GlobalBatch) -> Tensor | None:
        z: Tensor = batch.own["projections"][0]
        return self.value * z.square().sum()


def batch(z: Tensor, epoch: float) -> GlobalBatch:
    nothing: dict[str, list[Tensor]] = {}
    return GlobalBatch(
        own=FeatureMap("own", {"projections": [z]}),
        gathered=FeatureMap("gathered", nothing),
        gathered_labelled=FeatureMap("labelled", nothing),
        targets=torch.zeros(0, 2),
        rows=slice(0, 1),
        labelled=slice(0, 0),
        labelled_indices=torch.zeros(0, dtype=torch.int64),
        inputs=[z],
        indices=torch.zeros(1, dtype=torch.int64),
        rng_keys=torch.zeros(1, dtype=torch.int64),
        epoch=epoch,
        gather_labelled=lambda x: x,
    )


def objective(**terms: tuple[type[Loss], dict[str, Any]]) -> Objective:
    """The objective of losses and their options by name."""
    sections = {name: section_of(loss)(**options) for name, (loss, options) in terms.items()}
    return Objective(Terms.model_validate(sections))


@pytest.mark.parametrize(
    ("epoch", "share"), [(0.0, 0.0), (1.0, 0.25), (3.5, 0.875), (4.0, 1.0), (9.0, 1.0)]
)
def test_value_and_gradient_are_the_weighted_sum(epoch: float, share: float) -> None:
    """One weight is constant, one rises from 0 over four epochs; the terms are told unweighted."""
    terms = objective(
        one=(Square, {"weight": 0.5, "value": 3}),
        two=(Square, {"weight": 2, "value": 7, "ramp_epochs": 4}),
    )
    z = torch.tensor([2.0], requires_grad=True)
    loss, told = terms(batch(z, epoch))
    assert loss.item() == pytest.approx(0.5 * 12 + share * 2 * 28)
    (slope,) = torch.autograd.grad(loss, z)
    assert slope.item() == pytest.approx(0.5 * 12 + share * 2 * 28)  # d/dz z^2 = 4 = z^2 at 2
    assert {name: value.item() for name, value in told.items()} == {"one": 12, "two": 28}
    assert not any(value.requires_grad for value in told.values())


def test_a_term_that_gives_none_is_left_out_of_the_sum() -> None:
    class Idle(Square):
        def share(self, batch: GlobalBatch) -> None:
            return None

    z = torch.tensor([2.0], requires_grad=True)
    idle = Idle, {"weight": 3, "value": 1}
    both = objective(idle=idle, one=(Square, {"weight": 0.5, "value": 3}))
    loss, told = both(batch(z, 0.0))
    assert loss.item() == 6 and set(told) == {"one"}
    with pytest.raises(TrainingError, match="objective: idle gave no loss; add a term that does"):
        objective(idle=idle)(batch(z, 0.0))


DEFAULTS: dict[str, dict[str, Any]] = {  # what papers and authors' code say: see docs/objectives.md
    "barlow_twins": {"redundancy": 0.0051},
    "vicreg": {"invariance": 25, "variance": 25, "covariance": 1},
    "c2ae": {"alpha": 0.5, "penalty": 0.5, "scale": 5, "hidden": 512},
    "clip": {"tau": 0.07},
    "siglip": {"scale": 10},
    "cmc": {"tau": 0.5},
    "comco": {"queue": 8192, "momentum": 0.999, "tau": 0.17, "contrast": 0.3, "neighbours": 1}
    | {"neighbour_epochs": 100, "warmup_epochs": 1},
    "debiased": {"tau": 0.5, "tau_plus": 0.1},
    "deepmtmv": {"every_epochs": 10, "decay": 0.99, "cost": 0.0625, "separation": 1.95}
    | {"consensus": 0.1},
    "fixmatch": {"threshold": 0.95},
    "gce": {"q": 0.7},
    "hard": {"supervised": True, "tau": 0.5, "beta": 1, "threshold_start": -0.3}
    | {"threshold_end": 0, "threshold_epochs": 200, "detach": False},
    "hierarchical": {"tau": 0.1, "constrain": True},
    "input_weighted_unsupervised": {"tau": 1},
    "mib": {"beta": 1, "beta_start": 0.001, "beta_epochs": 100},
    "mulco": {"queue": 8192, "momentum": 0.999, "tau": 0.05},
    "nt_xent": {"tau": 0.5},
    "pico": {"queue": 8192, "momentum": 0.999, "tau": 0.07, "contrast": 0.5, "gamma": 0.99}
    | {"phi_start": 0.95, "phi_end": 0.8, "phi_epochs": 200, "warmup_epochs": 1},
    "plnl": {"pretrain_epochs": 200, "warmup_epochs": 20, "consistency_epochs": 100, "epochs": 3}
    | {"sure": 0.99, "neighbours": 500, "share": 0.1},
    "single_view_unsupervised": {"tau": 1},
    "supcon": {"tau": 0.1},
    "weighted_supervised": {"tau": 1, "self_pairs": False},
    "weighted_unsupervised": {"tau": 1},
}


def test_options_that_are_left_out_are_those_of_the_papers() -> None:
    for name, term in named_terms().items():
        options = term().model_dump()
        assert (options.pop("weight"), options.pop("ramp_epochs")) == (1, 0)
        numbers = {key: n for key, n in options.items() if isinstance(n, int | float)}
        assert numbers == DEFAULTS.get(name, {}), name
