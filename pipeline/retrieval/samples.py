"""Which samples the rows of an array of embeddings are: keys, row numbers, labels."""

import difflib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.negatives.definition import label_difference
from heron.shards.artefact import sha256
from heron.shards.atomic import atomic_write

FILES = "keys.npy", "rows.npy", "targets.npy", "known.npy", "labels.json"


@dataclass(frozen=True)
class Samples:
    """N samples, in the order of their vectors.

    Attributes:
        keys: of each, UTF-8, [N]; no two are the same.
        rows: their numbers in the data set, int64 [N].
        targets: labels as 0/1, uint8 [N, names]: a class is one-hot, a row without a label zeros.
        known: which have labels, bool [N].
        names: of the labels.
        kind: of the labels: see `heron.shards.manifest.Labels`.
    """

    keys: NDArray[np.bytes_]
    rows: NDArray[np.int64]
    targets: NDArray[np.uint8]
    known: NDArray[np.bool_]
    names: list[str]
    kind: str

    def __len__(self) -> int:
        """Returns how many samples there are."""
        return len(self.keys)

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.keys, kind="stable")

    def _position(self, key: bytes) -> int:
        """Returns where a key belongs among the sorted ones."""
        # A key longer than any of these is cut: numpy would copy all of them to its length.
        wanted = np.bytes_(key[: self.keys.dtype.itemsize])
        return int(np.searchsorted(self.keys, wanted, sorter=self._order))

    def key(self, number: int) -> str:
        """Returns the key of a sample."""
        return bytes(self.keys[number]).decode()

    def find(self, key: str) -> int:
        """Returns the number of the sample with a key.

        Raises:
            RetrievalError: none has this key; names the nearest ones.
        """
        at = self._position(key.encode())
        if at < len(self) and self.keys[self._order[at]] == key.encode():
            return int(self._order[at])
        around = [self.key(int(i)) for i in self._order[max(0, at - 50) : at + 50]]
        near = difflib.get_close_matches(key, around, 3, 0.0)
        raise RetrievalError(
            f"no sample has the key '{key}'; found {len(self):,} others, the nearest "
            f"{', '.join(near) or 'none'}; expected one of them"
        )

    def keys_with_prefix(self, prefix: str, most: int) -> list[str]:
        """Returns the first keys, in order, that begin with a text; at most `most`."""
        at = self._position(prefix.encode())
        near = (self.key(int(i)) for i in self._order[at : at + most])
        return [key for key in near if key.startswith(prefix)]

    def label_names(self, number: int) -> list[str]:
        """Returns the labels that a sample has, by name."""
        return [self.names[i] for i in np.flatnonzero(self.targets[number]).tolist()]

    @property
    def exclusive(self) -> bool:
        """Whether a sample has one class, and not any number of labels.

        Complementary labels that are known leave one: see `Reader.truth`.
        """
        return self.kind in ("multi_class", "hierarchical", "complementary")

    def label_distance(
        self, these: NDArray[np.int64], those: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Returns how far apart samples lie in label space, from 0 (the same labels) to 1.

        The share of labels in which two samples differ, HeroCon's dist(y_i, y_j) / c (Eq. 7), as
        H-SCL's and SupCon's 0 or 1 where classes exclude each other; NaN where one has no label.
        `these` and `those` are numbers of samples, of shapes that broadcast.
        """
        differ = label_difference(self.targets, these, those, self.exclusive)
        distance = (differ if self.exclusive else differ / max(1, len(self.names))).astype(
            np.float32
        )
        return np.where(self.known[these] & self.known[those], distance, np.float32(np.nan))

    def refuse_duplicates(self) -> None:
        """Raises a RetrievalError where a key is there twice, and names it."""
        ordered = self.keys[self._order]
        if len(twice := np.flatnonzero(ordered[1:] == ordered[:-1])):
            first, second = sorted(self._order[twice[0] : twice[0] + 2].tolist())
            raise RetrievalError(
                f"{len(twice):,} keys are there twice, the first '{self.key(first)}' of samples "
                f"{first} and {second}; expected each once; drop one of the two, or embed the "
                "data set again"
            )

    def save(self, folder: Path) -> dict[str, str]:
        """Writes the arrays to a folder, and returns the checksum of each file by name."""
        arrays: tuple[NDArray[Any], ...] = self.keys, self.rows, self.targets, self.known
        for name, array in zip(FILES, arrays, strict=False):
            with atomic_write(folder / name) as stream:
                np.save(stream, array, allow_pickle=False)
        with atomic_write(folder / FILES[-1]) as stream:
            stream.write(json.dumps({"kind": self.kind, "names": self.names}).encode())
        return {name: sha256(folder / name) for name in FILES}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Maps the arrays of a folder.

        Raises:
            RetrievalError: a file is missing, or not what it should be.
        """
        try:
            keys, rows, targets, known = (
                np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in FILES[:-1]
            )
            labels = json.loads((folder / FILES[-1]).read_text())
            found = cls(keys, rows, targets, known, labels["names"], labels["kind"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RetrievalError(
                f"{folder} cannot be read: {error}; expected {', '.join(FILES)}; make it again"
            ) from None
        shapes = [array.shape for array in (rows, targets[:, :0], known)]
        if shapes != [(len(keys),), (len(keys), 0), (len(keys),)]:
            raise RetrievalError(
                f"{folder}: {len(keys)} keys, {len(rows)} rows, {len(targets)} targets and "
                f"{len(known)} flags; expected as many of each; make it again"
            )
        return found
