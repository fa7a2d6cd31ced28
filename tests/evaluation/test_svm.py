"""Support vector machines on features."""

import numpy as np
import pytest

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.evaluation.probe import support_vectors
from heron.experiment.config import Config
from tests.experiments import frames


@pytest.mark.parametrize("classes", [2, 3])
def test_it_predicts_as_the_best_c_does(classes: int) -> None:
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    draw = np.random.default_rng(0)
    y = draw.integers(0, classes, 90)
    x = (draw.normal(size=(90, 4)) + y[:, None] * 0.8).astype(np.float32)
    found = support_vectors(x[:60], np.eye(5, dtype=np.float32)[y[:60]], x[60:])
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)
    assert not found[:, classes:].any()
    grid = {"C": [1e-3, 1e-2, 1e-1, 1, 10, 100, 1000]}
    best = GridSearchCV(SVC(), grid, cv=5).fit(x[:60].astype(float), y[:60]).predict(x[60:])
    assert (found.argmax(1) == best).mean() > 0.96  # ties of three classes may break otherwise


def test_one_class_and_few_rows() -> None:
    x, y = np.ones((3, 2), np.float32), np.eye(2, dtype=np.float32)
    assert support_vectors(x, y[[1, 1, 1]], x).argmax(1).tolist() == [1, 1, 1]
    spread = np.array([[0, 0], [0, 1], [5, 5]], np.float32)
    assert support_vectors(spread, y[[0, 0, 1]], spread).shape == (3, 2)


def test_several_labels_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("svm")
    np.savez(
        folder / "m.npz",
        view1=np.random.default_rng(0).normal(size=(40, 4)).astype("f4"),
        labels=np.random.default_rng(1).integers(0, 2, (40, 3)).astype("u1"),
    )
    config: Config = frames(
        folder,
        data={
            "build": {"source": "arrays", "npz": str(folder / "m.npz"), "train": None}
            | {"test": None, "classes": None, "seed": None},
            "split": "all",
            "protocol": {"labelled": 20, "test": "unlabelled"},
            "batch": {"unlabelled": 0},
            "epoch": "labelled",
            "views": [{"stored": "view1"}, {"stored": "view1"}],
        },
        objective={"cross_entropy": None, "weighted_unsupervised": None, "bce": {}},
        evaluate={"probe_by": "svm"},
    )
    with pytest.raises(ConfigError, match="probe_by is 'svm', which needs one class per row"):
        pretrain(config)
