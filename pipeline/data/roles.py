"""Which rows are labelled, unlabelled, tested and kept for validation: as lists, or as marks.

The marks of a large data set are written once, a byte a row, and mapped by training.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from heron.pipeline.config.data import Data
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.plan import Listed, Marked, Rows, ShardRows
from heron.pipeline.data.reader import Reader
from heron.shards.artefact import MANIFEST, Artefact, FileName, FileSum, Fingerprint

ROLES = "labelled", "unlabelled", "test", "validation"  # role i has bit i of a mark
MARKS, SIZES = "marks.npy", "sizes.npy"  # [rows], and rows of each role and shard [roles, shards]


class Roles:
    """Row numbers by role; labelled, validation and unlabelled rows make up the split, apart.

    Only rows with a label are tested, and no validation row is. A role is a list of row numbers,
    or marks that are looked up shard by shard: such a one is listed when the list is asked for.

    Attributes:
        by_shard: the rows of each role, of all shards.
    """

    def __init__(self, starts: Rows, *roles: Rows | Marked) -> None:
        """Takes the ascending rows of each of `ROLES`; `starts` are the shards' first rows."""
        self.by_shard: dict[str, ShardRows] = {
            role: rows if isinstance(rows, Marked) else Listed.cut(rows, starts)
            for role, rows in zip(ROLES, roles, strict=True)
        }

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
        return self.by_shard[role].whole

    def count(self, role: str) -> int:
        """Returns the number of rows of a role."""
        return self.by_shard[role].total

    def together(self, roles: Sequence[str]) -> ShardRows:
        """Returns the rows that have any of some roles, each once."""
        some = [self.by_shard[role] for role in dict.fromkeys(roles) if self.count(role)]
        if len(some) == 1:
            return some[0]
        marked = [rows for rows in some if isinstance(rows, Marked)]
        if marked and len(marked) == len(some):
            return marked[0].joined(int(np.bitwise_or.reduce([rows.bits for rows in marked])))
        lists = [np.empty(0, np.int64), *(rows.whole for rows in some)]
        return Listed.of([np.unique(np.concatenate(lists))])


class WrittenRoles(Artefact):
    """The manifest of written roles: of which data set, and by which protocol."""

    what: ClassVar[str] = "the manifest of roles"
    error: ClassVar[type[ConfigError]] = ConfigError
    again: ClassVar[str] = "write them again with heron shards protocol"
    versions: ClassVar[tuple[int, ...]] = (1,)

    format: Literal[1] = 1
    data: Fingerprint
    protocol: dict[str, Any]
    files: dict[FileName, FileSum]


def decided_by(data: Data) -> dict[str, Any]:
    """Returns what of a configuration decides the roles of the rows of a data set."""
    protocol = data.protocol.model_dump(mode="json", exclude={"complementary"})
    return {**protocol, "split": data.split, "views": sorted({v.stored for v in data.views})}


def write_roles(reader: Reader, roles: Roles, data: Data, folder: Path) -> WrittenRoles:
    """Writes the roles of a data set's rows to a new folder.

    Raises:
        ConfigError: the folder is there, or the protocol hides views or labels, for studies.
    """
    if data.protocol.hide_views or data.protocol.hide_labels:
        raise ConfigError(
            "data.protocol hides views or labels, which is for studies of small data sets; "
            "expected none hidden where roles are written"
        )
    if folder.exists():
        raise ConfigError(f"{folder} is there; expected a new folder; choose another")
    folder.mkdir(parents=True)
    marks = np.lib.format.open_memmap(
        folder / MARKS, "w+", np.uint8, (int(reader.starts[-1]),), version=(1, 0)
    )
    for bit, shards in enumerate(roles.by_shard.values()):
        for number in np.flatnonzero(shards.sizes).tolist():
            marks[shards.rows_of(number)] |= 1 << bit
    marks.flush()
    np.save(folder / SIZES, np.array([shards.sizes for shards in roles.by_shard.values()]))
    files = {name: FileSum.of(folder / name) for name in (MARKS, SIZES)}
    return WrittenRoles(
        data=reader.manifest.fingerprint, protocol=decided_by(data), files=files
    ).write(folder / MANIFEST)


def read_roles(reader: Reader, data: Data, folder: Path) -> Roles:
    """Returns roles that were written; they are looked up shard by shard.

    Raises:
        ConfigError: they are of another data set or protocol, or not as they were written.
    """
    manifest = WrittenRoles.read(folder / MANIFEST)
    for what, found, expected in (
        ("the data set", manifest.data, reader.manifest.fingerprint),
        ("the protocol", manifest.protocol, decided_by(data)),
    ):
        if found != expected:
            raise ConfigError(
                f"data.roles: {folder} was written for {what} {found}; expected {expected}; "
                f"{manifest.again}"
            )
    if sorted(manifest.files) != [MARKS, SIZES]:
        raise ConfigError(f"{folder} lists {sorted(manifest.files)}; expected {MARKS}, {SIZES}")
    manifest.check_files(folder, manifest.files)
    sizes = np.load(folder / SIZES, allow_pickle=False)
    marks = [
        Marked(reader.starts, sizes[bit], folder / MARKS, 1 << bit) for bit in range(len(ROLES))
    ]
    return Roles(reader.starts, *marks)
