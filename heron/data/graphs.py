"""Graphs as rows of integers: the labels of the nodes, then the edges; and their augmentations.

If the graphs of a data set have at most N nodes and E edges, a row is int32 [N + 2 E]: one label
per node, then one pair of nodes per edge, each undirected edge once; -1 where there is none.

Each augmentation (You et al. 2020, GraphCL, Section 3.1) is a function of the row. It takes rows of
graphs, N, a share, and a function that draws a given number of uniform numbers per row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from heron.shards.graph import unpack_graph

NONE = -1  # no node, or no edge
HIDDEN = -2  # the label of a masked node

Graphs = Int[Tensor, "rows numbers"]
Draw = Callable[[int], Tensor]


@dataclass(frozen=True)
class GraphDecoder:
    """Decodes the bytes of a graph into a row.

    `stored` has the maximal numbers of nodes and edges of a graph, and the number of node labels.
    """

    stored: tuple[int, ...]
    varying = False  # only pictures may have several sizes
    dtype = "int32"
    vocabulary = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return (self.stored[0] + 2 * self.stored[1],)

    def decode(self, data: bytes, out: NDArray[np.int32]) -> None:
        """Writes a graph to `out`, of `shape`.

        Raises ValueError or ShardError if the bytes are no graph, or the graph is too large.
        """
        self.write(*unpack_graph(data, self.stored), out)

    def write(
        self, labels: NDArray[np.int32], edges: NDArray[np.int32], out: NDArray[np.int32]
    ) -> None:
        """Writes labels [nodes] and edges [edges, 2] to `out`."""
        max_nodes = self.stored[0]
        out[:] = NONE
        out[: len(labels)] = labels
        out[max_nodes : max_nodes + edges.size] = edges.ravel()


def parted(
    rows: Int[Tensor, "rows numbers"], nodes: int
) -> tuple[Int[Tensor, "rows nodes"], Int[Tensor, "rows edges 2"]]:
    """Splits rows of graphs of at most `nodes` nodes into labels and edges."""
    return rows[:, :nodes], rows[:, nodes:].reshape(len(rows), (rows.shape[1] - nodes) // 2, 2)


def joined(
    labels: Int[Tensor, "rows nodes"], edges: Int[Tensor, "rows edges 2"]
) -> Int[Tensor, "rows numbers"]:
    """Joins labels and edges into rows: the inverse of `parted`."""
    return torch.cat([labels, edges.flatten(1)], 1)


def drop_nodes(x: Graphs, nodes: int, share: float, draw: Draw) -> Graphs:
    """Removes a share of the nodes, rounded down, and their edges."""
    labels, edges = parted(x, nodes)
    return _induced_subgraph(labels, edges, ~_select_share(labels != NONE, share, draw(nodes)))


def mask_nodes(x: Graphs, nodes: int, share: float, draw: Draw) -> Graphs:
    """Hides the labels of a share of the nodes, rounded down."""
    labels, edges = parted(x, nodes)
    hidden = _select_share(labels != NONE, share, draw(nodes))
    return joined(torch.where(hidden, HIDDEN, labels), edges)


def perturb_edges(x: Graphs, nodes: int, share: float, draw: Draw) -> Graphs:
    """Replaces a share of the edges, rounded down, by random ones; duplicates are kept once."""
    labels, edges = parted(x, nodes)
    if not edges.numel():
        return x
    exists = labels != NONE
    count = exists.sum(1, keepdim=True)
    node_order = (~exists).byte().argsort(dim=1, stable=True)  # existing nodes first
    chance, first, second = draw(3 * edges.shape[1]).double().chunk(3, 1)
    a = (first * count).long()
    b = (second * (count - 1)).long()
    b = b + (b >= a).long()  # differs from a
    ends = torch.stack([a, b], 2).clamp(max=nodes - 1).flatten(1)
    drawn = node_order.gather(1, ends).view(*a.shape, 2).sort(2)[0].to(edges.dtype)
    replaced = _select_share(edges[..., 0] >= 0, share, chance)
    edges = torch.where(replaced[..., None], drawn, edges)
    no_edge = nodes * nodes
    codes = edges[..., 0].long() * nodes + edges[..., 1]
    codes = torch.where(edges[..., 0] >= 0, codes, no_edge).sort(1)[0]
    codes[:, 1:] = torch.where(codes[:, 1:] == codes[:, :-1], no_edge, codes[:, 1:])
    pairs = torch.stack([codes // nodes, codes % nodes], 2)
    return joined(labels, torch.where(codes[..., None] < no_edge, pairs, NONE).to(edges.dtype))


def subgraph(x: Graphs, nodes: int, share: float, draw: Draw) -> Graphs:
    """Keeps a connected subgraph: a share of the nodes, rounded down, but at least one.

    It starts at a random node and adds random neighbours until it is large enough or has no
    further neighbours.
    """
    labels, edges = parted(x, nodes)
    exists, chance = labels != NONE, draw(nodes)
    target_size = _share_count(exists.sum(1), share).clamp(min=1)
    chosen, reachable = torch.zeros_like(exists), exists.clone()
    a, b = edges[..., 0].long(), edges[..., 1].long()
    for size in range(int(target_size.max()) if len(x) else 0):
        least, new = torch.where(reachable & ~chosen, chance, 2.0).min(1, keepdim=True)
        grows = (least < 2) & (size < target_size)[:, None]
        chosen.scatter_(1, new, chosen.gather(1, new) | grows)
        if size == 0:
            reachable = torch.zeros_like(exists)
        for end, other in ((a, b), (b, a)):
            touched = (end == new) & grows
            reached = torch.zeros_like(reachable, dtype=torch.uint8)
            reached.scatter_reduce_(1, other.clamp(min=0), touched.byte(), "amax")
            reachable |= reached.bool()
    return _induced_subgraph(labels, edges, chosen)


def group_sums(
    rows: Float[Tensor, "rows width"], group: Int[Tensor, " rows"], groups: int
) -> Float[Tensor, "groups width"]:
    """Returns the sum of the rows of each group, 0 for a group without rows.

    On a GPU `index_add` adds in whatever order its threads come; `index_put_` sorts first, so that
    two calls have equal bits. On a CPU both add in order, and the former is faster.
    """
    zeros = rows.new_zeros(groups, rows.shape[1])
    if rows.is_cuda:
        return zeros.index_put((group,), rows, accumulate=True)
    return zeros.index_add(0, group, rows)


def _share_count(count: Int[Tensor, "*some"], share: float) -> Int[Tensor, "*some"]:
    """Returns a share of counts, rounded down; .29 of 100 is 29 in spite of binary rounding."""
    return (count.double() * share + 1e-9).long()


def _select_share(
    exists: Bool[Tensor, "rows some"], share: float, chance: Float[Tensor, "rows some"]
) -> Bool[Tensor, "rows some"]:
    """Selects a share of the existing elements: those with the smallest `chance`."""
    order = torch.where(exists, chance, 2.0).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1, stable=True)
    return exists & (rank < _share_count(exists.sum(1, keepdim=True), share))


def _induced_subgraph(
    labels: Int[Tensor, "rows nodes"],
    edges: Int[Tensor, "rows edges 2"],
    kept: Bool[Tensor, "rows nodes"],
) -> Graphs:
    both_kept = kept.gather(1, edges.clamp(min=0).flatten(1).long()).view(edges.shape).all(2)
    return joined(torch.where(kept, labels, NONE), torch.where(both_kept[..., None], edges, NONE))
