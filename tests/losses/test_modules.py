"""The losses as modules: values, signatures, memories and types."""

import copy
from collections.abc import Callable
from typing import Any, assert_type

import pytest
import torch
from torch import Tensor

from heron import losses as h
from heron.base.errors import ConfigError
from heron.experiment.describe import documented
from heron.losses import functional as f
from heron.losses.named_terms import named_terms
from tests.losses.nets import CASES, CLASSES, DIM, Net, batches
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


def test_a_loss_is_one_class_with_its_equation() -> None:
    names = {section.loss.__name__: section for section in named_terms().values()}
    for name, section in names.items():
        assert getattr(h, name) is section.loss
        assert ".. math::" in section.loss.__doc__ or name in ("Bce", "CrossEntropy", *LIKE)
        meanings = documented(section)
        assert all(meanings[option] for option in section.model_fields), name
        assert section().build_loss().options == section().model_dump(
            exclude={"weight", "ramp_epochs"}
        )


LIKE = "InputWeightedUnsupervised", "Gce", "Mlcl", "Deepmtmv"  # as another, in words


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


def test_a_loss_shows_its_options() -> None:
    assert repr(h.NtXent(tau=0.3)).startswith("NtXent(\n  tau=0.3, gather=True")
    assert ", beta=2.0, " in repr(h.Hard(beta=2.0))
    assert h.InfoNCE is h.NTXentLoss is h.NtXent and h.SupConLoss is h.Supcon


def test_wrong_options_and_missing_widths_are_named() -> None:
    with pytest.raises(ConfigError, match="NtXent: tau must be .*, got -1"):
        h.NtXent(tau=-1)
    with pytest.raises(h.LossError, match="no module makes its weights; pass the widths"):
        h.WeightedUnsupervised()(Z)
    with pytest.raises(h.LossError, match=r"no classifier; build it with C2ae\(dim, labels"):
        h.C2ae()(Z, LABELS)
    with pytest.raises(h.LossError, match="it has no queue; build it with Mulco"):
        h.Mulco()(Z[0], Z[1], LOGITS, CLASS)


def test_every_case_has_a_gradient_for_every_parameter() -> None:
    for case in CASES:
        net = Net(case)
        for rows, epoch in list(batches(0, 1))[:3]:
            net(rows, epoch)["loss"].backward()
        missing = [n for n, p in net.named_parameters() if p.requires_grad and p.grad is None]
        assert missing == [], case


def test_views_of_two_types_are_compared_as_they_are() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(8, 4, generator=draw) for _ in range(2))
    half, exact = a.bfloat16(), h.NtXent()([a.bfloat16().float(), b])
    assert h.NtXent()([half, b]).item() == h.NtXent()([b, half]).item() == exact.item()


class Plain(h.ProjectionLoss):
    """A loss whose options have no annotations, or those of any class."""

    needs = h.NtXent.needs

    def __init__(self, *, tau=0.3, network: torch.nn.Module | None = None) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.tau, self.network = tau, network

    def share(self, batch: Any) -> Tensor:
        return f.nt_xent(batch.vectors["projections"], tau=self.tau)


def test_options_need_no_annotations() -> None:
    torch.testing.assert_close(Plain()(Z), f.nt_xent(Z, tau=0.3))
    network = torch.nn.Linear(2, 2)
    assert Plain(tau=0.2, network=network).network is network
    with pytest.raises(ConfigError, match="network must be an instance of Module.*got 3"):
        Plain(network=3)  # type: ignore[arg-type]


def test_matryoshka_is_the_mean_over_first_numbers() -> None:
    nested = h.Matryoshka(h.NtXent(tau=0.3), [2, DIM])(Z)
    by_width = [f.nt_xent([z[:, :m] for z in Z], tau=0.3) for m in (2, DIM)]
    torch.testing.assert_close(nested, torch.stack(by_width).mean(), rtol=1e-14, atol=0)
    assert h.NtXent(tau=0.3)(Z) == by_width[1]  # a class is not changed, an object is
    bottlenecks = h.Matryoshka(h.Mib(DIM), [2, DIM]).double()
    keys = torch.arange(BATCH)
    bottlenecks(Z, epoch=0.0, rng_keys=keys).backward()
    assert all(p.grad is not None for p in bottlenecks.parameters())
    for loss, widths in ((h.Bce(), [2]), (h.Infograph(DIM), [2]), (h.NtXent(), [4, 2])):
        with pytest.raises(h.LossError, match="Matryoshka: .*(use|must|widths)"):
            h.Matryoshka(loss, widths)
    with pytest.raises(h.LossError, match=f"projections must have {DIM + 1} numbers, got {DIM}"):
        h.Matryoshka(h.NtXent(), [2, DIM + 1])(Z)
