"""Rows that lack views or labels: hidden by protocol, in batches, in a run and its scores."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.data.batches import batches
from heron.data.dataset import build_data
from heron.data.options import Protocol
from heron.data.protocol import hide_views
from heron.data.reader import Reader
from heron.data.streams import ShardBatches
from heron.evaluation.collapse import measure
from heron.evaluation.knn import vote
from heron.evaluation.metrics import cross_view_recalls, multi_label_scores
from heron.evaluation.probe import fit_logistic
from heron.experiment.config import Config, parse_config
from heron.experiment.open_data import open_data
from heron.shards.build import build
from heron.sources import make_source
from tests.experiments import frames, merge

RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two views and four labels of 200 rows."""
    path = tmp_path_factory.mktemp("partial")
    labels = RANDOM.integers(0, 2, (200, 4))
    hidden = labels @ RANDOM.normal(size=(4, 6))
    views: dict[str, Any] = {
        name: (hidden + RANDOM.normal(size=(200, 6))).astype("f4") for name in ("v1", "v2")
    }
    np.savez(path / "mine.npz", labels=labels, **views)
    build(make_source("arrays", {"npz": path / "mine.npz"}), path / "mine", progress=False)
    return path


TREE: dict[str, Any] = {
    "data": {
        "split": "all",
        "protocol": {"labelled": 80, "hide_views": {"v2": 0.4}, "hide_labels": 0.5},
        "batch": {"labelled": 20, "unlabelled": 30},
        "views": [{"stored": "v1"}, {"stored": "v2"}],
        "standardise": True,
    },
    "model": {"encoder": {"kind": "mlp", "widths": [8]}, "projection_width": 4},
    "objective": {"bce": {}, "weighted_unsupervised": {}, "weighted_supervised": {}},
    "train": {"epochs": 2, "cpu_threads": 1},
    "evaluate": {"probe": "always", "knn": 5, "baselines": True},
    "tracking": [],
}


def config(folder: Path, name: str = "run", **changes: Any) -> Config:
    places = {"run": {"dir": str(folder / name)}, "data": {"path": str(folder / "mine")}}
    return parse_config(merge(merge(TREE, places), changes))


def test_a_row_keeps_a_view_and_its_own_draw(folder: Path) -> None:
    whole, rows = Reader(folder / "mine"), np.arange(200)
    assert not whole.may_lack_views and whole.present(rows, ["v2", "v1"]).all()
    hide_views(whole, {"v1": 0.5, "v2": 0.6}, Protocol(seed=3))
    present = whole.present(rows, ["v1", "v2"])
    assert whole.may_lack_views and present.any(1).all()
    assert 0.5 < present[:, 0].mean() < 0.8 and 0.3 < present[:, 1].mean() < 0.6
    alone = Reader(folder / "mine")
    hide_views(alone, {"v2": 0.6}, Protocol(seed=3))
    gone = ~alone.present(rows, ["v2"])[:, 0]
    assert 0.5 < gone.mean() < 0.7 and (gone >= ~present[:, 1]).all()  # the draw is the view's own


def test_a_view_that_cannot_be_hidden_is_named(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data.protocol.hide_views: .* has no stored view 'v3'; it has"
    ):
        hide_views(Reader(folder / "mine"), {"v3": 0.5}, Protocol())


def test_labels_are_hidden_from_training_alone(folder: Path) -> None:
    streams = open_data(config(folder))
    whole, roles = Reader(folder / "mine"), streams.roles
    seen, true = streams.targets(roles.labelled), whole.targets(roles.labelled)
    unknown = np.isnan(seen)
    assert 0.35 < unknown.mean() < 0.6 and not unknown.all(1).any() and streams.lacks_labels
    np.testing.assert_array_equal(seen[~unknown], true[~unknown])
    tested = streams.reader.ground_truth(roles.test)
    np.testing.assert_array_equal(tested, whole.ground_truth(roles.test))
    dropped = open_data(
        config(folder, data={"protocol": {"partial_rows": "drop"}, "batch": {"labelled": 2}})
    )
    kept = dropped.roles.labelled
    assert not np.isnan(dropped.targets(kept)).any() and 0 < len(kept) < len(roles.labelled)
    np.testing.assert_array_equal(dropped.roles.test, roles.test)
    assert not dropped.lacks_views and not dropped.lacks_labels
    with pytest.raises(ConfigError, match="needs multi_label ones, but those of .*; set it to 0"):
        other = frames(folder, data={"protocol": {"hide_labels": 0.5}})
        build_data(other.data, progress=False)
        open_data(other)


@pytest.mark.parametrize("world", [1, 3])
def test_batches_say_which_views_their_rows_have(folder: Path, world: int) -> None:
    streams = open_data(config(folder))
    for rank in range(world):
        source = ShardBatches(streams, 0, rank, world)
        for batch in batches(source, 0, 3, workers=0):
            expected = streams.reader.present(batch.indices.numpy(), ["v1", "v2"])
            assert batch.present is not None
            np.testing.assert_array_equal(batch.present.numpy(), expected)


def test_rows_that_the_model_sees_nothing_of(folder: Path) -> None:
    second: dict[str, Any] = {"data": {"views": [{"stored": "v2"}, {"stored": "v2"}]}}
    with pytest.raises(ConfigError, match="have none of v2"):
        open_data(config(folder, **second))
    second["data"] |= {"protocol": {"partial_rows": "drop", "hide_labels": 0.0}}
    streams = open_data(config(folder, **second))
    assert not streams.lacks_views and 0 < len(streams.roles.test) < 120


def test_a_run_on_rows_that_are_not_whole(folder: Path) -> None:
    result = pretrain(config(folder))
    counts = result["rows_by_views"]["test"]
    assert set(counts) == {"v1", "v1 + v2"} and sum(counts.values()) == 120
    assert result["auc_macro"] > 0.55 and result["probe_auc_macro"] > 0.55
    assert result["knn_auc_macro"] > 0.5 and result["logistic_auc_macro"] > 0.55
    with pytest.raises(ConfigError, match="objective.mib cannot use rows without all views"):
        pretrain(config(folder, objective={"mib": {}}), overwrite=True)
    with pytest.raises(ConfigError, match="classify_on is 'first_view', but some rows lack views"):
        first = {"classify_on": "first_view", "shared_encoder": True}
        pretrain(config(folder, model=first), overwrite=True)


def test_scores_of_labels_that_are_known() -> None:
    y = RANDOM.integers(0, 2, (60, 3)).astype("f4")
    p = np.clip(y * 0.4 + RANDOM.random((60, 3)) * 0.6, 0, 1).astype("f4")
    hidden = RANDOM.random(y.shape) < 0.3
    part = np.where(hidden, np.nan, y).astype("f4")
    found = multi_label_scores(p, part, 0.5)
    each = [
        multi_label_scores(p[~h][:, None, a], y[~h][:, None, a], 0.5)
        for a, h in enumerate(hidden.T)
    ]
    for name, of_one in (("f1_macro", "f1_macro"), ("auc_macro", "auc_macro"), ("map", "map")):
        assert found[name] == pytest.approx(np.mean([scores[of_one] for scores in each]))
    said, true, known = (p > 0.5)[~hidden], (y == 1)[~hidden], ~hidden
    micro = 2 * (said & true).sum() / (said.sum() + true.sum())
    assert found["f1_micro"] == pytest.approx(micro)
    agree = [((p[i] > 0.5) == y[i])[known[i]].all() for i in range(60)]
    assert found["subset_accuracy"] == pytest.approx(np.mean(agree))
    whole = multi_label_scores(p, y, 0.5)
    y_nan = np.concatenate([y, np.full((1, 3), np.nan, "f4")])
    p_nan = np.concatenate([p, np.ones((1, 3), "f4")])
    scores = multi_label_scores(p_nan, y_nan, 0.5)
    for name in ("f1_weighted", "f1_macro", "f1_micro", "auc_macro", "map"):
        assert scores[name] == pytest.approx(whole[name])


def test_a_probe_and_a_vote_of_labels_that_are_known() -> None:
    x, y = RANDOM.normal(size=(40, 3)), RANDOM.integers(0, 2, (40, 3)).astype("f4")
    part = np.where(RANDOM.random(y.shape) < 0.4, np.nan, y).astype("f4")
    part[:, 2] = np.nan
    found = fit_logistic(x, part, False, 1.0, 100)(x)
    for a in range(2):
        known = ~np.isnan(part[:, a])
        alone = fit_logistic(x[known], y[known][:, [a]], False, 1.0, 100)(x)
        np.testing.assert_allclose(found[:, [a]], alone)
    assert (found[:, 2] == 0.5).all()
    rows, tested = np.arange(40), np.arange(100, 104)
    votes = vote((rows, x.astype("f4"), part), (tested, x[:4].astype("f4")), 7, 0.5)
    near = x / np.linalg.norm(x, axis=1, keepdims=True)
    for q in range(4):
        cosine = near @ near[q]
        k = np.argsort(-cosine)[:7]
        for a in range(3):
            stated = k[~np.isnan(part[k, a])]
            w = np.exp(cosine[stated] / 0.5)
            expected = (w * part[stated, a]).sum() / w.sum() if len(stated) else 0.5
            assert votes[q, a] == pytest.approx(expected, rel=1e-4)


def test_measures_of_the_views_that_there_are() -> None:
    z = [torch.randn(30, 4, generator=torch.Generator().manual_seed(v)) for v in range(2)]
    present = torch.rand(30, 2, generator=torch.Generator().manual_seed(5)) < 0.6
    both = present.all(1)
    found = measure([x.where(present[:, [v]], 0) for v, x in enumerate(z)], present)
    assert found["alignment"] == pytest.approx(measure([x[both] for x in z])["alignment"])
    alone = [measure([x[present[:, v]]]) for v, x in enumerate(z)]
    assert found["uniformity"] == pytest.approx(max(m["uniformity"] for m in alone))
    recalls = cross_view_recalls(z, ["a", "b"], present)
    unit = [x / x.norm(dim=1, keepdim=True) for x in z]
    hits = []
    for i in both.nonzero()[:, 0].tolist():
        others = [k for k in present[:, 1].nonzero()[:, 0].tolist() if k != i]
        hits.append(
            bool((unit[0][i] @ unit[1][others].T < unit[0][i] @ unit[1][i]).sum() > len(others) - 5)
        )
    assert recalls["recall@5_a_b"] == pytest.approx(np.mean(hits))


def test_no_labelled_row_is_left(folder: Path) -> None:
    rows: dict[str, Any] = {n: RANDOM.normal(size=(40, 6)).astype("f4") for n in ("v1", "v2")}
    np.savez(folder / "bare.npz", **rows)
    build(make_source("arrays", {"npz": folder / "bare.npz"}), folder / "bare", progress=False)
    protocol = {"labelled": "all", "partial_rows": "drop", "hide_labels": 0.0}
    data = {
        "path": str(folder / "bare"),
        "protocol": protocol,
        "batch": {"labelled": 0, "unlabelled": 8},
    }
    objective: dict[str, Any] = dict.fromkeys(
        ["bce", "weighted_unsupervised", "weighted_supervised"], None
    )
    objective["nt_xent"] = {}
    streams = open_data(config(folder, data=data, objective=objective))
    assert not len(streams.roles.labelled) and 8 <= len(streams.roles.unlabelled) < 40
