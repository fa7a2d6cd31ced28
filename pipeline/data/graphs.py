"""Graphs as rows of whole numbers: the nodes' labels, then the edges; and their augmentations.

A row of a data set whose graphs have N nodes and E edges at most is int32 [N + 2 E]: a label a
node, then a pair of nodes an edge, each undirected edge once; -1 where there is none.

Each augmentation (You et al. 2020, GraphCL, Section 3.1) is a function of the row. It takes rows of
graphs, their most nodes, a share, and what draws so many uniform numbers a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from heron.shards.graph import unpack

NONE = -1  # where there is no node, and no edge
HIDDEN = -2  # a node whose label is not seen

Graphs = Int[Tensor, "rows numbers"]
Draw = Callable[[int], Tensor]


@dataclass(frozen=True)
class GraphDecoder:
    """Makes a row of the bytes of a graph.

    Attributes:
        stored: the most nodes and edges of a graph, and how many labels nodes have.
    """

    stored: tuple[int, ...]
    varying = False  # as of pictures, which have several sizes
    dtype = "int32"
    vocabulary = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a row."""
        return (self.stored[0] + 2 * self.stored[1],)

    def decode(self, data: bytes, out: NDArray[np.int32]) -> None:
        """Writes a graph to `out`, of `shape`.

        Raises:
            ValueError, ShardError: the bytes are no graph, or a larger one.
        """
        self.write(*unpack(data, self.stored), out)

    def write(
        self, labels: NDArray[np.int32], edges: NDArray[np.int32], out: NDArray[np.int32]
    ) -> None:
        """Writes labels [nodes] and edges [edges, 2] to `out`."""
        first = self.stored[0]
        out[:] = NONE
        out[: len(labels)] = labels
        out[first : first + edges.size] = edges.ravel()


def parted(
    rows: Int[Tensor, "rows numbers"], nodes: int
) -> tuple[Int[Tensor, "rows nodes"], Int[Tensor, "rows edges 2"]]:
    """Returns the labels and the edges of rows whose graphs have so many nodes at most."""
    return rows[:, :nodes], rows[:, nodes:].reshape(len(rows), (rows.shape[1] - nodes) // 2, 2)


def joined(
    labels: Int[Tensor, "rows nodes"], edges: Int[Tensor, "rows edges 2"]
) -> Int[Tensor, "rows numbers"]:
    """Returns rows of labels and edges."""
    return torch.cat([labels, edges.flatten(1)], 1)


def drop_nodes(x: Graphs, nodes: int, share: float, draw: Draw) -> Graphs:
    """Takes a share of the nodes out, rounded down, and the edges that they have."""
    labels, edges = parted(x, nodes)
    return _induced(labels, edges, ~_chosen(_there(labels), share, draw(nodes)))


def mask_nodes(x: Graphs, nodes: int, share: float, draw: Draw) -> Graphs:
    """Hides the labels of a share of the nodes, rounded down."""
    labels, edges = parted(x, nodes)
    hidden = _chosen(_there(labels), share, draw(nodes))
    return joined(torch.where(hidden, HIDDEN, labels), edges)


def perturb_edges(x: Graphs, nodes: int, share: float, draw: Draw) -> Graphs:
    """Takes a share of the edges out, rounded down, and adds as many between nodes by chance.

    One that is drawn twice, or that is there, is there once.
    """
    labels, edges = parted(x, nodes)
    if not edges.numel():
        return x
    there = _there(labels)
    count = there.sum(1, keepdim=True)
    order = (
        (~there).byte().argsort(dim=1, stable=True)
    )  # numbers of the nodes that are there, first
    chance, first, second = draw(3 * edges.shape[1]).double().chunk(3, 1)
    a = (first * count).long()
    b = (second * (count - 1)).long()
    b = b + (b >= a).long()  # another node than a
    ends = torch.stack([a, b], 2).clamp(max=nodes - 1).flatten(1)
    drawn = order.gather(1, ends).view(*a.shape, 2).sort(2)[0].to(edges.dtype)
    replaced = _chosen(edges[..., 0] >= 0, share, chance)
    edges = torch.where(replaced[..., None], drawn, edges)
    most = nodes * nodes
    numbers = edges[..., 0].long() * nodes + edges[..., 1]
    numbers = torch.where(edges[..., 0] >= 0, numbers, most).sort(1)[0]
    numbers[:, 1:] = torch.where(numbers[:, 1:] == numbers[:, :-1], most, numbers[:, 1:])
    pairs = torch.stack([numbers // nodes, numbers % nodes], 2)
    return joined(labels, torch.where(numbers[..., None] < most, pairs, NONE).to(edges.dtype))


def subgraph(x: Graphs, nodes: int, share: float, draw: Draw) -> Graphs:
    """Keeps a connected part: a share of the nodes, rounded down, and one at least.

    It begins at a node by chance, and takes in a neighbour by chance until it is large enough or
    has no other neighbours.
    """
    labels, edges = parted(x, nodes)
    there, chance = _there(labels), draw(nodes)
    wanted = _share_of(there.sum(1), share).clamp(min=1)
    kept, near = torch.zeros_like(there), there.clone()
    a, b = edges[..., 0].long(), edges[..., 1].long()
    for size in range(int(wanted.max()) if len(x) else 0):
        least, new = torch.where(near & ~kept, chance, 2.0).min(1, keepdim=True)
        grown = (least < 2) & (size < wanted)[:, None]
        kept.scatter_(1, new, kept.gather(1, new) | grown)
        if size == 0:
            near = torch.zeros_like(there)
        for end, other in ((a, b), (b, a)):
            touched = (end == new) & grown
            reached = torch.zeros_like(near, dtype=torch.uint8)
            reached.scatter_reduce_(1, other.clamp(min=0), touched.byte(), "amax")
            near |= reached.bool()
    return _induced(labels, edges, kept)


def _there(labels: Int[Tensor, "rows nodes"]) -> Bool[Tensor, "rows nodes"]:
    return labels != NONE


def _share_of(count: Int[Tensor, "*some"], share: float) -> Int[Tensor, "*some"]:
    """Returns a share of counts, rounded down; .29 of 100 is 29, whatever binary makes of .29."""
    return (count.double() * share + 1e-9).long()


def _chosen(
    there: Bool[Tensor, "rows some"], share: float, chance: Float[Tensor, "rows some"]
) -> Bool[Tensor, "rows some"]:
    """Returns which of those that are there have the least chance: a share of them."""
    order = torch.where(there, chance, 2.0).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1, stable=True)
    return there & (rank < _share_of(there.sum(1, keepdim=True), share))


def _induced(
    labels: Int[Tensor, "rows nodes"],
    edges: Int[Tensor, "rows edges 2"],
    kept: Bool[Tensor, "rows nodes"],
) -> Graphs:
    """Returns the graphs of the nodes that are kept."""
    ends = kept.gather(1, edges.clamp(min=0).flatten(1).long()).view(edges.shape).all(2)
    return joined(torch.where(kept, labels, NONE), torch.where(ends[..., None], edges, NONE))
