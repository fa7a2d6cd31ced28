"""InfoGraph's objective: a node's features identify its graph."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from heron.base.errors import ConfigError
from heron.data.graphs import NONE
from heron.losses.batch import GlobalBatch
from heron.losses.inputs import LossError, RowCounts, expect_width
from heron.losses.loss import Loss
from heron.losses.terms import Needs
from heron.models.heterogeneous import Encoded, Features, ModelSpec
from heron.models.options import ModelConfig


class Discriminators(nn.Module):
    """InfoGraph's networks of nodes and of graphs, whose inner products score their matches."""

    reads_nodes = True

    def __init__(self, width: int) -> None:
        """Builds both networks for features of a width."""
        super().__init__()
        self.of_nodes, self.of_graphs = _Discriminator(width), _Discriminator(width)

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `local` [rows, nodes, width], `global` [rows, width] and `sizes` [rows, 1].

        Each has a tensor for each view; `sizes` are the numbers of nodes.
        """
        return {
            "local": [self.of_nodes(nodes) for nodes in encoded.nodes],
            "global": [self.of_graphs(graphs) for graphs in encoded.hidden],
            "sizes": [
                _is_node(x, nodes).sum(1, keepdim=True)
                for x, nodes in zip(encoded.inputs, encoded.nodes, strict=True)
            ],
        }


class _Discriminator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers, self.beside = nn.Sequential(*layers), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) + self.beside(x)
        return out


class Infograph(Loss):
    r"""InfoGraph's loss (Sun et al. 2020, Eq. 3 and 4): nodes identify their graph.

    .. math:: \frac{1}{|V|} \sum_{u \in V} \Big( sp(-T(u, g(u)))
              + \frac{1}{G - 1} \sum_{g \ne g(u)} sp(T(u, g)) \Big) - 2 \log 2

    with sp(x) = log(1 + e^x), and T the inner product of the outputs of two networks of this
    module: one of a node's features, one of the sum over a graph's nodes. Averaged over views.
    """

    needs = Needs(gathered=("global", "sizes"), own=("local",))
    truncated = None

    def __init__(self, dim: int | None = None, *, gather: bool = True) -> None:
        """Builds the networks.

        Args:
            dim: width of a node's features; a run has that of its model.
            gather: compare nodes with the graphs of all processes.
        """
        super().__init__(gather=gather)
        self.dim = dim
        if dim is not None:
            self.build_own_parts(ModelSpec(ModelConfig(), [[1, 0, 2, 1]], 0, [dim], 0))

    def build_parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns the networks, shared by all views."""
        if any(len(shape) != 4 for shape in spec.shapes) or len(set(spec.widths)) > 1:
            raise ConfigError(
                "objective.infograph compares nodes with graphs, so all views must be graphs of "
                f"one width, got views of shapes {[tuple(s) for s in spec.shapes]} and features "
                f"{list(spec.widths)}"
            )
        return {"infograph_discriminators": lambda: Discriminators(spec.widths[0])}

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `infograph` of this process's graphs, averaged over the views."""
        views = zip(
            batch.own["local"],
            batch.gathered["global"],
            batch.gathered["sizes"],
            batch.inputs,
            strict=True,
        )
        losses = [
            infograph(local, graphs, _is_node(x, local), int(sizes.sum()), batch.rows)
            for local, graphs, sizes, x in views
        ]
        return torch.stack(losses).mean()

    def forward(self, nodes: Tensor, there: Tensor, *, sizes: RowCounts = None) -> Tensor:
        """Returns the loss over the graphs of all processes.

        Args:
            nodes: features of the nodes of this process's graphs, [batch, nodes, dim], padded to
                the same number of nodes on every process.
            there: True where there is a node, False where `nodes` is padding, [batch, nodes].
            sizes: numbers of graphs of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape or type, or there is only one graph.
        """
        if nodes.dim() != 3 or there.dtype != torch.bool or there.shape != nodes.shape[:2]:
            raise LossError(
                "nodes must be floats [batch, nodes, dim] and there booleans [batch, nodes], got "
                f"{list(nodes.shape)} and {there.dtype} {list(there.shape)}"
            )
        if self.dim is not None:
            expect_width("nodes", nodes.flatten(0, 1), self.dim)
        nodes = torch.where(there[..., None], nodes, 0.0)
        features = {
            "hidden": nodes.sum(1),
            "nodes": nodes.flatten(1),
            "inputs": torch.where(there, 0.0, float(NONE)).to(nodes.dtype),
        }
        return self.evaluate(features, sizes=sizes)

    def nodes(self, features: Features) -> list[Tensor]:
        """Returns the features of the nodes, [batch, nodes, dim]."""
        width = features["hidden"][0].shape[1]
        return [x.view(len(x), x.shape[1] // width, width) for x in features["nodes"]]


def infograph(
    local: Float[Tensor, "own nodes dim"],
    graphs: Float[Tensor, "batch dim"],
    there: Bool[Tensor, "own nodes"],
    total: int,
    rows: slice = slice(None),
) -> Float[Tensor, ""]:
    """InfoGraph's loss (Sun et al. 2020, Eq. 3 and 4, with Jensen and Shannon's estimator).

    It is the equation of `Infograph`, with V the nodes of the G graphs of the batch, and g(u) the
    graph of a node. The constant is that of their code; at T = 0 the loss is 0.

    Args:
        local: discriminator outputs of the nodes of this process's graphs.
        graphs: discriminator outputs of all graphs.
        there: True where `local` holds a node, not padding.
        total: number of nodes of all graphs.
        rows: this process's graphs among all.

    Returns:
        The share of the loss that belongs to `rows`: a scalar, 0 where no graph has a node.

    Raises:
        ValueError: there is only one graph, so there are no negatives.
    """
    if len(graphs) < 2:
        raise ValueError(f"needs at least 2 graphs in a batch, got {len(graphs)}")
    graph = torch.arange(len(graphs), device=graphs.device)[rows]
    nodes, own_graph = local[there], graph[:, None].expand(there.shape)[there]
    scores = nodes @ graphs.T
    positive = scores.gather(1, own_graph[:, None])[:, 0]
    negatives = softplus(scores).sum(1) - softplus(positive)
    losses = softplus(-positive) + negatives / (len(graphs) - 1) - 2 * math.log(2)
    return losses.sum() / max(total, 1)


def _is_node(x: Tensor, nodes: Tensor) -> Tensor:
    """Returns which places of encoded graphs hold a node, [rows, nodes]."""
    return x[:, : nodes.shape[1]] != NONE
