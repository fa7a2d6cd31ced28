"""Graphs as bytes: an npy file of int32, which holds the nodes' labels and the edges."""

import numpy as np
from numpy.typing import NDArray

from heron.shards.errors import shown
from heron.shards.index import array_at

Nodes = NDArray[np.int32]  # labels, [nodes]
Edges = NDArray[np.int32]  # pairs of nodes, numbered from 0, [edges, 2]


def tidy(pairs: NDArray[np.int64]) -> Edges:
    """Returns undirected edges as they are stored: each once, its lesser node first, sorted.

    Raises:
        ValueError: an edge joins a node with itself.
    """
    if len(loops := np.flatnonzero(pairs[:, 0] == pairs[:, 1])):
        raise ValueError(f"an edge joins node {pairs[loops[0], 0]} with itself")
    return np.unique(np.sort(pairs, 1), axis=0).astype(np.int32)


def pack(labels: Nodes, edges: Edges) -> bytes:
    """Returns a graph as the bytes of an npy file: how many nodes, their labels, the edges."""
    from heron.shards.build import npy  # here: it imports the sources, which import this

    return npy(np.concatenate([[len(labels)], labels, edges.ravel()]).astype(np.int32))


def unpack(data: bytes, shape: tuple[int, ...]) -> tuple[Nodes, Edges]:
    """Returns the labels of the nodes, and the edges, out of what `pack` has made.

    Args:
        data: the bytes.
        shape: the most nodes and edges of a graph, and how many labels there are.

    Raises:
        ValueError, ShardError: they are no graph, or one that does not fit the shape.
    """
    array = array_at(np.frombuffer(data, np.uint8), 0, len(data), "a graph")
    if array.dtype != np.int32 or array.ndim != 1 or not len(array):
        raise ValueError(f"is {array.dtype} {array.shape}; expected a graph: int32, one axis")
    nodes = int(array[0])
    if not 1 <= nodes < len(array) or (len(array) - 1 - nodes) % 2:
        raise ValueError(f"says {nodes} nodes in {len(array) - 1} numbers; expected a graph")
    labels, edges = array[1 : 1 + nodes], array[1 + nodes :].reshape(-1, 2)
    if fault := graph_fault(labels, edges, shape):
        raise ValueError(fault)
    return labels, edges


def graph_fault(labels: Nodes, edges: Edges, shape: tuple[int, ...]) -> str:
    """Says why a graph is not one of so many nodes, edges and labels at most, or returns ""."""
    nodes, most_edges, names = shape
    if not 1 <= len(labels) <= nodes or len(edges) > most_edges:
        return (
            f"has {len(labels)} nodes and {len(edges)} edges; expected 1 to {nodes} nodes and "
            f"{most_edges} edges at most"
        )
    if len(bad := np.flatnonzero((labels < 0) | (labels >= names))):
        return f"has a node of label {labels[bad[0]]}; expected 0 to {names - 1}"
    if not len(edges):
        return ""
    if edges.min() < 0 or edges.max() >= len(labels):
        return f"has an edge to node {shown(int(edges.max()))}; expected 0 to {len(labels) - 1}"
    numbers = edges[:, 0].astype(np.int64) * len(labels) + edges[:, 1]
    if (edges[:, 0] >= edges[:, 1]).any() or (np.diff(numbers) <= 0).any():
        return "has edges out of order; expected each once, its lesser node first, sorted"
    return ""
