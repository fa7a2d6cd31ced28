"""Predictions of rows, as a table, are what the run's scores are of."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from heron.api.job import pretrain
from heron.cli.main import main
from heron.data.dataset import build_data, load_or_assign_roles, open_reader
from heron.data.protocol import write_roles
from heron.evaluation.metrics import multi_class_scores
from heron.shards.build import build
from heron.sources import make_source
from tests.experiments import frames


def predicted(path: Path) -> Any:
    return pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)


@pytest.mark.parametrize("terms", [{}, {"cross_entropy": None}], ids=["classifier", "probe"])
def test_predictions_have_the_scores_of_the_run(
    terms: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = frames(tmp_path, objective=terms)
    result = pretrain(config)
    tables = {}
    for name in ("test.csv", "test.parquet"):
        words = ("predict", config.run.dir, "--role", "test", "--out", str(tmp_path / name))
        assert main(list(words)) == 0
        tables[name] = predicted(tmp_path / name)
    assert "test.csv: 70 rows, 4 labels" in capsys.readouterr().out
    table = tables["test.parquet"]
    assert [*table.columns[:2]] == ["row", "key"] and len(table.columns) == 6
    pd.testing.assert_frame_equal(table, tables["test.csv"], check_dtype=False, rtol=1e-6)
    assert table["row"].tolist() == list(range(300, 370)) and table["key"].is_unique
    from heron.data.reader import Reader

    y = Reader(Path(config.data.path)).ground_truth(table["row"].to_numpy())
    probability = table.to_numpy()[:, 2:].astype(np.float32)
    assert multi_class_scores(probability, y).items() <= result.items()

    whole = ("predict", config.run.dir, "--out", str(tmp_path / "all.csv"))
    assert main(list(whole)) == 0
    pd.testing.assert_frame_equal(
        predicted(tmp_path / "all.csv")[300:].reset_index(drop=True), tables["test.csv"], rtol=1e-5
    )
    assert main(list(whole)) == 1
    assert "all.csv already exists; choose another --out" in capsys.readouterr().err
    other = (*whole, "--overwrite", "--data", config.data.path)
    assert main(list(other)) == (1 if terms else 0)
    if terms:
        assert (
            "has no classifier, and a probe can only be trained on the run's"
            in capsys.readouterr().err
        )
    assert main([*whole[:3], str(tmp_path / "all.txt")]) == 2
    assert "--out must end with .csv or .parquet, got " in capsys.readouterr().err


def test_the_roles_and_fingerprint_of_the_run_do_not_bind_another_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = frames(tmp_path)
    build_data(own.data)
    reader = open_reader(own.data)
    roles = load_or_assign_roles(reader, own.data)
    write_roles(reader, roles, own.data, tmp_path / "roles")
    fingerprint = reader.manifest.fingerprint
    run = frames(tmp_path, data={"roles": str(tmp_path / "roles"), "fingerprint": fingerprint})
    pretrain(run)
    other = frames(tmp_path / "other", data={"build": {"train": 200, "test": 30}}).data
    build_data(other)
    words = ["predict", run.run.dir, "--data", other.path, "--role", "test"]
    assert main([*words, "--out", str(tmp_path / "other.csv")]) == 0
    assert len(predicted(tmp_path / "other.csv")) == 30
    embed = ["embed", run.run.dir, "--out", str(tmp_path / "embedded"), f"data.path={other.path}"]
    assert main([*embed, f"data.fingerprint={fingerprint}"]) == 1  # which the caller pins
    assert main(embed) == 0
    shutil.rmtree(own.data.path)
    build(make_source("frames", {"train": 300, "test": 70}), Path(own.data.path), progress=False)
    words = ["embed", run.run.dir, "--out", str(tmp_path / "own"), f"data.path={own.data.path}"]
    assert main(words) == 1  # the run's own data set is still the one that it pins
    assert f"pins {fingerprint}; restore" in capsys.readouterr().err
