"""Rows that a run could not read and went on without: named, counted, and not too many."""

from collections.abc import Iterable, Mapping

from shards.errors import ShardError


class Skipped:
    """The rows that all processes have skipped so far, and why."""

    def __init__(self, rows: int, most: float) -> None:
        """Allow the share `most` of so many rows.

        Args:
            rows: that the run draws from.
            most: `data.max_bad_fraction`.
        """
        self.rows, self.most = rows, most
        self.found: dict[int, str] = {}

    def __len__(self) -> int:
        """How many rows were skipped, each counted once."""
        return len(self.found)

    def add(self, found: Iterable[Mapping[int, str]]) -> list[str]:
        """Take what every process lost; a line for each row that was not known yet.

        Raises:
            ShardError: more rows are lost than a run may go on without.
        """
        new = {row: fault for lost in found for row, fault in lost.items()}
        new = {row: fault for row, fault in new.items() if row not in self.found}
        self.found |= new
        lines = [f"skipped row {row}: {fault}" for row, fault in sorted(new.items())]
        if len(self) > self.most * self.rows:
            raise ShardError(
                f"{len(self):,} of {self.rows:,} rows cannot be read, more than "
                f"data.max_bad_fraction = {self.most:g} of them; the last is {lines[-1]}"
            )
        return lines
