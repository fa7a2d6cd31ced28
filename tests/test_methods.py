"""Presets: every method of configs/methods.yaml on every experiment that it is for."""

from pathlib import Path

import pytest
import yaml

from launch.tables import TABLES
from pipeline.config import METHODS, load_config
from pipeline.errors import ConfigError
from pipeline.objectives.objective import Objective
from pipeline.terms import Hard, Mulco

CONFIGS = METHODS.parent
NAMES = list(yaml.safe_load(METHODS.read_text()))
FOR = {  # an experiment that has what a method needs
    "mulco": "yeast",
    "ub-": "yeast",
    "mse": "yeast",
    "gce": "yeast",
    "l-uw": "yeast",
    "mlcl": "yeast",
    "himul": "cifar10",
    "hicone": "cifar10",
}


def experiment(method: str) -> Path:
    found = [name for start, name in FOR.items() if method.startswith(start)]
    return CONFIGS / f"{found[0] if found else 'scene'}.yaml"


@pytest.mark.parametrize("method", NAMES)
def test_a_method_makes_its_terms(method: str) -> None:
    asked = yaml.safe_load(METHODS.read_text())[method]
    terms = load_config(experiment(method), method=method).objective.terms()
    kept = {"bce", "cross_entropy"} & terms.keys()
    assert bool(kept) == bool(asked.get("classifier"))
    assert terms.keys() - kept == asked.get("terms", {}).keys()
    for name, options in asked.get("terms", {}).items():
        for key, value in options.items():
            assert getattr(terms[name], key) == value
    assert Objective(terms).weights(epoch=1e9).keys() == terms.keys()


def test_the_experiment_s_options_stay_and_the_method_s_win() -> None:
    terms = load_config(CONFIGS / "yeast.yaml", method="mulco-sifted").objective.terms()
    assert isinstance(terms["mulco"], Mulco)
    assert terms["mulco"].kind == "sifted"
    assert terms["mulco"].ramp_epochs == 100
    found = load_config(CONFIGS / "cifar10.yaml", ["objective.hard.beta=2.0"], "h-ucl").objective
    assert isinstance(found.hard, Hard)
    assert (found.hard.supervised, found.hard.beta) == (False, 2.0)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_a_table_is_a_run(name: str) -> None:
    table = TABLES[name]
    for shown, method in table.methods.items():
        config = load_config(CONFIGS / table.config, method.overrides, method.name)
        assert config.objective.terms(), shown
        assert len(method.published or table.scores) == len(table.scores)


def test_unknown_methods_and_missing_classifiers_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown method 'mulco-sift'; did you mean 'mulco-sifte"):
        load_config(CONFIGS / "yeast.yaml", method="mulco-sift")
    with pytest.raises(ConfigError, match="method 'supcon' keeps the experiment's classifier, and"):
        load_config(CONFIGS / "cifar10.yaml", method="supcon")
