"""Presets: every method of configs/methods.yaml on every experiment that it is for."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from torch import Tensor

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.experiment.config import METHODS, load_config
from heron.losses.deepmtmv import Deepmtmv
from heron.losses.hard import Hard
from heron.losses.mulco import Mulco
from heron.losses.objective import Objective, build_losses
from heron.losses.pico import Pico
from heron.studies.published import TABLES
from heron.training.strategy import Strategy
from tests.experiments import frames, merge

CONFIGS = METHODS.parent
NAMES = list(yaml.safe_load(METHODS.read_text()))
FOR = {  # an experiment that has what a method needs
    "mulco": "yeast",
    "ub-": "yeast",
    "mse": "yeast",
    "gce": "yeast",
    "l-uw": "yeast",
    "mlcl": "yeast",
    "pico": "yeast",
    "comco": "yeast",
    "plnl": "yeast",
    "himul": "cifar10-tree",
    "hicone": "cifar10-tree",
}


def experiment(method: str) -> Path:
    found = [name for start, name in FOR.items() if method.startswith(start)]
    return CONFIGS / f"{found[0] if found else 'scene'}.yaml"


@pytest.mark.parametrize("method", NAMES)
def test_a_method_makes_its_terms(method: str) -> None:
    asked = yaml.safe_load(METHODS.read_text())[method]
    objective = load_config(experiment(method), method=method).objective
    terms = objective.terms()
    kept = {"bce", "cross_entropy"} & terms.keys()
    assert bool(kept) == bool(asked.get("classifier"))
    assert terms.keys() - kept == asked.get("terms", {}).keys()
    for name, options in asked.get("terms", {}).items():
        for key, value in options.items():
            assert getattr(terms[name], key) == value
    assert Objective(objective).weights(epoch=1e9).keys() == terms.keys()


@pytest.mark.parametrize("method", NAMES)
def test_a_method_trains_a_step(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On labels that suit it; every parameter gets a gradient, or DDP would stop."""
    if method == "infograph":
        pytest.skip("tests/objectives/test_infograph.py trains it, on graphs")
    view = {"stored": "view1", "augment": ["noise"]}
    tree = frames(tmp_path).model_dump()
    tree = merge(tree, {"train": {"steps": 2}, "data": {"views": [view, view]}})
    tree["model"] |= {"shared_encoder": True, "shared_projector": True}
    if "mulco" in method or FOR.get(method) == "yeast" or method.startswith("ub-"):
        tree["data"]["protocol"]["complementary"] = 2
        tree["data"]["batch"]["unlabelled"] = 0
    if method == "plnl":
        tree["model"]["classify_on"] = "first_view"
    if method.startswith("hi"):
        tree["data"]["batch"]["unlabelled"] = 10
        levels = np.stack([np.arange(40) % 2, np.arange(40) % 4], 1)
        x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
        np.savez(tmp_path / "mine.npz", view1=x, labels=levels)
        tree["data"] |= {
            "build": {
                "source": "arrays",
                "npz": str(tmp_path / "mine.npz"),
                "label_kind": "hierarchical",
            },
            "split": "all",
            "protocol": {"labelled": 20, "test": "unlabelled"},
        }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "experiment.yaml", method=method)
    seen: dict[str, bool] = {}

    length = Strategy.gradient_norm

    def watch(strategy: Strategy) -> Tensor | float:
        seen.update({n: p.grad is not None for n, p in strategy.model.named_parameters()})
        return length(strategy)

    monkeypatch.setattr(Strategy, "gradient_norm", watch)
    result = pretrain(config)
    assert result["steps"] == 2
    assert seen
    assert all(seen.values()), [name for name, has in seen.items() if not has]


def test_the_experiment_s_options_stay_and_the_method_s_win() -> None:
    objective = load_config(CONFIGS / "yeast.yaml", method="mulco-sifted").objective
    mulco = build_losses(objective)["mulco"]
    assert isinstance(mulco, Mulco)
    assert mulco.kind == "sifted"
    assert objective.root["mulco"].ramp_epochs == 100
    found = load_config(CONFIGS / "cifar10.yaml", ["objective.hard.beta=2.0"], "h-ucl").objective
    hard = build_losses(found)["hard"]
    assert isinstance(hard, Hard)
    assert (hard.supervised, hard.beta) == (False, 2.0)


def test_task_groups_are_deepmtmv_s_alone_and_its_options_stay() -> None:
    asked = ["objective.deepmtmv.widths=[4]"]
    found = build_losses(load_config(CONFIGS / "scene.yaml", asked, "deepmtmv").objective)[
        "deepmtmv"
    ]
    assert isinstance(found, Deepmtmv) and found.layers == [4]
    without = load_config(CONFIGS / "scene.yaml", asked, "dnn").objective
    assert "deepmtmv" not in without.terms()


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_a_table_is_a_run(name: str) -> None:
    table = TABLES[name]
    for shown, method in table.methods.items():
        given = [*method.overrides]
        epochs = load_config(CONFIGS / table.config, given, method.name).train.epochs
        given += method.scheduled(epochs)
        config = load_config(CONFIGS / table.config, given, method.name)
        assert build_losses(config.objective), shown
        assert len(method.published or table.scores) == len(table.scores)
        if isinstance(pico := build_losses(config.objective).get("pico"), Pico):
            assert pico.phi_epochs == config.train.epochs


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_experiment_is_a_method(path: Path) -> None:
    """And each says in a comment how to build its data."""
    if path == METHODS:
        return
    found = set(build_losses(load_config(path).objective)) - {"bce", "cross_entropy"}
    presets = yaml.safe_load(METHODS.read_text()).values()
    assert found in [set(preset.get("terms", {})) for preset in presets]
    config = load_config(path)
    assert config.data.build or "# heron shards build" in path.read_text()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_and_its_experiment_agree_on_the_data(name: str) -> None:
    table = TABLES[name]
    said = (CONFIGS / table.config).read_text()
    built = [line[2:] for line in said.splitlines() if line.startswith("# heron shards build")]
    assert built
    assert any(table.data.endswith(line) for line in built)


def test_unknown_methods_and_missing_classifiers_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown method 'mulco-sift'; did you mean 'mulco-sifte"):
        load_config(CONFIGS / "yeast.yaml", method="mulco-sift")
    with pytest.raises(ConfigError, match="method 'supcon' keeps the experiment's classifier, but"):
        load_config(CONFIGS / "cifar10.yaml", method="supcon")
