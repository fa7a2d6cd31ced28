"""What moves along with a model: keys of a slow copy, what PLNL remembers, groups of tasks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from heron.pipeline.data.batches import Batch
from heron.pipeline.data.streams import Streams
from heron.pipeline.distributed.exchange import (
    Split,
    globalise,
    judge_tasks,
    part_tasks,
    remember,
    slow_copy,
)
from heron.pipeline.distributed.strategy import Strategy
from heron.pipeline.distributed.sync_batchnorm import synchronise
from heron.pipeline.models.heterogeneous import Features, Heterogeneous
from heron.pipeline.models.momentum import Momentum
from heron.pipeline.models.selection import Selection
from heron.pipeline.models.task_groups import TaskGroups
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.objective import Objective


class Companions:
    """Those that the terms and the classifier ask for; every process holds the same.

    A step shows them its batch three times: `globalise` before the loss, `judge` before its
    gradient, `follow` when the weights have moved.
    """

    def __init__(
        self,
        objective: Objective,
        model: Heterogeneous,
        streams: Streams,
        split: Split,
        device: torch.device,
    ) -> None:
        """Make them.

        Args:
            objective: its terms say which there are.
            model: in its initial state, unwrapped.
            streams: whose labelled rows PiCO and PLNL remember.
            split: the rows of every process in a step.
            device: where they live.
        """
        self._objective, self._model, self._split = objective, model, split
        self._momentum: Momentum | None = None
        self._selection: Selection | None = None
        if objective.keyed or objective.selecting:
            rows = torch.from_numpy(streams.roles.labelled)
            ybar = torch.from_numpy(streams.targets(streams.roles.labelled))
            if objective.keyed:
                self._momentum = slow_copy(model, objective.keyed, rows, ybar).to(device)
                synchronise(self._momentum)
            if objective.selecting:
                self._selection = Selection(rows, ybar, objective.selecting).to(device)
        self._memory = self._selection if self._momentum is None else self._momentum
        self._groups = model.classifier if isinstance(model.classifier, TaskGroups) else None

    def state(self) -> dict[str, Tensor] | None:
        """What a checkpoint keeps of them beside the model, if there is anything."""
        return None if self._memory is None else self._memory.state_dict()

    def load(self, state: Mapping[str, Tensor] | None) -> None:
        """Take up a `state`."""
        if self._memory is not None:
            self._memory.load_state_dict(state or {})

    def globalise(
        self, features: Features, batch: Batch, inputs: Sequence[Tensor], epoch: float
    ) -> GlobalBatch:
        """What the terms see of all processes' rows: see `exchange.globalise`."""
        return globalise(
            features,
            batch,
            inputs,
            self._split,
            self._objective,
            self._momentum,
            epoch,
            self._selection,
        )

    def judge(self, features: Features, targets: Tensor) -> None:
        """Show task groups how wrong each view is about each task."""
        if self._groups is not None:
            exclusive = self._objective.exclusive
            judge_tasks(self._groups, features, targets, self._split, exclusive)

    def follow(
        self, strategy: Strategy, whole: GlobalBatch, step: int, per_epoch: int
    ) -> list[str]:
        """Follow the weights that step `step` has changed; lines that say what has parted."""
        if self._momentum is not None:
            with strategy.whole():
                self._momentum.follow(self._model)
            remember(self._momentum, whole, self._split)
        if self._groups is None or (step + 1) % (self._groups.config.every_epochs * per_epoch):
            return []
        with strategy.whole():
            return part_tasks(self._groups, step)
