"""The roles of rows - labelled, unlabelled, test, validation - as lists or as marks in a file.

The marks of a large data set, one byte per row, are written once and memory-mapped by training.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from heron.config.data import Data
from heron.config.errors import ConfigError
from heron.data.plan import Listed, Marked, Rows, ShardRows
from heron.data.reader import Reader
from heron.shards.artefact import MANIFEST, Artefact, FileName, FileSum, Fingerprint

ROLES = "labelled", "unlabelled", "test", "validation"  # role i is bit i of a mark
MARKS, SIZES = "marks.npy", "sizes.npy"  # marks [rows], and row counts [roles, shards]


class Roles:
    """Row numbers by role; labelled, validation and unlabelled rows partition the split.

    Only rows with a label are tested, and no validation row is. `by_shard` has the rows of each
    role: lists, or marks that are looked up shard by shard and listed only on request.
    """

    def __init__(self, starts: Rows, *roles: Rows | Marked) -> None:
        """Takes the ascending rows of each of `ROLES`; `starts` has the shards' first rows."""
        self.by_shard: dict[str, ShardRows] = {
            role: rows if isinstance(rows, Marked) else Listed.cut(rows, starts)
            for role, rows in zip(ROLES, roles, strict=True)
        }

    @property
    def labelled(self) -> Rows:
        """The rows whose labels training sees, in one array."""
        return self.rows_of("labelled")

    @property
    def unlabelled(self) -> Rows:
        """The rows that training sees without a label, in one array."""
        return self.rows_of("unlabelled")

    @property
    def test(self) -> Rows:
        """The rows that are tested, in one array."""
        return self.rows_of("test")

    @property
    def validation(self) -> Rows:
        """The rows that serve to choose a configuration, in one array."""
        return self.rows_of("validation")

    def rows_of(self, role: str) -> Rows:
        """Returns the rows of a role in one array."""
        return self.by_shard[role].all_rows

    def count(self, role: str) -> int:
        """Returns the number of rows of a role."""
        return self.by_shard[role].total

    def union(self, roles: Sequence[str]) -> ShardRows:
        """Returns the rows that have any of the roles, each once."""
        nonempty = [self.by_shard[role] for role in dict.fromkeys(roles) if self.count(role)]
        if len(nonempty) == 1:
            return nonempty[0]
        marked = [rows for rows in nonempty if isinstance(rows, Marked)]
        if marked and len(marked) == len(nonempty):
            return marked[0].with_bits(int(np.bitwise_or.reduce([rows.bits for rows in marked])))
        lists = [np.empty(0, np.int64), *(rows.all_rows for rows in nonempty)]
        return Listed.from_shards([np.unique(np.concatenate(lists))])


class WrittenRoles(Artefact):
    """The manifest of written roles, with the data set and the protocol that they belong to."""

    description: ClassVar[str] = "the manifest of roles"
    error: ClassVar[type[ConfigError]] = ConfigError
    remedy: ClassVar[str] = "write them again with heron shards protocol"
    versions: ClassVar[tuple[int, ...]] = (1,)

    format: Literal[1] = 1
    data: Fingerprint
    protocol: dict[str, Any]
    files: dict[FileName, FileSum]


def role_inputs(data: Data) -> dict[str, Any]:
    """Returns the options that determine the roles of a data set's rows."""
    protocol = data.protocol.model_dump(mode="json", exclude={"complementary"})
    return {**protocol, "split": data.split, "views": sorted({v.stored for v in data.views})}


def write_roles(reader: Reader, roles: Roles, data: Data, folder: Path) -> WrittenRoles:
    """Writes the roles of a data set's rows to a new folder.

    Raises ConfigError if the folder exists, or the protocol hides views or labels.
    """
    if data.protocol.hide_views or data.protocol.hide_labels:
        raise ConfigError(
            "data.protocol hides views or labels, which is for studies of small data sets; "
            "expected none hidden where roles are written"
        )
    if folder.exists():
        raise ConfigError(f"{folder} exists; expected a new folder; choose another")
    folder.mkdir(parents=True)
    marks = np.lib.format.open_memmap(
        folder / MARKS, "w+", np.uint8, (int(reader.starts[-1]),), version=(1, 0)
    )
    for bit, shard_rows in enumerate(roles.by_shard.values()):
        for number in np.flatnonzero(shard_rows.sizes).tolist():
            marks[shard_rows.rows_of(number)] |= 1 << bit
    marks.flush()
    np.save(folder / SIZES, np.array([shard_rows.sizes for shard_rows in roles.by_shard.values()]))
    files = {name: FileSum.of(folder / name) for name in (MARKS, SIZES)}
    return WrittenRoles(
        data=reader.manifest.fingerprint, protocol=role_inputs(data), files=files
    ).write(folder / MANIFEST)


def read_roles(reader: Reader, data: Data, folder: Path) -> Roles:
    """Returns written roles; ConfigError if they belong to other data or were altered."""
    manifest = WrittenRoles.read(folder / MANIFEST)
    for what, found, expected in (
        ("the data set", manifest.data, reader.manifest.fingerprint),
        ("the protocol", manifest.protocol, role_inputs(data)),
    ):
        if found != expected:
            raise ConfigError(
                f"data.roles: {folder} was written for {what} {found}; expected {expected}; "
                f"{manifest.remedy}"
            )
    if sorted(manifest.files) != [MARKS, SIZES]:
        raise ConfigError(f"{folder} lists {sorted(manifest.files)}; expected {MARKS}, {SIZES}")
    manifest.check_files(folder, manifest.files)
    sizes = np.load(folder / SIZES, allow_pickle=False)
    marks = [
        Marked(reader.starts, sizes[bit], folder / MARKS, 1 << bit) for bit in range(len(ROLES))
    ]
    return Roles(reader.starts, *marks)
