"""The rows of a study: a line of trials.jsonl for each trial that has ended."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from heron.pipeline.config.errors import StudyError
from heron.pipeline.config.sections import Plain
from heron.shards.artefact import Fingerprint, Sha256, fingerprint, parse_json, sha256
from heron.shards.errors import shown

ROWS = "trials.jsonl"
AGAIN = "take the line out, and run the study again: it runs what has no row"


class Row(BaseModel):
    """A trial that has ended, as a line of trials.jsonl: see docs/studies.md."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    trial: str
    status: Literal["done", "failed", "stopped"]
    error: str | None = None
    values: Plain
    command: str
    run: Annotated[str, Field(pattern=r"^trials/\w+$")]  # within the study's folder
    result: Plain | None = None
    result_sha256: Sha256 | None = None
    measured: Plain | None = None
    lineage: list[Plain] | None = None
    fingerprint: Fingerprint | None = None  # None: of the edition before there were any


def read_rows(path: Path, resumed: bool = False) -> list[tuple[int, Row]]:
    """Returns the rows of a study with the numbers of their lines; none without the file.

    A study that is `resumed` leaves out a last line that was cut short.

    Raises:
        StudyError: a line is damaged, or not what was written.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    cut_short = len(lines) if resumed else 0
    found = (
        (n, _row(line, f"{path}, line {n}", n == cut_short)) for n, line in enumerate(lines, 1)
    )
    return [(number, row) for number, row in found if row is not None]


def _row(line: bytes, where: str, may_be_cut_short: bool) -> Row | None:
    if not line.strip():
        return None
    try:
        row = Row.model_validate_json(line)
        tree = parse_json(line)
    except ValueError as error:
        if may_be_cut_short:
            return None
        said = str(error)
        if isinstance(error, ValidationError):
            fault = error.errors()[0]
            missing, name = fault["type"] == "missing", ".".join(map(str, fault["loc"]))
            value = f"{name} is {'missing' if missing else shown(fault['input'])}: " if name else ""
            said = f"{value}{fault['msg'][0].lower()}{fault['msg'][1:]}"
        raise StudyError(f"{where} is damaged: {said}; {AGAIN}") from None
    if row.fingerprint not in (None, made := fingerprint(tree)):
        raise StudyError(
            f"{where} is damaged: trial {row.trial} has fingerprint {row.fingerprint}, what the "
            f"line says has {made}; {AGAIN}"
        )
    return row


def refuse_other_run(row: Row, folder: Path, where: str) -> None:
    """Raises a StudyError where the run's result.json, if it is there, is not that of the row."""
    file = folder / row.run / "result.json"
    if row.result_sha256 and file.is_file() and (found := sha256(file)) != row.result_sha256:
        raise StudyError(
            f"{where}: trial {row.trial} tells of a result.json of sha256 "
            f"{row.result_sha256[:12]}…, and {file} has {found[:12]}…; expected the row's run: "
            f"bring it back, or {AGAIN}"
        )
