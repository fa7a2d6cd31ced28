"""The metrics of a step: summed over processes, and refused where they are not finite."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heron.config.errors import TrainingError
from heron.distributed import collectives
from heron.models.heterogeneous import Features
from heron.training import checkpoint


class StepValues:
    """Metrics of a step that are still being computed or copied; only `read` waits for them."""

    def __init__(self, scalars: Mapping[str, Any], device: torch.device) -> None:
        """Starts one all-reduce of `scalars`, tensors or numbers by name."""
        self.names, self.device = list(scalars), device
        self._wait_for_sums = collectives.begin_sum(self._stack(scalars))

    def close(self, **replicated: Any) -> None:
        """Adds numbers that are equal on all processes, and starts the copy of all to the host."""
        self.names += replicated
        self._numbers = torch.cat([self._wait_for_sums(), self._stack(replicated)])
        if self.device.type == "cuda":
            numbers = self._numbers
            self._copy_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copy_done.record()

    def read(self) -> dict[str, float]:
        """Returns the numbers by name; waits until they have been copied."""
        if self.device.type == "cuda":
            self._copy_done.synchronize()
        return dict(zip(self.names, self._numbers.tolist(), strict=True))

    def _stack(self, scalars: Mapping[str, Any]) -> Tensor:
        # A number is filled in on the device: to copy it there, the host would wait for the device.
        numbers = [
            x if isinstance(x, Tensor) else torch.full((), x, device=self.device)
            for x in scalars.values()
        ]
        return torch.stack([x.detach().double() for x in numbers])


class PendingStep(NamedTuple):
    """A step whose metrics have not been read yet.

    Attributes:
        summed: its metrics that are still being computed or copied.
        values: its other metrics, by name.
        features: of this process's rows; an error names those that are not finite.
        lost: rows that could not be read, and why.
    """

    step: int
    summed: StepValues
    values: dict[str, float]
    features: Features
    lost: dict[int, str]


def nonfinite(values: Mapping[str, float]) -> dict[str, float]:
    """Returns what may not be: under a loss scale above 1 a gradient may overflow."""
    found = {name: value for name, value in values.items() if not math.isfinite(value)}
    if values.get("loss_scale", 1) > 1:
        found.pop("gradient_norm", None)  # the step was skipped, and the scale halved
    return found


def refuse_nonfinite(
    values: Mapping[str, float], step: int, checkpoints: Path, features: Features
) -> list[str]:
    """Raises TrainingError where a value is not finite; all processes see the same values.

    Returns a line about a step that was skipped since its gradient overflowed.
    """
    if refused := nonfinite(values):
        names = [name for name in refused if name != "loss"] or ["loss"]
        complete = checkpoint.complete_checkpoints(checkpoints)
        scaled = "loss_scale" in values
        causes = _nonfinite_features(features) or ["the embeddings on all ranks are finite"]
        raise TrainingError(
            f"step {step}: {', '.join(f'{name} is {refused[name]}' for name in names)}; "
            f"{'; '.join(causes)}; this step was not saved; last checkpoint: "
            f"{complete[-1] if complete else 'none'}; lower optim.lr or raise tau, "
            "and check the data with `heron shards verify`"
            + ("; or use train.precision=tf32, as float16 ends at 65,504" if scaled else "")
        )
    if math.isfinite(values["gradient_norm"]):
        return []
    return [
        f"step {step}: the gradient overflowed in float16, so the step was skipped, and the loss "
        f"scale halved to {values['loss_scale'] / 2:g}"
    ]


def _nonfinite_features(features: Features) -> list[str]:
    """Returns a line for each feature of each process that is not finite; all must call it."""
    lines = []
    for name, tensors in features.items():
        for view, x in enumerate(tensors):
            of_view = f" of view {view + 1}" if len(tensors) > 1 else ""
            if bad := int((~x.isfinite()).flatten(1).any(1).sum()):
                lines.append(
                    f"rank {collectives.rank()}: {name}{of_view} are not finite in {bad} of "
                    f"{len(x)} rows"
                )
    return [line for gathered in collectives.gather_objects(lines) for line in gathered]
