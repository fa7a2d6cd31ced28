"""DeepMTMV: labels train a classifier whose layers split by the labels' errors."""

from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from heron.base.errors import ConfigError
from heron.base.sections import Natural, Positive
from heron.distributed.collectives import broadcast_object
from heron.losses.batch import GlobalBatch
from heron.losses.classification import Bce, CrossEntropy, bce, cross_entropy
from heron.losses.families import ClassifierLoss
from heron.losses.run import Memory, RunSpec, StepEnd, TermSetting
from heron.losses.task_groups import SplitRule, TaskGroups
from heron.losses.terms import CLASS_LABELS, Needs
from heron.models.heterogeneous import ModelSpec
from heron.models.options import Sizes


class Deepmtmv(ClassifierLoss):
    """DeepMTMV (Zheng, Cheng and He 2019): a classifier whose layers split into groups of labels.

    The classifier is part of this module; the loss is its binary cross-entropy, or cross-entropy of
    classes. At first all labels share all layers. Call `part` on every process every few epochs: it
    splits the highest shared layer into groups of labels with correlated errors, where cheaper.

    In a run it has no loss of its own: `bce` or `cross_entropy` trains the classifier.
    """

    needs = Needs(own=("hidden",), labels=CLASS_LABELS)

    def __init__(
        self,
        dim: int | None = None,
        labels: int | None = None,
        views: int = 1,
        classes: bool = False,
        *,
        widths: Sizes | None = None,
        every_epochs: Natural = 10,
        errors: Literal["view", "joint"] = "view",
        decay: Annotated[float, Field(ge=0, lt=1)] = 0.99,
        cost: Annotated[float, Field(ge=0)] = 0.0625,
        separation: Positive = 1.95,
        consensus: Annotated[float, Field(ge=0)] = 0.1,
    ) -> None:
        """Builds the layers.

        Args:
            dim: width of the features of one view; a run has that of its model.
            labels: number of labels; a run has that of its data.
            views: number of views, whose features are concatenated.
            classes: whether labels are exclusive classes, for which the loss is cross-entropy.
            widths: widths of the hidden layers; None: a half and a quarter of their input's, as in
                the authors' code.
            every_epochs: in a run, epochs between two calls of `part`.
            errors: errors of each `view` alone, or of the `joint` prediction.
            decay: factor by which the weight of earlier batches falls in the averages of errors.
            cost: cost of a further group in the top layer; it doubles with each layer below.
            separation: weight of the disagreement of the labels in a group.
            consensus: how strongly the views' clusterings are drawn together.
        """
        super().__init__()
        self.rule = SplitRule(every_epochs, errors, decay, cost, separation, consensus)
        self.layers, self.classes = widths, classes
        self.build_own_classifier(dim, labels, views)

    @property
    def groups(self) -> TaskGroups:
        """The classifier of a loop."""
        return cast(TaskGroups, self.parts["classifier"])

    def refuse(self, name: str, setting: TermSetting) -> None:
        """Raises ConfigError where no term trains the classifier."""
        if not any(isinstance(term, Bce | CrossEntropy) for term in setting.terms.values()):
            raise ConfigError(
                f"objective.{name} needs a classifier that labels train, so add bce or "
                f"cross_entropy to the terms; the terms are {', '.join(setting.terms)}"
            )

    def build_classifier(self, spec: ModelSpec) -> TaskGroups:
        """Returns the layers."""
        if len(widths := set(spec.widths[: spec.classified])) > 1:
            raise ConfigError(
                "objective.deepmtmv compares views, so the encoders must have one width, got "
                f"{spec.widths}"
            )
        return TaskGroups(self.rule, self.layers, widths.pop(), spec.classified, spec.labels)

    def build_memory(self, run: RunSpec) -> "TaskErrors":
        """Returns what records the errors; their averages are part of the classifier."""
        exclusive = any(isinstance(term, CrossEntropy) for term in run.terms.values())
        assert isinstance(run.model.classifier, TaskGroups)
        return TaskErrors(run.model.classifier, exclusive)

    def share(self, batch: GlobalBatch) -> None:
        """Records each view's errors on each task; there is no loss."""
        self.memory.update_task_errors(batch)

    def loop_share(self, batch: GlobalBatch) -> Tensor:
        """Returns this process's share of the classifier's loss, and records the labels' errors."""
        if self.training:
            TaskErrors(self.groups, self.classes).update_task_errors(batch)
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


class TaskErrors(Memory):
    """Updates the averages of a classifier's errors, and splits its layers by them."""

    def __init__(self, groups: "TaskGroups", exclusive: bool) -> None:
        """Takes the classifier; its scores are a softmax of `exclusive` classes, else sigmoids."""
        super().__init__()
        self._groups, self.exclusive = (groups,), exclusive  # in a tuple: its state is the model's

    def update_task_errors(self, batch: GlobalBatch) -> None:
        """Adds the errors of all labelled rows to the averages."""
        (groups,) = self._groups
        hidden = batch.own_labelled("hidden")[0][:, : groups.view_width * groups.views].detach()
        logits = torch.stack(groups.per_view(hidden), 1)
        scores = logits.softmax(2) if self.exclusive else logits.sigmoid()
        groups.update_averages(batch.gather_labelled((batch.own_targets[:, None] - scores).abs()))

    def update(self, step: StepEnd) -> list[str]:
        """Splits a layer every `every_epochs` epochs if that is cheaper, alike on all processes."""
        (groups,) = self._groups
        if (step.number + 1) % (groups.rule.every_epochs * step.steps_per_epoch):
            return []
        with step.gathered_parameters():
            level, layer_groups = step.broadcast_object(groups.choose_groups())
        if len(layer_groups) == 1:
            return []
        groups.layers[level].set_groups(layer_groups)
        text = " | ".join(" ".join(map(str, tasks)) for tasks in layer_groups)
        return [f"step {step.number}: layer {level + 1} of the task groups is split: {text}"]
