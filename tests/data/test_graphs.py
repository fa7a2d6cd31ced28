"""Graphs in batches: augmentations, each a function of the row."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heron.data.graphs import (
    HIDDEN,
    NONE,
    drop_nodes,
    mask_nodes,
    parted,
    perturb_edges,
    subgraph,
)
from heron.data.random_keys import uniforms
from tests.graphs import drawn, row

NODES, EDGES = 8, 8
X = torch.from_numpy(np.stack([row(graph, NODES, EDGES) for graph in drawn()[0]]))
KEYS = torch.arange(len(X)) * 7919
Augment = Callable[[Tensor, int, float, Any], Tensor]
ALL: dict[str, tuple[Augment, float]] = {
    "drop_nodes": (drop_nodes, 0.3),
    "mask_nodes": (mask_nodes, 0.3),
    "perturb_edges": (perturb_edges, 0.4),
    "subgraph": (subgraph, 0.7),
}


def augmented(name: str, x: Tensor = X, keys: Tensor = KEYS) -> Tensor:
    augment, share = ALL[name]
    return augment(x, NODES, share, partial(uniforms, keys, 3))


def read(x: Tensor) -> list[tuple[dict[int, int], set[tuple[int, int]]]]:
    """Labels by the numbers of the nodes, and edges."""
    found = []
    for labels, edges in zip(*parted(x, NODES), strict=True):
        nodes = {n: label for n, label in enumerate(labels.tolist()) if label != NONE}
        pairs = [(a, b) for a, b in edges.tolist() if a != NONE]
        assert all(a < b and a in nodes and b in nodes for a, b in pairs)
        assert len(set(pairs)) == len(pairs)
        found.append((nodes, set(pairs)))
    return found


@pytest.mark.parametrize("name", ALL)
def test_it_follows_the_row_and_nothing_else(name: str) -> None:
    whole = augmented(name)
    assert not torch.equal(whole, X)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))[:7]
    assert torch.equal(augmented(name, X[order], KEYS[order]), whole[order])
    assert len(augmented(name, X[:0], KEYS[:0])) == 0
    assert not torch.equal(augmented(name, X, KEYS + 1), whole)
    twice = augmented(name, whole)  # holes among the nodes are no nodes
    read(twice)


def test_nodes_are_dropped_with_their_edges() -> None:
    for (nodes, edges), (kept, left) in zip(read(X), read(augmented("drop_nodes")), strict=True):
        assert len(kept) == len(nodes) - int(0.3 * len(nodes))
        assert kept.items() <= nodes.items()
        assert left == {(a, b) for a, b in edges if a in kept and b in kept}


def test_labels_are_hidden() -> None:
    for (nodes, edges), (seen, same) in zip(read(X), read(augmented("mask_nodes")), strict=True):
        hidden = [n for n, label in seen.items() if label == HIDDEN]
        assert len(hidden) == int(0.3 * len(nodes)) and same == edges
        assert all(seen[n] == nodes[n] for n in nodes if n not in hidden)


def test_edges_are_others() -> None:
    added = 0
    for (nodes, edges), (same, left) in zip(read(X), read(augmented("perturb_edges")), strict=True):
        gone = int(0.4 * len(edges) + 1e-9)
        assert same == nodes and len(edges) - gone <= len(left) <= len(edges)
        assert len(edges & left) >= len(edges) - gone
        added += len(left - edges)
    assert added > 20


def test_a_subgraph_is_connected() -> None:
    for (nodes, edges), (kept, left) in zip(read(X), read(augmented("subgraph")), strict=True):
        assert len(kept) == int(0.7 * len(nodes)) and kept.items() <= nodes.items()
        assert left == {(a, b) for a, b in edges if a in kept and b in kept}
        reached, more = set[int](), {min(kept)}
        while more - reached:
            reached |= more
            more = {n for pair in left if reached & set(pair) for n in pair}
        assert reached == kept.keys()


def test_a_subgraph_ends_with_its_component() -> None:
    parts = torch.full((1, NODES + 2 * EDGES), NONE, dtype=torch.int32)
    parts[0, :4] = 1
    parts[0, NODES : NODES + 4] = torch.tensor([0, 1, 2, 3])
    ((kept, _),) = read(subgraph(parts, NODES, 1.0, partial(uniforms, KEYS[:1], 3)))
    assert kept.keys() in ({0, 1}, {2, 3})


def test_graphs_of_one_node() -> None:
    lone = torch.full((2, NODES + 2 * EDGES), NONE, dtype=torch.int32)
    lone[:, 3] = 1
    for name in ALL:
        assert torch.equal(augmented(name, lone, KEYS[:2]), lone)
