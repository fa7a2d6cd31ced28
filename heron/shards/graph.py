"""Graphs as bytes: an npy file of int32 with the labels of the nodes, and the edges."""

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import short_repr
from heron.shards.index import array_at

Nodes = NDArray[np.int32]  # labels, [nodes]
Edges = NDArray[np.int32]  # pairs of nodes, numbered from 0, [edges, 2]


def normalize_edges(pairs: NDArray[np.int64]) -> Edges:
    """Sorts undirected edges, lesser node first, without repeats; ValueError for a self-loop."""
    if len(loops := np.flatnonzero(pairs[:, 0] == pairs[:, 1])):
        raise ValueError(f"an edge joins node {pairs[loops[0], 0]} with itself")
    return np.unique(np.sort(pairs, 1), axis=0).astype(np.int32)


def pack_graph(labels: Nodes, edges: Edges) -> bytes:
    """Returns a graph as the bytes of an npy file: the number of nodes, their labels, the edges."""
    from heron.shards.write_shard import npy  # here: write_shard imports the users of this file

    return npy(np.concatenate([[len(labels)], labels, edges.ravel()]).astype(np.int32))


def unpack_graph(data: bytes, shape: tuple[int, ...]) -> tuple[Nodes, Edges]:
    """Returns the labels of the nodes, and the edges, of a graph from `pack_graph`.

    Raises ValueError or ShardError where the bytes are no graph, or it does not fit `shape`: the
    maximum number of nodes and of edges, and the number of node labels.
    """
    array = array_at(np.frombuffer(data, np.uint8), 0, len(data), "a graph")
    if array.dtype != np.int32 or array.ndim != 1 or not len(array):
        raise ValueError(f"must be a graph, int32 with one axis, got {array.dtype} {array.shape}")
    num_nodes = int(array[0])
    if not 1 <= num_nodes < len(array) or (len(array) - 1 - num_nodes) % 2:
        raise ValueError(f"says {num_nodes} nodes in {len(array) - 1} numbers, not a graph")
    labels, edges = array[1 : 1 + num_nodes], array[1 + num_nodes :].reshape(-1, 2)
    if fault := graph_fault(labels, edges, shape):
        raise ValueError(fault)
    return labels, edges


def graph_fault(labels: Nodes, edges: Edges, shape: tuple[int, ...]) -> str:
    """Returns how a graph does not fit a shape, or "": see `unpack_graph`."""
    max_nodes, max_edges, num_labels = shape
    if not 1 <= len(labels) <= max_nodes or len(edges) > max_edges:
        return (
            f"must have 1 to {max_nodes} nodes and at most {max_edges} edges, got {len(labels)} "
            f"nodes and {len(edges)} edges"
        )
    if len(invalid := np.flatnonzero((labels < 0) | (labels >= num_labels))):
        return f"has a node of label {labels[invalid[0]]}; labels go from 0 to {num_labels - 1}"
    if not len(edges):
        return ""
    if edges.min() < 0 or edges.max() >= len(labels):
        return (
            f"has an edge to node {short_repr(int(edges.max()))}; nodes go from 0 to "
            f"{len(labels) - 1}"
        )
    order = edges[:, 0].astype(np.int64) * len(labels) + edges[:, 1]
    if (edges[:, 0] >= edges[:, 1]).any() or (np.diff(order) <= 0).any():
        return "has edges out of order; write each once, its lesser node first, sorted"
    return ""
