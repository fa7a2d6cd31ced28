"""Rows of a data set by number: vectors mapped in place, pictures decoded, labels looked up."""

import errno
import hashlib
import math
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.decoders import stored_decoder
from heron.pipeline.data.opened import Indexes, OpenShard, copy_rows
from heron.pipeline.data.plan import Marked, Rows
from heron.pipeline.data.texts import TextDecoder
from heron.shards.artefact import FileSum
from heron.shards.errors import RESTORE, ShardError
from heron.shards.manifest import Manifest, Shard, View, load_manifest
from heron.shards.store import LocalStore, Store, open_store

OPEN = 128  # shards that a process keeps open: up to three descriptors each
EXHAUSTED = errno.EMFILE, errno.ENFILE, errno.ENOMEM  # no faults of the data


class Reader:
    """Random access to a folder of shards; the last ones opened stay open.

    Rows are numbered over the splits in the manifest's order, shard by shard. Opening checks the
    manifest, and the presence and size of every shard; an index is read, and its checksum compared,
    when its shard's turn comes, payloads when asked for, and `verify_payloads` compares the
    checksums of all. With `on_error` "skip", rows that cannot be read are faults that a caller is
    told of, and no exceptions.
    """

    def __init__(
        self,
        folder: str | Path | Store,
        on_error: Literal["raise", "skip"] = "raise",
        most_open: int = OPEN,
        manifest: Manifest | None = None,
    ) -> None:
        """Opens a folder or a URL that `heron shards build` or `heron shards index` made.

        With a `manifest`, which then lists no shards, nothing is opened: it has no rows.
        """
        self.store = folder if isinstance(folder, Store) else open_store(folder)
        self.manifest = manifest or load_manifest(self.store)
        self._views = {view.name: view for view in self.manifest.views}
        self.on_error = on_error
        self.most_open = most_open
        self.indexes = Indexes(self.store, self.manifest)
        self.shards, self.starts = self.indexes.shards, self.indexes.starts
        self.lost: dict[int, str] = {}  # rows that cannot be read, and why
        self.partial = self.manifest.partial  # whether rows lack views
        self.unknown = self.manifest.labels.unknown is not None  # whether rows lack single labels
        self.decoders = {name: stored_decoder(view) for name, view in self._views.items()}
        self._hidden_views: list[tuple[list[int], NDArray[np.bool_]]] = []
        self._hidden_labels: list[tuple[Rows, NDArray[np.bool_]]] = []
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        # By view, where the blocks of open shards lie: a line a shard, of which the first is that
        # of all that are not open, and 0 is no address.
        self._mapped: dict[str, NDArray[np.int64]] = {}
        self._lines = np.zeros(len(self.shards), np.int64)
        present = self.store.names() if self.shards else None
        for number, shard in enumerate(self.shards):
            if (fault := self._absence(shard, present)) is not None:
                self._lose(np.arange(*self.starts[number : number + 2]), fault)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a reading process is given: all but the open files."""
        closed = {"_open": OrderedDict(), "_mapped": {}, "_lines": np.zeros_like(self._lines)}
        return self.__dict__ | closed

    def _absence(self, shard: Shard, present: set[str] | None) -> str | None:
        """Returns what is wrong with a shard that shows without reading it, or None."""
        where = self.store.where(shard.file)
        missing = f"{where} is missing; the manifest lists it; {RESTORE}"
        if present is not None and shard.file not in present:
            return missing
        store, name = self.store.part(shard.file)
        if not isinstance(store, LocalStore):
            return None  # size and checksum are those of the manifest, or it is not fetched
        try:
            size = (store.folder / name).stat().st_size
        except FileNotFoundError:  # of a link to nothing
            return missing
        if size == shard.bytes:
            return None
        return f"{where} has {size} bytes; the manifest says {shard.bytes}; {RESTORE}"

    def verify_payloads(self) -> None:
        """Compares every local shard's checksum with the manifest's: reads all bytes, once.

        A shard that was found whole before, and has not changed since, is not read again. Remote
        shards are compared as they are fetched.

        Raises:
            ShardError: a shard was altered; `heron shards verify` names the sample.
        """
        for number, shard in enumerate(self.shards):
            store, name = self.store.part(shard.file)
            if not isinstance(store, LocalStore) or int(self.starts[number]) in self.lost:
                continue
            self.indexes[number]
            written = FileSum(bytes=shard.bytes, sha256=shard.sha256)
            if not (fault := written.fault(store.folder / name)):
                continue
            if self.on_error == "raise":
                raise ShardError(f"{fault}; {RESTORE}; `heron shards verify` names the sample")
            self.lost |= self._altered(number)

    def _altered(self, number: int) -> dict[int, str]:
        """Returns the rows of a shard whose bytes are not those that were written, and why."""
        shard, index = self._shard(number), self.indexes[number]
        first, starts = int(self.starts[number]), index.starts
        lost: dict[int, str] = {}
        for sample, member in np.argwhere(np.ones(index.crc32.shape)).tolist():
            if zlib.crc32(shard.payload(sample, member)) != index.crc32[sample, member]:
                fault = (
                    f"{shard.where} sample {index.keys[sample]}: member "
                    f"'{index.members[member]}' is altered: another crc32; {RESTORE}"
                )
                rows = range(first + int(starts[sample]), first + int(starts[sample + 1]))
                lost |= dict.fromkeys(rows, fault)
        return lost

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return list(self.manifest.splits)

    def shards_of(self, split: str) -> range:
        """Returns the numbers of a split's shards."""
        if split not in self.manifest.splits:
            raise ConfigError(
                f"split '{split}' is not in {self.store}; found {', '.join(self.splits)}"
            )
        first = sum(len(self.manifest.splits[s]) for s in self.splits[: self.splits.index(split)])
        return range(first, first + len(self.manifest.splits[split]))

    def shard_rows(self, split: str) -> Marked:
        """Returns the numbers of a split's rows, shard by shard."""
        numbers = self.shards_of(split)
        starts = self.starts[numbers.start : numbers.stop + 1]
        return Marked(starts, np.diff(starts))

    def split_rows(self, split: str) -> Rows:
        """Returns the numbers of a split's rows."""
        rows = self.shard_rows(split)
        return np.arange(rows.starts[0], rows.starts[-1])

    def labels(self, rows: Rows) -> NDArray[Any]:
        """Returns labels as stored: see `heron.shards.manifest.Labels`."""
        labels = self.indexes.labels(rows)
        for of, hidden in self._hidden_labels:
            at = np.searchsorted(of, rows).clip(max=len(of) - 1)
            found = of[at] == rows
            labels[found] = np.where(
                hidden[at[found]], self.manifest.labels.unlabelled, labels[found]
            )
        return labels

    def present(self, rows: Rows, names: Sequence[str]) -> NDArray[np.bool_]:
        """Returns which of the views named each row has, [rows, names]."""
        found = self.indexes.present(rows)
        for columns, hidden in self._hidden_views:
            found[:, columns] &= ~hidden[rows]
        return found[:, [self.manifest.views.index(self.view(name)) for name in names]]

    def hide_views(self, names: Sequence[str], hidden: NDArray[np.bool_]) -> None:
        """Takes views from rows: of all rows, those [rows, names] that are hidden."""
        columns = [self.manifest.views.index(self.view(name)) for name in names]
        self._hidden_views.append((columns, hidden))
        self.partial = True

    def hide_labels(self, rows: Rows, hidden: NDArray[np.bool_]) -> None:
        """Makes single labels of ascending rows unknown, those [rows, labels] that are hidden."""
        if len(rows):
            self._hidden_labels.append((rows, hidden))
        self.unknown = True

    def known(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which rows have a label, [rows]."""
        return self.manifest.labels.known(self.labels(rows))

    def targets(self, rows: Rows) -> NDArray[np.float32]:
        """Returns labels of labelled rows as 0/1 columns, one a name; NaN where one is unknown."""
        labels = self.labels(rows)
        if self.manifest.labels.kind == "hierarchical":
            labels = labels[:, -1]
        if labels.ndim == 1:
            known = np.flatnonzero(labels >= 0)
            targets = np.zeros((len(rows), len(self.manifest.labels.names)), np.float32)
            targets[known, labels[known]] = 1
            return targets
        targets = labels.astype(np.float32)
        if self.unknown:
            targets[labels == self.manifest.labels.unlabelled] = np.nan
        return targets

    def truth(self, rows: Rows) -> NDArray[np.float32]:
        """Returns what the rows are, as 0/1 columns, for scoring; zeros where that is not known.

        Of a row that has labels, single ones that are unknown are NaN.

        Raises:
            ConfigError: complementary labels of a row leave more than one class.
        """
        targets, known = self.targets(rows), self.known(rows)
        targets[~known] = 0
        if self.manifest.labels.kind != "complementary":
            return targets
        left = np.where(known, targets.shape[1] - targets.sum(1), 1)
        if (left != 1).any():
            bad = int(np.flatnonzero(left != 1)[0])
            key = self.sample_key(int(rows[bad]))
            raise ConfigError(
                f"{self.store}: the complementary labels of sample {key} "
                f"leave {int(left[bad])} classes; expected 1 in rows that are tested or probed; "
                "store there every class but the right one"
            )
        return np.where(known[:, None], 1 - targets, 0).astype(np.float32)

    def paths(self, rows: Rows) -> NDArray[np.int64]:
        """Returns hierarchical labels, [rows, levels]; [rows, 0] for other kinds."""
        if self.manifest.labels.kind != "hierarchical":
            return np.empty((len(rows), 0), np.int64)
        paths: NDArray[np.int64] = self.labels(rows)
        return paths

    def sample_key(self, row: int) -> str:
        """Returns the key of a row: see `sample_keys`."""
        return self.sample_keys(np.array([row]))[0]

    def sample_keys(self, rows: Rows) -> list[str]:
        """Returns the keys of rows: of the tar sample and, in a block, the row's place there."""
        block_rows = self.manifest.block_rows
        keys = np.empty(len(rows), object)
        for number, at, places in self.indexes.by_shard(rows):
            samples, offsets = np.divmod(places, block_rows or 1)
            found = self.indexes[number].keys[samples].tolist()
            if block_rows is not None:
                found = [f"{key}/{n}" for key, n in zip(found, offsets.tolist(), strict=True)]
            keys[at] = found
        return [str(key) for key in keys]

    def view(self, name: str) -> View:
        """Returns what the manifest says of a view."""
        if name not in self._views:
            raise ConfigError(
                f"data.views: stored view '{name}' is not in {self.store}; "
                f"found {', '.join(self._views)}"
            )
        return self._views[name]

    def vocabulary(self, name: str) -> int:
        """Returns how many token ids the texts of a view have; 0 of other views."""
        return self.decoders[name].vocabulary

    @property
    def tokenizers(self) -> dict[str, str]:
        """The sha256 of what makes tokens of each view of texts."""
        return {
            name: hashlib.sha256(decoder.tokenizer.encode()).hexdigest()
            for name, decoder in self.decoders.items()
            if isinstance(decoder, TextDecoder)
        }

    def read(self, name: str, rows: Rows) -> NDArray[Any]:
        """Returns one view of some rows in a new array: see `fill`."""
        decoder = self.decoders[self.view(name).name]
        out = np.empty((len(rows), *decoder.shape), decoder.dtype)
        self.fill({name: out}, rows)
        return out

    def fill(self, out: Mapping[str, NDArray[Any]], rows: Rows) -> None:
        """Reads stored views of some rows, in their order, into the arrays of `out`.

        Each is C-contiguous: float32 [rows, width] for vectors, uint8 [rows, height, width,
        channels] for images, int32 [rows, tokens] for texts, int32 rows of `data.graphs`. Rows that
        lack a view have zeros, and -1 for texts and graphs.

        Raises:
            ShardError: a row cannot be read. With `on_error` "skip" the row is added to `lost`,
                and has zeros, which are an input of every model.
        """
        shards, places = self.indexes.locate(rows)
        samples, offsets = np.divmod(places, self.manifest.block_rows or 1)
        has = (
            self.present(rows, list(out)) if self.partial else np.ones((len(rows), len(out)), bool)
        )
        for column, (name, array) in enumerate(out.items()):
            view = self.view(name)
            if self.manifest.block_rows is None and view.kind != "vector":
                self._decode(view, rows, shards, samples, has[:, column], array)
            else:
                self._copy(view, shards, samples, offsets, array)
            if self.partial:
                array[~has[:, column]] = -1 if view.kind in ("text", "graph") else 0
        if self.lost:
            unread = [row in self.lost for row in rows.tolist()]
            for array in out.values():
                array[unread] = 0

    def _decode(
        self,
        view: View,
        rows: Rows,
        shards: Rows,
        samples: Rows,
        has: NDArray[np.bool_],
        out: NDArray[Any],
    ) -> None:
        """Decodes the pictures, texts or graphs of a view into `out`, of the rows that have it."""
        decoder, column = self.decoders[view.name], self.manifest.views.index(view)
        for i in np.argsort(shards, kind="stable").tolist():
            if not has[i] or (self.lost and int(rows[i]) in self.lost):
                continue
            if (opened := self._opened(int(shards[i]))) is None:
                continue
            sample = int(samples[i])
            try:
                decoder.decode(opened.payload(sample, column), out[i])
            except (ValueError, ShardError, OSError) as error:
                where = f"{opened.where} sample {opened.index.keys[sample]}"
                self._lose(
                    rows[i : i + 1],
                    f"{where}: view '{view.name}' {error}; "
                    "run `heron shards verify` to see what else is damaged",
                )

    def _copy(
        self, view: View, shards: Rows, samples: Rows, offsets: Rows, out: NDArray[Any]
    ) -> None:
        """Copies rows of blocks to `out` from where they are mapped."""
        if view.name not in self._mapped:
            rows = int(np.diff(self.starts).max(initial=0))
            longest = -(-rows // (self.manifest.block_rows or 1))
            self._mapped[view.name] = np.zeros((self.most_open + 1, longest), np.int64)
        mapped = self._mapped[view.name]
        offsets = offsets * math.prod(view.shape) * np.dtype(view.dtype).itemsize
        if (starts := mapped[self._lines[shards], samples]).all():
            copy_rows(starts + offsets, out)
            return
        needed = np.unique(shards)
        for first in range(0, len(needed), self.most_open):  # so many can be open at once
            numbers = needed[first : first + self.most_open]
            at = np.isin(shards, numbers)
            for number in numbers.tolist():
                self._map(view, number, samples[shards == number])
            starts = np.where(at, mapped[self._lines[shards], samples], 0)
            copy_rows(np.where(starts, starts + offsets, 0), out)

    def _map(self, view: View, number: int, samples: Rows) -> None:
        """Notes where the blocks of a shard lie; loses those of `samples` that are faulty."""
        if (opened := self._opened(number)) is None:
            return
        column = self.manifest.views.index(view)
        found = opened.blocks(view, column)
        line = self._mapped[view.name][self._lines[number]]
        line[: len(found.addresses)] = found.addresses
        for sample in sorted(found.faults.keys() & {*samples.tolist()}):
            rows = self.starts[number] + opened.index.starts[sample : sample + 2]
            self._lose(np.arange(*rows), found.faults[sample])

    def _opened(self, number: int) -> OpenShard | None:
        """Returns a shard, opened; None where it cannot be: then none of its rows can be read."""
        try:
            return self._shard(number)
        except (ShardError, OSError) as error:
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                raise
            self._lose(np.arange(*self.starts[number : number + 2]), str(error))
            return None

    def _lose(self, rows: Rows, fault: str) -> None:
        if self.on_error == "raise":
            raise ShardError(fault)
        self.lost |= dict.fromkeys(rows.tolist(), fault)

    def _shard(self, number: int) -> OpenShard:
        """Returns a shard, opened; the one used longest ago is closed when there are many."""
        if number not in self._open:
            while len(self._open) >= self.most_open:
                closed, opened = self._open.popitem(last=False)
                for mapped in self._mapped.values():
                    mapped[self._lines[closed]] = 0
                self._lines[closed] = 0
                opened.close()
            shard, index = self.shards[number], self.indexes[number]
            local = self.store.local(shard.file, shard.bytes, shard.sha256)
            self._open[number] = OpenShard(local, self.store.where(shard.file), index)
            free = {*range(1, self.most_open + 1)} - {*self._lines[[*self._open]].tolist()}
            self._lines[number] = min(free)
        self._open.move_to_end(number)
        return self._open[number]
