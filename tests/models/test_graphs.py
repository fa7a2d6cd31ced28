"""GIN against a loop, and runs on graphs: processes, stops, a model that is given graphs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import heron
from heron.api.export import ExportError
from heron.api.job import pretrain
from heron.base.errors import ConfigError, InputError
from heron.data.reader import Reader
from heron.experiment.open_data import open_data
from heron.models.encoders import GinEncoder
from heron.models.options import Gin
from heron.training.tracking import read_metrics
from tests import ranks
from tests.graphs import drawn, graphs, row

pytest.importorskip("torch_geometric", reason="the extra graph is not installed")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "h-scl": {},
    "infograph": {
        "objective": {"hard": None, "infograph": {}},
        "data": {"views": [{"stored": "graph"}, {"stored": "graph", "augment": ["drop_nodes"]}]},
    },
}


def gin_loop(encoder: GinEncoder, rows: Tensor) -> Tensor:
    """Xu et al. 2019, Eq. 4.1 with epsilon 0, one node after the other; batch norm is left out."""
    out = []
    for one in rows:
        labels = one[:8].tolist()
        pairs = [(int(a), int(b)) for a, b in one[8:].view(-1, 2) if a >= 0]
        h = {n: torch.eye(3, dtype=torch.float64)[v] for n, v in enumerate(labels) if v >= 0}
        h |= {n: torch.zeros(3, dtype=torch.float64) for n, v in enumerate(labels) if v == -2}
        layers = []
        for convolution in encoder.convolutions:
            network: Any = convolution.nn
            near = {n: [b if a == n else a for a, b in pairs if n in (a, b)] for n in h}
            h = {n: torch.relu(network(sum((h[u] for u in near[n]), h[n]))) for n in h}
            layers.append(sum(h.values()))
        out.append(torch.cat([torch.as_tensor(layer) for layer in layers]))
    return torch.stack(out)


def test_gin_is_its_equation() -> None:
    torch.manual_seed(0)
    encoder = GinEncoder(Gin(width=4, layers=3), (8, 8, 2, 3), "model.encoder").double()
    norms: Any = encoder.norms
    for norm in norms:
        norm.eps = 0.0  # with mean 0 and variance 1 it then changes nothing
    x = torch.from_numpy(np.stack([row(graph, 8, 8) for graph in drawn(6)[0]]))
    x[2, 1] = -2
    x[3, 0] = -2
    keys = torch.zeros(6, dtype=torch.int64)
    encoder.eval()
    torch.testing.assert_close(encoder(x, keys), gin_loop(encoder, x), rtol=1e-12, atol=1e-12)
    nodes = encoder.nodes(x, keys)
    assert nodes.shape == (6, 8, 12) and not nodes[x[:, :8] == -1].any()
    assert encoder(x[:0], keys[:0]).shape == (0, 12)


def losses(folder: str, name: str, changes: dict[str, Any]) -> list[float]:
    config = graphs(Path(folder), name, train={"precision": "fp64"}, **changes)
    pretrain(config)
    rows = list(read_metrics(Path(folder) / name / "metrics.jsonl"))
    steps = [v for one in rows if "loss" in one for v in (one["loss"], one["gradient_norm"])]
    assert len(steps) == 8
    return steps


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_processes_are_one(name: str, tmp_path: Path) -> None:
    (one,) = ranks.run(1, losses, str(tmp_path), "one", OBJECTIVES[name])
    two = ranks.run(2, losses, str(tmp_path), "two", OBJECTIVES[name])
    torch.testing.assert_close(torch.tensor(two[0]), torch.tensor(one), rtol=1e-8, atol=1e-8)
    if name == "infograph":
        return
    pretrain(graphs(tmp_path, "whole"))
    pretrain(graphs(tmp_path, "cut", train={"steps": 2}))
    pretrain(graphs(tmp_path, "cut", run={"resume": "auto"}))
    weights = [
        tmp_path / run / "checkpoints/step-00000004/model.safetensors" for run in ("whole", "cut")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_model_takes_graphs(tmp_path: Path) -> None:
    assert 0 <= pretrain(graphs(tmp_path))["accuracy"] <= 1
    model = heron.from_pretrained(tmp_path / "run")
    given, _ = drawn(5)
    both = [(labels, edges + [(b, a) for a, b in edges]) for labels, edges in given]
    z = model.encode(given)
    assert z.shape == (5, 12)
    np.testing.assert_array_equal(model.encode(both), z)
    reader = Reader(tmp_path / "data")
    x = torch.from_numpy(reader.read("graph", np.arange(5)))
    with torch.no_grad():
        wanted = model.network.encoders[0](x, torch.zeros(5, dtype=torch.int64))
    np.testing.assert_allclose(z, wanted.numpy(), rtol=1e-6)
    for graph, told in (
        (([0, 9], [(0, 1)]), "row 0 has a node of label 9; labels go from 0 to 2"),
        (([0, 1], [(0, 2)]), "row 0 has an edge to node 2; nodes go from 0 to"),
        (([0, 1], [(0, 0)]), "row 0 an edge joins node 0 with itself"),
        (([0] * 9, []), "must have 1 to 8 nodes and at most"),
        (([0.5], []), "row 0 is labels float64"),
        (([0, 1], [0, 1]), r"row 0 is labels \[2\] and edges \[2\]"),
    ):
        with pytest.raises(InputError, match=told):
            model.encode([graph])
    with pytest.raises(ExportError, match="view 'graph' has graphs, whose encoder cannot be"):
        model.export(tmp_path / "m.onnx")
    with pytest.raises(InputError, match="view 'graph' must be a list of graphs"):
        model.encode(np.zeros((2, 3)))


def test_folds_are_tested_once_each_and_shuffled_anew(tmp_path: Path) -> None:
    from heron.data.dataset import build_data

    build_data(graphs(tmp_path).data, progress=False)

    def tested(fold: int) -> set[int]:
        roles = open_data(graphs(tmp_path, data={"protocol": {"fold": fold}})).roles
        assert set(roles.labelled.tolist()) == set(range(40)) - set(roles.test.tolist())
        assert len(roles.test) == 10 and (roles.test % 2).sum() == 5  # of each class
        return set(roles.test.tolist())

    first, second = [tested(fold) for fold in range(4)], [tested(fold) for fold in range(4, 8)]
    for one in (first, second):
        assert set.union(*one) == set(range(40))
    assert first[0] not in second and first[0] != set(range(10))


def test_the_plain_network_sees_graphs(tmp_path: Path) -> None:
    terms: dict[str, Any] = {"hard": {}, "cross_entropy": {}}
    result = pretrain(graphs(tmp_path, objective=terms, evaluate={"baselines": "plain"}))
    assert 0 <= result["plain_accuracy"] <= 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": {"encoder": {"kind": "mlp", "widths": [3], "width": None, "layers": None}}},
         "model.encoder is 'mlp', but the view has graphs; use 'gin', or"),
        ({"data": {"views": [{"stored": "graph", "augment": ["noise"]}] * 2}},
         "'noise' does not work on graph view 'graph'; graphs take drop_nodes"),
        ({"data": {"views": [{"stored": "graph", "size": 8}] * 2}},
         "but 'graph' has graphs; remove it"),
        ({"objective": {"hard": None, "input_weighted_unsupervised": {}}},
         "input_weighted_unsupervised compares the inputs.* but a view has graphs"),
        ({"evaluate": {"baselines": True}}, "baselines is true, but view 'graph' has graphs"),
        ({"data": {"protocol": {"folds": None}}}, "test is 'fold', but folds is null"),
    ],
)  # fmt: skip
def test_what_does_not_fit(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        pretrain(graphs(tmp_path, **changes))
