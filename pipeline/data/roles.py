"""Which rows are labelled, unlabelled, tested and kept for validation: as lists, or as marks."""

from collections.abc import Sequence

import numpy as np

from heron.pipeline.data.rows import Listed, Marked, Rows, ShardRows

ROLES = "labelled", "unlabelled", "test", "validation"  # role i has bit i of a mark
RoleRows = Rows | Marked


class Roles:
    """Row numbers by role; labelled, validation and unlabelled rows make up the split, apart.

    Only rows with a label are tested, and no validation row is. A role is a list of row numbers,
    or marks that are looked up shard by shard: such a one is listed when the list is asked for.
    """

    def __init__(
        self, labelled: RoleRows, unlabelled: RoleRows, test: RoleRows, validation: RoleRows
    ) -> None:
        """Takes the rows of each role, ascending."""
        self._rows: dict[str, RoleRows] = dict(
            zip(ROLES, (labelled, unlabelled, test, validation), strict=True)
        )

    @property
    def labelled(self) -> Rows:
        """The rows whose labels training sees, in a list."""
        return self.listed("labelled")

    @property
    def unlabelled(self) -> Rows:
        """The rows without a label that training sees, in a list."""
        return self.listed("unlabelled")

    @property
    def test(self) -> Rows:
        """The rows that are tested, in a list."""
        return self.listed("test")

    @property
    def validation(self) -> Rows:
        """The rows that choose a configuration, in a list."""
        return self.listed("validation")

    def listed(self, role: str) -> Rows:
        """Returns the rows of a role."""
        rows = self._rows[role]
        return rows.whole if isinstance(rows, Marked) else rows

    def count(self, role: str) -> int:
        """Returns the number of rows of a role."""
        rows = self._rows[role]
        return rows.total if isinstance(rows, Marked) else len(rows)

    def by_shard(self, role: str, starts: Rows, shards: range) -> ShardRows:
        """Returns the rows of a role in some shards; `starts` are the first rows of all shards."""
        rows = self._rows[role]
        if isinstance(rows, Marked):
            return rows.between(shards.start, shards.stop)
        return Listed.cut(rows, starts[shards.start : shards.stop + 1])

    def together(self, roles: Sequence[str]) -> Rows | ShardRows:
        """Returns the rows that have any of some roles, each once."""
        some = [self._rows[role] for role in dict.fromkeys(roles) if self.count(role)]
        marked = [rows for rows in some if isinstance(rows, Marked)]
        if len(some) == len(marked) > 0:
            bits = int(np.bitwise_or.reduce([rows.bits for rows in marked]))
            return marked[0].joined(bits) if len(some) > 1 else marked[0]
        return np.unique(np.concatenate([np.empty(0, np.int64), *map(self.listed, roles)]))
