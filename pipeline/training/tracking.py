"""What a run tells while it goes: a progress bar, a JSON object a step, TensorBoard."""

import json
import math
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from heron.shards.progress import progress_bar


class Tracker:
    """Writes on the main process; on the others every call does nothing.

    Attributes:
        earlier_s: seconds that the steps before this start have taken, as far as it is known.
    """

    def __init__(self, folder: Path, start: int, steps: int, main: bool) -> None:
        """Opens the files; lines of steps from `start` on, left by a run cut short, are dropped.

        So is an evaluation at `start`, which a run that goes on from there makes again.
        """
        self.main, self.earlier_s = main, 0.0
        if not main:
            return
        from torch.utils.tensorboard import SummaryWriter  # here: one process writes

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        before = [row for row in read_metrics(path) if row["step"] < start]
        kept = [row for row in before if row["step"] < start - 1 or "loss" in row]
        self.earlier_s = sum(row.get("seconds") or 0.0 for row in kept)
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self.lines = path.open("a", buffering=1)
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start)
        self.bar = progress_bar(initial=start, total=steps, unit="step")

    def step(self, row: dict[str, Any]) -> None:
        """Records one training step; `row` has the keys `step` and `loss`."""
        if not self.main:
            return
        self._write(row)
        self.bar.update()
        self.bar.set_postfix(loss=f"{row['loss']:.4f}", refresh=False)

    def scores(self, step: int, epoch: float, scores: dict[str, float]) -> None:
        """Records an evaluation; without a classifier there is nothing to record."""
        if not self.main or not scores:
            return
        self._write({"step": step, "epoch": epoch} | {f"test/{k}": v for k, v in scores.items()})
        shown = ", ".join(f"{k} {scores[k]:.4f}" for k in ("f1_weighted", "auc_macro"))
        self.say(f"epoch {epoch:g}: {shown}")

    def say(self, *lines: str) -> None:
        """Prints lines without breaking the bar."""
        for line in lines if self.main else ():
            tqdm.write(line)

    def _write(self, row: dict[str, Any]) -> None:
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        self.lines.write(json.dumps(finite) + "\n")
        for name, value in row.items():
            if name not in ("step", "epoch"):
                self.board.add_scalar(name, value, row["step"])

    def __enter__(self) -> Self:
        """Used as a context, so that what was written is on disk also after an error."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the files."""
        if self.main:
            self.bar.close()
            self.lines.close()
            self.board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl; none without the file. A line cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
