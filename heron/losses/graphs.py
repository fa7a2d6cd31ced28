"""Losses of graphs and their nodes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heron.losses.inputs import LossError, expect_width
from heron.losses.loss import Loss
from heron.pipeline.config.model import Model
from heron.pipeline.data.graphs import NONE
from heron.pipeline.models.heterogeneous import Features, ModelSpec
from heron.pipeline.objectives import infograph


class Infograph(Loss):
    r"""InfoGraph's loss (Sun et al. 2020, Eq. 3 and 4): a node tells its graph from others.

    .. math:: \frac{1}{|V|} \sum_{u \in V} \Big( sp(-T(u, g(u)))
              + \frac{1}{G - 1} \sum_{g \ne g(u)} sp(T(u, g)) \Big) - 2 \log 2

    with sp(x) = log(1 + e^x) and T the inner product of what two networks, which are its own, make
    of a node's features and of the sum over a graph's nodes.
    """

    def __init__(self, dim: int, *, gather: bool = True) -> None:
        """Builds the networks.

        Args:
            dim: width of a node's features.
            gather: compare nodes with the graphs of all processes.
        """
        spec = ModelSpec(Model(), [[1, 0, 2, 1]], 0, [dim], 0)
        super().__init__(infograph.Infograph, {}, gather, spec)
        self.dim = dim

    def forward(
        self, nodes: Tensor, there: Tensor, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Returns the loss of the graphs of all processes.

        Args:
            nodes: features of the nodes of this process's graphs, [batch, nodes, dim], as many
                places for nodes on every process.
            there: whether there is a node, [batch, nodes]; what `nodes` holds elsewhere is not
                looked at.
            sizes: graphs of every process, where they are known; None exchanges them.

        Raises:
            LossError: they are of another shape or type, or there is one graph alone.
        """
        if nodes.dim() != 3 or there.dtype != torch.bool or there.shape != nodes.shape[:2]:
            raise LossError(
                f"nodes are {list(nodes.shape)} and there is {there.dtype} {list(there.shape)}; "
                "expected floats [batch, nodes, dim] and booleans [batch, nodes]"
            )
        expect_width({"nodes": nodes.flatten(0, 1)}, self.dim)
        nodes = torch.where(there[..., None], nodes, 0.0)
        features = {
            "hidden": nodes.sum(1),
            "nodes": nodes.flatten(1),
            "inputs": torch.where(there, 0.0, float(NONE)).to(nodes.dtype),
        }
        return self.evaluate(features, sizes=sizes)

    def nodes(self, known: Features) -> list[Tensor]:
        """Returns the nodes, [batch, nodes, dim]."""
        return [x.view(len(x), x.shape[1] // self.dim, self.dim) for x in known["nodes"]]

    if TYPE_CHECKING:
        __call__ = forward
