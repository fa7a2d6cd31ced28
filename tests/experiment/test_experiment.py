"""The configuration: strict, errors that name the nearest right key; every shipped one fits."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from heron.base.errors import ConfigError
from heron.base.sections import dump_yaml, read_tree
from heron.experiment.config import METHODS, Config, dump_config, load_config, parse_config
from heron.experiment.overrides import as_typed, parse_override
from heron.losses.named_terms import Terms, named_terms
from heron.sources import make_source

CONFIGS = sorted(set(METHODS.parent.glob("*.yaml")) - {METHODS})
SMALL = """
run: {dir: runs/x}
data: {path: data/x, batch: {labelled: 8}, views: [{stored: view1}]}
objective: {bce: {weight: 1}}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_shipped_configuration_fits_and_survives_a_round_trip(
    path: Path, tmp_path: Path
) -> None:
    config = load_config(path)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    if config.data.build is not None:
        options = dict(config.data.build)
        make_source(options.pop("source"), options)


def test_overrides_replace_make_and_take_out(small: Path) -> None:
    overrides = ["optim.lr=1e-3", "objective.weighted_supervised.weight=0.5", "optim.kind=sgd"]
    config = load_config(small, overrides)
    assert config.optim.lr == 0.001
    assert list(config.objective.terms()) == ["bce", "weighted_supervised"]
    without = load_config(small, [*overrides, "objective.weighted_supervised=null"])
    assert list(without.objective.terms()) == ["bce"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.rl=1", "optim.rl: unknown key; did you mean 'lr'"),
        ("optm.lr=1", "optm: unknown key; did you mean 'optim'"),
        ("train.epoch=3", "train.epoch: unknown key; did you mean 'epochs'"),
        ("objective.weighted_unsupervisd.weight=1", "did you mean 'weighted_unsupervised'"),
        ("model.encoder={kind: mlp, width: [3]}", "unknown key; did you mean 'widths'"),
        ("data.views=[{stored: a, augmnt: [crop]}]", "unknown key; did you mean 'augment'"),
        ("model.encoder={kind: resnet, width: [4]}", "unknown key; did you mean 'widths'"),
        ("model.encoder={kind: linear, widths: [4]}", "unknown key; did you mean 'width'"),
        ("model.encoder={kind: resnet, widths: [4]}", "a depth for each stage, got 1 and 4 of"),
        (
            "model.encoder={kind: resnet, widths: [4, 6], depths: [1, 1], layer: bottleneck}",
            r"widths must be multiples of 4, .*; got \[6\]",
        ),
        ("model.encoder={kind: convnet, shape: [28, 28]}", "must have at least 3 items"),
        ("optim.schedule=step", r"step without milestones; set some: epochs: \[100, 150\]"),
        ("optim.zzzzzz=1", "unknown key; choose one of kind, lr, momentum"),
        ("optim.lr=abc", "optim.lr must be a valid number, got 'abc'"),
        ("train.epochs=2.5", "train.epochs must be a valid integer, got 2.5"),
        ("train.epochs='3'", "train.epochs must be a valid integer, got '3'"),
        ("data.canvas=300", "data.canvas: unknown key; choose one of path, sources"),
        ("data.standardise=1", "data.standardise must be a valid boolean, got 1"),
        (
            "evaluate.baselines=none",
            "evaluate.baselines must be True, False, 'plain' or 'scikit-learn', got 'none'",
        ),
        ("objective.bce.weight=-1", "objective.bce.weight must be .* or equal to 0, got -1"),
        ("objective.bce.weight=0", "no term has a weight above 0"),
        (
            "objective.weighted_supervised.tau=0",
            "tau must be greater than or equal to 0.003, got 0",
        ),
        ("data.protocol={folds: 5, fold: 7}", "fold must be 0 to 4, got 7"),
        ("data.protocol={folds: 5, labelled: 7}", "set folds"),
        ("run.dir=null", "run.dir must be a valid string, got None"),
        ("optim.lr", "has no '='; write key=value: optim\\.lr=0\\.1"),
        ("seed.more=1", "'seed' is the value 0, not a section"),
        ("optim.lr=[", "is not valid YAML"),
    ],
)
def test_what_does_not_fit_is_named_with_its_remedy(
    small: Path, override: str, message: str
) -> None:
    with small.open("a") as file:
        file.write("seed: 0\n")
    with pytest.raises(ConfigError, match=message):
        load_config(small, [override])


def test_missing_keys_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run is missing"):
        parse_config({})
    with pytest.raises(ConfigError, match=r"none.yaml does not exist; found none"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"list.yaml must have keys such as '"):
        load_config(tmp_path / "list.yaml")


def test_a_key_given_twice_is_refused(small: Path) -> None:
    small.write_text(SMALL + "seed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match="key 'seed' is given twice"):
        load_config(small)


def test_every_fault_is_listed_at_once(small: Path) -> None:
    with pytest.raises(ConfigError) as fault:
        load_config(small, ["optim.rl=1", "train.epochs=x"])
    assert str(fault.value) == (
        "configuration: (1) optim.rl: unknown key; did you mean 'lr'?; (2) "
        "train.epochs must be a valid integer, got 'x'"
    )


def test_the_schema_is_strict_all_the_way_down() -> None:
    def sections(model: Any) -> None:
        if model is Terms:
            for term in named_terms().values():
                sections(term)
            return
        assert model.model_config["extra"] == "forbid", model
        for field in model.model_fields.values():
            for part in getattr(field.annotation, "__args__", (field.annotation,)):
                if isinstance(part, type) and hasattr(part, "model_fields"):
                    sections(part)

    sections(Config)


def test_an_override_of_a_place_in_a_list() -> None:
    faces = METHODS.with_name("faces.yaml")
    config = load_config(faces, ["data.views.1.size=32", "data.views.0.augment.0=flip"])
    assert [view.size for view in config.data.views] == [None, [32, 32]]
    assert "flip" in str(config.data.views[0].augment)
    for override, place in (("data.views.2.size=8", "2"), ("data.views.first=8", "first")):
        message = f"'{place}' is not an index of a list of 2 items; use 0 to 1"
        with pytest.raises(ConfigError, match=message):
            load_config(faces, [override])


@pytest.mark.parametrize(
    "text", ["1e-3", "12e5", "+1_0e2", "1.5", "0x1", "yes", "null", "a: b", "try #2"]
)
def test_texts_that_look_like_something_else_stay_texts(text: str, tmp_path: Path) -> None:
    """A study with a text such as '1e-3' took its own folder for another study's."""
    for value in (text, [text], {"a": text}):
        assert parse_override(f"key={as_typed(value)}") == ("key", value)
        (tmp_path / "x.yaml").write_text(dump_yaml({"key": value}))
        assert read_tree(tmp_path / "x.yaml") == {"key": value}


def test_an_experiment_can_be_sent_to_another_process() -> None:
    config = load_config("configs/faces.yaml", ["objective.supcon.tau=0.2"])
    again = pickle.loads(pickle.dumps(config))
    assert again == config and again.objective.root["supcon"].model_dump()["tau"] == 0.2
    assert copy.deepcopy(config) == config
