"""Weights beside those that are trained: their moving average, and the best so far."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from heron.base.errors import TrainingError
from heron.evaluation.metrics import Scores
from heron.experiment.options import Train
from heron.training.checkpoint import BestSoFar, Snapshot
from heron.training.strategy import State, Strategy


class _Weights:
    """Weights that may stand in the model's place; each process has its own, or its shards."""

    def __init__(self, strategy: Strategy) -> None:
        """Keeps nothing yet."""
        self._strategy, self._kept = strategy, State()

    @torch.no_grad()
    def take(self, state: State | None = None) -> None:
        """Keeps the model's weights as they are, or full tensors by name: a checkpoint's."""
        for name, own in self._strategy.own_tensors().items():
            value = self._strategy.own_part(name, state[name]).to(own) if state else own
            if name in self._kept:  # in place: two copies would not fit beside the model
                self._kept[name].copy_(value)
            else:
                self._kept[name] = value.clone()

    @contextmanager
    def as_model(self) -> Iterator[None]:
        """While it is open, the model has what is kept, if anything; every process must open it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self) -> State:
        """Copies what is kept, as `Strategy.model_state` copies the weights; {} if nothing is."""
        return self._strategy.copies(self._kept)

    @torch.no_grad()
    def _swap(self) -> None:
        if not self._kept:
            return
        swapped = set[int]()
        for name, own in self._strategy.own_tensors().items():
            if own.numel() and own.data_ptr() not in swapped:  # tied weights have several names
                weights = own.clone()
                own.copy_(self._kept[name])
                self._kept[name].copy_(weights)
            swapped.add(own.data_ptr())


class Ema(_Weights):
    """The moving average of a run's weights, which is scored and saved in their place.

    After step t = 1, 2, ... it becomes d * average + (1 - d) * weights, where d is the smaller of
    the decay and (1 + t) / (10 + t), as in TensorFlow's `ExponentialMovingAverage`, so that the
    average of a short run forgets its initial weights. Running statistics of batch norm are
    averaged like weights; counts are copied. Without a decay it does nothing.
    """

    def __init__(self, strategy: Strategy, decay: float | None, state: State) -> None:
        """Begins with the weights of the model, or with the `state` of a checkpoint."""
        super().__init__(strategy)
        self._decay = decay
        if decay is not None:
            self.take(state)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follows the weights after `step` steps."""
        if self._decay is None:
            return
        decay, averages, weights = min(self._decay, (1 + step) / (10 + step)), [], []
        for name, own in self._strategy.own_tensors().items():
            if own.is_floating_point():
                averages.append(self._kept[name])
                weights.append(own)
            else:
                self._kept[name].copy_(own)
        torch._foreach_lerp_(averages, weights, 1 - decay)


class Best(_Weights):
    """The weights of a run's best evaluation, by a score of the validation rows.

    Of equal ones the last is kept. Without `train.keep: best` nothing is; `found` is None before
    the first evaluation.
    """

    def __init__(
        self,
        strategy: Strategy,
        train: Train,
        exclusive: bool,
        state: State,
        found: BestSoFar | None,
    ) -> None:
        """Begins anew, or with the `state` of a checkpoint and what was `found` until then."""
        super().__init__(strategy)
        self.name = train.keep_by or ("accuracy" if exclusive else "auc_macro")
        self.wanted, self._patience = train.keep == "best", train.patience
        self.found = found if found and self.wanted and found.name == self.name else None
        if self.wanted:
            strategy.own_tensors()  # ZeRO 3 refuses
        if self.found:
            self.take(state)

    def look(self, step: int, scores: Scores) -> list[str]:
        """Keeps the model's weights if they are the best so far; returns lines about it.

        A score that was seen before the run was resumed is not counted twice; for errors see
        `refuse_unscored`.
        """
        if not self.wanted:
            return []
        self.refuse_unscored(scores)
        score, best = scores[self.name], self.found
        if best and step <= best.seen:
            return []
        highest = -math.inf if best is None else _rank(best.score)
        misses = best.misses + 1 if best and _rank(score) <= highest else 0
        if best is None or _rank(score) >= highest:  # of equals, what has trained longer
            self.take()
            best = BestSoFar(self.name, None if math.isnan(score) else score, step, step, 0)
        self.found = replace(best, seen=step, misses=misses)
        if not self.out_of_patience:
            return []
        return [
            f"step {step}: the run ends, since {self._patience} evaluations (train.patience) had "
            f"no better {self.name} of the validation rows; the best is that of step {best.step}"
        ]

    def refuse_unscored(self, scores: Scores) -> None:
        """Raises a TrainingError if `train.keep_by` is no score of the validation rows."""
        if self.name not in scores:
            raise TrainingError(
                f"train.keep_by is {self.name}, but the validation rows have only "
                f"{', '.join(sorted(scores)) or 'no score'}; set train.keep_by to one of them, or "
                "train.keep=last"
            )

    @property
    def out_of_patience(self) -> bool:
        """Whether the run ends, since `train.patience` evaluations were no better than the best."""
        return self.found is not None and 0 < (self._patience or 0) <= self.found.misses


def _rank(score: float | None) -> float:
    return -math.inf if score is None or math.isnan(score) else score


class Kept:
    """The weights that a run keeps beside those that it trains.

    Attributes:
        average: that of `train.ema`.
        best: those of `train.keep: best`.
    """

    def __init__(
        self, strategy: Strategy, train: Train, exclusive: bool, snapshot: Snapshot | None
    ) -> None:
        """Begins anew, or with what a checkpoint has; `exclusive`: a row has one label."""
        average, best, found = ({}, {}, None)
        if snapshot:
            average, best, found = snapshot.average, snapshot.best, snapshot.found
        self.average = Ema(strategy, train.ema, average)
        self.best = Best(strategy, train, exclusive, best, found)

    def as_model(self) -> AbstractContextManager[None]:
        """While it is open, the model has the weights that the run ends with."""
        return self.best.as_model() if self.best.found else self.average.as_model()
