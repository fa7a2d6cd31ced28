"""Every term of projections is its mean over prefixes; what has no prefix is refused."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.base.errors import ConfigError
from heron.data.options import ModelView
from heron.experiment.config import parse_config
from heron.losses.batch import FeatureMap, GlobalBatch
from heron.losses.comco import scl_nl
from heron.losses.mib import Bottlenecks
from heron.losses.momentum import CallerKeyQueue
from heron.losses.named_terms import Terms, named_terms
from heron.losses.objective import Objective
from heron.losses.pico import Pico, pseudo_target_loss
from heron.losses.unsupervised import NtXent
from heron.models.heterogeneous import Encoded
from heron.models.options import ModelConfig
from tests import baseline_oracles, oracles
from tests.experiments import FRAMES, merge
from tests.objectives.test_no_negatives import looped_barlow, looped_vicreg
from tests.objectives.test_terms import draw

BATCH, LABELLED, DIM, WIDTHS = 7, 5, 6, [2, 3, 6]
LABEL = torch.tensor([1, 0, 0, 2, 1])
LEVELS = torch.tensor([[0, 0], [0, 1], [0, 1], [1, 0], [0, 0]])
VIEWS = [ModelView(stored="view1"), ModelView(stored="view1")]
SCALES = ("clip_scale", "siglip_scale", "siglip_bias")
OTHERS = ("weights", "input_projections", "hidden", "inputs")


def features() -> dict[str, list[Tensor]]:
    """Two views of all there is, of all rows; inputs take no gradient."""
    names = ("projections", *OTHERS)
    found = {
        name: [draw(BATCH, DIM + (n > 2), seed=10 * n + view) for view in range(2)]
        for n, name in enumerate(names)
    }
    learnt = {name: [draw(BATCH, seed=n)] for n, name in enumerate(SCALES)}
    return found | learnt | {"inputs": [x.detach() for x in found["inputs"]]}


def batch(known: Mapping[str, list[Tensor]], rows: slice = slice(0, BATCH)) -> GlobalBatch:
    """The batch as it is for the process that has some rows; the labelled ones are the first."""
    here = range(*rows.indices(BATCH))
    own = {name: [x[rows] for x in parts] for name, parts in known.items()}
    labelled = {"hidden": [known["hidden"][0][:LABELLED]], "paths": [LEVELS]}
    return GlobalBatch(
        own=FeatureMap("own", own),
        gathered=FeatureMap("gathered", known),
        gathered_labelled=FeatureMap("labelled", labelled),
        vectors=FeatureMap("vectors", known),
        labelled_vectors=FeatureMap(
            "labelled_vectors",
            labelled | {"projections": [z[:LABELLED] for z in known["projections"]]},
        ),
        targets=torch.eye(3).double()[LABEL],
        rows=rows,
        labelled=slice(min(here.start, LABELLED), min(here.stop, LABELLED)),
        labelled_indices=torch.arange(LABELLED),
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
    "barlow_twins": (
        {"redundancy": 0.3},
        lambda f, m: looped_barlow(first(f["projections"], m), 0.3),
    ),
    "vicreg": ({}, lambda f, m: looped_vicreg(first(f["projections"], m), 25, 25, 1)),
    "cmc": ({"tau": 0.3}, lambda f, m: oracles.cmc(first(f["projections"], m), 0.3)),
    "clip": ({}, lambda f, m: oracles.clip(first(f["projections"], m), f["clip_scale"][0])),
    "siglip": (
        {},
        lambda f, m: oracles.siglip(
            first(f["projections"], m), f["siglip_scale"][0], f["siglip_bias"][0]
        ),
    ),
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
    terms = Terms.model_validate({name: options})
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


def test_every_term_of_projections_has_its_loop() -> None:
    compared = {k for k, t in named_terms().items() if "projections" in t.loss.needs.features}
    assert compared == LOOPS.keys() | OF_KEYS.keys() | {"mib"}


KEYS, LOGITS = draw(LABELLED, DIM, seed=70).detach(), draw(LABELLED, 3, seed=71)
QUEUE, OF_QUEUE = draw(4, DIM, seed=72).detach(), draw(4, 3, seed=73).detach().softmax(1)
WRONG = torch.eye(3).double()[LABEL]
OF_CLASS = torch.eye(3).double()[OF_QUEUE.argmax(1)]
# The loop of a width of each term with a queue, of queries, keys and what the queue holds.
OF_KEYS: dict[str, tuple[dict[str, Any], Tensor, Callable[[Tensor, int], Tensor]]] = {
    "mulco": (
        {"tau": 0.3},
        OF_QUEUE,
        lambda q, m: oracles.mulco(
            q, KEYS[:, :m], QUEUE[:, :m], LOGITS.detach().softmax(1), OF_QUEUE, WRONG, 0.3,
            "weighted",
        ),
    ),
    "comco": (
        {"tau": 0.3, "neighbours": 2, "contrast": 0.7},
        torch.cat([OF_CLASS, OF_CLASS.roll(1, 1)], 1),
        lambda q, m: scl_nl(LOGITS, WRONG, total=LABELLED)
        + 0.7
        * baseline_oracles.comco(
            q, KEYS[:, :m], QUEUE[:, :m],
            [*LOGITS.argmax(1).tolist() * 2, *OF_CLASS.argmax(1).tolist()],
            [[c] for c in (*LABEL.tolist() * 2, *OF_CLASS.roll(1, 1).argmax(1).tolist())],
            3, 0.3, 2, True,
        ),
    ),
    "pico": (
        {"tau": 0.3, "contrast": 0.7},
        OF_CLASS,
        lambda q, m: 0.7
        * baseline_oracles.pico(
            q, KEYS[:, :m], QUEUE[:, :m], (LOGITS - 99 * WRONG).argmax(1), OF_CLASS.argmax(1), 0.3
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_KEYS)
def test_a_term_with_a_queue_compares_first_numbers_and_keeps_whole_keys(name: str) -> None:
    options, posteriors, loop = OF_KEYS[name]
    queue, offered = 13, []
    kinds: dict[tuple[int, ...], Any] = {}
    for widths in (tuple(WIDTHS), ()):
        memory: Any = (
            Pico(DIM, WRONG, queue=queue, gamma=0.9).memory
            if name == "pico"
            else CallerKeyQueue(queue, DIM, posteriors.shape[1])
        )
        memory.double().enqueue(QUEUE, posteriors)
        objective = Objective(Terms.model_validate({name: options}), widths)
        objective.terms[name].memory = memory
        known = features() | {"keys": [KEYS], "logits": [LOGITS]}
        kinds[widths] = objective(batch(known))[0], known["projections"][0], memory
        offered.append(memory.offered)
    (found, z, nested), (_, _, whole) = kinds.values()
    expected = torch.stack([loop(z[:LABELLED, :m], m) for m in WIDTHS]).sum() / len(WIDTHS)
    if name == "pico":
        targets = nested.disambiguation.pseudo_targets(torch.arange(LABELLED))
        expected = expected + pseudo_target_loss(LOGITS, targets, total=LABELLED)
        for kept in ("prototypes", "targets"):  # they moved once, by whole projections
            moved = getattr(nested.disambiguation, kept)
            assert torch.equal(moved, getattr(whole.disambiguation, kept)) and moved.any()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    for slope, wanted in zip(
        torch.autograd.grad(found, [z, LOGITS], materialize_grads=True, allow_unused=True),
        torch.autograd.grad(expected, [z, LOGITS], materialize_grads=True, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(slope, wanted, rtol=1e-8, atol=1e-11)
    assert all(torch.equal(a, b) for a, b in zip(*offered, strict=True))


def test_a_width_of_bottlenecks_has_its_own() -> None:
    known = features()["projections"]
    rows = torch.arange(BATCH)
    torch.manual_seed(0)
    parts = Bottlenecks(WIDTHS, 2).double()
    encoded = Encoded([], rows, [], [BATCH], [], rows, known, None, None, None)
    made = parts.add_features(encoded)
    terms = Terms.model_validate({"mib": {"beta": 0.3}})
    found = Objective(terms, WIDTHS)(batch({**features(), "projections": known, **made}))[0]
    losses = []
    for at, width in enumerate(WIDTHS):
        own = Bottlenecks([width], 2).double()
        for mine, other in zip(own, list(parts)[2 * at : 2 * at + 2], strict=True):
            mine.load_state_dict(other.state_dict())
        encoded = Encoded([], rows, [], [4], [], rows, first(known, width), None, None, None)
        of_width = own.add_features(encoded)
        assert of_width["critics"][0].shape == (BATCH, width)
        losses.append(
            baseline_oracles.mib(of_width["critics"], of_width["means"], of_width["stds"], 0.3)
        )
    expected = torch.stack(losses).sum() / len(WIDTHS)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    for slope, wanted in zip(
        torch.autograd.grad(found, known), torch.autograd.grad(expected, known), strict=True
    ):
        torch.testing.assert_close(slope, wanted, rtol=1e-8, atol=1e-11)


def test_a_term_of_other_features_is_taken_once() -> None:
    terms = Terms.model_validate({"nt_xent": {}, "weighted_supervised": {}})
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


class Whole(NtXent):
    """A term of one's own without a meaning on prefixes."""

    truncated = None


@pytest.mark.parametrize(
    ("terms", "kind", "message"),
    [
        (
            {"tests.objectives.test_matryoshka.Whole": {}},
            "multi_class",
            r"objective.tests.*Whole cannot use the first .* with it, or use another",
        ),
        (
            {"bce": {}},
            "multi_label",
            r"matryoshka is \[2, 4\], but none of bce compares proj.* to \[",
        ),
    ],
)
def test_what_has_no_prefix_is_refused(terms: dict[str, Any], kind: str, message: str) -> None:
    model = ModelConfig(
        projection_width=4, matryoshka=[2, 4], shared_encoder=True, shared_projector=True
    )
    objective = Objective(Terms.model_validate(terms), model.matryoshka)
    with pytest.raises(ConfigError, match=message):
        objective.refuse_unfit(kind, VIEWS, 8, model)
    plain = model.model_copy(update={"matryoshka": []})
    objective.refuse_unfit(kind, VIEWS, 8, plain)


@pytest.mark.parametrize("widths", [[4, 2, 8], [2, 2, 8], [2, 4]])
def test_widths_rise_to_the_whole(widths: list[int]) -> None:
    tree = merge(FRAMES, {"run": {"dir": "r"}, "data": {"path": "p"}})
    changes = {"model": {"projection_width": 8, "matryoshka": widths}}
    with pytest.raises(
        ConfigError, match="matryoshka must increase up to projection_width, .*; got"
    ):
        parse_config(merge(tree, changes))
