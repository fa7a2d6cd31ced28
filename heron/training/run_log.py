"""A run's log: a progress bar, a JSON object per step, and its trackers."""

import json
import math
from pathlib import Path
from typing import Any, Self

from heron.shards.atomic import atomic_write, naming
from heron.shards.terminal import Bar
from heron.training.trackers import Trackers
from heron.training.tracking import read_metrics


class RunLog:
    """Writes on the main process; on the others every method does nothing.

    `earlier_s` are the seconds that steps before this start took, as far as they are known.
    """

    def __init__(
        self, folder: Path, start: int, steps: int, main: bool, trackers: Trackers | None = None
    ) -> None:
        """Opens the files; drops lines of steps from `start` on, which an interrupted run left.

        It also drops an evaluation at `start`, which a run that resumes there repeats.
        """
        self.main, self.earlier_s = main, 0.0
        if not main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        rows = read_metrics(path)
        before = [row for row in rows if row["step"] < start]
        kept = [row for row in before if row["step"] < start - 1 or "loss" in row]
        self.earlier_s = sum(row.get("seconds") or 0.0 for row in kept)
        with atomic_write(path) as stream:  # the only record of the steps before
            stream.writelines(json.dumps(row).encode() + b"\n" for row in kept)
        self.lines = path.open("a", buffering=1)
        self.bar = Bar(steps, "step", start=start, name=folder.name)
        self.loss = self.score = self.rate = ""  # the newest, shown beside the bar
        self.trackers = trackers
        if trackers:
            last_step = max((row["step"] for row in rows if "loss" in row), default=-1)
            last_scores = max((row["step"] for row in rows if "loss" not in row), default=-1)
            self.say(*trackers.start(start, last_step, last_scores))

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
            self.say(*self.trackers.log(values, row["step"], scores="loss" not in row))

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
