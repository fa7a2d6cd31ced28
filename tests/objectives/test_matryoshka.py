"""Every term of projections is its mean over prefixes; what has no prefix is refused."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import ModelView, parse_config
from heron.pipeline.config.model import Model
from heron.pipeline.config.terms import Terms, named_terms
from heron.pipeline.objectives.batch import ByName, GlobalBatch
from heron.pipeline.objectives.objective import Objective
from tests import oracles
from tests.experiments import FRAMES, merge
from tests.objectives.test_terms import draw

BATCH, LABELLED, DIM, WIDTHS = 7, 5, 6, [2, 3, 6]
LABEL = torch.tensor([1, 0, 0, 2, 1])
LEVELS = torch.tensor([[0, 0], [0, 1], [0, 1], [1, 0], [0, 0]])
VIEWS = [ModelView(stored="view1"), ModelView(stored="view1")]
OTHERS = ("weights", "input_projections", "hidden", "inputs")


def features() -> dict[str, list[Tensor]]:
    """Two views of all there is, of all rows; inputs take no gradient."""
    names = ("projections", *OTHERS)
    found = {
        name: [draw(BATCH, DIM + (n > 2), seed=10 * n + view) for view in range(2)]
        for n, name in enumerate(names)
    }
    return found | {"inputs": [x.detach() for x in found["inputs"]]}


def batch(known: Mapping[str, list[Tensor]], rows: slice = slice(0, BATCH)) -> GlobalBatch:
    """The batch as it is for the process that has some rows; the labelled ones are the first."""
    here = range(*rows.indices(BATCH))
    own = {name: [x[rows] for x in parts] for name, parts in known.items()}
    labelled = {"hidden": [known["hidden"][0][:LABELLED]], "paths": [LEVELS]}
    return GlobalBatch(
        own=ByName("own", own),
        gathered=ByName("gathered", known),
        gathered_labelled=ByName("labelled", labelled),
        targets=torch.eye(3).double()[LABEL],
        rows=rows,
        labelled=slice(min(here.start, LABELLED), min(here.stop, LABELLED)),
        labelled_at=torch.arange(LABELLED),
        inputs=[x[rows] for x in known["inputs"]],
        indices=torch.arange(BATCH)[rows],
        rng_keys=torch.arange(BATCH)[rows],
        epoch=200.0,
        gather_labelled=lambda x: x,
    )


# The loop of each term, in float64, of the first m numbers of all that has as many as z.
Loop = Callable[[dict[str, list[Tensor]], int], Tensor]


def first(parts: list[Tensor], m: int, rows: int = BATCH) -> list[Tensor]:
    return [x[:rows, :m] for x in parts]


LOOPS: dict[str, tuple[dict[str, Any], Loop]] = {
    "nt_xent": ({"tau": 0.3}, lambda f, m: oracles.nt_xent(first(f["projections"], m), 0.3)),
    "cmc": ({"tau": 0.3}, lambda f, m: oracles.cmc(first(f["projections"], m), 0.3)),
    "debiased": (
        {"tau": 0.3, "tau_plus": 0.2},
        lambda f, m: oracles.debiased(first(f["projections"], m), 0.3, 0.2),
    ),
    "weighted_unsupervised": (
        {"tau": 0.3},
        lambda f, m: oracles.weighted_unsupervised(
            first(f["projections"], m), first(f["weights"], m), 0.3, "all", "all_views"
        ),
    ),
    "input_weighted_unsupervised": (
        {"tau": 0.3},
        lambda f, m: oracles.input_weighted_unsupervised(
            first(f["projections"], m), f["inputs"], 0.3, "all"
        ),
    ),
    "single_view_unsupervised": (
        {"tau": 0.3},
        lambda f, m: oracles.single_view_unsupervised(
            first(f["input_projections"], m),
            first(f["projections"], m),
            first(f["weights"], m),
            0.3,
        ),
    ),
    "supcon": (
        {"tau": 0.3},
        lambda f, m: oracles.supcon(first(f["projections"], m, LABELLED), LABEL, 0.3),
    ),
    "hard": (
        {"tau": 0.3, "hardening": "exp", "beta": 0.7},
        lambda f, m: oracles.hard(
            first(f["projections"], m, LABELLED), LABEL, 0.3,
            hardening="exp", beta=0.7, threshold=1.0, positives="label", detach=False,
        ),
    ),
    "hierarchical": (
        {"tau": 0.3},
        lambda f, m: oracles.hierarchical(
            first(f["projections"], m, LABELLED), LEVELS, 0.3, True, "exp_inverse"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_a_term_is_the_mean_of_its_loop_over_the_widths(name: str) -> None:
    options, loop = LOOPS[name]
    terms = Terms.model_validate({name: options}).terms()
    assert Objective(terms).matryoshka == ()
    known = features()
    leaves = [x for parts in known.values() for x in parts if x.requires_grad]
    expected = torch.stack([loop(known, m) for m in WIDTHS]).sum() / len(WIDTHS)
    slopes = torch.autograd.grad(expected, leaves, allow_unused=True, materialize_grads=True)
    shares = [
        Objective(terms, WIDTHS)(batch(known, rows))[0]
        for rows in (slice(0, 3), slice(3, 3), slice(3, BATCH))
    ]
    found = torch.stack(shares).sum()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    got = torch.autograd.grad(found, leaves, allow_unused=True, materialize_grads=True)
    for one, other in zip(got, slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)
    assert not math.isclose(found.item(), loop(known, DIM).item(), rel_tol=1e-4)


def test_every_term_of_projections_has_its_loop_or_is_refused() -> None:
    compared = {k for k, t in named_terms().items() if "projections" in t.needs.features}
    refused = {k for k in compared if named_terms()[k].nested is None}
    assert refused == {"mulco", "pico", "comco", "mib"}
    assert compared - refused == LOOPS.keys()


def test_a_term_of_other_features_is_taken_once() -> None:
    terms = Terms.model_validate({"nt_xent": {}, "weighted_supervised": {}}).terms()
    (_, nested), (_, whole) = (
        Objective(terms, WIDTHS)(batch(features())),
        Objective(terms)(batch(features())),
    )
    assert nested["weighted_supervised"] == whole["weighted_supervised"]
    assert nested["nt_xent"] != whole["nt_xent"]


def test_nothing_is_sent_for_a_prefix() -> None:
    known = features()
    part = batch(known).prefix({"projections"}, 2)
    assert part.projections[1].data_ptr() == known["projections"][1].data_ptr()
    assert [x.shape[1] for x in (part.projections[0], part.own["projections"][0])] == [2, 2]
    assert part.gathered["weights"][0].shape[1] == DIM


@pytest.mark.parametrize(
    ("terms", "kind", "message"),
    [
        (
            {"mib": {}},
            "multi_class",
            r"objective.mib has no meaning on the first .* it, or another",
        ),
        ({"mulco": {}}, "complementary", r"objective.mulco has no meaning on the first numbers of"),
        (
            {"bce": {}},
            "multi_label",
            r"matryoshka is \[2, 4\], and none of bce compares proj.*or \[",
        ),
    ],
)
def test_what_has_no_prefix_is_refused(terms: dict[str, Any], kind: str, message: str) -> None:
    model = Model(projection_width=4, matryoshka=[2, 4], shared_encoder=True, shared_projector=True)
    objective = Objective(Terms.model_validate(terms).terms(), model.matryoshka)
    with pytest.raises(ConfigError, match=message):
        objective.refuse(kind, VIEWS, 8, model)
    plain = model.model_copy(update={"matryoshka": []})
    objective.refuse(kind, VIEWS, 8, plain)


@pytest.mark.parametrize("widths", [[4, 2, 8], [2, 2, 8], [2, 4]])
def test_widths_rise_to_the_whole(widths: list[int]) -> None:
    tree = merge(FRAMES, {"run": {"dir": "r"}, "data": {"path": "p"}})
    changes = {"model": {"projection_width": 8, "matryoshka": widths}}
    with pytest.raises(ConfigError, match=r"matryoshka is .*; expected rising widths, the last of"):
        parse_config(merge(tree, changes))
