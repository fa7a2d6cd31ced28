"""A run's log: a progress bar, a JSON object per step, its trackers, and its result."""

import json
import math
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic_core import to_json

from heron.config.errors import TrainingError
from heron.config.sections import Plain
from heron.shards.artefact import MAX_MANIFEST_BYTES, Count, describe_errors, parse_json
from heron.shards.atomic import atomic_write, save_json
from heron.shards.terminal import Bar
from heron.version import __version__

if TYPE_CHECKING:  # results are read without torch and accelerate
    from heron.training.trackers import Trackers

START = "run.json"
FACTS = (  # fields of a result that are no scores
    *("steps", "epochs", "train_seconds", "seconds", "world_size", "skipped_rows"),
    *("peak_memory_bytes", "strategy", "precision", "mfu", "contrast", "version", "fingerprint"),
)


class RunLog:
    """Writes on the main process; on the others every method does nothing.

    `earlier_s` are the seconds that steps before this start took, as far as they are known.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        steps: int,
        main: bool,
        trackers: "Trackers | None" = None,
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
            self.lines.close()
            if self.trackers:
                self.say(*self.trackers.finish())


def write_start(folder: Path, config: str, steps: int, fingerprint: str) -> None:
    """Writes config.yaml and run.json, before a run's first step."""
    with atomic_write(folder / "config.yaml") as stream:
        stream.write(config.encode())
    facts = {"started": datetime.now(UTC).isoformat(timespec="seconds"), "steps": steps}
    facts |= {"host": socket.gethostname(), "version": __version__, "fingerprint": fingerprint}
    facts |= {"command": shlex.join(sys.argv), "torch": version("torch"), "commit": _commit()}
    save_json(folder / START, facts)


def _commit() -> str | None:
    """Returns the commit of the git checkout that Heron runs from; None outside of one."""
    path = Path(__file__)
    # The second revision fails where Heron lies in the checkout of another project.
    command = ["git", "-C", str(path.parent), "rev-parse", "HEAD", f"HEAD:./{path.name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout[:12]


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Writes result.json atomically; a score that is not finite becomes null."""
    with atomic_write(folder / "result.json") as stream:
        stream.write(to_json(result, indent=1, inf_nan_mode="null") + b"\n")


class Metrics(BaseModel):
    """A line of metrics.jsonl or of rungs.jsonl: a step, and numbers by their names."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, float | None]

    step: Count


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl: see `read_lines`."""
    return read_lines(path, Metrics)


def read_lines(path: Path, kind: Any = Plain) -> list[dict[str, Any]]:
    """Returns the lines of a file of JSON objects; none where the file does not exist.

    An incomplete last line is left out; `kind` is the type of a line, for pydantic. Raises
    TrainingError, with file and line, if one is not of its kind.
    """
    data = path.read_bytes() if path.exists() else b""
    lines, adapter, rows = data.split(b"\n"), TypeAdapter(kind), []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                rows.append(parse_json(line))
                adapter.validate_python(rows[-1], strict=True)
        except ValueError as error:
            if number == len(lines):  # it does not end with a newline
                return rows[: number - 1]
            raise TrainingError(
                f"{path}, line {number} is damaged: {describe_errors(error)}; expected a line as "
                "it was written; bring the file back, or take the line out"
            ) from None
    return rows


def scores_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scores of a result by name, without facts of the run."""
    return {name: value for name, value in result.items() if name not in FACTS}


WRITTEN = "the result that a run wrote; bring it back, or take it away and run again"


def read_result(
    path: Path, numbers: Sequence[str] = (), kind: Any = Plain, expected: str = WRITTEN
) -> dict[str, Any]:
    """Returns the content of a result.json, or of another JSON file of a run.

    `numbers` are fields that must be there, as numbers or null; `kind` is the file's type, for
    pydantic; `expected` is the expectation and remedy of the TrainingError if it is unreadable or
    not of its kind.
    """
    try:
        with path.open("rb") as stream:
            result = parse_json(stream.read(MAX_MANIFEST_BYTES + 1))
        TypeAdapter(kind).validate_python(result, strict=True)
        values = {name: result.get(name, "nothing") for name in numbers}
        TypeAdapter(dict[str, float | None]).validate_python(values, strict=True)
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{path} cannot be read: {describe_errors(error)}; expected {expected}"
        ) from None
    content: dict[str, Any] = result
    return content
