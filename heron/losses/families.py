"""Losses by what their `forward` takes: derive your own from the one that fits."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from heron.losses.batch import GlobalBatch
from heron.losses.inputs import (
    LossError,
    RowCounts,
    Views,
    as_columns,
    as_groups,
    as_inputs,
    as_probabilities,
    as_rows,
    as_views,
    expect_width,
    same_rows,
)
from heron.losses.loss import Loss
from heron.models.heterogeneous import ModelSpec
from heron.models.options import ModelConfig


class ProjectionLoss(Loss):
    """A loss of projections alone."""

    def forward(self, projections: Views, *, sizes: RowCounts = None) -> Tensor:
        """Returns the loss over the samples of all processes.

        Args:
            projections: this process's, [batch, views, dim] or a tensor [batch, dim] for each view.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        return self.evaluate({"projections": projections}, sizes=sizes)


class InputLoss(Loss):
    """A loss of projections and the inputs that they were computed from."""

    def forward(
        self, projections: Views, inputs: Tensor | Sequence[Tensor], *, sizes: RowCounts = None
    ) -> Tensor:
        """Returns the loss over the samples of all processes.

        Args:
            projections: this process's, [batch, views, dim] or a tensor [batch, dim] for each view.
            inputs: a tensor [batch, ...] for each view; their widths may differ.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        views = as_views(projections, "projections")
        features = {"projections": views, "inputs": as_inputs(inputs, len(views))}
        return self.evaluate(features, sizes=sizes)


class LabelledLoss(Loss):
    """A loss of labelled features; if it reads `hidden`, the views' features are concatenated."""

    def columns(self, labels: Tensor) -> Tensor:
        """Returns the labels as columns."""
        return as_groups(labels)

    def forward(
        self,
        features: Views,
        labels: Tensor,
        *,
        sizes: RowCounts = None,
        label_weights: Tensor | None = None,
    ) -> Tensor:
        """Returns the loss over the samples of all processes.

        Args:
            features: features of this process's labelled samples, [batch, dim], [batch, views, dim]
                or a tensor [batch, dim] for each view.
            labels: class numbers [batch], or 0 or 1 for each label, [batch, labels].
            sizes: numbers of samples of every process, if known; None exchanges them.
            label_weights: how much each label counts, 0 to 1, [batch, labels] or [batch], where
                `weighs_labels`; None: all count 1.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        views, columns = as_views(features, "features"), self.columns(labels)
        same_rows({"features": views[0], "labels": columns})
        if "hidden" in self.needs.features:
            views, name = [torch.cat(views, 1)], "hidden"
        else:
            name = "projections"
        return self.evaluate({name: views}, columns, sizes=sizes, label_weights=label_weights)


class LogitLoss(Loss):
    """A loss of a classifier's logits and the labels, averaged over the samples."""

    missing_views = True

    @staticmethod
    def columns(labels: Tensor, classes: int, /) -> Tensor:
        """Returns the labels as columns, one for each of `classes`."""
        return as_columns(labels, classes)

    @staticmethod
    @abstractmethod
    def function(logits: Tensor, targets: Tensor, /, *, total: int) -> Tensor:
        """Returns these samples' share of the mean over `total` samples, such as `bce`."""

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `function` of this process's labelled samples."""
        return self.function(batch.logits, batch.own_targets, total=batch.num_labelled)

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        sizes: RowCounts = None,
        label_weights: Tensor | None = None,
    ) -> Tensor:
        """Returns the mean over the samples of all processes.

        Args:
            logits: logits of this process's samples, [batch, labels].
            labels: columns [batch, labels] or class numbers [batch]; `Bce` and `CrossEntropy` take
                columns from 0 to 1.
            sizes: numbers of samples of every process, if known; None exchanges them.
            label_weights: how much each label counts, 0 to 1, [batch, labels] or [batch], where
                `weighs_labels`; None: all count 1.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        columns = self.columns(labels, as_rows(logits, "logits").shape[1])
        features = {"logits": logits}
        return self.evaluate(features, columns, sizes=sizes, label_weights=label_weights)


class ClassifierLoss(Loss):
    """A loss of features and labels with a classifier of its own, `parts["classifier"]`."""

    dim: int | None = None
    labels: int | None = None

    def build_own_classifier(self, dim: int | None, labels: int | None, views: int = 1) -> None:
        """Builds the classifier for a loop, unless `dim`, a view's width, is None as in a run."""
        if dim is None or labels is None:
            return
        self.dim, self.labels = dim * views, labels
        self.build_own_parts(ModelSpec(ModelConfig(), [], labels, [dim] * views, views))

    def predict(self, features: Views) -> Tensor:
        """Returns the classifier's logits of features, [batch, labels]."""
        logits: Tensor = self.parts["classifier"](self._concatenated(features))
        return logits

    def _concatenated(self, features: Views) -> Tensor:
        if self.dim is None:
            name = type(self).__name__
            raise LossError(f"there is no classifier; build it with {name}(dim, labels, ...)")
        hidden = torch.cat(as_views(features, "features"), 1)
        expect_width("features", hidden, self.dim)
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
        hidden, columns = self._concatenated(features), as_probabilities(labels, self.labels)
        return self.evaluate({"hidden": hidden}, columns, sizes=sizes)
