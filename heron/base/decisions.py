"""What people decided on samples and labels that look wrong: a CSV file with a line for each."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from heron.base.atomic import atomic_write
from heron.base.errors import FORMULA, HeronError, csv_line, short_repr

RIGHT, WRONG, UNKNOWN, DROP, SKIP = "right", "wrong", "unknown", "drop", "skip"
CHOICES = RIGHT, WRONG, UNKNOWN, DROP, SKIP
# In the folder of an audit: its numbers, the labels that it lists, what is decided on them.
AUDIT, LISTED, DECIDED = "audit.json", "labels.csv", "decisions.csv"
MAX_BYTES = 2**30  # of a file that is read


class Decision(NamedTuple):
    """A line: the label of a sample, what it is and what is more likely, and what was decided.

    `label` is empty where samples have one class each; `given` and `likely` are then names of
    classes, else 0 or 1. `decision` is one of `CHOICES`, or empty.
    """

    key: str
    label: str = ""
    given: str = ""
    likely: str = ""
    suspicion: str = ""
    decision: str = ""

    @property
    def acts(self) -> bool:
        """Whether the label, or the sample, was found to be wrong."""
        return self.decision in (WRONG, UNKNOWN, DROP)


def read_columns(
    path: Path, required: Sequence[str], option: str, error: type[HeronError]
) -> dict[str, list[str]]:
    """Reads a CSV file with a header, and returns all of its columns, by name.

    Raises `error`, which names `option`, if there is no such file, it is no CSV file in UTF-8 or
    larger than 1 GiB, or one of the `required` columns is missing.
    """
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"{size:,} bytes, and the limit is {MAX_BYTES:,}")
        with path.open(encoding="utf-8-sig", newline="") as stream:
            lines = csv.reader(stream, strict=True)
            names = [name.strip().lower() for name in next(lines, [])]
            if len(names) == 1 and (other := re.search(r"[;\t]", names[0])):
                raise ValueError(f"its cells are separated by {other[0]!r}, not by commas")
            if twice := [name for name, count in Counter(names).items() if name and count > 1]:
                raise ValueError(f"two columns have the name '{twice[0]}'")
            columns: list[list[str]] = [[] for _ in names]
            for cells in lines:
                if not any(cells):
                    continue
                if len(cells) != len(names):
                    raise ValueError(
                        f"line {lines.line_num} has {len(cells)} cells, the first {len(names)}"
                    )
                for column, cell in zip(columns, cells, strict=False):
                    column.append(_plain(cell))
    except (OSError, ValueError, csv.Error) as fault:
        raise error(f"cannot read {option} {path}: {fault}; pass a CSV file in UTF-8") from None
    if missing := [name for name in required if name not in names]:
        raise error(
            f"{option} {path} has no column '{missing[0]}'; it must have the columns "
            f"{' and '.join(required)}"
        )
    return dict(zip(names, columns, strict=True))


def _plain(cell: str) -> str:
    """Returns a cell without the apostrophe that `csv_line` puts before formulas."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell.lstrip("'")) else cell


def read_decisions(
    path: Path,
    option: str,
    error: type[HeronError],
    undecided: str = SKIP,
    first: int | None = None,
) -> list[Decision]:
    """Reads decisions; of the `first` lines (None: all), those that have none are `undecided`.

    Raises `error` as `read_columns` does, and for an unknown decision, or two on one label.
    """
    columns = read_columns(path, ["key", "decision"], option, error)
    empty = [""] * len(columns["key"])
    fields = (columns.get(name, empty) for name in Decision._fields)
    found: dict[tuple[str, str], Decision] = {}
    for number, line in enumerate(map(Decision._make, zip(*fields, strict=True)), 1):
        choice = line.decision.strip().lower() or (
            undecided if first is None or number <= first else SKIP
        )
        if choice and choice not in CHOICES:
            raise error(
                f"{option} {path}, line {number + 1}: the decision must be one of "
                f"{', '.join(CHOICES)}, or nothing, got {short_repr(line.decision)}"
            )
        line = line._replace(decision=choice)
        earlier = found.get((line.key, line.label))
        if earlier is None or earlier.decision in ("", SKIP):
            found[line.key, line.label] = line
        elif choice not in ("", SKIP, earlier.decision) or line.likely != earlier.likely:
            of = f" of '{line.label}'" if line.label else ""
            raise error(
                f"{option} {path} has two decisions on sample '{line.key}'{of}: {earlier.decision} "
                f"{earlier.likely} and {choice} {line.likely}; remove one of the lines"
            )
    return list(found.values())


def write_decisions(path: Path, decisions: Iterable[Decision]) -> None:
    """Writes decisions, whole or not at all; spreadsheets find no formula in them."""
    with atomic_write(path) as stream:
        lines = iter([Decision._fields, *decisions])
        while block := list(islice(lines, 4096)):
            stream.write("".join(f"{csv_line(cells)}\n" for cells in block).encode())
