"""The pictures, texts and numbers of a sample, out of its shards."""

import os
from collections.abc import Collection
from contextlib import suppress
from typing import Self

import numpy as np
from PIL import Image

from heron.base.errors import CheckpointError, ConfigError, RetrievalError
from heron.data.reader import Reader
from heron.experiment.config import load_saved
from heron.retrieval.embedding_model import refuse_options
from heron.retrieval.samples import Samples
from heron.shards.cache import ShardCache
from heron.shards.manifest import View
from heron.shards.picture import pixels
from heron.shards.show import DRAWABLE_CHANNELS
from heron.shards.store import is_remote, open_store
from heron.shards.texts import read_text
from heron.training.pretrained import locate

MAX_VIEWS, MAX_NUMBERS, MAX_CHARACTERS = 8, 64, 300  # of a sample's values that are shown


class SamplePictures:
    """The pictures of samples, out of the shards that they were embedded from."""

    def __init__(self, reader: Reader) -> None:
        """Takes the views of pictures in 1 or 3 channels, and those of texts and of numbers."""
        self.reader = reader
        self.others = [view for view in reader.manifest.views if view.kind in ("text", "vector")]
        self.views = {
            view.name: view
            for view in reader.manifest.views
            if view.kind == "image" and view.shape[2] in DRAWABLE_CHANNELS
        }

    @classmethod
    def open(cls, data: str, run: str, trusted: bool = True, trust_code: bool = False) -> Self:
        """Opens shards: a folder, or a URL, which is read as the run's configuration says.

        `trusted` says that the user gave the run, and so its `data.storage_options`, which may lead
        to other addresses; a RetrievalError is raised if an address needs those of a run that is
        not trusted, and a ShardError if the shards are missing or damaged. `trust_code`: see
        `load_saved`.
        """
        if is_remote(data):
            try:
                config = load_saved(locate(run), ["model={}"], trust_code).data
                refuse_options(config.model_copy(update={"path": data}), trusted)
                cache = ShardCache(config.cache.dir, config.cache.bytes)
                return cls(Reader(open_store(data, cache, config.storage_options)))
            except (CheckpointError, ConfigError):
                pass  # there is no such run: try the defaults
        return cls(Reader(data))

    def of(self, samples: Samples, number: int, name: str = "") -> Image.Image | None:
        """Returns a sample's picture of a view, by default the first; None if it has none.

        It is RGB, in its stored size. Raises a RetrievalError if the shards hold another sample
        there, or no picture, and a ShardError if a shard is missing or damaged.
        """
        view = self.views.get(name or next(iter(self.views), ""))
        if name and view is None:
            names = ", ".join(self.views)
            remedy = f"use one of {names}" if names else "the samples have no pictures"
            raise RetrievalError(f"no picture view named '{name}'; {remedy}")
        row, key, reader = self._row(samples, number), samples.key(number), self.reader
        if view is None or not reader.present(np.array([row]), [view.name]).all():
            return None
        if reader.manifest.block_rows is not None:
            raw = reader.read(view.name, np.array([row]))[0]
            return Image.fromarray(raw[..., 0] if raw.shape[2] == 1 else raw).convert("RGB")
        try:
            return Image.fromarray(pixels(self._bytes(view, row)))
        except ValueError as fault:
            raise RetrievalError(
                f"{reader.store} sample '{key}': view '{view.name}' is damaged ({fault}); run "
                "`heron shards verify`"
            ) from None

    def values(
        self, samples: Samples, number: int, names: Collection[str] = ()
    ) -> dict[str, str | list[float]]:
        """Returns a sample's texts and first numbers by view, cut to be shown; without absent ones.

        `names` are of the views, by default of all. Raises as `of` does.
        """
        row, values = self._row(samples, number), dict[str, str | list[float]]()
        for view in [view for view in self.others if not names or view.name in names][:MAX_VIEWS]:
            if not self.reader.present(np.array([row]), [view.name]).all():
                continue
            if view.kind == "vector":
                numbers = self.reader.read(view.name, np.array([row]))[0].reshape(-1)
                values[view.name] = np.nan_to_num(numbers[:MAX_NUMBERS]).tolist()
                continue
            with suppress(ValueError):  # no text: `heron shards verify` says so
                values[view.name] = read_text(self._bytes(view, row), view.field)[:MAX_CHARACTERS]
        return values

    def _row(self, samples: Samples, number: int) -> int:
        """Returns the row of a sample; a RetrievalError if the shards hold another one there."""
        row, key, reader = int(samples.rows[number]), samples.key(number), self.reader
        stored_key = reader.sample_key(row) if 0 <= row < reader.starts[-1] else "no sample"
        if stored_key != key:
            raise RetrievalError(
                f"row {row:,} of {reader.store} is '{stored_key}', but '{key}' in the index; pass "
                "the shards that were embedded with --data"
            )
        return row

    def _bytes(self, view: View, row: int) -> bytes:
        """Returns the bytes of a sample's picture file, as stored in its tar."""
        reader = self.reader
        shard = int(np.searchsorted(reader.starts, row, side="right")) - 1
        record, index = reader.shards[shard], reader.indexes[shard]
        member = row - int(reader.starts[shard]), reader.manifest.views.index(view)
        with (
            reader.store.local(record.file, record.bytes, record.sha256) as local,
            local.path.open("rb", buffering=0) as stream,
        ):
            return os.pread(stream.fileno(), int(index.lengths[member]), int(index.offsets[member]))
