"""A run's log: each step's metrics, summed over processes; a progress bar, lines, trackers."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from heron.base.atomic import atomic_write, naming
from heron.base.errors import TrainingError
from heron.base.terminal import Bar
from heron.distributed import collectives
from heron.training.checkpoint import complete_checkpoints
from heron.training.trackers import Trackers
from heron.training.tracking import read_metrics


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
        lost: rows that could not be read, and why.
    """

    step: int
    summed: StepValues
    values: dict[str, float]
    lost: dict[int, str]


def nonfinite(values: Mapping[str, float]) -> dict[str, float]:
    """Returns what may not be: under a loss scale above 1 a gradient may overflow."""
    found = {name: value for name, value in values.items() if not math.isfinite(value)}
    if values.get("loss_scale", 1) > 1:
        found.pop("gradient_norm", None)  # the step was skipped, and the scale halved
    return found


def refuse_nonfinite(values: Mapping[str, float], step: int, checkpoints: Path) -> list[str]:
    """Raises TrainingError where a value is not finite; all processes see the same values.

    Returns a line about a step that was skipped since its gradient overflowed.
    """
    if refused := nonfinite(values):
        names = [name for name in refused if name != "loss"] or ["loss"]
        complete = complete_checkpoints(checkpoints)
        scaled = "loss_scale" in values
        raise TrainingError(
            f"step {step}: {', '.join(f'{name} is {refused[name]}' for name in names)}; "
            f"this step was not saved; last checkpoint: {complete[-1] if complete else 'none'}; "
            "lower optim.lr or raise tau, and check the data with `heron shards verify`"
            + ("; or use train.precision=tf32, as float16 ends at 65,504" if scaled else "")
        )
    if math.isfinite(values["gradient_norm"]):
        return []
    return [
        f"step {step}: the gradient overflowed in float16, so the step was skipped, and the loss "
        f"scale halved to {values['loss_scale'] / 2:g}"
    ]


class RunLog:
    """Writes on the main process; on the others every method does nothing.

    `earlier_s` are the seconds that steps before this start took, as far as they are known.
    """

    def __init__(
        self, folder: Path, start: int, steps: int, main: bool, trackers: Trackers | None = None
    ) -> None:
        """Opens the files; drops what an interrupted run wrote from `start` on, scores included."""
        self.main, self.earlier_s = main, 0.0
        if not main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        before = [row for row in read_metrics(path) if row["step"] < start]
        kept = [row for row in before if row["step"] < start - 1 or "loss" in row]
        self.earlier_s = sum(row.get("seconds") or 0.0 for row in kept)
        with atomic_write(path) as stream:  # the only record of the steps before
            stream.writelines(json.dumps(row).encode() + b"\n" for row in kept)
        self.lines = path.open("a", buffering=1)
        self.bar = Bar(steps, "step", start=start, name=folder.name)
        self.loss = self.score = self.rate = ""  # the newest, shown beside the bar
        self.trackers = trackers
        if trackers:
            self.say(*trackers.start(start))

    def step(self, row: dict[str, Any]) -> None:
        """Records one training step; `row` has the keys `step` and `loss`."""
        if not self.main:
            return
        self._write(row)
        rate = row.get("samples_per_s")
        self.loss, self.rate = f"loss {row['loss']:.4f}", f"{rate:,.0f} samples/s" if rate else ""
        self._show(1)

    def scores(self, step: int, epoch: float, scores: dict[str, float], role: str = "test") -> None:
        """Records an evaluation of a role, if it has any scores."""
        if not self.main or not scores:
            return
        self._write({"step": step, "epoch": epoch} | {f"{role}/{k}": v for k, v in scores.items()})
        names = ["f1_weighted", "auc_macro", "knn_f1_weighted", "knn_accuracy", "rankme"]
        names += [name for name in scores if name.startswith("recall@10")]
        texts = [f"{k} {scores[k]:.4f}" for k in names if k in scores]
        self.score = texts[0] if texts else ""
        self._show(0)
        self.say(f"epoch {epoch:g}{f', {role}' if role != 'test' else ''}: {', '.join(texts)}")

    def say(self, *lines: str) -> None:
        """Prints lines without breaking the bar."""
        for line in lines if self.main else ():
            print(line, flush=True)

    def _show(self, steps: int) -> None:
        self.bar.update(steps, ", ".join(filter(None, (self.loss, self.score, self.rate))))

    def _write(self, row: dict[str, Any]) -> None:
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        with naming(self.lines.name, Path(self.lines.name)):
            self.lines.write(json.dumps(finite) + "\n")
        if self.trackers:
            values = {k: v for k, v in row.items() if k not in ("step", "epoch")}
            self.say(*self.trackers.log(values, row["step"]))

    def __enter__(self) -> Self:
        """Returns the log; as a context, it also closes the files after an error."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the files."""
        if self.main:
            self.bar.close()
            with naming(self.lines.name, Path(self.lines.name)):
                self.lines.close()  # it tries again to write what it could not
            if self.trackers:
                self.say(*self.trackers.finish())
