"""Losses with learnt modules of their own: bottlenecks, autoencoders, task groups, graphs."""

from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from heron.config.model import ModelConfig
from heron.config.sections import check
from heron.data.graphs import NONE
from heron.distributed.collectives import broadcast_object
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
from heron.models.heterogeneous import Features, ModelSpec
from heron.objectives import c2ae, deepmtmv, infograph, mib
from heron.objectives.batch import GlobalBatch
from heron.objectives.classification import bce, cross_entropy


class Mib(Loss):
    r"""The multi-view information bottleneck (Federici et al. 2020, Section 3.2).

    .. math:: -I(z_1; z_2) + \beta D_{SKL}(p(z_1|v_1) \,\|\, p(z_2|v_2))

    over all pairs of views. The module has a bottleneck :math:`p(z|v)` with a critic for each view.
    :math:`\beta` changes exponentially from `beta_start` to `beta` over `beta_epochs`.
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
        r"""Builds a bottleneck for each view.

        Args:
            dim: width of the projections.
            views: number of views, at least 2.
            beta: final weight of D_SKL.
            beta_start: initial weight of D_SKL.
            beta_epochs: epochs from `beta_start` to `beta`.
            gather: compare the rows of all processes.
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
        """Returns the loss over the samples of all processes.

        Args:
            projections: this process's, [batch, views, dim] or a tensor [batch, dim] for each view.
            epoch: the current epoch, which may be fractional.
            rng_keys: int64 [batch], a key for each sample, different in each step. The draws of z
                are a function of the keys, so any number of processes draws the same. None takes
                the keys from torch's generator.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        views = as_views(projections, "projections")
        if len(views) != self.views:
            raise LossError(f"projections are of {len(views)} views; expected {self.views}")
        if rng_keys is None:
            rng_keys = torch.randint(1 << 62, (len(views[0]),), device=views[0].device)
        is_int64 = isinstance(rng_keys, Tensor) and rng_keys.dtype == torch.int64
        if not is_int64 or rng_keys.shape != views[0].shape[:1]:
            raise LossError(
                f"rng_keys are {shown(rng_keys)}; expected int64 {len(views[0])}, one a sample"
            )
        return self.evaluate({"projections": views}, rng_keys=rng_keys, epoch=epoch, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class _WithClassifier(Loss):
    """A loss of features and labels with a classifier of its own."""

    dim: int
    labels: int

    def predict(self, features: Views) -> Tensor:
        """Returns the classifier's logits of features, [batch, labels]."""
        logits: Tensor = self.parts["classifier"](self._hidden(features))
        return logits

    def _hidden(self, features: Views) -> Tensor:
        hidden = torch.cat(as_views(features, "features"), 1)
        expect_width({"features": hidden}, self.dim)
        return hidden

    def forward(self, features: Views, labels: Tensor, *, sizes: RowCounts = None) -> Tensor:
        """Returns the loss over the samples of all processes.

        Args:
            features: this process's, [batch, dim] or a tensor for each view, `dim` columns in all.
            labels: columns [batch, labels] or class numbers [batch].
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        hidden, columns = self._hidden(features), as_probabilities(labels, self.labels)
        return self.evaluate({"hidden": hidden}, columns, sizes=sizes)

    if TYPE_CHECKING:
        __call__ = forward


class C2ae(_WithClassifier):
    r"""C2AE (Yeh et al. 2017, Eq. 1 to 3), with the label autoencoder that predicts.

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
            labels: number of labels.
            alpha: :math:`\alpha`, the weight of the last sum.
            penalty: :math:`\lambda`.
            scale: s; 1 in the paper, 5 in the authors' code.
            hidden: width of the autoencoder's hidden layers.
            code: width of a code; None: 0.8 times the number of labels.
            gather: compare the rows of all processes.
        """
        spec = ModelSpec(ModelConfig(), [], labels, [dim], 1)
        super().__init__(c2ae.C2ae, options_of(c2ae.C2ae, locals()), gather, spec)
        self.dim, self.labels = dim, labels


class Deepmtmv(_WithClassifier):
    """DeepMTMV (Zheng, Cheng and He 2019): a classifier whose layers split into groups of labels.

    The classifier is part of this module; the loss is its binary cross-entropy, or cross-entropy of
    classes. At first all labels share all layers. Call `part` on every process every few epochs: it
    splits the highest shared layer into groups of labels with correlated errors, where cheaper.
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
            labels: number of labels.
            views: number of views, whose features are concatenated.
            classes: whether labels are exclusive classes, for which the loss is cross-entropy.
            widths: widths of the hidden layers; None: a half and a quarter of their input's.
            errors: errors of each `view` alone, or of the `joint` prediction.
            decay: decay of the running means of errors, per batch.
            cost: cost of a further group in the top layer; it doubles with each layer below.
            separation: weight of the disagreement of the labels in a group.
            consensus: how strongly the views' clusterings are drawn together.
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
        """Returns this process's share of the classifier's loss, and records the labels' errors."""
        if self.training:
            self.errors.update_task_errors(batch)
        logits = self.predict(batch.own_labelled("hidden"))
        function = cross_entropy if self.classes else bce
        return function(logits, batch.own_targets, total=batch.num_labelled)

    def part(self) -> list[list[int]]:
        """Splits the highest layer that all labels share into groups, where that is cheaper.

        Returns:
            The labels of each group; empty if nothing was split.
        """
        level, groups = broadcast_object(self.groups.choose_groups())
        if len(groups) == 1:
            return []
        self.groups.layers[level].set_groups(groups)
        return cast(list[list[int]], groups)


class Infograph(Loss):
    r"""InfoGraph's loss (Sun et al. 2020, Eq. 3 and 4): nodes identify their graph.

    .. math:: \frac{1}{|V|} \sum_{u \in V} \Big( sp(-T(u, g(u)))
              + \frac{1}{G - 1} \sum_{g \ne g(u)} sp(T(u, g)) \Big) - 2 \log 2

    with sp(x) = log(1 + e^x), and T the inner product of the outputs of two networks of this
    module: one of a node's features, one of the sum over a graph's nodes.
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

    def nodes(self, features: Features) -> list[Tensor]:
        """Returns the features of the nodes, [batch, nodes, dim]."""
        return [x.view(len(x), x.shape[1] // self.dim, self.dim) for x in features["nodes"]]

    if TYPE_CHECKING:
        __call__ = forward
