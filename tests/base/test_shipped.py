"""A shipped experiment has a name, a file of one's own has a path; each error names the nearest."""

from pathlib import Path

import pytest

from heron.base.errors import ConfigError
from heron.base.shipped import CONFIGS, find_config, names_in
from heron.experiment.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def test_every_name_is_an_experiment() -> None:
    names = names_in(CONFIGS)
    assert {"scene", "faces", "frames"} <= set(names)
    for name in names:
        assert find_config(name) == ROOT / "configs" / f"{name}.yaml"
        load_config(find_config(name))


def test_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.yaml"
    mine.touch()
    assert find_config(mine) == find_config(str(mine)) == mine
    monkeypatch.chdir(tmp_path)
    assert find_config("mine.yaml") == Path("mine.yaml")
    (tmp_path / "scene").mkdir()  # such as a folder of shards
    assert find_config("scene") == ROOT / "configs" / "scene.yaml"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("scnee", "No experiment named 'scnee'. Did you mean 'scene'?"),
        (".", ". is a folder, not a YAML file. Choose one of"),
        ("configs/scene.yaml", "configs/scene.yaml does not exist. Did you mean 'scene'?"),
        ("./scene", "Did you mean 'scene'?"),
        (Path("scene"), "Did you mean 'scene'?"),
        ("zzz", "Choose one of captions, celeba"),
        ("methods", "No experiment named 'methods'. Choose one of captions"),
    ],
)  # fmt: skip
def test_what_is_not_there(
    given: str | Path, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        find_config(given)
    assert told in str(caught.value)
