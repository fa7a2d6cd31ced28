"""Encoders of graphs."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heron.config.extras import require
from heron.config.model import Gin
from heron.data.graphs import NONE, parted
from heron.models.group_sums import group_sums


class GinEncoder(nn.Module):
    r"""A graph isomorphism network (Xu et al. 2019), as InfoGraph's (Sun et al. 2020).

    Layer k is, of the features h of nodes v with neighbours N(v),

    .. math:: h_v^{(k)} = BN(ReLU(MLP^{(k)}(h_v^{(k-1)} + \sum_{u \in N(v)} h_u^{(k-1)})))

    with h^(0) the one-hot label of the node (all 0 where it is hidden), and MLP two linear layers
    with a ReLU between. A node's features are those of all layers, concatenated; a graph's are the
    sum over its nodes. Batch norm is over the nodes of a stream's rows on all processes.

    Attributes:
        width: of the features.
    """

    def __init__(self, options: Gin, shape: Sequence[int], key: str) -> None:
        """Draws the weights; `shape` is (nodes, edges, 2, labels), errors name `key`."""
        super().__init__()
        geometric: Any = require("torch_geometric.nn", key)
        self.most_nodes, _, _, self.labels = shape
        self.width = options.width * options.layers
        width, layers = self.labels, []
        for _ in range(options.layers):
            layers.append(
                nn.Sequential(
                    nn.Linear(width, options.width),
                    nn.ReLU(),
                    nn.Linear(options.width, options.width),
                )
            )
            width = options.width
        self.convolutions = nn.ModuleList(map(geometric.GINConv, layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(options.width) for _ in layers)

    def forward(self, x: Int[Tensor, "rows numbers"], keys: Tensor) -> Float[Tensor, "rows width"]:
        """Returns each graph's sum over its nodes; for the format of x see `data.graphs`."""
        exists, features = self._features(x)
        graph = exists.nonzero()[:, 0]
        return group_sums(features, graph, len(x))

    def nodes(
        self, x: Int[Tensor, "rows numbers"], keys: Tensor
    ) -> Float[Tensor, "rows nodes width"]:
        """Returns features of the nodes of each graph, 0 where there is no node."""
        exists, features = self._features(x)
        out = features.new_zeros(*exists.shape, self.width)
        return out.masked_scatter(exists[..., None], features)

    def _features(
        self, x: Int[Tensor, "rows numbers"]
    ) -> tuple[Bool[Tensor, "rows nodes"], Float[Tensor, "all_nodes width"]]:
        """Returns which nodes exist, and the features of those, row after row."""
        labels, edges = parted(x, self.most_nodes)
        exists = labels != NONE
        index = (exists.flatten().cumsum(0) - 1).view(exists.shape)  # of a node among all
        rows, columns = edges[..., 0].ge(0).nonzero(as_tuple=True)
        ends = index[rows[:, None], edges[rows, columns].long()]
        edge_index = torch.cat([ends, ends.flip(1)]).T  # in both directions
        weight: Any = self.norms[0].weight
        h = torch.zeros(int(exists.sum()), self.labels, dtype=weight.dtype, device=x.device)
        label = labels[exists].long()
        h[label >= 0, label[label >= 0]] = 1
        layers = []
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            h = norm(torch.relu(convolution(h, edge_index)))
            layers.append(h)
        return exists, torch.cat(layers, 1)
