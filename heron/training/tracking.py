"""The files of a run beside its checkpoints: its start, a JSON object per step, its outcome."""

import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic_core import to_json

from heron.base.artefact import MAX_MANIFEST_BYTES, Count, describe_errors, parse_json
from heron.base.atomic import atomic_write, save_json
from heron.base.errors import TrainingError
from heron.base.sections import Plain
from heron.base.shipped import __version__

if TYPE_CHECKING:  # listing runs loads no torch
    from heron.data.reader import Reader
    from heron.data.rows import Roles, Rows
    from heron.evaluation.evaluator import Predictions
    from heron.evaluation.metrics import Evaluate
    from heron.experiment.config import Config

START = "run.json"
LONG_S = 120.0  # of training, compared with which a map costs little
FACTS = (  # fields of a result that are no scores
    *("steps", "kept_step", "epochs", "train_seconds", "seconds", "world_size", "skipped_rows"),
    *("peak_memory_bytes", "strategy", "precision", "mfu", "contrast", "version", "fingerprint"),
)


def write_start(folder: Path, config: str, steps: int, fingerprint: str) -> None:
    """Writes config.yaml and run.json before a run's first step; until its end it has no result."""
    for stale in ("result.json", "report.html"):
        (folder / stale).unlink(missing_ok=True)
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
                f"{path}, line {number} is damaged: {describe_errors(error)}; restore the file, or "
                "remove the line"
            ) from None
    return rows


def scores_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scores of a result by name, without facts of the run."""
    return {name: value for name, value in result.items() if name not in FACTS}


WRITTEN = "the result that a run wrote; restore it, or remove it and run again"


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
            f"cannot read {path}: {describe_errors(error)}; it must be {expected}"
        ) from None
    content: dict[str, Any] = result
    return content


# Writes the report of a run into its folder, from what its evaluation has found; returns its path.
WriteReport = Callable[
    [Path, "Config", Mapping[str, Any], "Predictions", "Predictions | None", "Reader"], Path
]


def wants_map(setting: Literal["auto", "always", "never"], train_seconds: float) -> bool:
    """Returns whether the report has a map and neighbours of test rows, which take seconds.

    `auto` includes them if training took long, counting the time before it was resumed.
    """
    return setting == "always" or (setting == "auto" and train_seconds >= LONG_S)


def map_rows(roles: "Roles", options: "Evaluate") -> "Rows":
    """Returns about `evaluate.map_rows` rows for the map: test, validation or unlabelled ones."""
    rows = roles.test if options.test else roles.validation
    rows = rows if len(rows) else roles.unlabelled
    return rows[:: max(1, len(rows) // options.map_rows)]
