"""Every key of an experiment: a resume with another value is refused, or changes no later step."""

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from heron.api.job import pretrain
from heron.base.errors import CheckpointError, HeronError
from heron.base.sections import dump_yaml
from heron.data.dataset import load_or_assign_roles, open_reader
from heron.data.protocol import write_roles
from heron.experiment.config import Config, load_config, parse_config
from heron.experiment.describe import describe_keys
from heron.training.checkpoint import resume_facts
from heron.training.tracking import read_metrics
from tests.experiments import FRAMES, merge

STOP, STEPS = 3, 8
MEASURED = "step", "loss", "lr", "gradient_norm"
BASE = merge(
    FRAMES,
    {
        "data": {"protocol": {"validation": 0.2}},
        "optim": {"kind": "adamw", "lr": 0.005, "milestones": [1], "warmup_epochs": 0},
        "train": {"epochs": None, "steps": None, "total_steps": STEPS},
        "evaluate": {"map": "never"},
        "tracking": [],
    },
)
# What a resumed run may change, with another value of each; all other keys are refused.
FREE: dict[str, Any] = {
    "run.dir": "moved",
    "run.resume": "force",
    "data.path": "elsewhere",
    "data.roles": "roles",
    "data.build": None,
    "data.workers": 1,
    "data.verify": False,
    "data.on_error": "skip",
    "data.max_bad_fraction": 0.5,
    "data.cache.dir": "cache",
    "data.cache.bytes": 10**9,
    "data.storage_options": {"anon": True},  # of a remote data set
    "train.steps": STEPS - 2,
    "train.epochs": 1,  # 11 steps
    "train.total_steps": STEPS + 3,
    "train.activation_checkpointing": True,
    "train.measure_every_steps": 2,
    "train.evaluate_every_epochs": 1,
    "train.evaluate_every_steps": 1,
    "train.save_every_epochs": 1,
    "train.save_every_steps": 2,
    "train.keep_checkpoints": 1,
    "train.timeout_s": 99,
    "train.cpu_threads": 2,
    "evaluate.probe": "always",
    "evaluate.probe_by": "svm",
    "evaluate.knn": 5,
    "evaluate.knn_tau": 0.3,
    "evaluate.cross_view": True,
    "evaluate.threshold": "fitted",
    "evaluate.batch": 7,
    "evaluate.map": "always",
    "evaluate.map_rows": 9,
    "evaluate.baselines": "plain",
    "evaluate.seeds": 2,
    "evaluate.test": False,
    "tracking": ["tensorboard"],
}
REFUSED: dict[str, Any] = {
    "seed": 4,
    "data.sources": [{"path": "frames", "weight": 2}],
    "data.balance": "labels",
    "data.webdataset": {"labelled": ["a.tar"]},
    "data.fingerprint": f"sha256:{'0' * 64}",
    "data.split": "test",
    "train.frozen_views": 2,
    "data.protocol.labelled": 59,
    "data.protocol.folds": 5,
    "data.protocol.fold": 1,
    "data.protocol.seed": 1,
    "data.protocol.complementary": 1,
    "data.protocol.test": "unlabelled",
    "data.protocol.hide_views": {"view1": 0.1},
    "data.protocol.hide_labels": 0.1,
    "data.protocol.hide_label_rows": 0.5,
    "data.protocol.partial_rows": "drop",
    "data.protocol.validation": 0.3,
    "data.protocol.stratified": True,
    "data.protocol.leave_out": "left.csv",
    "data.protocol.label_weights": "weights.csv",
    "data.batch.labelled": 11,
    "data.batch.unlabelled": 20,
    "data.views.0.stored": "view2",
    "data.views.0.name": "mine",
    "data.views.0.size": 8,
    "data.views.0.augment": [],
    "data.views.0.tokens": 5,
    "data.views.0.tokenizer": "mine.json",
    "data.views.1.stored": "view1",
    "data.views.1.name": "mine",
    "data.views.1.size": 8,
    "data.views.1.augment": ["noise"],
    "data.views.1.tokens": 5,
    "data.views.1.tokenizer": "mine.json",
    "data.standardise": False,
    "data.epoch": "labelled",
    "data.canonical_streams": 1,
    "data.window_rows": 65,
    "data.draft": False,
    "data.decode_size": 8,
    "model.encoder.widths": [16, 13],
    "model.encoder.dropout": 0.3,
    "model.encoder.norm": False,
    "model.encoder.kind": "convnet",
    "model.encoders": {"view1": {"kind": "mlp", "widths": [9]}},
    "model.projector": "mlp",
    "model.projection_width": 9,
    "model.matryoshka": [4],
    "model.shared_encoder": True,
    "model.shared_projector": True,
    "model.classify_on": "first_view",
    "objective.cross_entropy.weight": 2.0,
    "objective.cross_entropy.ramp_epochs": 1,
    "objective.weighted_unsupervised.weight": 2.0,
    "objective.weighted_unsupervised.ramp_epochs": 1,
    "objective.weighted_unsupervised.tau": 0.4,
    "objective.weighted_unsupervised.anchors": "unlabelled",
    "objective.weighted_unsupervised.negatives": "other_view",
    "objective.weighted_supervised.weight": 2.0,
    "objective.weighted_supervised.ramp_epochs": 2,
    "objective.weighted_supervised.tau": 0.4,
    "objective.weighted_supervised.distance": "indicator",
    "objective.weighted_supervised.self_pairs": True,
    "optim.kind": "sgd",
    "optim.lr": 0.004,
    "optim.momentum": 0.5,
    "optim.weight_decay": 0.1,
    "optim.trust_coefficient": 0.1,
    "optim.lars_exclude_1d": True,
    "optim.schedule": "cosine",
    "optim.milestones": [2],
    "optim.gamma": 0.2,
    "optim.warmup_epochs": 1,
    "optim.clip_norm": 1.0,
    "negatives.mine": 2,
    "negatives.every_steps": 2,
    "negatives.nearest": 3,
    "negatives.gpu": True,
    "train.precision": "bf16",
    "train.micro_batch": 16,
    "train.compile": True,
    "train.ema": 0.9,
    "train.keep": "best",
    "train.keep_by": "f1_macro",
    "train.patience": 3,
    "train.deterministic": True,
}
CASES = {**FREE, **REFUSED}
ROUNDED = {"train.cpu_threads"}  # as the number of processes does, it changes the order of sums
WHOLE = ("objective.", "model.", "optim.", "negatives.", "data.webdataset.")  # sections


def experiment(folder: Path, changes: dict[str, Any]) -> Config:
    """BASE with other values, by dotted keys; its data and its run lie in `folder`."""
    places = {"run": {"dir": str(folder / "run")}, "data": {"path": str(folder / "frames")}}
    tree = merge(copy.deepcopy(BASE), places)
    for key, value in changes.items():
        *parents, last = key.split(".")
        section: Any = tree
        for parent in parents:
            if isinstance(section, list):
                section = section[int(parent)]
            else:
                section = section.setdefault(parent, {})
        section[last] = value
    return parse_config(tree)


def end_of(run: Path) -> tuple[bytes, list[dict[str, float]]]:
    """The weights of a run, to the bit, and what its steps measured after the stop."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    after = [{key: row[key] for key in MEASURED} for row in rows if row["step"] >= STOP]
    return (run / "checkpoints/latest/model.safetensors").read_bytes(), after


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that train.steps stopped after STOP steps, its data twice, and roles of its rows."""
    folder = tmp_path_factory.mktemp("stopped")
    config = experiment(folder, {"train.steps": STOP})
    pretrain(config)
    shutil.copytree(folder / "frames", folder / "elsewhere")
    reader = open_reader(config.data)
    (key,) = reader.sample_keys(load_or_assign_roles(reader, config.data).labelled[:1])
    (folder / "left.csv").write_text(f"key\n{key}\n")
    (folder / "weights.csv").write_text(f"key,weight\n{key},0.5\n")
    write_roles(reader, load_or_assign_roles(reader, config.data), config.data, folder / "roles")
    return folder


def changed(key: str, folder: Path) -> dict[str, Any]:
    """The changes of a case; those that name a folder lie in `folder`."""
    value, places = CASES[key], ["run.dir", "data.path", "data.roles", "data.cache.dir"]
    places += ["data.protocol.leave_out", "data.protocol.label_weights"]
    changes = {key: str(folder / value) if key in places else value}
    if key == "data.sources":
        changes = {key: [{"path": str(folder / "frames")}], "data.path": "", "data.build": None}
    if key == "train.epochs":
        changes["train.total_steps"] = None
    if key in ("train.keep", "train.keep_by", "train.patience"):
        changes |= {"train.keep": "best", "train.evaluate_every_steps": 1}
    if key == "data.protocol.folds":
        changes["data.protocol.labelled"] = "all"
    return changes


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # of torch.compile
@pytest.mark.parametrize("key", CASES)
def test_a_resume_with_another_value_is_refused_or_changes_no_step(
    stopped: Path, tmp_path: Path, key: str
) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, symlinks=True)
    if key == "run.dir":
        (tmp_path / "run").rename(tmp_path / "moved")
    changes = {"run.resume": "auto"} | changed(key, tmp_path)
    if key in REFUSED:
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        said = key if key.startswith("train") else f"{key.split('.')[0]}|{key.split('.')[-1]}"
        with pytest.raises(HeronError, match=said):
            pretrain(experiment(tmp_path, changes))
        assert {path: path.read_bytes() for path in files} == files
        return
    config = experiment(tmp_path, changes)
    pretrain(config)
    whole = tmp_path / "whole"
    pretrain(experiment(tmp_path, changes | {"run.resume": "never", "run.dir": str(whole)}))
    resumed, straight = end_of(Path(config.run.dir)), end_of(whole)
    assert len(straight[1]) > 0
    if key in ROUNDED:
        for row, expected in zip(resumed[1], straight[1], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)
    else:
        assert resumed == straight


def test_every_key_is_here_or_in_a_section_that_is_compared_whole(tmp_path: Path) -> None:
    names = {key.name.replace(".N", ".0") for key in describe_keys() if "section" not in key.type}
    prefixes = (*WHOLE, "data.views.0.augment.", "data.sources.0.")
    assert {name for name in names if not name.startswith(prefixes)} <= CASES.keys()
    dump, facts = (f(experiment(tmp_path, {})) for f in (Config.model_dump, resume_facts))
    for section in ("objective", "model", "optim", "negatives"):
        assert facts[section] == dump[section]
    for key in ("views", "webdataset"):
        assert facts["data"][key] == dump["data"][key]


@pytest.mark.parametrize("key", ["train.epochs", "train.total_steps"])
def test_the_length_that_a_cosine_extends_over_may_not_change(tmp_path: Path, key: str) -> None:
    cosine = {"optim.schedule": "cosine", "run.resume": "auto"}
    pretrain(experiment(tmp_path, cosine | {"train.steps": STOP}))
    other = {"train.epochs": 1, "train.total_steps": None} if key == "train.epochs" else {key: 9}
    with pytest.raises(CheckpointError, match=f"{key} is null, not 1|{key} is 8, not 9"):
        pretrain(experiment(tmp_path, cosine | other))


@pytest.mark.parametrize("length", ["total_steps", "steps"])  # as written now, and before
def test_a_stopped_cosine_goes_on_as_if_it_had_not_stopped(tmp_path: Path, length: str) -> None:
    tree = merge(
        BASE, {"optim": {"schedule": "cosine"}, "data": {"path": str(tmp_path / "frames")}}
    )
    tree["train"] = {"cpu_threads": 1, "precision": "fp32", "epochs": None, length: STEPS}
    (tmp_path / "cosine.yaml").write_text(dump_yaml(tree))

    def run(name: str, *overrides: str) -> str:
        words = [f"run.dir={tmp_path / name}", *overrides]
        return str(pretrain(load_config(tmp_path / "cosine.yaml", words))["fingerprint"])

    fingerprints = {run("whole"), run("parts", f"train.steps={STOP}")}
    fingerprints.add(run("parts", "run.resume=auto"))
    whole, parts = end_of(tmp_path / "whole"), end_of(tmp_path / "parts")
    assert parts == whole and len(fingerprints) == 1
    rates = [row["lr"] for row in read_metrics(tmp_path / "parts/metrics.jsonl") if "lr" in row]
    expected = [0.005 * (1 + math.cos(math.pi * t / STEPS)) / 2 for t in range(STEPS)]
    assert rates == pytest.approx(expected)
