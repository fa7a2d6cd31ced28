"""What is predicted and scored: by a classifier, by a probe, from all views or the first."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heron.base.errors import TrainingError
from heron.data.dataset import build_data
from heron.data.streams import Streams
from heron.data.views import Views
from heron.evaluation.evaluator import Evaluator
from heron.evaluation.metrics import cross_view_recalls, fitted_threshold, multi_label_scores
from heron.experiment.open_data import open_data
from heron.losses.classification import Bce
from heron.losses.supervised import WeightedSupervised
from heron.losses.unsupervised import WeightedUnsupervised
from heron.models.heterogeneous import Heterogeneous
from tests.experiments import frames

ONE_VIEW: dict[str, Any] = {"stored": "view1", "augment": ["noise"]}
FIRST: dict[str, Any] = {
    "model": {"classify_on": "first_view", "shared_encoder": True},
    "data": {"views": [ONE_VIEW, ONE_VIEW]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    build_data(frames(folder).data, progress=False)
    return folder


def make(
    folder: Path, classify: bool, **changes: Any
) -> tuple[Evaluator, Heterogeneous, Streams, Views]:
    config = frames(folder, **changes)
    streams = open_data(config)
    views = Views(streams.reader, config.data, torch.device("cpu"))
    shapes = [streams.reader.view(view.stored).shape for view in config.data.views]
    torch.manual_seed(0)
    terms = {"bce": Bce()} if classify else {"weighted_supervised": WeightedSupervised()}
    model = Heterogeneous(config.model, shapes, 4, terms)
    return Evaluator(streams.reader, views, config.evaluate), model, streams, views


def test_without_a_classifier_a_probe_is_scored(folder: Path) -> None:
    evaluator, model, streams, _ = make(folder, classify=False)
    predictions, scores = evaluator.evaluate(model, streams.roles)
    assert predictions.probability is not None
    assert predictions.probability.shape == (70, 4)
    assert scores == evaluator.score(predictions, 0.5)
    assert scores["accuracy"] > 0.4  # of four classes, by features that were never trained
    again, same = evaluator.evaluate(model, streams.roles)
    assert same == scores
    assert np.array_equal(again.y, predictions.y)


def test_a_probe_beside_a_classifier_has_names_of_its_own(folder: Path) -> None:
    alone, model, streams, _ = make(folder, classify=True)
    plain, scores = alone.evaluate(model, streams.roles)
    both, _, _, _ = make(folder, classify=True, evaluate={"probe": "always"})
    predictions, more = both.evaluate(model, streams.roles)
    assert more == scores | {k: v for k, v in more.items() if k.startswith("probe_")}
    assert len(more) == 2 * len(scores)
    assert more["probe_accuracy"] > more["accuracy"]  # the classifier was never trained
    assert plain.probability is not None and predictions.probability is not None
    assert np.array_equal(predictions.probability, plain.probability)


def test_no_probe_and_no_classifier_are_no_scores(folder: Path) -> None:
    evaluator, model, streams, _ = make(folder, classify=False, evaluate={"probe": "never"})
    predictions, scores = evaluator.evaluate(model, streams.roles)
    assert predictions.probability is None
    assert scores == {}


def test_the_first_view_is_all_that_evaluation_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, model, streams, views = make(folder, classify=True, **FIRST)
    seen = []
    inputs = Views.__call__

    def spy(self: Views, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        made = inputs(self, *args, **kwargs)
        seen.append(len(made))
        return made

    monkeypatch.setattr(Views, "__call__", spy)
    predictions = evaluator.predict(model, streams.roles.test, hidden=True)
    assert set(seen) == {1}
    assert predictions.hidden is not None and predictions.probability is not None
    assert predictions.hidden.shape == (70, 12)
    assert model.classifier is not None
    logits = model.classifier(torch.from_numpy(predictions.hidden))
    expected = logits.softmax(1).detach().numpy()
    np.testing.assert_allclose(predictions.probability, expected, rtol=1e-5)


def test_only_stored_views_that_are_classified_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, model, streams, _ = make(folder, classify=True)
    asked = []
    stored = streams.reader.read

    def spy(name: str, rows: Any) -> Any:
        asked.append(name)
        return stored(name, rows)

    monkeypatch.setattr(streams.reader, "read", spy)
    evaluator.predict(model, streams.roles.test[:3])
    assert asked == ["view1", "view2"]
    asked.clear()
    model.classified, model.classifier = 1, None
    evaluator.predict(model, streams.roles.test[:3])
    assert asked == ["view1"]


@pytest.mark.parametrize(
    ("kind", "exclusive"),
    [
        ("multi_class", True),
        ("hierarchical", True),
        ("complementary", True),
        ("multi_label", False),
    ],
)
def test_labels_that_exclude_each_other(folder: Path, kind: str, exclusive: bool) -> None:
    evaluator, _, streams, _ = make(folder, classify=True)
    labels = streams.reader.manifest.labels.model_copy(update={"kind": kind})
    streams.reader.manifest = streams.reader.manifest.model_copy(update={"labels": labels})
    assert evaluator.exclusive == exclusive


def test_a_fitted_threshold_is_that_of_the_validation_rows(folder: Path) -> None:
    kept = {"protocol": {"labelled": 60, "test": "test", "validation": 0.25}}
    given = {"threshold": "fitted", "probe": "always", "knn": 5}
    evaluator, model, streams, _ = make(folder, classify=True, data=kept, evaluate=given)
    labels = streams.reader.manifest.labels.model_copy(update={"kind": "multi_label"})
    streams.reader.manifest = streams.reader.manifest.model_copy(update={"labels": labels})
    _, scores = evaluator.evaluate(model, streams.roles)
    validation = evaluator.predict(model, streams.roles.validation)
    test, known = evaluator.predict(model, streams.roles.test), evaluator.threshold(validation)
    assert validation.probability is not None and test.probability is not None
    assert known == fitted_threshold(validation.probability, validation.y) == scores["threshold"]
    expected = multi_label_scores(test.probability, test.y, known)
    assert expected.items() <= scores.items()
    assert len({scores[f"{one}threshold"] for one in ("", "probe_", "knn_")}) == 3
    _, its = evaluator.evaluate(model, streams.roles, "validation")
    assert its["threshold"] == known


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "hidden features"),  # of the probe
        ({"evaluate": {"probe": "never", "knn": 5}}, "hidden features"),
        ({"evaluate": {"probe": "never", "cross_view": True}}, "projections"),
    ],
)
def test_what_is_not_finite_is_not_scored(folder: Path, changes: dict[str, Any], what: str) -> None:
    evaluator, model, streams, views = make(folder, classify=False, **changes)
    terms = {"weighted_unsupervised": WeightedUnsupervised()}
    shapes = [streams.reader.view(view.stored).shape for view in views.views]
    model = Heterogeneous(frames(folder).model, shapes, 4, terms)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(TrainingError, match=f"{what} of 70 of 70 rows are not finite, .* lower"):
        evaluator.evaluate(model, streams.roles)


def test_a_query_that_is_not_finite_finds_nothing() -> None:
    views = [torch.eye(20, 30, dtype=torch.float64) for _ in range(2)]
    assert set(cross_view_recalls(views, ["a", "b"]).values()) == {1.0}
    views[0][3] = torch.nan
    found = cross_view_recalls(views, ["a", "b"])
    assert found["recall@1_a_b"] == found["recall@10_a_b"] == 0.95
