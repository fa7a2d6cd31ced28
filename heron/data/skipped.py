"""Counts and reports the unreadable rows that a run skips, and limits their number."""

from collections.abc import Iterable, Mapping

import numpy as np

from heron.data.plan import ShardRows
from heron.shards.errors import ShardError


class SkippedRows:
    """The rows that all processes have skipped so far, with their faults."""

    def __init__(self, rows: ShardRows, max_fraction: float, endless: int = 0) -> None:
        """Allows at most `max_fraction` of the rows that the run draws or scores.

        Samples of an endless stream have numbers below 0, and count as `endless` further rows.
        """
        self.rows, self.max_fraction = rows, max_fraction
        self.count = rows.total + endless
        self.faults: dict[int, str] = {}

    def __len__(self) -> int:
        """The number of distinct rows that were skipped."""
        return len(self.faults)

    def add(self, lost_by_process: Iterable[Mapping[int, str]]) -> list[str]:
        """Records the lost rows of every process; returns a line for each new fault."""
        new = {row: fault for lost in lost_by_process for row, fault in lost.items()}
        candidates = np.sort(np.fromiter((row for row in new if row not in self.faults), np.int64))
        counted = candidates[self.rows.contains(candidates) | (candidates < 0)]
        new = {row: new[row] for row in counted.tolist()}
        self.faults |= new
        rows_of: dict[str, list[int]] = {}
        for row, fault in new.items():
            rows_of.setdefault(fault, []).append(row)
        return [f"skipped{_rows_text(numbers)}: {fault}" for fault, numbers in rows_of.items()]

    def refuse(self) -> None:
        """Raises ShardError if more rows are lost than allowed."""
        if len(self) > self.max_fraction * self.count:
            raise ShardError(
                f"{len(self):,} of the run's {self.count:,} rows cannot be read, more than "
                f"data.max_bad_fraction = {self.max_fraction:g} of them; the last fault: "
                f"{list(self.faults.values())[-1]}"
            )


def _rows_text(rows: list[int]) -> str:
    if rows[0] < 0:
        return ""  # the fault itself names a sample without a row number
    if len(rows) == 1:
        return f" row {rows[0]}"
    return f" {len(rows):,} rows, {rows[0]} to {rows[-1]}"
