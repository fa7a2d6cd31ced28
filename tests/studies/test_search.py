"""What trials of a search draw, and how their experiments differ from the one they began with."""

import json
from pathlib import Path

import pytest
import yaml

from heron.base.errors import ConfigError
from heron.base.shipped import find_config
from heron.cli.compare import SPACE
from heron.experiment.config import Config, load_config
from heron.studies.search import OWN, SearchSettings, Space, load_space
from heron.studies.suggestions import Tpe


def test_draws_are_the_same_for_all_methods_and_the_first_is_none() -> None:
    space = load_space(SPACE)
    ours, plain = (load_config(find_config("scene"), [], name) for name in ("herocon", "dnn"))
    assert space.draw(ours, 0, 0) == {} == space.draw(plain, 5, 0)
    drawn = [space.draw(ours, 0, n) for n in range(1, 40)]
    shared = [space.draw(plain, 0, n) for n in range(1, 40)]
    assert [*shared[0]] == ["optim.lr", "model.encoder.dropout"]
    assert all(one.items() <= other.items() for one, other in zip(shared, drawn, strict=True))
    assert {*drawn[0]} - {*shared[0]} == {
        f"objective.weighted_{name}.{key}"
        for name in ("unsupervised", "supervised")
        for key in ("weight", "tau")
    }
    rates = [one["optim.lr"] / ours.optim.lr for one in drawn]
    assert 0.2 <= min(rates) < 0.5 and 2 < max(rates) <= 5
    assert space.draw(ours, 1, 1) != drawn[0]
    encoders = ["model.encoders={view2: {kind: mlp}}", "model.shared_encoder=false"]
    named = {"scene": ["view1", "view2"], "own": ["view2"]}
    for name, views in named.items():
        stored = json.dumps([{"stored": "features", "name": view} for view in views])
        config = load_config(find_config("scene"), [*encoders, f"data.views={stored}"], "dnn")
        found = {key for key in space.draw(config, 0, 1) if key.endswith("dropout")}
        every = {"model.encoder.dropout", "model.encoders.view2.dropout"}
        assert found == (every if name == "scene" else {"model.encoders.view2.dropout"})


def crops(config: Config) -> set[tuple[float, float, float]]:
    steps = [step for view in config.data.views for step in view.model_dump()["augment"]]
    return {(*step["crop"]["area"], step["crop"]["flip"]) for step in steps if "crop" in step}


def test_crops_are_drawn_alike_for_all_views(tmp_path: Path) -> None:
    """Optuna is told of the experiment as it stands, which has an area of its own."""
    space, config = load_space(SPACE), load_config(find_config("faces"), [], "dnn")
    assert crops(config) == {(0.8, 1.0, 0.5)}
    drawn = [space.draw(config, 0, number) for number in range(1, 60)]
    assert {one["crop"] for one in drawn} == {0.4, 0.7, 0.8, 0.9}
    assert {one["flip"] for one in drawn} == {0, 0.5}
    settings = SearchSettings(find_config("faces"), [], space, 8, 0, "auc_macro", tmp_path)
    for number in range(1, 9):
        made = settings.trial(config, number, tmp_path)
        assert crops(made.config) == {(made.values["crop"], 1.0, made.values["flip"])}
        assert f"crop={made.values['crop']}" in made.description
    tpe = Tpe(tmp_path, space.absolute(config), 0)
    params = tpe._params(space.standing(config))
    assert params is not None and params["crop"] == 2 and params["flip"] == 1


@pytest.mark.parametrize(
    ("first", "second", "varies"),
    [
        ("{crop: {area: [0.05, 0.4]}}", "{crop: {area: [0.4, 1]}}", set()),  # multi-crop
        ("{crop: {area: [0.3, 1]}}", "{crop: {area: [0.4, 1]}}", {"flip"}),
        ("{crop: {flip: 0}}, flip", "{crop: {flip: 0}}", {"crop"}),
        ("color", "color", set()),
        ("crop", "color", {"crop", "flip"}),
    ],
)
def test_crops_that_differ_stay_as_they_are(first: str, second: str, varies: set[str]) -> None:
    words = [f"data.views.{view}.augment=[{steps}]" for view, steps in enumerate((first, second))]
    config = load_config(find_config("faces"), words, "dnn")
    space = load_space(SPACE)
    for found in (space.draw(config, 0, 1), space.tree(config)):
        assert {*found} & {"crop", "flip"} == varies


@pytest.mark.parametrize("ranges", ["crop: [2]", "crop: []", "crop: [0]", "flip: [3]"])
def test_shares_that_cannot_be_are_refused(ranges: str, tmp_path: Path) -> None:
    (path := tmp_path / "space.yaml").write_text(ranges)
    with pytest.raises(ConfigError, match=ranges[:4]):
        load_space(path)


def test_networks_without_connected_layers_have_no_dropout_to_search() -> None:
    grid = "model.encoder={kind: vgg, channels: [4], depths: [1], places: 1, widths: []}"
    config = load_config(find_config("faces"), [grid], "dnn")
    assert "model.encoder.dropout" not in load_space(SPACE).draw(config, 0, 1)


def test_thresholds_are_fitted_unless_the_experiment_states_one(tmp_path: Path) -> None:
    scene = load_config(find_config("scene")).model_dump(mode="json", exclude_defaults=True)
    for stated, words, expected in [(None, [], "fitted"), (0.3, [], 0.3), (0.3, [0.2], 0.2)]:
        evaluate = scene.get("evaluate", {}) | ({"threshold": stated} if stated else {})
        (path := tmp_path / "mine.yaml").write_text(yaml.safe_dump(scene | {"evaluate": evaluate}))
        overrides = [f"evaluate.threshold={word}" for word in words]
        settings = SearchSettings(path, overrides, Space(), 1, 0, "auc_macro", tmp_path)
        assert settings.experiment(OWN, 0).evaluate.threshold == expected
