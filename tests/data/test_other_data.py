"""What a run says of its own data set goes no further; what rows lack is seen by nobody."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heron.api.job import pretrain
from heron.cli.main import main
from heron.data.options import SourceShare, without_locations
from heron.data.reader import Reader
from heron.data.views import Views
from heron.evaluation.evaluator import Evaluator, with_means
from heron.evaluation.scikit import raw_inputs
from heron.experiment.config import parse_config
from heron.experiment.open_data import open_data
from heron.shards.build import build
from heron.sources import make_source
from heron.training.saved import portable
from tests.data import test_mixtures as mixtures
from tests.data.test_partial_rows import config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two views and four labels, of which a third of the rows' first is not known."""
    path, draw = tmp_path_factory.mktemp("other"), np.random.default_rng(1)
    labels = draw.integers(0, 2, (200, 4)).astype(float)
    labels[::3, 0] = np.nan
    labels[5::9] = np.nan
    labels[5::9, 1] = 0
    views: dict[str, Any] = {n: draw.normal(5, 1, (200, 6)).astype("f4") for n in ("v1", "v2")}
    np.savez(path / "mine.npz", labels=labels, **views)
    source = make_source("arrays", {"npz": path / "mine.npz", "unknown": "allow"})
    build(source, path / "mine", progress=False)
    return path


def test_a_label_that_is_not_known_is_no_class(folder: Path) -> None:
    protocol: dict[str, Any] = {"labelled": 80, "hide_views": {}, "hide_labels": 0.0}
    streams = open_data(
        config(folder, data={"protocol": protocol, "balance": "labels", "batch": {"labelled": 20}})
    )
    assert streams.labelled is not None
    drawn = np.concatenate([streams.labelled.batch_rows(t) for t in range(60)])
    assert set(drawn.tolist()) == set(streams.roles.labelled.tolist())
    of_nothing = streams.targets(drawn)
    assert (np.nan_to_num(of_nothing).sum(1) == 0).any()  # rows of no label that is known


def test_nobody_sees_a_view_that_is_hidden(folder: Path) -> None:
    experiment = config(folder)
    reader = open_data(experiment).reader
    views = Views(reader, experiment.data, torch.device("cpu"))
    evaluator = Evaluator(reader, views, experiment.evaluate)
    rows = np.arange(200)
    there = reader.present(rows, ["v2"])[:, 0]
    assert not reader.read("v2", rows)[~there].any()
    whole = Reader(folder / "mine").read("v2", rows)
    np.testing.assert_array_equal(reader.read("v2", rows)[there], whole[there])
    raw = raw_inputs(evaluator, rows).hidden
    assert raw is not None
    means = raw[there][:, 6:].mean(0)
    np.testing.assert_allclose(raw[~there][:, 6:], np.tile(means, (sum(~there), 1)), rtol=1e-5)
    np.testing.assert_array_equal(evaluator.inputs(rows).hidden, raw)
    columns = np.array([[1, np.nan], [3, 4]], np.float32)
    assert with_means(columns).tolist() == [[1, 4], [3, 4]]
    columns = np.array([[np.inf, np.nan, np.nan], [3, np.nan, 4]], np.float32)
    assert with_means(columns).tolist() == [[np.inf, 0, 4], [3, 0, 4]]


def test_another_data_set_is_opened_alone_and_whole(folder: Path) -> None:
    data = config(folder).data
    other = mixtures.config(folder).data.for_data_set("x")
    assert (other.path, other.sources) == ("x", None)
    assert (
        data.for_data_set("x").protocol.hide_views == {}
        and data.for_data_set("x").protocol.hide_labels == 0
    )
    saved = portable(config(folder)).data
    assert saved.path == "mine" and saved.protocol.hide_views == {}


def test_a_fingerprint_pins_its_own_data_set_alone(folder: Path) -> None:
    pinned = config(folder, data={"fingerprint": f"sha256:{'0' * 64}"})
    assert pinned.data.for_data_set("x").fingerprint is None
    assert pinned.data.for_data_set(pinned.data.path).fingerprint == pinned.data.fingerprint
    assert portable(pinned).data.fingerprint == pinned.data.fingerprint  # at another place
    several = pinned.data.model_copy(update={"sources": [SourceShare(path="a")], "path": ""})
    mixture = pinned.model_copy(update={"data": several})
    assert portable(mixture).data.fingerprint is None


def test_where_sources_lie_decides_nothing(tmp_path: Path) -> None:
    one, two = (mixtures.config(tmp_path / name).data.model_dump() for name in ("a", "b"))
    assert one != two and without_locations(one) == without_locations(two)


def test_a_run_on_a_mixture_predicts_another_data_set(tmp_path: Path) -> None:
    mixtures.made(tmp_path)
    experiment = mixtures.config(tmp_path).model_dump(mode="json")
    experiment["objective"] = {"supcon": {}, "cross_entropy": {}}
    pretrain(parse_config(experiment))
    out = tmp_path / "p.csv"
    words = ["predict", str(tmp_path / "run"), "--data", str(tmp_path / "small")]
    assert main([*words, "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 21
