"""The samples that embeddings are of: keys, row numbers, labels."""

import difflib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from heron.base.artefact import FileSum, Record, describe_errors
from heron.base.atomic import atomic_write, save_json
from heron.base.errors import RESTORE, RetrievalError, ShardError
from heron.evaluation.negatives import close_label_difference, label_difference
from heron.shards.index import array_at

FILES = "keys.npy", "rows.npy", "targets.npy", "known.npy", "labels.json"
REMEDY = "make it again"
BLOCK = 2**20  # keys checked at a time


class LabelNames(Record):
    """Kind and names of labels: see `heron.shards.manifest.Labels`."""

    kind: Literal["multi_label", "multi_class", "hierarchical", "complementary", "none"]
    names: list[str]


@dataclass(frozen=True)
class Samples:
    """N samples, in the order of their vectors."""

    keys: NDArray[np.bytes_]  # UTF-8, unique, [N]
    rows: NDArray[np.int64]  # their numbers in the data set, [N]
    targets: NDArray[np.uint8]  # 0/1, [N, names]: a class is one-hot, a row without a label zeros
    known: NDArray[np.bool_]  # which samples have labels, [N]
    names: list[str]  # of the labels
    kind: str  # of the labels: see `heron.shards.manifest.Labels`

    def __len__(self) -> int:
        """Returns how many samples there are."""
        return len(self.keys)

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.keys, kind="stable")

    def _position(self, key: bytes) -> int:
        """Returns the insertion point of a key among the sorted keys."""
        # Truncate a key longer than all of these, or NumPy would copy all of them to its length.
        truncated = np.bytes_(key[: self.keys.dtype.itemsize])
        return int(np.searchsorted(self.keys, truncated, sorter=self._order))

    def _holds(self, key: str, position: int) -> bool:
        """Returns whether a key stands at a position among the sorted keys."""
        return position < len(self) and bool(self.keys[self._order[position]] == key.encode())

    def key(self, number: int) -> str:
        """Returns the key of a sample."""
        return bytes(self.keys[number]).decode()

    def find(self, key: str) -> int:
        """Returns the number of the sample with a key; else a RetrievalError names near keys.

        Zeros before a number may be left out: `0123` is `000123`, unless that is a key itself.
        """
        for written in (key, self._padded(key)):
            if self._holds(written, position := self._position(written.encode())):
                return int(self._order[position])
        position = self._position(key.encode())
        nearby = [self.key(int(i)) for i in self._order[max(0, position - 50) : position + 50]]
        similar = self.keys_with(key, 3) if key else []
        similar += difflib.get_close_matches(key, nearby, 3, 0.0)
        nearest = ", ".join([*dict.fromkeys(similar)][:3])
        hint = f". Did you mean {nearest}?" if nearest else ""
        raise RetrievalError(f"no sample has the key '{key}' (of {len(self):,}){hint}")

    def _padded(self, key: str) -> str:
        """Returns a number with as many zeros before it as the first key is long."""
        return key.zfill(len(self.key(0))) if len(self) and key.isdecimal() else key

    def keys_with(self, text: str, limit: int) -> list[str]:
        """Returns up to `limit` keys: what `find` takes `text` for, then others that contain it.

        Those that begin with it come first, sorted, then others in the order of the samples.
        """
        encoded = text.encode()
        position = self._position(encoded)
        candidates = (self.key(int(i)) for i in self._order[position : position + limit])
        padded = self._padded(text)
        first = [padded] if self._holds(padded, self._position(padded.encode())) else []
        begin = (key for key in candidates if key.startswith(text))
        matches = dict.fromkeys([*first, *begin][:limit])
        if encoded.strip(b"\0"):
            others = np.flatnonzero(np.strings.find(self.keys, encoded) >= 0)
            matches |= dict.fromkeys(map(self.key, others[: limit + len(matches)].tolist()))
        return list(matches)[:limit]

    @cached_property
    def close_difference(self) -> int:
        """The largest label difference of close labels: see `evaluation.negatives`."""
        return close_label_difference(self.targets, self.known, self.exclusive)

    @property
    def max_difference(self) -> int:
        """The label difference at the label distance 1."""
        return 1 if self.exclusive else max(1, len(self.names))

    @property
    def close_distance(self) -> float:
        """The largest label distance of close labels, as `label_distance` has it."""
        return float(np.float32(self.close_difference / self.max_difference))

    @cached_property
    def _label_bits(self) -> NDArray[np.uint8]:
        return np.packbits(self.targets.T, axis=1)  # the samples with each label, as bits

    def label_counts(self, allowed: NDArray[np.bool_] | None = None) -> list[int]:
        """Returns how many of the allowed samples have each label; None allows all."""
        bits = self._label_bits if allowed is None else self._label_bits & np.packbits(allowed)
        return np.bitwise_count(bits).sum(1, dtype=np.int64).tolist()  # type: ignore[no-any-return]

    def label_names(self, number: int) -> list[str]:
        """Returns the names of a sample's labels."""
        return [self.names[i] for i in np.flatnonzero(self.targets[number]).tolist()]

    @property
    def exclusive(self) -> bool:
        """Whether a sample has one class rather than any number of labels.

        Complementary labels, if known, leave one class: see `Reader.ground_truth`.
        """
        return self.kind in ("multi_class", "hierarchical", "complementary")

    def label_distance(
        self, first: NDArray[np.int64], second: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Returns the distances of pairs of samples in label space, from 0 (same labels) to 1.

        It is the share of labels in which two samples differ, HeroCon's dist(y_i, y_j) / c (Eq. 7),
        or H-SCL's and SupCon's 0 or 1 if classes are exclusive; NaN if either has no label. `first`
        and `second` are numbers of samples, of shapes that broadcast.
        """
        differ = label_difference(self.targets, first, second, self.exclusive)
        distance = (differ / self.max_difference).astype(np.float32)
        return np.where(self.known[first] & self.known[second], distance, np.float32(np.nan))

    def refuse_duplicates(self) -> None:
        """Raises a RetrievalError that names a key, if two samples have it."""
        ordered = self.keys[self._order]
        if len(repeated := np.flatnonzero(ordered[1:] == ordered[:-1])):
            first, second = sorted(self._order[repeated[0] : repeated[0] + 2].tolist())
            raise RetrievalError(
                f"{len(repeated):,} keys occur twice, first '{self.key(first)}' in samples {first} "
                f"and {second}, but keys must be unique; remove one of the two, or embed the data "
                "set again"
            )

    def save(self, folder: Path) -> dict[str, FileSum]:
        """Writes the arrays to a folder; returns the size and checksum of each file."""
        arrays: tuple[NDArray[Any], ...] = self.keys, self.rows, self.targets, self.known
        for name, array in zip(FILES, arrays, strict=False):
            with atomic_write(folder / name) as stream:
                np.save(stream, array, allow_pickle=False)
        save_json(folder / FILES[-1], {"kind": self.kind, "names": self.names})
        return {name: FileSum.of(folder / name) for name in FILES}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Maps the arrays of a folder; RetrievalError if a file is missing or damaged."""
        keys, rows, targets, known = (map_array(folder / name, REMEDY) for name in FILES[:-1])
        path = folder / FILES[-1]
        try:
            labels = LabelNames.model_validate_json(path.read_bytes(), strict=True)
        except (OSError, ValidationError) as error:
            reason = (
                describe_errors(error) if isinstance(error, ValidationError) else error.strerror
            )
            raise RetrievalError(f"cannot read {path}: {reason}; {REMEDY}") from None
        samples = cls(keys, rows, targets, known, labels.names, labels.kind)
        if fault := samples._fault():
            raise RetrievalError(f"{folder}: {fault}; {REMEDY}")
        return samples

    def _fault(self) -> str:
        """Returns what is wrong with the arrays, or ""."""
        count, width = len(self), len(self.names)
        expected: list[tuple[str, NDArray[Any], str, tuple[int, ...]]] = [
            ("keys", self.keys, f"|S{self.keys.itemsize}", (count,)),
            ("rows", self.rows, "<i8", (count,)),
            ("targets", self.targets, "|u1", (count, width)),
            ("known", self.known, "|b1", (count,)),
        ]
        for name, array, dtype, shape in expected:
            if array.dtype.str != dtype or array.shape != shape:
                return f"{name} must be {dtype} {shape}, got {array.dtype.str} {array.shape}"
        if self.rows.min(initial=0) < 0:
            return f"rows must be at least 0, got {self.rows.min()}"
        for name, array in (("target", self.targets), ("flag", self.known.view(np.uint8))):
            if array.max(initial=0) > 1:
                return f"{name}s must be 0 or 1, got {array.max()}"
        if self.exclusive and (self.targets.sum(1, dtype=np.int64) != self.known).any():
            return f"labels are {self.kind}, but a sample does not have exactly one class"
        try:
            for first in range(0, count, BLOCK):  # a zero after each, so that none ends in the next
                block = self.keys[first : first + BLOCK]
                block.astype(f"S{block.itemsize + 1}").tobytes().decode()
        except UnicodeDecodeError:
            return "a key is not UTF-8"
        return ""


def map_array(path: Path, again: str) -> NDArray[Any]:
    """Maps the array of an npy file; raises a RetrievalError where it is none."""
    try:
        data = np.memmap(path, np.uint8, "r")
        return array_at(data, 0, len(data), str(path))
    except (OSError, ValueError) as error:
        raise RetrievalError(f"cannot read {path}: {error}; {again}") from None
    except ShardError as error:
        raise RetrievalError(f"{str(error).removesuffix(f'; {RESTORE}')}; {again}") from None
