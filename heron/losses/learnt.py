"""Losses with networks of their own: bottlenecks, autoencoders, groups of tasks, graphs."""

from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from heron.losses.inputs import (
    LossError,
    RowCounts,
    Views,
    as_probabilities,
    as_views,
    expect_width,
    shown,
)
from heron.losses.loss import Loss, options_of
from heron.pipeline.config.model import ModelConfig
from heron.pipeline.config.sections import check
from heron.pipeline.data.graphs import NONE
from heron.pipeline.distributed.collectives import from_first
from heron.pipeline.models.heterogeneous import Features, ModelSpec
from heron.pipeline.objectives import c2ae, deepmtmv, infograph, mib
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.classification import bce, cross_entropy


class Mib(Loss):
    r"""The multi-view information bottleneck (Federici et al. 2020, Section 3.2).

    .. math:: -I(z_1; z_2) + \beta D_{SKL}(p(z_1|v_1) \,\|\, p(z_2|v_2))

    over all pairs of views; a bottleneck :math:`p(z|v)` with its critic a view is its own.
    :math:`\beta` goes exponentially from `beta_start` to `beta` over `beta_epochs`.
    """

    def __init__(
        self,
        dim: int,
        views: int = 2,
        *,
        beta: float = 1.0,
        beta_start: float = 1e-3,
        beta_epochs: int = 100,
        gather: bool = True,
    ) -> None:
        r"""Builds a bottleneck a view.

        Args:
            dim: width of the projections.
            views: how many, from two on.
            beta: weight of D_SKL in the end.
            beta_start: weight of D_SKL at first.
            beta_epochs: epochs between the two.
            gather: compare rows of all processes.
        """
        config = check(ModelConfig, {"projection_width": dim}, "dim")
        spec = ModelSpec(config, [[]] * views, 0, [], 0)
        super().__init__(mib.Mib, options_of(mib.Mib, locals()), gather, spec)
        self.views = views

    def forward(
        self,
        projections: Views,
        *,
        epoch: float,
        rng_keys: Tensor | None = None,
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the loss of the samples of all processes.

        Args:
            projections: of this process: [batch, views, dim], or a tensor [batch, dim] a view.
            epoch: now; a fraction of it counts.
            rng_keys: a whole number a sample, other ones in each step, [batch]: the draws of z are
                a function of them, so several processes draw what one draws. None takes them from
                torch's generator.
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: the projections cannot be compared; says why.
        """
        views = as_views(projections, "projections")
        if len(views) != self.views:
            raise LossError(f"projections are of {len(views)} views; expected {self.views}")
        if rng_keys is None:
            rng_keys = torch.randint(1 << 62, (len(views[0]),), device=views[0].device)
        keyed = isinstance(rng_keys, Tensor) and rng_keys.dtype == torch.int64
        if not keyed or rng_keys.shape != views[0].shape[:1]:
            raise LossError(
                f"rng_keys are {shown(rng_keys)}; expected int64 {len(views[0])}, one a sample"
            )
        return self.evaluate({"projections": views}, rng_keys=rng_keys, epoch=epoch, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class _OfClassifier(Loss):
    """A loss with a classifier of its own, of features and labels."""

    dim: int
    labels: int

    def predict(self, features: Views) -> Tensor:
        """Returns the logits of samples, [batch, labels]."""
        logits: Tensor = self.parts["classifier"](self._hidden(features))
        return logits

    def _hidden(self, features: Views) -> Tensor:
        hidden = torch.cat(as_views(features, "features"), 1)
        expect_width({"features": hidden}, self.dim)
        return hidden

    def forward(self, features: Views, labels: Tensor, *, sizes: RowCounts = None) -> Tensor:
        """Returns the loss of the samples of all processes.

        Args:
            features: of this process: [batch, dim], or a tensor a view, `dim` numbers in all.
            labels: columns [batch, labels], or class numbers [batch].
            sizes: samples of every process, where they are known; None exchanges them.

        Raises:
            LossError: features or labels are not what the loss expects; says what it found.
        """
        hidden, columns = self._hidden(features), as_probabilities(labels, self.labels)
        return self.evaluate({"hidden": hidden}, columns, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class C2ae(_OfClassifier):
    r"""C2AE (Yeh et al. 2017, Eq. 1 to 3); the label autoencoder, which predicts, is its own.

    With codes :math:`X = F_x(x)` and :math:`E = F_e(y)`,

    .. math:: \|X - E\|_F^2 + \lambda (\|X^T X - I\|_F^2 + \|E^T E - I\|_F^2) + \alpha \sum_i
        \frac{1}{|y_i^1| |y_i^0|} \sum_{p \in y_i^1, q \in y_i^0} e^{s (F_d(e_i)_q - F_d(e_i)_p)}

    divided by the number of samples.
    """

    def __init__(
        self,
        dim: int,
        labels: int,
        *,
        alpha: float = 0.5,
        penalty: float = 0.5,
        scale: float = 5.0,
        hidden: int = 512,
        code: int | None = None,
        gather: bool = True,
    ) -> None:
        r"""Builds the label autoencoder.

        Args:
            dim: width of the features.
            labels: how many there are.
            alpha: weight of the second sum.
            penalty: :math:`\lambda`.
            scale: s: 1 as printed, 5 in the authors' code.
            hidden: width of the autoencoder's hidden layers.
            code: width of a code; None is 0.8 of the labels.
            gather: compare rows of all processes.
        """
        spec = ModelSpec(ModelConfig(), [], labels, [dim], 1)
        super().__init__(c2ae.C2ae, options_of(c2ae.C2ae, locals()), gather, spec)
        self.dim, self.labels = dim, labels


class Deepmtmv(_OfClassifier):
    """DeepMTMV (Zheng, Cheng and He 2019): a classifier whose layers part into groups of labels.

    The classifier is its own; the loss is its binary cross-entropy, or cross-entropy of classes.
    All labels share all layers at first. Call `part` on every process after every few epochs: where
    that is cheaper, the highest shared layer parts into groups of labels that err together.
    """

    def __init__(
        self,
        dim: int,
        labels: int,
        views: int = 1,
        *,
        classes: bool = False,
        widths: list[int] | None = None,
        errors: Literal["view", "joint"] = "view",
        decay: float = 0.99,
        cost: float = 0.0625,
        separation: float = 1.95,
        consensus: float = 0.1,
    ) -> None:
        """Builds the layers.

        Args:
            dim: width of the features of one view.
            labels: how many there are.
            views: how many stand side by side.
            classes: a sample has one class: cross-entropy.
            widths: of the hidden layers; None is a half and a quarter of what they see.
            errors: of each `view` alone, or of the `joint` prediction.
            decay: of the averages of errors, over batches.
            cost: of a further group in the top layer, twice as much in each below.
            separation: weight of how little the labels of a group agree.
            consensus: how strongly the views' clusters are drawn together.
        """
        spec = ModelSpec(ModelConfig(), [], labels, [dim] * views, views)
        super().__init__(deepmtmv.Deepmtmv, options_of(deepmtmv.Deepmtmv, locals()), spec=spec)
        self.dim, self.labels, self.classes = dim * views, labels, classes
        self.errors = deepmtmv.TaskErrors(self.groups, classes)

    @property
    def groups(self) -> deepmtmv.TaskGroups:
        """The classifier."""
        return cast(deepmtmv.TaskGroups, self.parts["classifier"])

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns this process's share of the classifier's loss, and notes which labels err."""
        if self.training:
            self.errors.update_task_errors(batch)
        logits = self.predict(batch.own_labelled("hidden"))
        function = cross_entropy if self.classes else bce
        return function(logits, batch.own_targets, total=batch.num_labelled)

    def part(self) -> list[list[int]]:
        """Parts the highest layer that all labels share, where that is cheaper.

        Returns:
            The labels of each group; empty where nothing parts.
        """
        level, found = from_first(self.groups.choose())
        if len(found) == 1:
            return []
        self.groups.layers[level].part(found)
        return cast(list[list[int]], found)


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
        spec = ModelSpec(ModelConfig(), [[1, 0, 2, 1]], 0, [dim], 0)
        super().__init__(infograph.Infograph, {}, gather, spec)
        self.dim = dim

    def forward(self, nodes: Tensor, there: Tensor, *, sizes: RowCounts = None) -> Tensor:
        """Returns the loss of the graphs of all processes.

        Args:
            nodes: features of the nodes of this process's graphs, [batch, nodes, dim], as many
                places for nodes on every process.
            there: whether there is a node, [batch, nodes]; `nodes` is not looked at elsewhere.
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
