"""The losses as modules: values, signatures, memories, types, and what they refuse."""

import copy
import inspect
from collections.abc import Callable
from typing import Any, assert_type

import pytest
import torch
from torch import Tensor

from heron import losses as h
from heron.losses import functional as f
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.terms import named_terms
from heron.shards.errors import HeronError
from tests.losses.nets import CASES, CLASSES, DIM, Net, batches, wrong_labels
from tests.objectives.test_terms import draw

BATCH = 7
Z = [draw(BATCH, DIM, seed=v).detach() for v in (0, 1)]
X = [draw(BATCH, width, seed=9 + width).detach() for width in (5, 3)]
LOGITS = draw(BATCH, CLASSES, seed=5).detach()
CLASS = torch.arange(BATCH) % CLASSES
HOT = torch.nn.functional.one_hot(CLASS, CLASSES).double()
LABELS = (draw(BATCH, 4, seed=6) > 0).double()
PATHS = torch.stack([CLASS // 2, CLASS], 1)

Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]
VALUES: dict[str, Pair] = {
    "NtXent": (lambda: h.NtXent(tau=0.3)(Z), lambda: f.nt_xent(Z, tau=0.3)),
    "NtXent, one tensor": (lambda: h.NtXent()(torch.stack(Z, 1)), lambda: f.nt_xent(Z)),
    "Cmc": (lambda: h.Cmc(tau=0.3)(Z), lambda: f.cmc(Z, tau=0.3)),
    "Debiased": (
        lambda: h.Debiased(tau=0.3, tau_plus=0.2)(Z),
        lambda: f.debiased(Z, tau=0.3, tau_plus=0.2),
    ),
    "Hard": (lambda: h.Hard()(Z, CLASS), lambda: f.hard(Z, CLASS)),
    "Hard, without labels": (
        lambda: h.Hard(supervised=False, positives="augmentation")(Z),
        lambda: f.hard(Z, positives="augmentation"),
    ),
    "InputWeightedUnsupervised": (
        lambda: h.InputWeightedUnsupervised(anchors="first")(Z, X),
        lambda: f.input_weighted_unsupervised(Z, X, anchors="first"),
    ),
    "Supcon": (lambda: h.Supcon()(Z, CLASS + 10**12), lambda: f.supcon(Z, CLASS)),
    "Supcon, one view": (lambda: h.Supcon()(Z[0], HOT), lambda: f.supcon(Z[:1], CLASS)),
    "WeightedSupervised": (
        lambda: h.WeightedSupervised(tau=0.2, self_pairs=True)(Z, LABELS),
        lambda: f.weighted_supervised(torch.cat(Z, 1), LABELS, tau=0.2, self_pairs=True),
    ),
    "WeightedSupervised, classes": (
        lambda: h.WeightedSupervised(num_classes=CLASSES, distance="indicator")(Z[0], CLASS),
        lambda: f.weighted_supervised(Z[0], HOT, distance="indicator"),
    ),
    "Hierarchical": (
        lambda: h.Hierarchical(constrain=False)(Z, PATHS),
        lambda: f.hierarchical(Z, PATHS, constrain=False),
    ),
    "Bce": (lambda: h.Bce()(LOGITS, HOT.bool()), lambda: f.bce(LOGITS, HOT, total=BATCH)),
    "CrossEntropy": (
        lambda: h.CrossEntropy()(LOGITS, CLASS),
        lambda: torch.nn.functional.cross_entropy(LOGITS, CLASS),
    ),
    "Gce": (lambda: h.Gce(q=0.3)(LOGITS, HOT), lambda: f.gce(LOGITS, HOT, total=BATCH, q=0.3)),
    "half precision": (
        lambda: h.NtXent()([z.bfloat16() for z in Z]),
        lambda: f.nt_xent([z.bfloat16().float() for z in Z]),
    ),
}


def of_sets(module: h.Loss, function: Callable[..., Tensor]) -> Pair:
    """A loss for complementary labels, which the module is given as class numbers."""
    return lambda: module(LOGITS, CLASS), lambda: function(LOGITS, HOT, total=BATCH)


VALUES |= {
    "UbLog": of_sets(h.UbLog(), f.ub_log),
    "UbExp": of_sets(h.UbExp(), f.ub_exp),
    "Mse": of_sets(h.Mse(), f.mse),
    "LUw": of_sets(h.LUw(), f.l_uw),
    "Mlcl": of_sets(h.Mlcl(), f.mlcl),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_module_is_its_function(name: str) -> None:
    module, function = VALUES[name]
    torch.testing.assert_close(module(), function(), rtol=1e-14, atol=0)


def test_parts_are_the_functions_arguments() -> None:
    loss = h.WeightedUnsupervised(DIM).double()
    weight = [loss.parts["weight"](z) for z in Z]
    torch.testing.assert_close(loss(Z), f.weighted_unsupervised(Z, weight))
    one = h.SingleViewUnsupervised(DIM, [5, 3]).double()
    maps: Any = one.parts["input_projectors"]
    mapped = [projector(x) for projector, x in zip(maps, X, strict=True)]
    weight = [one.parts["weight"](z) for z in Z]
    torch.testing.assert_close(one(Z, X), f.single_view_unsupervised(mapped, Z, weight))
    scale, bias = torch.tensor([[4.0], [-1.5]]).double().expand(2, BATCH)
    torch.testing.assert_close(h.Clip(tau=0.25).double()(Z), f.clip(Z, scale))
    torch.testing.assert_close(h.Siglip(scale=4, bias=-1.5).double()(Z), f.siglip(Z, scale, bias))
    codes = h.C2ae(DIM, CLASSES).double()
    assert codes.predict(Z[0]).shape == (BATCH, CLASSES)


def test_every_option_is_an_argument_with_its_default() -> None:
    terms = {term.__name__: term for term in named_terms().values()}
    assert set(terms) == set(h.__all__) - {"Loss", "LossError", "MomentumEncoder"}
    for name, term in terms.items():
        module = getattr(h, name)
        assert ".. math::" in module.__doc__ or name in ("Bce", "CrossEntropy", "Deepmtmv", *LIKE)
        arguments = inspect.signature(module).parameters
        # `part` of Deepmtmv is called by the loop, and `MomentumEncoder` has the momentum.
        given = set(term.model_fields) - {"weight", "ramp_epochs", "momentum", "every_epochs"}
        for option in given:
            assert arguments[option].default == term.model_fields[option].get_default(), option


LIKE = "InputWeightedUnsupervised", "Gce", "Mlcl"  # as another, in words


def test_every_function_is_exported() -> None:
    assert {name for name in f.__all__ if not callable(getattr(f, name))} == set()
    assert set(named_terms()) - {"deepmtmv"} <= set(f.__all__)


def test_calls_have_types() -> None:
    assert_type(h.NtXent()(Z), Tensor)
    assert_type(h.Mib(DIM).double()(Z, epoch=0.5), Tensor)

    def refused() -> None:  # mypy would report an ignored error that is none
        h.Supcon()(Z)  # type: ignore[call-arg]
        h.NtXent(tua=0.1)  # type: ignore[call-arg]
        h.Hard(hardening="much")  # type: ignore[arg-type]

    with pytest.raises(TypeError):
        refused()


def test_a_memory_moves_on_in_training_alone_and_is_saved() -> None:
    for case in ("Mulco", "Comco", "Pico", "Plnl", "Deepmtmv"):
        net = Net(case)
        rows = list(batches(0, 1))
        net(*rows[0])
        before = copy.deepcopy(net.state_dict())
        net.eval()
        value = net(*rows[1])["loss"]
        torch.testing.assert_close(net.state_dict(), before)
        net.train()
        assert torch.equal(net(*rows[1])["loss"], value)
        moved = [name for name, x in net.state_dict().items() if not torch.equal(x, before[name])]
        assert moved, case
        again = Net(case)
        again.load_state_dict(before)
        assert torch.equal(again(*rows[1])["loss"], value)


def test_a_copy_of_a_network_follows_it() -> None:
    network = torch.nn.Linear(2, 2)
    slow = h.MomentumEncoder(network, momentum=0.75)
    before = network.weight.detach().clone()
    with torch.no_grad():
        network.weight += 1
    slow.update()
    torch.testing.assert_close(slow.slow.weight, before + 0.25)
    assert not slow(torch.ones(1, 2)).requires_grad
    assert list(slow.state_dict()) == ["slow.weight", "slow.bias"]


def test_losses_are_exact_under_autocast() -> None:
    loss = h.WeightedUnsupervised(DIM)
    half = [view.bfloat16() for view in Z]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = loss(half)
    assert torch.equal(mixed, loss([view.float() for view in half]))


def test_a_term_of_ones_own_is_a_loss() -> None:
    (term,) = (term for name, term in named_terms().items() if name == "nt_xent")
    loss = h.Loss(term, {"tau": 0.3})
    assert repr(loss).startswith("Loss(\n  tau=0.3, gather=True")
    torch.testing.assert_close(loss.evaluate({"projections": Z}), f.nt_xent(Z, tau=0.3))
    assert ", beta=2.0, " in repr(h.Hard(beta=2.0))  # an argument reaches the term


REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: h.NtXent(tau=0.0),
        "NtXent does not fit: tau: found 0.0; input should be greater than or equal to 0.003",
    ),
    (
        lambda: h.NtXent()(Z[0]),
        "NtXent: nt_xent has 1 view; expected at least 2: a single-view data set needs two "
        "augmentations of it",
    ),
    (
        lambda: h.NtXent()(torch.ones(2, 3, 4, 5)),
        "NtXent: projections are float32 2 × 3 × 4 × 5; expected floats [batch, dim], "
        "[batch, views, dim], or a list with a tensor [batch, dim] a view",
    ),
    (
        lambda: h.NtXent()([Z[0], Z[1][:3]]),
        "NtXent: rows: projections of view 1 have 7 and projections of view 2 3; expected the same",
    ),
    (
        lambda: h.NtXent()([Z[0], Z[1][:, :3]]),
        "NtXent: views of the projections have [3, 4] numbers; expected one width",
    ),
    (
        lambda: h.NtXent()([]),
        "NtXent: projections are an empty list; expected a tensor [batch, dim] a view",
    ),
    (
        lambda: h.Supcon()(Z, CLASS[:3]),
        "Supcon: rows: features have 7 and labels 3; expected the same",
    ),
    (
        lambda: h.WeightedSupervised()(Z, CLASS[:3, None]),
        "WeightedSupervised: rows: features have 7 and labels 3; expected the same",
    ),
    (
        lambda: h.Supcon()(Z, CLASS.float()),
        "Supcon: labels are float32 7; expected class numbers [batch], or columns "
        "[batch, labels]; take argmax(1) of one-hot labels",
    ),
    (
        lambda: h.WeightedSupervised()(Z, CLASS),
        "WeightedSupervised: labels are int64 7; expected 0 or 1 for each label, "
        "[batch, labels]; give num_classes for class numbers [batch]",
    ),
    (
        lambda: h.WeightedSupervised()(Z, LABELS * 2),
        "WeightedSupervised: weighted_supervised: labels of row 0 are",
    ),
    (
        lambda: h.CrossEntropy()(LOGITS, CLASS - 1),
        "CrossEntropy: the label of row 0 is -1; expected 0 to 2; leave rows without a label out",
    ),
    (
        lambda: h.CrossEntropy()(LOGITS, CLASS + 1),
        "CrossEntropy: the label of row 2 is 3; expected 0 to 2",
    ),
    (
        lambda: h.Bce()(LOGITS, LABELS),
        "Bce: labels are float64 7 × 4; expected 0 or 1 for each label, [batch, 3], or class "
        "numbers [batch]",
    ),
    (
        lambda: h.Bce()(LOGITS, HOT * 2),
        "Bce: labels of row 0 are [2.0, 0.0, 0.0]; expected 0 to 1",
    ),
    (
        lambda: h.UbLog()(LOGITS, HOT * 0),
        "UbLog: row 0 has 0 complementary labels of 3 classes; expected 1 to 2",
    ),
    (
        lambda: h.Hierarchical()(Z, CLASS),
        "Hierarchical: labels are int64 7; expected paths: whole numbers "
        "[batch, levels], coarsest level first",
    ),
    (
        lambda: h.InputWeightedUnsupervised()(Z, X[0]),
        "InputWeightedUnsupervised: inputs are of 1 and projections of 2 views; expected as "
        "many: a list with a tensor [batch, ...] a view",
    ),
    (
        lambda: h.Hard()(Z),
        "Hard: labels are missing, and supervised is True; expected labels exactly where it is "
        "True",
    ),
    (
        lambda: h.Hard(hardening="threshold")(Z, CLASS),
        "Hard: epoch is missing, and its threshold moves with it; expected epoch=..., 0.0 at the "
        "start",
    ),
    (
        lambda: h.WeightedUnsupervised(DIM)(Z),
        "WeightedUnsupervised: features are float64 and its own parameters float32; expected the "
        "same: loss.double(), loss.float(), or features of its type",
    ),
    (
        lambda: h.WeightedUnsupervised(DIM + 1).double()(Z),
        "WeightedUnsupervised: projections have 4 numbers; expected 5, which dim says",
    ),
    (
        lambda: h.Mib(DIM, 3).double()(Z, epoch=0.0),
        "Mib: projections are of 2 views; expected 3",
    ),
    (
        lambda: h.C2ae(DIM, CLASSES).double()(Z, HOT),
        "C2ae: features have 8 numbers; expected 4, which dim says",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES, queue=6)(Z[0], Z[1], LOGITS, HOT),
        "Mulco: queue is 6, smaller than the 7 rows of all processes, which would push each "
        "other out; expected at least 7",
    ),
    (
        lambda: h.Mulco(DIM + 1, CLASSES)(Z[0], Z[1], LOGITS, HOT),
        "Mulco: keys have 4 numbers; expected 5, which dim says",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES + 1)(Z[0], Z[1], LOGITS, HOT),
        "Mulco: logits are of 3 classes; expected 4, which classes says",
    ),
    (
        lambda: h.Pico(DIM, wrong_labels())(Z[0], Z[1], LOGITS, CLASS + 21, epoch=0.0),
        "Pico: indices are 21 to 23; expected rows of the labels that the loss was made with, "
        "0 to 22",
    ),
    (
        lambda: h.Plnl(wrong_labels())([LOGITS[:, :2]], [LOGITS[:, :2]], CLASS, epoch=0.0),
        "Plnl: logits are of 2 classes; expected 3, as the labels that the loss was made with",
    ),
    (
        lambda: h.Plnl(wrong_labels())([LOGITS], [LOGITS] * 2, CLASS, epoch=0.0),
        "Plnl: logits are of 1 and 2 views; expected as many",
    ),
    (
        lambda: h.Plnl(wrong_labels())([LOGITS], [LOGITS], CLASS.float(), epoch=0.0),
        "Plnl: indices are float32 7; expected the samples' rows of the labels that the "
        "loss was made with, whole numbers [batch]",
    ),
    (
        lambda: h.MomentumEncoder(torch.nn.Linear(2, 2), 1.5),
        "MomentumEncoder: momentum is 1.5; expected 0 to 1, e.g. 0.999",
    ),
]


NAN = float("nan")
BOTH = torch.stack(Z, 1)
ONE_VIEW = "expected floats [batch, dim] of one view"
REFUSED += [
    (
        lambda: h.Supcon()(Z, torch.where(CLASS == 0, -1, CLASS)),
        "Supcon: labels of row 0 are [-1]; expected 0 or more; leave rows without a label out",
    ),
    (lambda: h.Hard()(Z, HOT * NAN), "Hard: labels of row 0 are [nan, nan, nan]; expected 0 or"),
    (lambda: h.Hierarchical()(Z, PATHS - 1), "Hierarchical: labels of row 0 are [-1, -1]; expec"),
    (lambda: h.Supcon()(Z, HOT[:, :0]), "Supcon: labels are float64 7 × 0; expected class numbe"),
    (lambda: h.Supcon()(Z, [0] * 7), "Supcon: labels are list; expected class numbers [batch]"),  # type: ignore[arg-type]
    (lambda: h.WeightedSupervised()(Z, HOT * 1j), "WeightedSupervised: labels are complex128 7"),
    (lambda: h.UbLog()(LOGITS, None), "UbLog: labels are NoneType; expected 0 or 1 for each lab"),  # type: ignore[arg-type]
    (lambda: h.Bce()(LOGITS[None], CLASS), f"Bce: logits are float64 1 × 7 × 3; {ONE_VIEW}"),
    (lambda: h.Bce()(LOGITS, HOT * NAN), "Bce: labels of row 0 are [nan, nan, nan]; expected 0"),
    (lambda: h.NtXent()(None), "NtXent: projections are NoneType; expected floats [batch, dim]"),  # type: ignore[arg-type]
    (
        lambda: h.InputWeightedUnsupervised()(Z, [x[:, 0] for x in X]),
        "InputWeightedUnsupervised: inputs are float64 7; expected a tensor [batch, ...] a view",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES)(BOTH, Z[1], LOGITS, CLASS),
        f"Mulco: queries are float64 7 × 2 × 4; {ONE_VIEW}",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES)(Z[0], Z[1], LOGITS, HOT * 0),
        "Mulco: row 0 has 0 complementary labels of 3 classes; expected 1 to 2",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES)(Z[0], Z[1] * NAN, LOGITS, CLASS),
        "Mulco: keys of row 0 of all processes are not finite; expected finite numbers, since the "
        "queue keeps them; leave such rows out",
    ),
    (
        lambda: h.Comco(DIM, CLASSES)(Z[0], Z[1], LOGITS, CLASS, epoch=NAN),
        "Comco: epoch is nan; expected a finite number, 0.0 at the start",
    ),
    (lambda: h.Mulco(DIM, CLASSES, queue=-1), "queue is -1; expected a whole number, 1 at least"),
    (lambda: h.Pico(DIM, 2 * HOT), "complementary labels of row 0 are [2.0, 0.0, 0.0]; expected"),
    (lambda: h.Mib(0), "dim does not fit: projection_width: found 0; input should be greater"),
    (lambda: h.Mib(DIM)(Z, epoch=0.0, rng_keys=CLASS[:3]), "Mib: rng_keys are int64 3; expected"),
    (
        lambda: h.Deepmtmv(DIM, CLASSES).double()(Z[0], 2 * HOT),
        "Deepmtmv: labels of row 0 are [2.0, 0.0, 0.0]; expected 0 to 1",
    ),
]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16])
def test_rows_are_whole_numbers_of_any_type(kind: torch.dtype) -> None:
    def losses(indices: Tensor) -> list[Tensor]:
        pico, plnl = h.Pico(DIM, wrong_labels()), h.Plnl(wrong_labels())
        return [
            pico.double()(Z[0], Z[1], LOGITS, indices, epoch=0.0),
            plnl.double()([LOGITS], [LOGITS], indices, epoch=0.0),
        ]

    rows = torch.arange(7)
    assert losses(rows.to(kind)) == losses(rows)


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises((h.LossError, ConfigError)) as error:
        call()
    assert str(error.value).startswith(message)
    assert isinstance(error.value, HeronError)


def test_every_case_has_a_gradient_for_every_parameter() -> None:
    for case in CASES:
        net = Net(case)
        for rows, epoch in list(batches(0, 1))[:3]:
            net(rows, epoch)["loss"].backward()
        missing = [n for n, p in net.named_parameters() if p.requires_grad and p.grad is None]
        assert missing == [], case
