"""Drawn graphs: rings and stars, whose nodes have three labels."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.experiment.config import Config, parse_config
from tests.experiments import merge

Graph = tuple[list[int], list[tuple[int, int]]]


def drawn(count: int = 40) -> tuple[list[Graph], list[int]]:
    """Rings (1) and stars (2) of four to eight nodes."""
    graphs, classes = [], []
    for number in range(count):
        draw = np.random.default_rng(number)
        nodes, star = int(draw.integers(4, 9)), number % 2
        ring = [(a, (a + 1) % nodes) for a in range(nodes)]
        edges = [(0, a) for a in range(1, nodes)] if star else ring
        graphs.append((draw.integers(0, 3, nodes).tolist(), edges))
        classes.append(1 + star)
    return graphs, classes


def write_tu(folder: Path, count: int = 40, labelled: bool = True) -> Path:
    """Writes them in the TU format."""
    folder.mkdir(parents=True, exist_ok=True)
    graphs, classes = drawn(count)
    starts = np.cumsum([0] + [len(labels) for labels, _ in graphs])
    pairs = [
        (int(start) + x + 1, int(start) + y + 1)
        for start, (_, edges) in zip(starts, graphs, strict=False)
        for a, b in edges
        for x, y in ((a, b), (b, a))
    ]
    of = [number + 1 for number, (labels, _) in enumerate(graphs) for _ in labels]
    parts: dict[str, list[Any]] = {
        "A": [f"{a}, {b}" for a, b in pairs],
        "graph_indicator": of,
        "graph_labels": classes,
    }
    if labelled:
        parts["node_labels"] = [label for labels, _ in graphs for label in labels]
    for part, lines in parts.items():
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"{folder.name}_{part}.txt").write_text(text)
    return folder


GRAPHS: dict[str, Any] = {
    "data": {
        "split": "all",
        "protocol": {"folds": 4, "test": "fold"},
        "batch": {"labelled": 15},
        "epoch": "labelled",
        "views": [
            {"stored": "graph", "augment": ["drop_nodes", "mask_nodes"]},
            {"stored": "graph", "augment": ["perturb_edges", "subgraph"]},
        ],
    },
    "model": {
        "encoder": {"kind": "gin", "width": 6, "layers": 2},
        "projector": "mlp",
        "projection_width": 5,
        "shared_encoder": True,
        "shared_projector": True,
        "classify_on": "first_view",
    },
    "objective": {"hard": {"hardening": "exp"}},
    "optim": {"kind": "adam", "lr": 0.01},
    "train": {"steps": 4, "epochs": 9, "cpu_threads": 1},
    "evaluate": {"probe_by": "svm", "map": "never"},
}


def graphs(folder: Path, name: str = "run", **changes: Any) -> Config:
    """A short run on two augmented views of the drawn graphs."""
    if not (folder / "rings").exists():
        write_tu(folder / "rings")
    places = {
        "run": {"dir": str(folder / name)},
        "data": {
            "path": str(folder / "data"),
            "build": {"source": "tu", "folder": str(folder / "rings")},
        },
    }
    return parse_config(merge(merge(GRAPHS, places), changes))


def row(graph: Graph, nodes: int, edges: int) -> NDArray[np.int32]:
    """A graph as the reader gives it."""
    out = np.full(nodes + 2 * edges, -1, np.int32)
    labels, pairs = graph
    out[: len(labels)] = labels
    tidied = sorted(tuple(sorted(pair)) for pair in pairs)
    out[nodes : nodes + 2 * len(pairs)] = np.array(tidied).ravel()
    return out
