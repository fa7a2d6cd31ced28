"""DeepMTMV's task groups against plain shared layers, its loops, and runs that part their tasks."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.losses.deepmtmv import Deepmtmv
from heron.losses.task_groups import TaskGroups, affinity, disagreement, embedding, partition
from heron.training.optim import Lars
from heron.training.pretrained import from_pretrained
from heron.training.tracking import read_metrics
from tests import baseline_oracles, ranks
from tests.distributed.test_strategies import choose
from tests.experiments import frames
from tests.objectives.test_terms import draw
from tests.weekly import WEEKLY

TASKS, VIEWS = 5, 2
PARTED = [[0, 3], [1], [2, 4]]
LATER = [[0, 1, 3], [2, 4]]


def tree(**options: Any) -> TaskGroups:
    torch.manual_seed(0)
    loss = Deepmtmv(3, TASKS, VIEWS, widths=[4, 3], **options)
    return loss.groups.double()


class Shared(nn.Module):
    """The same network with one `nn.Linear` a group, and a loop over tasks."""

    def __init__(self, like: TaskGroups) -> None:
        super().__init__()
        layers = [*like.layers, like.heads]
        self.groups = [[[*range(TASKS)]], [[*range(TASKS)]], [[t] for t in range(TASKS)]]
        self.levels = nn.ModuleList(nn.ModuleList() for _ in layers)
        for modules, layer, groups in zip(self.levels, layers, self.groups, strict=True):
            assert isinstance(modules, nn.ModuleList)
            for group in groups:
                one = nn.Linear(layer.weight.shape[2], layer.weight.shape[1]).double()
                one.weight.data.copy_(layer.weight[group[0]])
                one.bias.data.copy_(layer.bias[group[0]])
                modules.append(one)

    def forward(self, seen: Tensor) -> Tensor:
        columns = []
        for task in range(TASKS):
            x = seen
            for level, groups in enumerate(self.groups):
                (place,) = [i for i, group in enumerate(groups) if task in group]
                x = self.levels[level][place](x)  # type: ignore[index]
                x = x if level == len(self.groups) - 1 else x.relu()
            columns.append(x[:, 0])
        return torch.stack(columns, 1)

    def part(self, level: int, groups: list[list[int]], optimizer: Optimizer) -> None:
        """Copy the one module of a level, and what the optimiser keeps of it, to each group."""
        modules = self.levels[level]
        assert isinstance(modules, nn.ModuleList)
        for _ in groups[1:]:
            modules.append(copy.deepcopy(modules[0]))
            for mine, new in zip(modules[0].parameters(), modules[-1].parameters(), strict=True):
                optimizer.add_param_group({"params": [new]})
                optimizer.state[new] = copy.deepcopy(optimizer.state[mine])
        self.groups[level] = groups


OPTIMISERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: Adam(p, lr=0.05, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_a_tree_is_shared_layers_that_are_copied_when_tasks_part(kind: str) -> None:
    mine = tree()
    theirs = Shared(mine)
    optimizers = [OPTIMISERS[kind](m.parameters()) for m in (mine, theirs)]
    x, y = draw(7, 6).detach(), (draw(7, TASKS, seed=1).detach() > 0).double()
    for step in range(9):
        if step in (3, 6):
            level, groups = (1, PARTED) if step == 3 else (0, LATER)
            mine.layers[level].set_groups(groups)
            theirs.part(level, groups, optimizers[1])
        found = [model(x) for model in (mine, theirs)]
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
        for logits, optimizer in zip(found, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(logits, y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert all(p.grad is not None for p in mine.parameters())
    (first, _) = mine.layers
    assert not torch.equal(first.weight[0], first.weight[2])  # which have parted
    torch.testing.assert_close(first.weight[0], first.weight[3], rtol=1e-12, atol=1e-12)


def test_lars_takes_the_step_of_the_layer_that_all_share() -> None:
    mine = tree()
    theirs = Shared(mine)
    x = draw(7, 6).detach()
    for model in (mine, theirs):
        model(x).square().sum().backward()
        Lars(model.parameters(), lr=1.0, weight_decay=0.1).step()
    for layer, modules in zip(mine.layers, theirs.levels, strict=False):
        torch.testing.assert_close(layer.weight[2], modules[0].weight)  # type: ignore[index]
        torch.testing.assert_close(layer.bias[2], modules[0].bias)  # type: ignore[index]


def test_a_view_alone_sees_nothing_of_the_others() -> None:
    x = draw(7, 6).detach()
    first, second = tree().per_view(x)
    torch.testing.assert_close(first, tree()(x * torch.tensor([1, 1, 1, 0, 0, 0])).detach())
    torch.testing.assert_close(second, tree()(x * torch.tensor([0, 0, 0, 1, 1, 1])).detach())
    joint = tree(errors="joint")
    assert [torch.equal(logits, joint(x)) for logits in joint.per_view(x)] == [True] * VIEWS


def test_averages_are_those_of_a_loop() -> None:
    mine = tree(decay=0.7)
    mean = torch.zeros(VIEWS, TASKS, dtype=torch.float64)
    agreed, total = torch.zeros(VIEWS, TASKS, TASKS, dtype=torch.float64), 0.0
    for batch in range(4):
        errors = draw(6, VIEWS, TASKS, seed=batch).detach().sigmoid()
        mine.update_averages(errors)
        before, total = 0.7 * total, 0.7 * total + 1
        both = torch.zeros_like(agreed)
        for v in range(VIEWS):
            for i in range(TASKS):
                for j in range(TASKS):
                    same = [(e[v, i] >= mean[v, i]) == (e[v, j] >= mean[v, j]) for e in errors]
                    both[v, i, j] = sum(map(float, same)) / len(same)
        mean = (before * mean + sum(errors) / len(errors)) / total
        agreed = (before * agreed + both) / total
    torch.testing.assert_close(mine.margins, mean)
    torch.testing.assert_close(mine.agreement, agreed)
    mine.update_averages(errors[:0])  # a batch without labels
    torch.testing.assert_close(mine.margins, mean)
    assert float(mine.weight) == pytest.approx(total)


def agreements(views: int, tasks: int, seed: int = 0) -> Any:
    """Symmetric, in [0, 1], 1 on the diagonal."""
    a = np.random.default_rng(seed).uniform(size=(views, tasks, tasks))
    a = (a + a.transpose(0, 2, 1)) / 2
    a[:, range(tasks), range(tasks)] = 1
    return a


BRANCHES = [[0, 4], [1], [2, 3, 6], [5]]


def test_affinity_and_cost_are_those_of_loops() -> None:
    a = agreements(2, 7)
    expected = [baseline_oracles.task_affinity(torch.tensor(view), BRANCHES) for view in a]
    np.testing.assert_allclose(affinity(a, BRANCHES), expected, rtol=1e-12)
    labels, importance = np.array([1, 0, 1, 0]), np.array([0.3, 0.7])
    asked = baseline_oracles.grouping_cost(expected, [[0, 2], [1, 3]], [0.3, 0.7], 0.1, 1.5)
    found = 0.1 + 1.5 / 2 * disagreement(affinity(a, BRANCHES), labels, importance)
    assert found == pytest.approx(asked, rel=1e-12)


def planted(groups: list[list[int]], views: int = 2) -> Any:
    """Tasks of a group agree, others do not, with some noise of each view's own."""
    tasks = sum(map(len, groups))
    a = 0.45 + 0.1 * agreements(views, tasks)
    for group in groups:
        a[:, *np.ix_(group, group)] += 0.4
    a[:, range(tasks), range(tasks)] = 1
    return a


def test_tasks_that_err_together_stay_together() -> None:
    even, options = np.array([0.5, 0.5]), {"separation": 1.95, "consensus": 0.1}
    groups = [[0, 3, 5], [1, 2], [4, 6, 7]]
    singles = [[t] for t in range(8)]
    assert partition(planted(groups), singles, even, cost=0.05, **options) == groups
    assert partition(planted(groups), singles, even, cost=9.0, **options) == [[*range(8)]]
    # Of branches, whole ones; never each for itself.
    whole = [[0, 3, 5], [1], [2], [4, 6], [7]]
    assert partition(planted(groups), whole, even, cost=0.05, **options) == groups
    assert partition(planted(groups), groups, even, cost=0.0, **options) != groups
    assert partition(planted([[0, 1]]), [[0], [1]], even, cost=0.0, **options) == [[0, 1]]


@pytest.mark.parametrize(("cost", "count"), [(0.02, 3), (0.1, 2), (0.3, 1)])
def test_the_groups_are_the_cheapest_of_all_groupings(cost: float, count: int) -> None:
    """By search over all of them, on affinities that clusters can see."""
    a, singles = planted([[0, 2], [1, 3]], 3), [[t] for t in range(4)]
    importance = np.array([0.2, 0.3, 0.5])
    affinities = [baseline_oracles.task_affinity(torch.tensor(view), singles) for view in a]
    every: dict[float, list[list[int]]] = {}
    for code in range(4**4):
        labels = [code // 4**t % 4 for t in range(4)]
        groups = sorted([t for t in range(4) if labels[t] == g] for g in set(labels))
        if len(groups) < 4:
            price = baseline_oracles.grouping_cost(
                affinities, groups, importance.tolist(), cost, 1.5
            )
            every[price] = groups
    found = partition(a, singles, importance, cost=cost, separation=1.5, consensus=0.1)
    assert found == every[min(every)]
    assert len(found) == count


def test_the_embedding_s_bases_maximise_what_they_should() -> None:
    a = agreements(3, 6)
    root = np.sqrt(a.sum(2))
    laplacians = a / (root[:, :, None] * root[:, None, :])

    def value(bases: Any, consensus: float) -> float:
        own = sum(np.trace(u.T @ of @ u) for u, of in zip(bases, laplacians, strict=True))
        p = [u @ u.T for u in bases]
        return float(own + consensus * sum(np.trace(p[v] @ p[w]) for v, w in PAIRS))

    def bases(consensus: float) -> Any:
        """Out of the rows, whose lengths are those of a row of U when none is zero."""
        monkey = np.linalg.eigh
        kept: list[Any] = []

        def watch(x: Any) -> Any:
            kept.append(monkey(x))
            return kept[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np.linalg, "eigh", watch)
            embedding(a, 2, consensus)
        return [found[1][:, -2:] for found in kept[-3:]]

    apart, drawn = bases(0.0), bases(0.5)
    assert value(apart, 0.0) > value(drawn, 0.0)
    assert value(drawn, 0.5) > value(apart, 0.5)
    rows = embedding(a, 2, 0.5)
    assert rows.shape == (6, 6)
    np.testing.assert_allclose(np.linalg.norm(rows.reshape(6, 3, 2), axis=2), 1)
    unit = [u / np.linalg.norm(u, axis=1, keepdims=True) for u in drawn]
    gram = sum(u @ u.T for u in unit)  # which signs and rotations leave alone
    np.testing.assert_allclose(rows @ rows.T, gram, atol=1e-6)


PAIRS = [(0, 1), (0, 2), (1, 2)]


def test_layers_part_from_the_top_and_lower_groups_hold_whole_upper_ones() -> None:
    mine = tree(cost=0.1)
    assert mine.choose_groups() == (0, [[0, 1, 2, 3, 4]])  # nothing is known yet
    mine.agreement.copy_(torch.tensor(planted([[0, 3], [1], [2, 4]])))
    mine.weight.fill_(1)
    assert mine.choose_groups() == (1, [[0, 3], [1], [2, 4]])
    mine.layers[1].set_groups(PARTED)
    assert mine.layers[1].groups.tolist() == [0, 1, 2, 0, 2]
    level, groups = mine.choose_groups()
    assert level == 0 and len(groups) < 3
    assert all(any(set(upper) <= set(group) for group in groups) for upper in PARTED)
    mine.layers[0].set_groups(LATER)
    assert mine.choose_groups() == (0, [[0, 1, 2, 3, 4]])  # nothing is left


def test_a_view_weighs_as_the_first_layer_takes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()

    def watched(agreement: Any, branches: Any, importance: Any, **_: Any) -> list[list[int]]:
        seen.append(importance)
        return [[0]]

    monkeypatch.setattr("heron.losses.task_groups.partition", watched)
    mine = tree()
    mine.weight.fill_(1)
    mine.choose_groups()
    weight = mine.layers[0].weight[0]  # [out, columns of all views]
    taken = [0.0] * VIEWS
    for row in weight.tolist():
        for column, value in enumerate(row):
            taken[column // 3] += max(value, 0) / (len(row) / VIEWS * len(weight))
    expected = np.exp(taken) / np.exp(taken).sum()
    np.testing.assert_allclose(seen[0], expected, rtol=1e-12)


def parting(folder: Path, name: str, **changes: Any) -> Any:
    """Six steps an epoch; layers part after the first and, it may be, the second."""
    options = {"widths": [9, 6], "every_epochs": 1, "cost": 0.001}
    groups = {"deepmtmv": options | changes.pop("groups", {})}
    settings: dict[str, Any] = {
        "data": {"epoch": "labelled", "batch": {"unlabelled": 10}, "path": str(folder / "frames")},
        "objective": {"weighted_unsupervised": None, "weighted_supervised": None} | groups,
        "optim": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "warmup_epochs": 0},
        "train": {"steps": 14, "epochs": 3},
    }
    for key, value in changes.items():
        settings[key] = settings.get(key, {}) | value
    return frames(folder, name, **settings)


def run_parting(folder: str, name: str, strategy: str) -> float:
    choose(strategy)
    return float(pretrain(parting(Path(folder), name))["train_seconds"])


def state(run: Path) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / "latest" / "model.safetensors")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parting")
    pretrain(parting(folder, "run"))
    return folder


def test_a_run_parts_its_layers_and_loads_again(straight: Path) -> None:
    weights = state(straight / "run")
    assert weights["classifier.hidden.1.groups"].any()
    model = from_pretrained(straight / "run")
    assert isinstance(model.classifier, TaskGroups)
    torch.testing.assert_close(dict(model.state_dict()), weights)


def test_a_run_that_stops_between_goes_on_with_its_bits(straight: Path, tmp_path: Path) -> None:
    """Stopped where the averages count, between the first part and the second."""
    shards = {"data": {"path": str(straight / "frames")}}
    pretrain(parting(tmp_path, "run", train={"steps": 9}, **shards))
    pretrain(parting(tmp_path, "run", run={"resume": "auto"}, **shards))
    rows = [
        [row["loss"] for row in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in row]
        for folder in (straight, tmp_path)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 14
    for name, value in state(straight / "run").items():
        assert torch.equal(state(tmp_path / "run")[name], value), name


STRATEGIES = ["ddp", "zero0", "zero1", "zero2", "zero3"]


@pytest.mark.parametrize("strategy", STRATEGIES if WEEKLY else STRATEGIES[-1:])
def test_parts_are_the_same_under_every_strategy(straight: Path, strategy: str) -> None:
    """Two processes; the groups to the bit, the weights to what summation order leaves."""
    ranks.run(2, run_parting, str(straight), strategy, strategy)
    found = state(straight / strategy)
    for name, value in state(straight / "run").items():
        if name.endswith(".groups"):
            assert torch.equal(found[name], value), name
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_groups_without_a_classifier_that_labels_train_are_refused(tmp_path: Path) -> None:
    config = parting(tmp_path, "run", objective={"cross_entropy": None, "supcon": {}})
    message = (
        "objective.deepmtmv needs a classifier .* add bce or .*; the terms are deepmtmv, supcon"
    )
    with pytest.raises(ConfigError, match=message):
        pretrain(config)


def test_groups_beside_another_classifier_are_refused(tmp_path: Path) -> None:
    objective: dict[str, Any] = {"cross_entropy": None, "bce": {}, "c2ae": {}}
    with pytest.raises(
        ConfigError, match="objective.deepmtmv and objective.c2ae each bring their own classifier"
    ):
        pretrain(parting(tmp_path, "run", objective=objective))
