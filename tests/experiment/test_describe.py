"""Every key of an experiment has a type, a default and a meaning, from one source."""

import re
from pathlib import Path

import pytest

from heron.base.shipped import CONFIGS, find_config, names_in
from heron.cli.main import main
from heron.experiment.config import load_config
from heron.experiment.describe import describe_keys, keys_at

KEYS = {key.name: key for key in describe_keys()}


def test_every_key_has_a_meaning() -> None:
    assert [key.shown for key in describe_keys() if not key.meaning.endswith(".")] == []
    assert all(key.type and key.default for key in describe_keys())


def leaves(tree: object, name: str = "") -> list[str]:
    """The dotted names of all leaves, N for a place in a list of sections."""
    name = re.sub(r"^model\.encoders\.[^.]+", "model.encoder", name)
    free = "data.build", "data.storage_options", "model.encoder.config"
    if isinstance(tree, dict) and tree and name not in free:
        return [
            leaf for key, one in tree.items() for leaf in leaves(one, f"{name}.{key}".strip("."))
        ]
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        return [leaf for one in tree for leaf in leaves(one, f"{name}.N")]
    return [name]


@pytest.mark.parametrize("name", names_in(CONFIGS))
def test_every_key_of_a_shipped_experiment_is_described(name: str) -> None:
    shown = leaves(load_config(find_config(name)).model_dump(mode="json"))
    assert [leaf for leaf in shown if leaf not in KEYS] == []


def test_types_and_defaults_are_those_of_the_sections() -> None:
    for name, kind, default in [
        ("train.steps", "whole number ≥ 1 or null", "null"),
        ("optim.lr", "number > 0", "0.05"),
        ("data.batch.labelled", "whole number ≥ 0 or all", "required"),
        ("data.views.N.augment.N.crop.area", "2 of: number > 0, ≤ 1", "[0.4, 1.0]"),
        ("objective.nt_xent.tau", "number ≥ 0.003", "0.5"),
        ("evaluate.probe", "auto or always or never", "auto"),
    ]:
        assert (KEYS[name].type, KEYS[name].default) == (kind, default)
    assert [key.encoder_kind for key in keys_at("model.encoder.kernel")] == ["convnet"]


def test_keys_inside_lists_and_tables_are_as_an_override_takes_them() -> None:
    assert [key.name for key in keys_at("data.sources.0.weight")] == ["data.sources.N.weight"]
    assert KEYS["data.sources"].type == KEYS["data.views"].type == "list of sections"
    assert "model.encoders.VIEW.kernel" in KEYS and "model.encoders.kernel" not in KEYS


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--help", "data.views.0.size"]) == 0
    assert capsys.readouterr().out == (
        "data.views.N.size: 2 of: whole number ≥ 1 or null, default null\n"
        "    height and width that pictures are resized to, one number for both; null: as stored.\n"
    )
    assert main(["config"]) == 0
    assert capsys.readouterr().out.count("\n    ") >= len(KEYS)
    assert main(["config", "scene", "optim.lr", "optim.lr=0.1"]) == 0
    assert capsys.readouterr().out == "0.1\n"
    assert main(["config", "scene", "--method", "herocon-u"]) == 0
    assert "weighted_supervised" not in capsys.readouterr().out


def test_a_file_that_is_called_as_a_section_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(find_config("scene").read_text())
    assert main(["config", "train.yaml", "optim.lr", "optim.lr=0.1"]) == 0
    assert capsys.readouterr().out == "0.1\n"


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("train.stps",), 1, "unknown key 'train.stps'; did you mean 'train.steps'?"),
        (("scene", "data.views.7"), 1, "has no data.views.7 (no '7'); choose one of 0, 1"),
        (("scene", "train", "optim"), 2, "one experiment and one key at most, got train optim"),
        (("optim.lr=2",), 2, "overrides and --method need an experiment to change; pass its"),
        (("scnee",), 1, "Did you mean 'scene'?"),
    ],
)
def test_what_is_not_there(
    words: tuple[str, ...], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *words]) == status
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
