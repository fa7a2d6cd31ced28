"""Graphs as rows of whole numbers: the nodes' labels, then the edges.

A row of a data set whose graphs have N nodes and E edges at most is int32 [N + 2 E]: a label a
node, then a pair of nodes an edge, each undirected edge once; -1 where there is none.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from heron.shards.graph import unpack

NONE = -1  # where there is no node, and no edge
HIDDEN = -2  # a node whose label is not seen


@dataclass(frozen=True)
class GraphDecoder:
    """Makes a row of the bytes of a graph.

    Attributes:
        stored: the most nodes and edges of a graph, and how many labels nodes have.
    """

    stored: tuple[int, ...]
    varying = False  # as of pictures, which have several sizes
    dtype = "int32"

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
