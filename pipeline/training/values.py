"""What a step says in numbers: over all processes, and refused where they are not finite."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heron.pipeline.config.errors import TrainingError
from heron.pipeline.distributed import collectives
from heron.pipeline.models.heterogeneous import Features
from heron.pipeline.training import checkpoint


class StepValues:
    """Numbers of a step on their way from the device; nothing waits for them before `read`."""

    def __init__(self, scalars: Mapping[str, Any], device: torch.device) -> None:
        """Begins the sums over processes of some scalars, tensors or numbers: one exchange."""
        self.names, self.device = list(scalars), device
        self._sums = collectives.begin_sum(self._stack(scalars))

    def close(self, **own: Any) -> None:
        """Adds numbers that all processes have alike, and begins the copy of all to the host."""
        self.names += own
        self._numbers = torch.cat([self._sums(), self._stack(own)])
        if self.device.type == "cuda":
            numbers = self._numbers
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied.record()

    def read(self) -> dict[str, float]:
        """Returns the numbers by name, when they have come."""
        if self.device.type == "cuda":
            self._copied.synchronize()
        return dict(zip(self.names, self._numbers.tolist(), strict=True))

    def _stack(self, scalars: Mapping[str, Any]) -> Tensor:
        numbers = [torch.as_tensor(x, device=self.device) for x in scalars.values()]
        return torch.stack([x.detach().double() for x in numbers])


class Unread(NamedTuple):
    """What is known of a step while its numbers are on their way.

    Attributes:
        step: its number.
        numbers: that are on their way.
        values: the others, by name.
        features: of this process's rows, for the error of one that is not finite.
        lost: rows that could not be read, and why.
    """

    step: int
    numbers: StepValues
    values: dict[str, float]
    features: Features
    lost: dict[int, str]


def refuse_nonfinite(
    values: Mapping[str, float], step: int, saved: Path, features: Features
) -> None:
    """Stops before what is not finite is saved; all processes see the same values."""
    wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
    if wrong:
        named = [name for name in wrong if name != "loss"] or ["loss"]
        checkpoints = checkpoint.complete(saved)
        where = _nonfinite(features) or ["the embeddings of all ranks are finite"]
        raise TrainingError(
            f"step {step}: {', '.join(f'{name} is {wrong[name]}' for name in named)}; "
            f"{'; '.join(where)}; nothing later was saved; last checkpoint: "
            f"{checkpoints[-1] if checkpoints else 'none'}; lower optim.lr or raise tau, "
            "and check the data with `heron shards verify`"
        )


def _nonfinite(features: Features) -> list[str]:
    """Says which features of which process are not finite; every process calls it."""
    lines = []
    for name, tensors in features.items():
        for view, x in enumerate(tensors):
            of_view = f" of view {view + 1}" if len(tensors) > 1 else ""
            if bad := int((~x.isfinite()).flatten(1).any(1).sum()):
                lines.append(
                    f"rank {collectives.rank()}: {name}{of_view} of {bad} of {len(x)} rows are not "
                    "finite"
                )
    return [line for found in collectives.gather_objects(lines) for line in found]
