"""An encoder and an augmentation in files outside the repository, named by their dotted paths."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from heron.api.job import pretrain
from heron.base.errors import CheckpointError, ConfigError
from heron.base.sections import leaves
from heron.cli.main import main
from heron.experiment.config import dump_config, load_config, parse_config
from heron.experiment.overrides import as_typed, override
from heron.training.pretrained import from_pretrained
from heron.training.tracking import read_metrics
from tests import ranks
from tests.experiments import frames

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = {"nets": "training.md", "augmentations": "data.md"}
WRONG = """
from my_lab.augmentations import *
from my_lab.nets import *

class Half(OwnAugmentation):
    def __call__(self, x, draw):
        return x[:, ::2]

class Idle(OwnAugmentation):
    pass

class Empty(OwnEncoder):
    pass
"""


@pytest.fixture
def my_lab(my_lab: Path) -> Path:
    """A folder on the Python path with the guides' files, and one that is wrong."""
    for name, page in GUIDES.items():
        blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
        (code,) = [block for block in blocks if "(Own" in block]
        (my_lab / f"{name}.py").write_text(code)
    (my_lab / "wrong.py").write_text(WRONG)
    return my_lab.parent


def tree(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Frames with the guides' encoder, and their augmentation of both views."""
    mask = {"my_lab.augmentations.Mask": {"part": 0.3}}
    views = [{"stored": view, "augment": [mask, "noise"]} for view in ("view1", "view2")]
    model = {"encoder": {"kind": "my_lab.nets.Tanh", "width": 9}} | changes.pop("model", {})
    base = frames(folder, name, train={"precision": "fp64"}).model_dump(mode="json")
    data = base["data"] | {"views": views} | changes.pop("data", {})
    return base | {"data": data, "model": base["model"] | model} | changes


def train(folder: str, name: str) -> list[float]:
    """The losses of five steps in float64."""
    pretrain(parse_config(tree(Path(folder), name)))
    rows = [row for row in read_metrics(Path(folder) / name / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 5
    return [value for row in rows for value in (row["loss"], row["gradient_norm"])]


def test_they_train_on_two_processes_as_on_one(my_lab: Path) -> None:
    (one,) = ranks.run(1, train, str(my_lab), "one")
    two = ranks.run(2, train, str(my_lab), "two")
    torch.testing.assert_close(torch.tensor(two[0]), torch.tensor(one), rtol=1e-8, atol=1e-8)
    written = load_config(my_lab / "one" / "config.yaml")
    assert dump_config(parse_config(written.model_dump(mode="json"))) == dump_config(written)
    assert from_pretrained(my_lab / "one").widths[0] == 9


def test_a_run_of_ones_own_parts_is_opened_as_the_next_step_says(
    my_lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (my_lab / "mine.yaml").write_text(dump_config(parse_config(tree(my_lab, "mine"))))
    assert main(["pretrain", str(my_lab / "mine.yaml")]) == 0
    (line,) = re.findall("next: heron (embed .*)", capsys.readouterr().err)
    assert line.endswith(" --trust-code")
    monkeypatch.chdir(my_lab)
    words = line.removesuffix(" --trust-code").split()

    def in_a_process_of_its_own(words: list[str]) -> int:
        for name in [name for name in sys.modules if name.startswith("my_lab")]:
            del sys.modules[name]
        return main(words)

    assert in_a_process_of_its_own(words) == 1
    refused = capsys.readouterr().err
    assert "model.encoder: my_lab.nets.Tanh is code that is not Heron's" in refused.replace(
        "\n", " "
    )
    assert "data.views.0.augment.0: my_lab.augmentations.Mask is code" in refused.replace("\n", " ")
    assert in_a_process_of_its_own(line.split()) == 0


def test_a_run_resumes_with_ones_own_parts_and_refuses_others(my_lab: Path) -> None:
    mine = parse_config(tree(my_lab, "mine"))
    pretrain(mine)
    changed = {"encoder": {"kind": "mlp", "widths": [9]}}
    for name in [name for name in sys.modules if name.startswith("my_lab")]:
        del sys.modules[name]
    again = {"run": {"dir": str(my_lab / "mine"), "resume": "auto"}}
    views = {"views": [{"stored": "view1"}, {"stored": "view2"}]}
    other = parse_config(tree(my_lab, "mine", model=changed, data=views) | again)
    with pytest.raises(
        CheckpointError, match=r"my_lab\.nets\.Tanh is code .* alone cannot have it"
    ):
        pretrain(other)
    assert "my_lab.nets" not in sys.modules
    pretrain(parse_config(tree(my_lab, "mine") | again))  # it has ended: nothing is left to do


def test_the_augmentation_acts(my_lab: Path) -> None:
    plain = tree(my_lab, "plain", data={"views": [{"stored": "view1"}, {"stored": "view2"}]})
    pretrain(parse_config(plain | {"data": plain["data"] | {"path": str(my_lab / "plain-data")}}))
    rows = list(read_metrics(my_lab / "plain" / "metrics.jsonl"))
    assert rows[0]["loss"] != train(str(my_lab), "masked")[0]


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ("my_lab.nets.Tank", "has no 'Tank'; it must be a subclass of .*; did you mean 'Tanh'"),
        ("my_lab.wrong.Empty", "my_lab.wrong.Empty has no method build"),
        ("my_leb.nets.Tanh", "my_leb.nets.Tanh: cannot import module 'my_leb.nets'"),
    ],
)
def test_an_encoder_that_is_wrong_is_named(my_lab: Path, encoder: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(tree(my_lab, "run", model={"encoder": {"kind": encoder}}))


def test_an_override_finds_a_dotted_name_in_a_list() -> None:
    masked = {"my_lab.Mask": {"part": 1}}
    given: dict[str, Any] = {"data": {"views": [{"augment": ["noise", masked]}]}}
    for name, value in list(leaves(given)):
        override(given, f"{name}={as_typed(value)}")
    override(given, "data.views.0.augment.1.my_lab.Mask.part=2")
    assert given == {"data": {"views": [{"augment": ["noise", {"my_lab.Mask": {"part": 2}}]}]}}


def test_options_are_checked(my_lab: Path) -> None:
    asked = {"encoder": {"kind": "my_lab.nets.Tanh", "widht": 3}}
    with pytest.raises(ConfigError, match="widht: unknown key"):
        parse_config(tree(my_lab, "run", model=asked))
    given = [{"stored": "view1", "augment": [{"my_lab.augmentations.Mask": {"part": "x"}}]}] * 2
    with pytest.raises(ConfigError, match="part.*'x'"):
        parse_config(tree(my_lab, "run", data={"views": given}))


def test_an_augmentation_that_is_wrong_is_named(my_lab: Path) -> None:
    def views(name: str) -> dict[str, Any]:
        return {"views": [{"stored": "view1", "augment": [name]}, {"stored": "view2"}]}

    with pytest.raises(ConfigError, match="Idle cannot be called; give it a method __call__"):
        parse_config(tree(my_lab, "run", data=views("my_lab.wrong.Idle")))
    with pytest.raises(
        ConfigError, match="273\\), as it was given, got torch\\.float32 \\(31, 137\\)"
    ):
        pretrain(parse_config(tree(my_lab, "run", data=views("my_lab.wrong.Half"))))
