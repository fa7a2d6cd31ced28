"""Whole runs: the same on any number of processes and workers, resumed, stopped, reported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heron.api.job import pretrain
from heron.base.errors import CheckpointError, ConfigError, ShardError, SourceError
from heron.experiment.config import load_config, parse_config, run_fingerprint
from heron.shards.manifest import load_manifest
from heron.training.checkpoint import complete_checkpoints
from heron.training.tracking import read_metrics
from tests import ranks
from tests.experiments import frames, merge

CONFIGS = Path(__file__).parent.parent / "configs"
MAP = {"map": "always"}
CNN = {"kind": "cnn", "widths": None, "dropout": None}


def losses(folder: Path) -> list[dict[str, Any]]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    return [{k: v for k, v in row.items() if k.startswith("loss")} for row in rows]


def weights(folder: Path, kind: str = "model") -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / "latest" / f"{kind}.safetensors")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others are compared with."""
    folder = tmp_path_factory.mktemp("straight")
    pretrain(frames(folder, evaluate=MAP))
    return folder


@pytest.mark.parametrize(("weight", "said"), [(0.5, False), (0.0, True)])
def test_unlabelled_rows_that_no_term_looks_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weight: float, said: bool
) -> None:
    objective = {"weighted_unsupervised": {"weight": weight, "tau": 0.5}}
    pretrain(frames(tmp_path, objective=objective, train={"steps": 1}))
    out = capsys.readouterr().out
    assert "global batch 31 = 31 over 1 process (10 labelled)" in out
    assert ("no term uses unlabelled rows" in out) == said


def train_here(folder: str, run: str) -> float:
    """What a spawned process runs."""
    return float(pretrain(frames(Path(folder), run))["f1_weighted"])


@pytest.mark.parametrize("world", [2, 3])
def test_five_steps_are_those_of_one_process(straight: Path, world: int) -> None:
    scores = ranks.run(world, train_here, str(straight), f"world{world}")
    alone = json.loads((straight / "run" / "result.json").read_text())
    many = json.loads((straight / f"world{world}" / "result.json").read_text())
    data = load_manifest(straight / "frames").fingerprint
    resumed = frames(straight, "elsewhere", run={"resume": "auto"}, train={"timeout_s": 9})
    expected = run_fingerprint(resumed.in_precision("fp32"), data)  # `auto` on a CPU
    assert many["fingerprint"] == expected != alone["fingerprint"]  # which has a map
    assert many["world_size"] == world
    assert set(scores) == {many["f1_weighted"]}
    assert many["f1_weighted"] == pytest.approx(alone["f1_weighted"], abs=0.02)
    theirs = losses(straight / f"world{world}")
    for one, row in zip(losses(straight / "run"), theirs, strict=True):
        assert row == pytest.approx(one, rel=1e-5)
    for name, value in weights(straight / "run").items():
        other = weights(straight / f"world{world}")[name]
        torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_run_repeats_bit_for_bit_whatever_the_workers(straight: Path, tmp_path: Path) -> None:
    pretrain(frames(tmp_path, data={"workers": 2, "path": str(straight / "frames")}))
    assert losses(tmp_path / "run") == losses(straight / "run")
    for name, value in weights(straight / "run").items():
        assert torch.equal(weights(tmp_path / "run")[name], value), name


def test_a_run_in_two_parts_is_the_run_in_one(straight: Path, tmp_path: Path) -> None:
    shards = {"path": str(straight / "frames")}
    pretrain(frames(tmp_path, data=shards, train={"steps": 3}))
    pretrain(frames(tmp_path, data=shards, run={"resume": "auto"}))
    assert losses(tmp_path / "run") == losses(straight / "run")
    for name, value in weights(straight / "run").items():
        assert torch.equal(weights(tmp_path / "run")[name], value), name


def test_a_shortened_run_is_the_beginning_of_the_long_one(straight: Path, tmp_path: Path) -> None:
    pretrain(frames(tmp_path, data={"path": str(straight / "frames")}, train={"steps": 2}))
    assert losses(tmp_path / "run") == losses(straight / "run")[:2]


def test_the_folder_of_a_run(straight: Path) -> None:
    folder = straight / "run"
    result = json.loads((folder / "result.json").read_text())
    assert {"f1_weighted", "auc_macro", "steps", "seconds", "world_size", "version"} <= set(result)
    assert result["steps"] == 5
    assert (result["strategy"], result["precision"]) == ("one process", "fp32")
    rows = read_metrics(folder / "metrics.jsonl")
    needed = {"step", "epoch", "loss", "loss/cross_entropy", "lr", "samples_per_s", "data_wait_s"}
    assert needed <= set(rows[0])
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 4]
    measures = {"alignment", "uniformity", "effective_rank"}  # of the last step, at the least
    assert measures <= set(rows[4]) and not measures & set(rows[3])
    assert -4 <= rows[4]["uniformity"] < 0 < rows[4]["alignment"] and rows[4]["effective_rank"] > 1
    parts = 0.5 * rows[0]["loss/weighted_unsupervised"] + rows[0]["loss/cross_entropy"]
    assert rows[0]["loss"] == pytest.approx(parts)  # L_s is ramped up from 0
    page = (folder / "report.html").read_text()
    assert 'id="map"' in page and "Loss of weighted_unsupervised" in page and "AUC, macro" in page
    assert " src=" not in page.replace(' src="data:', "") and "<link" not in page  # fetches nothing
    assert list((folder / "tensorboard").iterdir())
    state = json.loads((folder / "checkpoints/latest/state.json").read_text())
    assert state["position"] == {"step": 5, "epoch": 0, "step_in_epoch": 5}


def test_its_configuration_is_enough_to_run_again(straight: Path) -> None:
    settled = frames(straight, evaluate=MAP, train={"precision": "fp32"})
    assert load_config(straight / "run" / "config.yaml") == settled


def test_only_whole_checkpoints_count(straight: Path, tmp_path: Path) -> None:
    shards = {"path": str(straight / "frames")}
    saving = {"steps": None, "save_every_epochs": 1, "keep_checkpoints": 1}
    pretrain(frames(tmp_path, data=shards, train=saving))
    folder = tmp_path / "run" / "checkpoints"
    (newest,) = complete_checkpoints(folder)
    assert newest.name == "step-00000022"
    (folder / "step-00000099").mkdir()  # cut short: no mark
    assert complete_checkpoints(folder) == [newest]
    again: dict[str, Any] = {"run": {"resume": "auto"}, "data": shards}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optim": {"momentum": 0.5}}, "optim.momentum is 0.9, not 0.5; run with .*config.yaml"),
        ({"model": {"encoder": {"widths": [8, 12]}}}, r"model.encoder.widths is \[16, 12\], not"),
        (
            {"seed": 4, "objective": {"cross_entropy": {"weight": 2.0}}},
            "weight is 1.0, not 2.0; se",
        ),
        ({"train": {"steps": 3}}, "past the run's end at step 3; raise"),
    ]
    for changes, message in cases:
        with pytest.raises(CheckpointError, match=message):
            pretrain(frames(tmp_path, **(again | changes)))
    (newest / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(
        CheckpointError, match="step-00000022 is damaged .model.safetensors has 100 by"
    ):
        pretrain(frames(tmp_path, **again))


def test_a_new_run_neither_mixes_nor_loses_the_checkpoints_of_an_earlier(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = {"path": str(straight / "frames")}
    pretrain(frames(tmp_path, data=shards, train={"steps": 3}))
    pretrain(frames(tmp_path, data=shards, train={"steps": 2}), overwrite=True)
    assert "an earlier run that has ended is now in" in capsys.readouterr().out
    assert [p.name for p in complete_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step-00000002"
    ]
    assert [p.name for p in complete_checkpoints(tmp_path / "run-1" / "checkpoints")] == [
        "step-00000003"
    ]


def test_cross_entropy_of_independent_labels_is_refused(tmp_path: Path) -> None:
    y = np.random.default_rng(0).integers(0, 2, (40, 3)).astype(np.uint8)
    np.savez(tmp_path / "mine.npz", view1=np.ones((40, 4), np.float32), labels=y)
    data = {"build": {"source": "arrays", "npz": str(tmp_path / "mine.npz"), "seed": None}}
    gone = {"train": None, "test": None, "classes": None}
    message = "cross_entropy needs labels of kind multi_class or hierarchical, .* sees multi_label"
    changes = {"build": data["build"] | gone, "split": "all", "views": [{"stored": "view1"}] * 2}
    roles = {"protocol": {"labelled": 20, "test": "unlabelled"}, "batch": {"unlabelled": 5}}
    with pytest.raises(ConfigError, match=message):
        pretrain(frames(tmp_path, data=changes | roles))


def test_an_altered_shard_is_refused_before_the_first_step(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (straight / "frames").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tar = tmp_path / "train-000000.tar"
    data = bytearray(tar.read_bytes())
    data[5000] ^= 1
    tar.write_bytes(bytes(data))
    config = frames(tmp_path, data={"path": str(tmp_path), "build": None})
    with pytest.raises(
        ShardError, match=r"000.tar was altered: its sha256 is .* instead of .*; restore"
    ):
        pretrain(config)
    index = tmp_path / "train-000000.index.npz"
    index.write_bytes((tmp_path / "test-000000.index.npz").read_bytes())
    with pytest.raises(ShardError, match="is not the index that the manifest lists"):
        pretrain(config)


UNCLASSIFIED = {"cross_entropy": None, "weighted_supervised": None}


def test_a_run_without_classifier_and_probe_ends_with_its_report(
    straight: Path, tmp_path: Path
) -> None:
    data = {"path": str(straight / "frames"), "batch": {"labelled": 0}}
    config = frames(tmp_path, data=data, objective=UNCLASSIFIED, evaluate={"probe": "never"} | MAP)
    pretrain(config)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == 5
    assert "f1_weighted" not in result
    assert 'id="map"' in (tmp_path / "run" / "report.html").read_text()


def train_unclassified(folder: str, name: str, data: str) -> dict[str, float]:
    """Unlabelled rows in two augmentations, one encoder; scored by a probe on the first view."""
    view = {"stored": "view1", "augment": ["noise"]}
    changes = {
        "data": {"path": data, "batch": {"labelled": 0}, "views": [view, view]},
        "model": {"shared_encoder": True, "classify_on": "first_view", "projector": "mlp"},
        "objective": UNCLASSIFIED,
        "train": {"steps": None, "epochs": 1, "evaluate_every_epochs": 1},
        "evaluate": MAP,
    }
    result = pretrain(frames(Path(folder), name, **changes))
    return {k: v for k, v in result.items() if k in ("f1_weighted", "auc_macro", "accuracy")}


def test_a_run_without_a_classifier_is_scored_by_a_probe(straight: Path, tmp_path: Path) -> None:
    folder, data = str(tmp_path), str(straight / "frames")
    one = train_unclassified(folder, "one", data)
    two = ranks.run(2, train_unclassified, folder, "two", data)
    assert one["accuracy"] > 0.35  # of four classes
    assert two[0] == two[1]
    assert two[0] == pytest.approx(one, abs=0.02)
    page = (tmp_path / "two" / "report.html").read_text()
    assert 'id="map"' in page and "Confusion" in page
    scored = [row for row in read_metrics(tmp_path / "one" / "metrics.jsonl") if "loss" not in row]
    assert scored[-1]["test/accuracy"] == one["accuracy"]


def test_faces_on_two_processes_are_those_on_one(tmp_path: Path) -> None:
    """Images and crops; evaluation with fewer rows than processes."""
    (one,) = ranks.run(1, train_faces, str(tmp_path), "one")
    two = ranks.run(2, train_faces, str(tmp_path), "two")
    assert len(one[0]) == 20
    # AdamW divides by the gradient's size, and makes much of the crops' rounding in float32; what
    # it takes off the loss in a step, 7%, is told from that all the same.
    assert len(one[1]) == 2 and abs(one[1][1] / one[1][0] - 1) > 0.05
    for found in two:
        assert found == [pytest.approx(one[0], rel=1e-6), pytest.approx(one[1], rel=2e-5)]


def train_faces(folder: str, name: str) -> list[list[float]]:
    """The losses of twenty steps of SGD in float64, and of two of AdamW in float32."""
    sgd = {"kind": "sgd", "lr": 0.001, "momentum": 0.0, "weight_decay": 0.0}
    return [
        faces(folder, f"{name}-sgd", {"steps": 20, "precision": "fp64"}, sgd),
        faces(folder, f"{name}-adamw", {"steps": 2}, {"lr": 0.001, "warmup_epochs": 0}),
    ]


def faces(folder: str, name: str, train: dict[str, Any], optim: dict[str, Any]) -> list[float]:
    tree = load_config(CONFIGS / "faces.yaml").model_dump()
    changes = {
        "run": {"dir": f"{folder}/{name}"},
        "data": {
            "path": f"{folder}/faces",
            "build": {"source": "faces", "train": 60, "test": 1, "size": 32},
            "protocol": {"labelled": 20, "validation": 0.0},
            "batch": {"labelled": 5, "unlabelled": 12},
        },
        "train": {"epochs": 7, "cpu_threads": 1} | train,
        "evaluate": {"baselines": False, "threshold": 0.4},
        "optim": optim,
    }
    pretrain(parse_config(merge(tree, changes)))
    return [row["loss"] for row in losses(Path(folder) / name)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": {"batch": {"labelled": 61}}},
            "data\\.batch\\.labelled is 61, but there are only 60",
        ),
        ({"data": {"canonical_streams": 4}}, "4, which does not divide data.batch.labelled = 10"),
        ({"data": {"batch": {"labelled": 1}}}, "data.batch.labelled is 1; use 2 or more,"),
        ({"data": {"split": "valid"}}, ".* has no split 'valid', only train, test"),
        (
            {"data": {"views": [{"stored": "jpg"}] * 2}},
            ".* has no stored view 'jpg'; it has view1",
        ),
        (
            {"data": {"protocol": {"labelled": 301}}},
            "labelled is 301, but split 'train' has only 300",
        ),
        ({"data": {"batch": {"labelled": 0, "unlabelled": 0}}}, "data.batch has no rows"),
        (
            {"data": {"views": [{"stored": "view1", "augment": ["crop"]}] * 2}},
            "'crop' does not work on",
        ),
        (
            {"data": {"views": [{"stored": "view1"}]}},
            "needs at least 2 views, but data.views has 1",
        ),
        ({"model": {"shared_encoder": True}}, r"needs views of one shape, got \[\(273,\), \(112"),
        ({"model": {"encoder": CNN}}, "'cnn', but the view is a vector"),
        ({"data": {"build": {"trains": 3}}}, "did you mean 'train'"),
        ({"data": {"build": {"source": None}}}, "data.build has no 'source'; add one,"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(
    straight: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = {"path": str(straight / "frames")} | changes.get("data", {})
    config = frames(tmp_path, **(changes | {"data": data}))
    with pytest.raises((ConfigError, SourceError), match=message):
        pretrain(config)


def test_a_batch_without_labels_trains(straight: Path, tmp_path: Path) -> None:
    """The supervised terms are 0 and stay differentiable."""
    batch = {"labelled": 0, "unlabelled": 8}
    pretrain(frames(tmp_path, data={"path": str(straight / "frames"), "batch": batch}))
    rows = losses(tmp_path / "run")
    assert len(rows) == 5
    assert all(row["loss/cross_entropy"] == row["loss/weighted_supervised"] == 0 for row in rows)
    assert all(row["loss/weighted_unsupervised"] > 0 for row in rows)
