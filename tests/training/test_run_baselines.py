"""The baselines of a run: scikit-learn's classifiers on its inputs, and the plain network's run."""

import json
from pathlib import Path
from typing import Any

import pytest

from heron.api.job import pretrain
from heron.experiment.config import load_config, parse_config
from heron.training.baselines import other_seeds, plain, summary
from heron.training.tracking import read_metrics
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


def test_a_run_and_its_baselines_side_by_side_on_any_number_of_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = small(str(tmp_path), "run")
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    shown = capfd.readouterr().out  # also of the process that fits
    for prefix in (prefixes := ("", "plain_", "logistic_", "forest_")):
        assert written[f"{prefix}auc_macro"] == result[f"{prefix}auc_macro"]
        assert f"auc_macro {result[f'{prefix}auc_macro']:.4f}" in shown
    assert len({result[f"{prefix}auc_macro"] for prefix in prefixes}) == 4
    assert "boosting_auc_macro" not in result  # of 40 labels
    for name in ("logistic regression", "random forest"):
        told = [shown.index(f"{word} {name}") for word in ("fitting", "by")]
        assert told == sorted(told)

    # The report is there before the baselines are, and says which are to come.
    report = str(tmp_path / "run" / "report.html")
    first, last = shown.index(f"report: {report}, to be updated with "), f"report: {report}\n"
    assert first < shown.index("plain: ") < shown.index(last)
    assert "the plain network\n" in shown[first:].partition("\n")[0] + "\n"
    assert "to_come" not in written and "Still to come" not in Path(report).read_text()

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
    config = load_config(FACES, ["evaluate.seeds=3"])
    first, second = other_seeds(config)
    assert (first.seed, second.seed) == (config.seed + 1, config.seed + 2)
    assert first.evaluate.baselines == "plain" and first.evaluate.seeds == 1
    for asked, of_seeds in (("plain", "plain"), ("scikit-learn", False), ("false", False)):
        changed = load_config(FACES, ["evaluate.seeds=2", f"evaluate.baselines={asked}"])
        assert [other.evaluate.baselines for other in other_seeds(changed)] == [of_seeds], asked
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
