"""The model's heads: which views the classifier sees, and what a projector is."""

from typing import Any

import pytest
import torch
from torch import nn

from heron.base.errors import ConfigError
from heron.losses import Loss
from heron.losses.classification import Bce
from heron.losses.mib import Mib
from heron.losses.single_view import SingleViewUnsupervised
from heron.losses.unsupervised import WeightedUnsupervised
from heron.models.heterogeneous import Heterogeneous
from heron.models.options import Mlp, ModelConfig

MLP = Mlp(widths=[7, 5])


def build(views: int = 2, project_inputs: bool = False, **options: Any) -> Heterogeneous:
    torch.manual_seed(0)
    config, shapes = ModelConfig(encoder=MLP, projection_width=4, **options), [[6]] * views
    terms: dict[str, Loss] = {"bce": Bce(), "weighted_unsupervised": WeightedUnsupervised()}
    if project_inputs:
        terms["single_view_unsupervised"] = SingleViewUnsupervised()
    return Heterogeneous(config, shapes, 3, terms)


def projectors(model: Heterogeneous) -> nn.ModuleList:
    found = model.input_projectors
    assert isinstance(found, nn.ModuleList)
    return found


def test_the_first_view_alone_is_classified() -> None:
    model = build(classify_on="first_view", shared_encoder=True).eval()
    assert model.classifier is not None
    assert model.classifier.in_features == 5
    x, keys = [torch.rand(4, 6), torch.rand(4, 6)], torch.arange(4)
    both, first = model(x, keys, [4]), model(x[:1], keys, [4])
    torch.testing.assert_close(first["logits"], both["logits"])
    torch.testing.assert_close(first["hidden"][0], both["hidden"][0][:, :5])
    assert both["hidden"][0].shape == (4, 10)
    assert len(first["projections"]) == len(first["weights"]) == 1


def test_all_views_are_classified_unless_asked() -> None:
    model = build()
    assert model.classified == 2
    assert model.classifier is not None
    assert model.classifier.in_features == 10


def test_encoders_that_evaluation_would_not_see_are_refused() -> None:
    with pytest.raises(ConfigError, match="'first_view', but each of 2 views .* set model.sha"):
        build(classify_on="first_view")
    assert build(views=1, classify_on="first_view").classified == 1


def test_inputs_are_projected_by_a_map_of_each_projector() -> None:
    plain, model = build(views=1), build(views=1, project_inputs=True)
    x, keys = [torch.rand(4, 6)], torch.arange(4)
    (found,) = model(x, keys, [4])["input_projections"]
    (layer,) = projectors(model)
    torch.testing.assert_close(found, layer(x[0]))
    parameters = dict(model.named_parameters())
    for name, weights in plain.named_parameters():  # nothing else begins otherwise
        torch.testing.assert_close(parameters[name], weights, msg=name)
    shared = build(project_inputs=True, shared_encoder=True, shared_projector=True)
    assert len(projectors(shared)) == 1
    assert len(projectors(build(project_inputs=True, shared_encoder=True))) == 2


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("layer", ["Linear", "ReLU", "BatchNorm1d"]), ("mlp", ["Linear", "ReLU", "Linear"])],
)
def test_projectors(kind: str, layers: list[str]) -> None:
    (projector, other) = build(projector=kind).projectors
    assert isinstance(projector, nn.Sequential)
    assert [type(layer).__name__ for layer in projector] == layers
    first, last = projector[0], [m for m in projector if isinstance(m, nn.Linear)][-1]
    assert isinstance(first, nn.Linear)
    assert (first.in_features, last.out_features) == (5, 4)
    assert first.out_features == (5 if kind == "mlp" else 4)
    assert not torch.equal(first.weight, next(other.parameters()))


def test_the_order_of_terms_changes_no_weight() -> None:
    terms: dict[str, Loss] = {
        "weighted_unsupervised": WeightedUnsupervised(),
        "single_view_unsupervised": SingleViewUnsupervised(),
        "mib": Mib(),
    }
    states = []
    for names in (terms, reversed(terms)):
        torch.manual_seed(0)
        config = ModelConfig(encoder=MLP, projection_width=4)
        model = Heterogeneous(config, [[6]] * 2, 3, {name: terms[name] for name in names})
        states.append(model.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)
