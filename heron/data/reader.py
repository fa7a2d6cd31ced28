"""Reads rows of a data set by number: maps vectors, decodes pictures, looks labels up."""

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

from heron.base.artefact import FileSum
from heron.base.dotted import suggest
from heron.base.errors import RESTORE, ConfigError, ShardError
from heron.data.decoders import TextDecoder, stored_decoder
from heron.data.open_shards import Indexes, OpenShard, copy_rows
from heron.data.rows import Marked, Rows
from heron.shards.manifest import Manifest, Shard, View, load_manifest
from heron.shards.store import LocalStore, Store, open_store

MAX_OPEN_SHARDS = 128  # per process; each takes up to three file descriptors
EXHAUSTED = errno.EMFILE, errno.ENFILE, errno.ENOMEM  # the machine's limits, no fault of the data


class Reader:
    """Random access to a folder of shards; keeps the most recently used shards open.

    Rows are numbered over the splits in the manifest's order, shard by shard. The constructor
    checks the manifest, and the presence and size of every shard. An index is checked when its
    shard is first needed; payloads are verified by `verify_payloads`. With `on_error` "skip", rows
    that cannot be read are listed in `lost`.
    """

    def __init__(
        self,
        folder: str | Path | Store,
        on_error: Literal["raise", "skip"] = "raise",
        max_open_shards: int = MAX_OPEN_SHARDS,
        manifest: Manifest | None = None,
        known: Sequence[View] = (),
    ) -> None:
        """Opens a folder or a URL that `heron shards build` or `heron shards index` has written.

        A `manifest`, if passed, must list no shards: nothing is opened, and the reader has no rows.
        `known` are views that a model was trained on: every row lacks those of them that the data
        set does not have, unless it has none of them.
        """
        self.store = folder if isinstance(folder, Store) else open_store(folder)
        self.manifest = manifest or load_manifest(self.store)
        stored, given = ({v.name: v for v in views} for views in (self.manifest.views, known))
        self.absent = given.keys() - stored.keys() if given.keys() & stored.keys() else set()
        self._views = {name: given[name] for name in self.absent} | stored
        self.on_error = on_error
        self.max_open_shards = max_open_shards
        self.indexes = Indexes(self.store, self.manifest)
        self.shards, self.starts = self.indexes.shards, self.indexes.starts
        self.lost: dict[int, str] = {}  # rows that cannot be read, and the reasons
        self.may_lack_views = self.manifest.partial or bool(self.absent)
        self.may_lack_labels = self.manifest.labels.unknown is not None  # single labels of a row
        self.decoders = {name: stored_decoder(view) for name, view in self._views.items()}
        self._hidden_views: list[tuple[list[int], NDArray[np.bool_]]] = []
        self._hidden_labels: list[tuple[Rows, NDArray[np.bool_]]] = []
        self._open_shards: OrderedDict[int, OpenShard] = OrderedDict()
        # By view, the memory addresses of the blocks of open shards, [slots, blocks]; 0 is no
        # address. Each open shard has a slot; slot 0, all zeros, stands for all closed shards.
        self._block_addresses: dict[str, NDArray[np.int64]] = {}
        self._slots = np.zeros(len(self.shards), np.int64)
        present = self.store.names() if self.shards else None
        for number, shard in enumerate(self.shards):
            if (fault := self._shard_fault(shard, present)) is not None:
                self._mark_lost(np.arange(*self.starts[number : number + 2]), fault)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle for a loader worker: all but the open files."""
        closed: dict[str, Any] = {"_open_shards": OrderedDict(), "_block_addresses": {}}
        return self.__dict__ | closed | {"_slots": np.zeros_like(self._slots)}

    def _shard_fault(self, shard: Shard, present: set[str] | None) -> str | None:
        """Returns a shard's fault that shows without reading it, or None."""
        where = self.store.where(shard.file)
        missing = f"{where} is missing, but the manifest lists it; {RESTORE}"
        if present is not None and shard.file not in present:
            return missing
        store, name = self.store.locate(shard.file)
        if not isinstance(store, LocalStore):
            return None  # fetching compares size and checksum with the manifest
        try:
            size = (store.folder / name).stat().st_size
        except FileNotFoundError:  # a dangling link
            return missing
        if size == shard.bytes:
            return None
        return f"{where} has {size} bytes, but the manifest says {shard.bytes}; {RESTORE}"

    def verify_payloads(self) -> None:
        """Compares the checksums of local shards with the manifest; ShardError if one was altered.

        Skips shards verified before and unchanged since; remote ones are verified when fetched.
        """
        for number, shard in enumerate(self.shards):
            store, name = self.store.locate(shard.file)
            if not isinstance(store, LocalStore) or int(self.starts[number]) in self.lost:
                continue
            self.indexes[number]
            expected = FileSum(bytes=shard.bytes, sha256=shard.sha256)
            if not (fault := expected.fault(store.folder / name)):
                continue
            if self.on_error == "raise":
                raise ShardError(f"{fault}; {RESTORE}; `heron shards verify` names the sample")
            self.lost |= self._altered_rows(number)

    def _altered_rows(self, number: int) -> dict[int, str]:
        """Returns the rows of a shard whose bytes differ from those written, and the faults."""
        shard, index = self._open_shard(number), self.indexes[number]
        first_row, starts = int(self.starts[number]), index.starts
        lost: dict[int, str] = {}
        for sample, member in np.argwhere(np.ones(index.crc32.shape)).tolist():
            if zlib.crc32(shard.payload(sample, member)) != index.crc32[sample, member]:
                fault = (
                    f"{shard.where} sample {index.keys[sample]}: member '{index.members[member]}' "
                    f"was altered: its crc32 differs; {RESTORE}"
                )
                rows = range(first_row + int(starts[sample]), first_row + int(starts[sample + 1]))
                lost |= dict.fromkeys(rows, fault)
        return lost

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return list(self.manifest.splits)

    def shards_of(self, split: str) -> range:
        """Returns the numbers of a split's shards."""
        if split not in self.manifest.splits:
            raise ConfigError(f"{self.store} has no split '{split}', only {', '.join(self.splits)}")
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
        """Returns labels in the stored format: see `heron.shards.manifest.Labels`."""
        labels = self.indexes.labels(rows)
        for hidden_rows, hidden in self._hidden_labels:
            positions = np.searchsorted(hidden_rows, rows).clip(max=len(hidden_rows) - 1)
            match = hidden_rows[positions] == rows
            labels[match] = np.where(
                hidden[positions[match]], self.manifest.labels.unlabelled_value, labels[match]
            )
        return labels

    def present(self, rows: Rows, names: Sequence[str]) -> NDArray[np.bool_]:
        """Returns which of the named views each row has, [rows, names]."""
        present = self.indexes.present(rows)
        for columns, hidden in self._hidden_views:
            present[:, columns] &= ~hidden[rows]
        stored = [name for name in names if name not in self.absent]
        found = np.zeros((len(rows), len(names)), bool)
        found[:, [name not in self.absent for name in names]] = present[
            :, [self.manifest.views.index(self.view(name)) for name in stored]
        ]
        return found

    def hide_views(self, names: Sequence[str], hidden: NDArray[np.bool_]) -> None:
        """Treats views as missing where `hidden`, over all rows of the data set, [rows, names]."""
        columns = [self.manifest.views.index(self.view(name)) for name in names]
        self._hidden_views.append((columns, hidden))
        self.may_lack_views = True

    def hide_labels(self, rows: Rows, hidden: NDArray[np.bool_]) -> None:
        """Makes single labels of ascending rows unknown where `hidden`, [rows, labels]."""
        if len(rows):
            self._hidden_labels.append((rows, hidden))
        self.may_lack_labels = True

    def is_labelled(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which rows have a label, [rows]."""
        return self.manifest.labels.is_labelled(self.labels(rows))

    def targets(self, rows: Rows) -> NDArray[np.float32]:
        """Returns the labels of labelled rows, 0/1, [rows, labels]; NaN where one is unknown."""
        labels = self.labels(rows)
        if self.manifest.labels.kind == "hierarchical":
            labels = labels[:, -1]
        if labels.ndim == 1:
            known = np.flatnonzero(labels >= 0)
            targets = np.zeros((len(rows), len(self.manifest.labels.names)), np.float32)
            targets[known, labels[known]] = 1
            return targets
        targets = labels.astype(np.float32)
        if self.may_lack_labels:
            targets[labels == self.manifest.labels.unlabelled_value] = np.nan
        return targets

    def ground_truth(self, rows: Rows) -> NDArray[np.float32]:
        """Returns the ground truth for scoring, 0/1, [rows, labels]; zeros for unlabelled rows.

        Unknown single labels of a labelled row are NaN. Raises ConfigError if the complementary
        labels of a row leave more than one class.
        """
        targets, known = self.targets(rows), self.is_labelled(rows)
        targets[~known] = 0
        if self.manifest.labels.kind != "complementary":
            return targets
        remaining = np.where(known, targets.shape[1] - targets.sum(1), 1)
        if (remaining != 1).any():
            bad = int(np.flatnonzero(remaining != 1)[0])
            key = self.sample_key(int(rows[bad]))
            raise ConfigError(
                f"{self.store}: the complementary labels of sample {key} leave "
                f"{int(remaining[bad])} classes, but rows that are tested or probed must have 1 "
                "left; store every class but the right one there"
            )
        return np.where(known[:, None], 1 - targets, 0).astype(np.float32)

    def label_paths(self, rows: Rows) -> NDArray[np.int64]:
        """Returns hierarchical labels, [rows, levels]; [rows, 0] for other kinds of labels."""
        if self.manifest.labels.kind != "hierarchical":
            return np.empty((len(rows), 0), np.int64)
        paths: NDArray[np.int64] = self.labels(rows)
        return paths

    def sample_key(self, row: int) -> str:
        """Returns the key of a row: see `sample_keys`."""
        return self.sample_keys(np.array([row]))[0]

    def sample_keys(self, rows: Rows) -> list[str]:
        """Returns the keys of the rows' tar samples; in blocks, with `/` and the row's offset."""
        block_rows = self.manifest.block_rows
        keys = np.empty(len(rows), object)
        for number, positions, local_rows in self.indexes.by_shard(rows):
            samples, offsets = np.divmod(local_rows, block_rows or 1)
            found = self.indexes[number].keys[samples].tolist()
            if block_rows is not None:
                found = [f"{key}/{n}" for key, n in zip(found, offsets.tolist(), strict=True)]
            keys[positions] = found
        return [str(key) for key in keys]

    def view(self, name: str) -> View:
        """Returns the manifest's entry of a stored view."""
        if name not in self._views:
            raise ConfigError(
                f"data.views: {self.store} has no stored view '{name}'; it has "
                f"{', '.join(self._views)}; {suggest(name, list(self._views))}"
            )
        return self._views[name]

    def vocabulary(self, name: str) -> int:
        """Returns the number of token ids of a text view; 0 for other views."""
        return self.decoders[name].vocabulary

    @property
    def tokenizers(self) -> dict[str, str]:
        """The sha256 of each text view's tokenizer, by the view's name."""
        return {
            name: hashlib.sha256(decoder.tokenizer.encode()).hexdigest()
            for name, decoder in self.decoders.items()
            if isinstance(decoder, TextDecoder)
        }

    def read(self, name: str, rows: Rows) -> NDArray[Any]:
        """Returns one view of the rows in a new array: see `fill`."""
        decoder = self.decoders[self.view(name).name]
        out = np.empty((len(rows), *decoder.shape), decoder.dtype)
        self.fill({name: out}, rows)
        return out

    def payloads(self, name: str, rows: Rows) -> list[bytes | None]:
        """Returns the stored bytes of a view of rows that are tar samples; None where one lacks it.

        Raises ShardError for a row that cannot be read.
        """
        column = self.manifest.views.index(self.view(name))
        present = self.present(rows, [name])[:, 0].tolist()
        places = zip(*(part.tolist() for part in self.indexes.locate(rows)), present, strict=True)
        return [self._open_shard(n).payload(row, column) if has else None for n, row, has in places]

    def fill(self, out: Mapping[str, NDArray[Any]], rows: Rows) -> None:
        """Reads stored views of the rows, in the given order, into the arrays of `out`.

        The arrays are C-contiguous: float32 [rows, width] for vectors, uint8 [rows, height, width,
        channels] for images, int32 [rows, tokens] for texts, int32 rows of `data.graphs`. A missing
        view is 0, or -1 for texts and graphs. A row that cannot be read is a ShardError; with
        `on_error` "skip" it is added to `lost` and filled with zeros, a valid input of every model.
        """
        shards, local_rows = self.indexes.locate(rows)
        samples, offsets = np.divmod(local_rows, self.manifest.block_rows or 1)
        present = np.ones((len(rows), len(out)), bool)
        if self.may_lack_views:
            present = self.present(rows, list(out))
        for column, (name, array) in enumerate(out.items()):
            view = self.view(name)
            if name in self.absent:
                pass  # blank, below
            elif self.manifest.block_rows is None and view.kind != "vector":
                self._decode(view, rows, shards, samples, present[:, column], array)
            else:
                self._copy_from_blocks(view, shards, samples, offsets, array)
            if self.may_lack_views:
                array[~present[:, column]] = -1 if view.kind in ("text", "graph") else 0
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
        present: NDArray[np.bool_],
        out: NDArray[Any],
    ) -> None:
        """Decodes the members of a view into `out`, for the rows where it is `present`."""
        decoder, column = self.decoders[view.name], self.manifest.views.index(view)
        for i in np.argsort(shards, kind="stable").tolist():
            if not present[i] or (self.lost and int(rows[i]) in self.lost):
                continue
            if (shard := self._try_open_shard(int(shards[i]))) is None:
                continue
            sample = int(samples[i])
            try:
                decoder.decode(shard.payload(sample, column), out[i])
            except (ValueError, ShardError, OSError) as error:
                where = f"{shard.where} sample {shard.index.keys[sample]}"
                self._mark_lost(
                    rows[i : i + 1],
                    f"{where}: view '{view.name}' {error}; "
                    "run `heron shards verify` to see what else is damaged",
                )

    def _copy_from_blocks(
        self, view: View, shards: Rows, samples: Rows, offsets: Rows, out: NDArray[Any]
    ) -> None:
        if view.name not in self._block_addresses:
            rows = int(np.diff(self.starts).max(initial=0))
            shape = self.max_open_shards + 1, -(-rows // (self.manifest.block_rows or 1))
            self._block_addresses[view.name] = np.zeros(shape, np.int64)
        addresses = self._block_addresses[view.name]
        offsets = offsets * math.prod(view.shape) * np.dtype(view.dtype).itemsize
        if (block_addresses := addresses[self._slots[shards], samples]).all():
            copy_rows(block_addresses + offsets, out)
            return
        needed = np.unique(shards)
        for start in range(0, len(needed), self.max_open_shards):
            shard_numbers = needed[start : start + self.max_open_shards]
            in_shards = np.isin(shards, shard_numbers)
            for number in shard_numbers.tolist():
                self._map_blocks(view, number, samples[shards == number])
            block_addresses = np.where(in_shards, addresses[self._slots[shards], samples], 0)
            copy_rows(np.where(block_addresses, block_addresses + offsets, 0), out)

    def _map_blocks(self, view: View, number: int, samples: Rows) -> None:
        """Records the addresses of a shard's blocks; marks faulty blocks of `samples` as lost."""
        if (shard := self._try_open_shard(number)) is None:
            return
        column = self.manifest.views.index(view)
        blocks = shard.blocks(view, column)
        addresses = self._block_addresses[view.name][self._slots[number]]
        addresses[: len(blocks.addresses)] = blocks.addresses
        for sample in sorted(blocks.faults.keys() & {*samples.tolist()}):
            rows = self.starts[number] + shard.index.starts[sample : sample + 2]
            self._mark_lost(np.arange(*rows), blocks.faults[sample])

    def _try_open_shard(self, number: int) -> OpenShard | None:
        """Opens a shard; if it cannot be opened, marks all of its rows as lost and returns None."""
        try:
            return self._open_shard(number)
        except (ShardError, OSError) as error:
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                raise
            self._mark_lost(np.arange(*self.starts[number : number + 2]), str(error))
            return None

    def _mark_lost(self, rows: Rows, fault: str) -> None:
        if self.on_error == "raise":
            raise ShardError(fault)
        self.lost |= dict.fromkeys(rows.tolist(), fault)

    def _open_shard(self, number: int) -> OpenShard:
        """Returns an open shard; closes the least recently used one when too many are open."""
        if number not in self._open_shards:
            while len(self._open_shards) >= self.max_open_shards:
                closed_number, closed_shard = self._open_shards.popitem(last=False)
                for addresses in self._block_addresses.values():
                    addresses[self._slots[closed_number]] = 0
                self._slots[closed_number] = 0
                closed_shard.close()
            shard, index = self.shards[number], self.indexes[number]
            local = self.store.local(shard.file, shard.bytes, shard.sha256)
            self._open_shards[number] = OpenShard(local, self.store.where(shard.file), index)
            used = {*self._slots[[*self._open_shards]].tolist()}
            self._slots[number] = min({*range(1, self.max_open_shards + 1)} - used)
        self._open_shards.move_to_end(number)
        return self._open_shards[number]
