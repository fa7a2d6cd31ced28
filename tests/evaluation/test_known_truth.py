"""Scores of a network whose probabilities are known: each kind of labels, on 1, 2 and 3 processes.

See `known`: what is expected comes from the arrays that were written, and from scikit-learn.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from heron.api.model import Model
from heron.cli.main import main
from heron.training.signature import Signature
from tests import ranks
from tests.evaluation.known import (
    BIAS,
    CLASSIFIER,
    EXCLUSIVE,
    NAMES,
    TEST,
    TRAIN,
    WIDTH,
    Known,
    config,
    near,
    opened,
    scores,
    write,
)

KINDS = ["multi_label", *EXCLUSIVE]
SETS = [(kind, whole) for kind in KINDS for whole in (True, False)]
K, TAU = 5, 0.3
NEIGHBOURS: dict[str, Any] = {"knn": K, "knn_tau": TAU}
ALL: dict[str, Any] = {"evaluate": {**NEIGHBOURS, "cross_view": True, "probe": "always"}}
TESTED_AND_LABELLED: dict[str, Any] = {"data": {"protocol": {"test": "train"}}}
Sets = dict[str, tuple[Path, Known]]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    """Every set by its name, such as `multi_label True`."""
    written = {}
    for kind, whole in SETS:
        folder = tmp_path_factory.mktemp("known")
        written[f"{kind} {whole}"] = folder, write(folder, kind, whole)
    return written


def evaluated(folder: Path, kind: str) -> dict[str, Any]:
    """What an evaluation of all that can be asked for finds, in types that processes hand on."""
    evaluator, model, streams = opened(folder, kind, **ALL)
    predictions, found = evaluator.evaluate(model, streams.roles)
    more = evaluator.predict(model, streams.roles.test, hidden=True, projected=True)
    by_prefix, _ = evaluator.predictors(model, streams.roles.labelled, streams.roles.test)
    arrays = {"y": predictions.y, "rows": predictions.rows, "hidden": more.hidden}
    arrays |= {f"z{view}": z for view, z in enumerate(more.projections)}
    arrays |= {prefix: of.probability for prefix, of in by_prefix.items()}
    again, other, _ = opened(folder, kind, evaluate=NEIGHBOURS, **TESTED_AND_LABELLED)
    own = again.predictors(other, streams.roles.labelled, streams.roles.labelled)[0]["knn_"]
    arrays["own"] = own.probability
    return {"scores": found} | {k: np.asarray(v).tolist() for k, v in arrays.items()}


def on_all(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: evaluated(folder, name.split()[0]) for name, folder in folders.items()}


@pytest.fixture(scope="module", params=[1, 2, 3])
def found(sets: Sets, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of some processes finds in every set."""
    return ranks.run(request.param, on_all, {name: folder for name, (folder, _) in sets.items()})


def probe(known: Known, labelled: Any, queries: Any) -> NDArray[np.float64]:
    """scikit-learn's logistic regression on standardised features: one per label, or of classes."""
    scaler = StandardScaler().fit(known.hidden(labelled))
    x, asked = scaler.transform(known.hidden(labelled)), scaler.transform(known.hidden(queries))
    fit = partial(LogisticRegression, max_iter=1000)
    if known.kind in EXCLUSIVE:
        return np.asarray(fit().fit(x, known.y[labelled].argmax(1)).predict_proba(asked))
    columns = []
    for y in known.y[labelled].T:
        has = ~np.isnan(y)
        columns.append(fit().fit(x[has], y[has]).predict_proba(asked)[:, 1])
    return np.stack(columns, 1)


def votes(known: Known, labelled: Any, queries: Any) -> NDArray[np.float64]:
    """Wu et al.'s weighted vote by a loop over the others; unknown labels do not vote."""
    out = np.empty((len(queries), 4))
    features = known.hidden(np.arange(len(known.y)))
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    for place, row in enumerate(queries):
        others = sorted((-(unit[other] @ unit[row]), other) for other in labelled if other != row)
        for label in range(4):
            pairs = [(math.exp(-c / TAU), known.y[other, label]) for c, other in others[:K]]
            pairs = [(weight, y) for weight, y in pairs if not math.isnan(y)]
            total = sum(weight for weight, _ in pairs)
            out[place, label] = sum(w * y for w, y in pairs) / total if pairs else 0.5
    return out


def recalls(known: Known) -> dict[str, float]:
    """recall@k by a loop: fewer than k other rows with the second view are as near as the own."""
    rows, found = known.test, {}
    z, there = known.projections(rows), known.present(rows)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in z]
    for u, v, names in ((0, 1, "a_b"), (1, 0, "b_a")):
        places = []
        for row in np.flatnonzero(there.all(1)):
            cosines = [(unit[u][row] @ unit[v][key], key) for key in np.flatnonzero(there[:, v])]
            own = unit[u][row] @ unit[v][row]
            places.append(sum(c >= own - 1e-6 for c, key in cosines if key != row))
        for k in (1, 5, 10):
            found[f"recall@{k}_{names}"] = float(np.mean([place < k for place in places]))
    assert found["recall@5_a_b"] != found["recall@5_b_a"]  # else a swap would not show
    return found


@pytest.mark.parametrize(("kind", "whole"), SETS)
def test_rows_probabilities_and_features_are_the_known_ones(
    sets: Sets, found: list[dict[str, Any]], kind: str, whole: bool
) -> None:
    _, known = sets[name := f"{kind} {whole}"]
    rows = known.test
    present = known.present(rows)
    for process in found:
        assert process[name]["rows"] == rows.tolist()
        np.testing.assert_array_equal(process[name]["y"], known.y[rows])
        near(process[name][""], known.probability(rows), atol=1e-5)
        near(process[name]["hidden"], known.hidden(rows), atol=1e-4)
        for view, z in enumerate(known.projections(rows)):
            its = np.array(process[name][f"z{view}"])[present[:, view]]
            near(its, z[present[:, view]], atol=1e-4)


@pytest.mark.parametrize(("kind", "whole"), SETS)
def test_scores_are_scikit_learn_s_of_the_known_probabilities(
    sets: Sets, found: list[dict[str, Any]], kind: str, whole: bool
) -> None:
    _, known = sets[name := f"{kind} {whole}"]
    rows, labelled = known.test, known.labelled()
    values = np.linalg.svd(known.hidden(rows), compute_uv=False)
    shares = values / values.sum()
    expected = scores(known.probability(rows), known.y[rows], kind)
    for prefix, method in (("probe_", probe), ("knn_", votes)):
        its = scores(method(known, labelled, rows), known.y[rows], kind)
        expected |= {f"{prefix}{key}": value for key, value in its.items()}
    expected |= recalls(known) | {"rankme": math.exp(-(shares * np.log(shares)).sum())}
    for process in found:
        assert process[name]["scores"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("kind", "whole"), SETS)
def test_the_probe_and_the_vote_learn_from_the_labelled_rows(
    sets: Sets, found: list[dict[str, Any]], kind: str, whole: bool
) -> None:
    """No row votes on itself, where those that are tested are the labelled ones."""
    _, known = sets[name := f"{kind} {whole}"]
    rows, labelled = known.test, known.labelled()
    for process in found:
        its = probe(known, labelled, rows)
        near(process[name]["probe_"], its, atol=2e-3)
        near(process[name]["knn_"], votes(known, labelled, rows), atol=1e-4)
        own = votes(known, labelled, labelled)
        near(process[name]["own"], own, atol=1e-4)


@pytest.mark.parametrize("kind", EXCLUSIVE)
def test_without_a_classifier_the_probe_is_the_prediction(sets: Sets, kind: str) -> None:
    folder, known = sets[f"{kind} False"]
    rows, labelled = known.test, known.labelled()
    evaluator, model, streams = opened(folder, kind, classify=False)
    predictions, _ = evaluator.evaluate(model, streams.roles)
    its = probe(known, labelled, rows)
    near(predictions.probability, its, atol=2e-3)

    given = {"probe_by": "svm"}
    evaluator, model, streams = opened(folder, kind, classify=False, evaluate=given)
    predictions, found = evaluator.evaluate(model, streams.roles)
    x, classes = known.hidden(labelled), known.y[labelled].argmax(1)
    folds = min(5, int(np.bincount(classes).min()))
    grid = {"C": [10.0**power for power in range(-3, 4)]}
    best = GridSearchCV(SVC(break_ties=True), grid, cv=folds).fit(x, classes)
    decision = best.decision_function(known.hidden(rows))
    shares = np.exp(decision) / np.exp(decision).sum(1, keepdims=True)
    near(predictions.probability, shares, atol=2e-3)
    accuracy = (best.predict(known.hidden(rows)) == known.y[rows].argmax(1)).mean()
    assert found["accuracy"] == pytest.approx(accuracy) and accuracy > 0.4


@pytest.mark.parametrize("whole", [True, False])
def test_a_threshold_is_fitted_on_validation_rows_alone(sets: Sets, whole: bool) -> None:
    folder, known = sets[f"multi_label {whole}"]
    kept = {"protocol": {"validation": 0.4}}
    fitted = {"threshold": "fitted"}
    evaluator, model, streams = opened(folder, "multi_label", data=kept, evaluate=fitted)
    rows = streams.roles.validation
    assert 10 < len(rows) < 20 and set(rows) < set(known.labelled())
    assert not set(rows) & set(streams.roles.labelled)
    probability, y = known.probability(rows), known.y[rows]
    values = np.unique(probability.astype(np.float32)).astype(float)
    tried = [
        (-scores(probability, y, "multi_label", t)["f1_weighted"], abs(t - 0.5), t)
        for t in ((values[1:] + values[:-1]) / 2).tolist()
    ]
    best = min((round(loss, 12), *rest) for loss, *rest in tried)[2]
    assert min(abs(best - 0.4), abs(best - 0.5)) > 0.005  # neither default
    for role, own in (("test", known.test), ("validation", rows)):
        predictions, found = evaluator.evaluate(model, streams.roles, role)  # type: ignore[arg-type]
        assert predictions.rows.tolist() == own.tolist()
        expected = scores(known.probability(own), known.y[own], "multi_label", best)
        assert found == pytest.approx(expected | {"threshold": best}, rel=1e-4)


def test_a_threshold_that_is_set_is_the_one_that_is_used(sets: Sets) -> None:
    folder, known = sets["multi_label True"]
    of = partial(scores, known.probability(known.test), known.y[known.test], "multi_label")
    for threshold in (0.15, 0.75):
        given = {"threshold": threshold}
        evaluator, model, streams = opened(folder, "multi_label", evaluate=given)
        assert evaluator.evaluate(model, streams.roles)[1] == pytest.approx(of(threshold))
    assert of(0.15)["f1_weighted"] != of(0.75)["f1_weighted"]


@pytest.mark.parametrize("world", [1, 3])
def test_rows_that_cannot_be_read_are_left_out(sets: Sets, world: int) -> None:
    folder, known = sets["multi_class True"]
    gone = [known.test[0], known.test[11], known.test[-1]]
    kept = np.setdiff1d(known.test, gone)
    for process in ranks.run(world, without, folder, [int(row) for row in gone]):
        assert process["rows"] == kept.tolist()
        np.testing.assert_array_equal(process["y"], known.y[kept])
        near(process["probability"], known.probability(kept), atol=1e-5)
        expected = scores(known.probability(kept), known.y[kept], "multi_class")
        assert process["scores"] == pytest.approx(expected)


def without(folder: Path, lost: list[int]) -> dict[str, Any]:
    evaluator, model, streams = opened(folder, "multi_class")
    streams.reader.lost |= dict.fromkeys(lost, "cut off")
    found, of = evaluator.evaluate(model, streams.roles)
    assert found.probability is not None
    arrays: dict[str, Any] = {"rows": found.rows, "y": found.y, "probability": found.probability}
    return {"scores": of} | {name: array.tolist() for name, array in arrays.items()}


def test_inputs_of_baselines_are_the_views_side_by_side(sets: Sets) -> None:
    """Standardised; a view that a row lacks has the mean of the rows that are asked for."""
    folder, known = sets["multi_label False"]
    evaluator, _, streams = opened(folder, "multi_label")
    for rows in (known.test, known.labelled()):
        found = evaluator.inputs(rows)
        scaled = [(x - np.nanmean(x[:TRAIN], 0)) / np.nanstd(x[:TRAIN], 0) for x in known.views]
        columns = np.concatenate([x[rows] for x in scaled], 1)
        near(found.hidden, np.where(np.isnan(columns), np.nanmean(columns, 0), columns), 1e-5)
        np.testing.assert_array_equal(found.y, known.y[rows])


def test_the_first_view_alone_classifies(tmp_path: Path) -> None:
    """With `classify_on: first_view` what is predicted does not depend on the others."""
    known = write(tmp_path, "multi_class", whole=True)
    first: dict[str, Any] = {"classify_on": "first_view", "shared_encoder": True}
    given: dict[str, Any] = {"views": [{"stored": "a"}, {"stored": "a"}]}
    evaluator, model, streams = opened(tmp_path, "multi_class", model=first, data=given)
    predictions = evaluator.predict(model, streams.roles.test, hidden=True)
    a = known.by_view(known.test)[0]
    near(predictions.hidden, a, atol=1e-4)
    logits = a @ CLASSIFIER[:, :WIDTH].T + BIAS
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    near(predictions.probability, shares, atol=1e-5)


def test_a_table_of_predictions_names_the_columns_that_it_has(sets: Sets, tmp_path: Path) -> None:
    """`heron predict` with a saved model whose weights are the known ones."""
    for kind in ("multi_label", "multi_class"):
        folder, known = sets[f"{kind} False"]
        _, model, streams = opened(folder, kind)
        made = config(folder, kind)
        signature = Signature.of(streams.reader, made.data.views)
        Model(model, made, signature, torch.device("cpu")).save_pretrained(tmp_path / kind)
        out = tmp_path / f"{kind}.csv"
        words = ["predict", str(tmp_path / kind), "--split", "test", "--out", str(out)]
        assert main([*words, "--data", str(folder / "known")]) == 0
        table, rows = pd.read_csv(out), np.arange(TRAIN, TRAIN + TEST)
        assert [*table.columns] == ["row", "key", *NAMES]
        assert table["row"].tolist() == rows.tolist()
        for column, name in enumerate(NAMES):
            expected = known.probability(rows)[:, column]
            near(table[name], expected, atol=1e-5)


def test_rows_without_labels_have_no_scores(tmp_path: Path) -> None:
    known = write(tmp_path, "none", whole=True)
    evaluator, model, streams = opened(tmp_path, "none", evaluate={"cross_view": True})
    predictions, found = evaluator.evaluate(model, streams.roles)
    assert found == {} and not len(predictions.rows)
    rows = np.arange(len(known.y))[::-7].copy()  # in an order of the caller's
    predictions = evaluator.predict(model, rows, hidden=True, projected=True)
    assert predictions.rows.tolist() == rows.tolist()
    near(predictions.hidden, known.hidden(rows), atol=1e-4)
    for z, expected in zip(predictions.projections, known.projections(rows), strict=True):
        near(z, expected, atol=1e-4)
