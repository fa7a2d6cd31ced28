"""The exponential moving average of a run's weights, scored and saved as the model in their place.

After step t = 1, 2, ... it becomes d * average + (1 - d) * weights, where d is the smaller of the
decay and (1 + t) / (10 + t), as in TensorFlow's `ExponentialMovingAverage`, so that the average of
a short run forgets its initial weights. Running statistics of batch norm are averaged like weights;
counts are copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from heron.training.strategy import State, Strategy


class Ema:
    """Averages this process's weights, or its shards of them; without a decay it does nothing."""

    def __init__(self, strategy: Strategy, decay: float | None, state: State) -> None:
        """Begins with the weights of the model, or with the `state` of a checkpoint.

        `state` has full tensors by name.
        """
        self._strategy, self._decay = strategy, decay
        self._average: State = {}
        if decay is not None:
            self._average = {
                name: (strategy.own_part(name, state[name]).to(own) if state else own).clone()
                for name, own in strategy.own_tensors().items()
            }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follows the weights after `step` steps."""
        if self._decay is None:
            return
        decay, averages, weights = min(self._decay, (1 + step) / (10 + step)), [], []
        for name, own in self._strategy.own_tensors().items():
            if own.is_floating_point():
                averages.append(self._average[name])
                weights.append(own)
            else:
                self._average[name].copy_(own)
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def as_model(self) -> Iterator[None]:
        """While it is open, the model has the average; every process must open it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self) -> State:
        """Copies the average, as `Strategy.model_state` copies the weights; {} without one."""
        return self._strategy.copies(self._average)

    @torch.no_grad()
    def _swap(self) -> None:
        if self._decay is None:
            return
        swapped = set[int]()
        for name, own in self._strategy.own_tensors().items():
            if own.numel() and own.data_ptr() not in swapped:  # tied weights have several names
                weights = own.clone()
                own.copy_(self._average[name])
                self._average[name].copy_(weights)
            swapped.add(own.data_ptr())
