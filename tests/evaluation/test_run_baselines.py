"""The baselines of a run: logistic regression by its parts, and the plain network's run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from heron.pipeline.config.experiment import load_config, parse_config
from heron.pipeline.evaluation.baselines import logistic_regression, other_seeds, plain, summary
from heron.pipeline.pretrain import pretrain
from heron.pipeline.training.tracking import read_metrics
from tests import ranks
from tests.experiments import frames, merge

FACES = Path(__file__).parents[2] / "configs" / "faces.yaml"


def small(folder: str, name: str, **changes: Any) -> dict[str, Any]:
    """A short run on few faces, with its baselines."""
    tree = load_config(FACES).model_dump()
    few = {
        "run": {"dir": f"{folder}/{name}"},
        "data": {
            "path": f"{folder}/faces",
            "build": {"train": 80, "test": 30},
            "protocol": {"labelled": 12},
            "batch": {"labelled": 8, "unlabelled": 14},
        },
        "model": {"encoder": {"channels": [4, 4], "widths": [16]}},
        # In float64, in which the order of sums is no matter.
        "train": {
            "epochs": 1,
            "cpu_threads": 1,
            "evaluate_every_epochs": None,
            "precision": "fp64",
        },
        "evaluate": {"map": "never", "map_rows": 10, "seeds": 1},
    }
    return pretrain(parse_config(merge(merge(tree, few), changes)))


def clouds(rows: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Inputs of 30 numbers, two labels that a few of them tell, one of no row, one of all."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 30))
    x[:, :3] *= 5
    y = np.stack([x[:, 0] > 0, x[:, 1] + x[:, 2] > 3, np.zeros(rows), np.ones(rows)], 1)
    return x.astype(np.float32), y.astype(np.float32)


def test_logistic_regression_is_scikit_learns_on_components() -> None:
    (x, y), (others, truth) = clouds(90, 0), clouds(200, 1)
    probability, chosen = logistic_regression(x[:, None], y, others[:, None], exclusive=False)
    scaler = StandardScaler().fit(x)
    pca = PCA(int(chosen["components"]), svd_solver="full").fit(scaler.transform(x))
    inputs, asked = (pca.transform(scaler.transform(rows)) for rows in (x, others))
    for label in range(2):
        model = LogisticRegression(C=chosen["c"], max_iter=300).fit(inputs, y[:, label])
        expected = model.predict_proba(asked)[:, 1]
        np.testing.assert_allclose(probability[:, label], expected, atol=1e-5)
    assert ((probability[:, 0] > 0.5) == truth[:, 0]).mean() > 0.8
    assert not probability[:, 2].any() and (probability[:, 3] == 1).all()


def test_exclusive_classes_of_which_one_has_no_example() -> None:
    (x, _), (others, _) = clouds(90, 0), clouds(50, 1)
    y = np.eye(4, dtype=np.float32)[(x[:, 0] > 0) * 2]
    probability, _ = logistic_regression(x[:, None], y, others[:, None], exclusive=True)
    assert not probability[:, [1, 3]].any()
    np.testing.assert_allclose(probability.sum(1), 1, atol=1e-5)


def test_views_that_are_alike_share_the_weights_where_that_predicts_better() -> None:
    """Of two views, each with the same directions under noise of its own, two rows are made."""
    (x, y), (others, truth) = clouds(60, 0), clouds(200, 1)
    draw = np.random.default_rng(2)
    pairs, asked_pairs = (
        rows[:, None] + 3 * draw.normal(size=(len(rows), 2, 30)) for rows in (x, others)
    )
    probability, chosen = logistic_regression(pairs, y, asked_pairs, exclusive=False)
    assert chosen["shared"] == 1
    stacked = pairs.reshape(120, 30)
    scaler = StandardScaler().fit(stacked)
    pca = PCA(int(chosen["components"]), svd_solver="full").fit(scaler.transform(stacked))
    inputs, asked = (
        pca.transform(scaler.transform(a.reshape(-1, 30))) for a in (pairs, asked_pairs)
    )
    model = LogisticRegression(C=chosen["c"], max_iter=300).fit(inputs, y[:, 0].repeat(2))
    expected = model.predict_proba(asked)[:, 1].reshape(200, 2).mean(1)
    np.testing.assert_allclose(probability[:, 0], expected, atol=1e-5)
    assert ((probability[:, 0] > 0.5) == truth[:, 0]).mean() > 0.7


def test_few_rows_that_say_nothing_are_no_fault() -> None:
    x, y = np.ones((1, 1, 3)), np.array([[0, 1]], np.float32)
    probability, _ = logistic_regression(x, y, np.ones((2, 1, 3)), exclusive=False)
    np.testing.assert_array_equal(probability, [[0, 1], [0, 1]])


def test_a_run_and_its_baselines_side_by_side_on_any_number_of_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = small(str(tmp_path), "run")
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    shown = capsys.readouterr().out
    assert "baselines: logistic regression, tuned" in shown
    for prefix in ("", "plain_", "logistic_"):
        assert written[f"{prefix}auc_macro"] == result[f"{prefix}auc_macro"]
        assert f"auc_macro {result[f'{prefix}auc_macro']:.4f}" in shown
    assert len({result[f"{prefix}auc_macro"] for prefix in ("", "plain_", "logistic_")}) == 3

    # The plain network is a run of its own: same rows, same steps, same first weights, one term.
    other = json.loads((tmp_path / "run" / "plain" / "result.json").read_text())
    assert other["auc_macro"] == result["plain_auc_macro"] and other["steps"] == result["steps"]
    rows, its = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "run/plain"))
    assert its[0]["loss/bce"] == rows[0]["loss/bce"]
    assert [key for key in its[0] if key.startswith("loss/")] == ["loss/bce"]

    changes = {"objective": {"weighted_unsupervised": None, "weighted_supervised": None}}
    alone = small(str(tmp_path), "alone", **changes, evaluate={"baselines": "plain"})
    assert alone["auc_macro"] == alone["plain_auc_macro"] == result["plain_auc_macro"]
    assert not (tmp_path / "alone" / "plain").exists()

    two = ranks.run(2, small, str(tmp_path), "two")
    for key in (k for k in result if k.endswith(("auc_macro", "f1_weighted"))):
        assert two[0][key] == two[1][key] == pytest.approx(result[key], abs=1e-6), key


def test_the_plain_network_is_asked_for_nothing_of_projections(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"evaluate": {"cross_view": True}, "model": {"matryoshka": [2, 8]}}
    alone = plain(frames(tmp_path, objective={"weighted_unsupervised": {}}, **asked))
    assert alone is not None
    assert pretrain(alone)["steps"] > 0


def test_further_seeds_train_networks_alone() -> None:
    config = load_config(FACES)
    first, second = other_seeds(config)
    assert (first.seed, second.seed) == (config.seed + 1, config.seed + 2)
    assert first.evaluate.baselines == "plain" and first.evaluate.seeds == 1
    results = [
        {
            "auc_macro": 0.5,
            "f1_weighted": 0.5,
            "logistic_auc_macro": 0.7,
            "logistic_f1_weighted": 1,
        },
        {"auc_macro": 0.7, "f1_weighted": 0.5},
    ]
    found = summary(results, "run")
    assert found is not None and found[1] == [
        ["run", "0.6000 ± 0.1414", "0.5000 ± 0.0000"],
        ["logistic regression", "0.7000", "1.0000"],
    ]


def test_without_a_classifier_there_is_no_plain_network() -> None:
    assert plain(load_config(FACES, method="simclr")) is None
