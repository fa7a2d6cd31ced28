"""Rows that a run could not read and went on without: named, counted, and not too many."""

from collections.abc import Iterable, Mapping

import numpy as np

from heron.pipeline.data.plan import ShardRows
from heron.shards.errors import ShardError


class Skipped:
    """The rows that all processes have skipped so far, and why."""

    def __init__(self, rows: ShardRows, most: float, endless: int = 0) -> None:
        """Allows at most the share `most` of the rows that the run draws or scores, each once.

        Samples of an endless stream have numbers below 0; `endless` of them count as rows.
        """
        self.rows, self.most = rows, most
        self.count = rows.total + endless
        self.faults: dict[int, str] = {}

    def __len__(self) -> int:
        """The number of rows that were skipped, each counted once."""
        return len(self.faults)

    def add(self, lost_by_process: Iterable[Mapping[int, str]]) -> list[str]:
        """Notes what every process lost; returns a line for each fault that is new."""
        new = {row: fault for lost in lost_by_process for row, fault in lost.items()}
        known = np.sort(np.fromiter((row for row in new if row not in self.faults), np.int64))
        kept = known[self.rows.has(known) | (known < 0)]
        new = {row: new[row] for row in kept.tolist()}
        self.faults |= new
        rows: dict[str, list[int]] = {}
        for row, fault in new.items():
            rows.setdefault(fault, []).append(row)
        return [f"skipped{_named(numbers)}: {fault}" for fault, numbers in rows.items()]

    def refuse(self) -> None:
        """Raises ShardError where more rows are lost than a run may go on without."""
        if len(self) > self.most * self.count:
            raise ShardError(
                f"{len(self):,} of the run's {self.count:,} rows cannot be read, more than "
                f"data.max_bad_fraction = {self.most:g} of them; the last fault: "
                f"{list(self.faults.values())[-1]}"
            )


def _named(rows: list[int]) -> str:
    if rows[0] < 0:
        return ""  # what has no number is named by its fault
    if len(rows) == 1:
        return f" row {rows[0]}"
    return f" {len(rows):,} rows, {rows[0]} to {rows[-1]}"
