"""A term in one file outside the repository, named by its dotted path."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from heron.api.job import pretrain
from heron.base.dotted import load_class
from heron.base.errors import ConfigError, TrainingError
from heron.data.plan import even_slice
from heron.distributed import collectives
from heron.experiment.config import dump_config, load_config, parse_config
from heron.losses import Loss
from heron.training.tracking import read_metrics
from tests import ranks
from tests.experiments import frames

GUIDE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text()
TERM = "my_lab.losses.Decoupled"


WRONG = """
class Bare(Loss):
    needs = Needs(gathered=("projections",))
    def share(self, batch):
        return 0.5

class Rows(Bare):
    def share(self, batch):
        return batch.projections[0][:, 0]

class Silent(Bare):
    def share(self, batch):
        return None

class Unasked(Bare):
    needs = Needs(own=("projections",))
    def share(self, batch):
        return batch.projections[0].sum()

class Remembers(Bare):
    def build_memory(self, run):
        return {}

class Taken(Bare):
    def build_parts(self, spec):
        return {"encoders": lambda: torch.nn.Linear(1, 1)}

class Old(Bare):
    needs = ("project",)

class Sized(Bare):
    def __init__(self, dim):
        super().__init__()

class Weighs(Bare):
    def __init__(self, *, weight=1.0):
        super().__init__()
"""


@pytest.fixture
def my_lab(my_lab: Path) -> Path:
    """A folder on the Python path with the guide's file, and one that is wrong."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (my_lab / "losses.py").write_text(code)
    needy = "class Needy(Decoupled):\n    needs = Needs(gathered=('attention',))\n"
    empty = "class Empty(Loss):\n    pass\n"
    imports = "from my_lab.losses import *\nfrom heron.losses import Loss\n"
    (my_lab / "wrong.py").write_text(f"{imports}\n{needy}\n{empty}\n{WRONG}")
    return my_lab.parent


def train(folder: str, name: str) -> list[float]:
    """The losses of five steps in float64 with the guide's term beside a classifier."""
    terms = {"cross_entropy": {"weight": 1.0}, TERM: {"weight": 0.5, "tau": 0.2}}
    tree = frames(Path(folder), name, train={"precision": "fp64"}).model_dump()
    pretrain(parse_config({**tree, "objective": terms}))
    rows = [row for row in read_metrics(Path(folder) / name / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 5 and all(row[f"loss/{TERM}"] > 0 for row in rows)
    return [value for row in rows for value in (row["loss"], row["gradient_norm"])]


def test_it_trains_on_two_processes_as_on_one(my_lab: Path) -> None:
    (one,) = ranks.run(1, train, str(my_lab), "one")
    two = ranks.run(2, train, str(my_lab), "two")
    torch.testing.assert_close(torch.tensor(two[0]), torch.tensor(one), rtol=1e-8, atol=1e-8)
    written = load_config(my_lab / "one" / "config.yaml")
    assert written.objective.root[TERM].model_dump() == {
        "weight": 0.5,
        "ramp_epochs": 0,
        "tau": 0.2,
    }
    assert dump_config(parse_config(yaml.safe_load(dump_config(written)))) == dump_config(written)


def in_a_loop(folder: str) -> tuple[Tensor, Tensor]:
    """The guide's loss of this process's rows in a loop, and their gradient."""
    kind: Any = load_class(TERM, Loss)
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(2, 7, 4, generator=draw, dtype=torch.float64)
    own = even_slice(7, collectives.rank(), collectives.world_size())
    views = z[:, own].clone().requires_grad_()
    value = kind(tau=0.2)(list(views))
    value.backward()
    assert views.grad is not None
    return value.detach(), views.grad / collectives.world_size()


def test_a_loop_calls_it_on_two_processes_as_on_one(my_lab: Path) -> None:
    ((value, gradient),) = ranks.run(1, in_a_loop, str(my_lab))
    two = ranks.run(2, in_a_loop, str(my_lab))
    z = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = torch.nn.functional.normalize(z, dim=2)
    anchors = []
    for i, u, v in ((i, u, 1 - u) for i in range(7) for u in (0, 1)):
        others = [unit[w, k] for w in (0, 1) for k in range(7) if k != i]
        logits = torch.stack([unit[u, i] @ other / 0.2 for other in others])
        anchors.append(logits.logsumexp(0) - unit[u, i] @ unit[v, i] / 0.2)
    torch.testing.assert_close(value, torch.stack(anchors).mean())
    torch.testing.assert_close(torch.stack([two[0][0], two[1][0]]), value.expand(2))
    torch.testing.assert_close(torch.cat([two[0][1], two[1][1]], 1), gradient)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (
            "my_lb.losses.Mine",
            {},
            "cannot import module 'my_lb.losses' .*; install its package",
        ),
        (
            "my_lab.losses.Mine",
            {},
            "losses. has no .Mine.; it must be a subclass of heron",
        ),
        (
            "my_lab.losses.decoupled",
            {},
            "is <function decoupled .*; it must be a subclass of heron",
        ),
        (TERM, {"tua": 1.0}, "tua: unknown key"),
        (TERM, {"tau": -1.0}, "tau must be greater than or equal to 0.003, got -1.0"),
    ],
)
def test_what_is_wrong_is_named(
    my_lab: Path, path: str, options: dict[str, Any], message: str
) -> None:
    tree = frames(my_lab).model_dump()
    with pytest.raises(ConfigError, match=message):
        parse_config({**tree, "objective": {path: options}})


def test_an_override_whose_dots_are_split_is_told_how_to_write_it(my_lab: Path) -> None:
    config = my_lab / "frames.yaml"
    config.write_text(dump_config(frames(my_lab)))
    with pytest.raises(ConfigError, match=r"by 'objective={my_lab.losses.Mine: {weight: 1.0}}'"):
        load_config(config, [f"objective.{TERM}.weight=1.0"])
    term = load_config(config, [f"objective={{{TERM}: {{weight: 1.0}}}}"]).objective.terms()
    assert list(term) == [TERM]


@pytest.mark.parametrize("objective", [{1: {}}, {"bce": {}, TERM: [1]}])
def test_keys_and_sections_of_a_wrong_type_are_faults(my_lab: Path, objective: Any) -> None:
    tree = frames(my_lab).model_dump()
    with pytest.raises(ConfigError, match=r"objective\.(1|my_lab)"):
        parse_config({**tree, "objective": objective})


def test_a_need_that_there_is_not(my_lab: Path) -> None:
    tree = frames(my_lab).model_dump() | {"objective": {"my_lab.wrong.Needy": {}}}
    message = "my_lab.wrong.Needy needs attention, which no part .*; use some of hidden, inputs"
    with pytest.raises(ConfigError, match=message):
        pretrain(parse_config(tree))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Bare", "Bare: its loss must be a scalar tensor, got 0.5"),
        ("Rows", r"Rows: its loss must be a scalar tensor, got a tensor \(31,\)"),
        ("Silent", "wrong.Silent gave no loss; add a term that does"),
        ("Unasked", "reads 'projections', which is not among its needs.gathered"),
        ("Remembers", "Remembers: its memory must be a Memory, got dict"),
        ("Taken", "Taken adds a part 'encoders', a name that every model already has"),
        (
            "Sized",
            "Sized cannot be built without 'dim'; give it a default, or put it after",
        ),
        ("Weighs", "Weighs has an option 'weight', which every term already has; rename it"),
        ("Old", r"Old must have needs = Needs\(gathered=\(...\), ...\), got \('project',\)"),
    ],
)
def test_what_a_term_gives_that_is_wrong_is_named(my_lab: Path, name: str, message: str) -> None:
    tree = frames(my_lab).model_dump() | {"objective": {f"my_lab.wrong.{name}": {}}}
    with pytest.raises((ConfigError, TrainingError), match=message):
        pretrain(parse_config(tree))


def test_an_override_reaches_a_dotted_term(my_lab: Path) -> None:
    config = my_lab / "mine.yaml"
    tree = frames(my_lab).model_dump(mode="json") | {"objective": {TERM: {"tau": 0.3}, "bce": {}}}
    config.write_text(yaml.safe_dump(tree))
    given = [f"objective.{TERM}.weight=2", "objective.bce.weight=3"]
    terms = load_config(config, given).objective.terms()
    assert terms[TERM].model_dump() == {"weight": 2, "ramp_epochs": 0, "tau": 0.3}
    assert terms["bce"].weight == 3
    assert TERM not in load_config(config, [f"objective.{TERM}=null"]).objective.terms()


def test_a_term_without_a_loss(my_lab: Path) -> None:
    tree = frames(my_lab).model_dump() | {"objective": {"my_lab.wrong.Empty": {}}}
    with pytest.raises(ConfigError, match=r"my_lab.wrong.Empty has no method share"):
        parse_config(tree)
