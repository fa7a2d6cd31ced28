"""The picture of a sample, out of its shards."""

import os
from io import BytesIO
from typing import Self

import numpy as np
from PIL import Image

from heron.pipeline.config.errors import CheckpointError, ConfigError, RetrievalError
from heron.pipeline.config.experiment import load_config
from heron.pipeline.data.pictures import PILLOWS
from heron.pipeline.data.reader import Reader
from heron.pipeline.retrieval.given import BOMB
from heron.pipeline.retrieval.samples import Samples
from heron.pipeline.training.pretrained import locate
from heron.shards.cache import ShardCache
from heron.shards.show import DRAWN
from heron.shards.store import open_store


class Pictures:
    """The pictures of samples, out of the shards that they were embedded from."""

    def __init__(self, reader: Reader) -> None:
        """Take the first view of pictures in 1 or 3 channels, if there is one."""
        self.reader = reader
        views = reader.manifest.views
        drawn = [v for v in views if v.kind == "image" and v.shape[2] in DRAWN]
        self.view = drawn[0] if drawn else None

    @classmethod
    def open(cls, data: str, run: str) -> Self:
        """Open shards.

        Args:
            data: a folder, or a URL.
            run: whose configuration says how a URL is read; a folder needs none.

        Raises:
            ShardError: they are missing or damaged.
        """
        if "://" not in data:
            return cls(Reader(data))
        try:
            known = load_config(locate(run) / "config.yaml").data
        except (CheckpointError, ConfigError):
            return cls(Reader(data))
        cache = ShardCache(known.cache.dir, known.cache.bytes)
        return cls(Reader(open_store(data, cache, known.storage_options)))

    def of(self, samples: Samples, number: int) -> Image.Image | None:
        """The picture of a sample, RGB, of its stored size; None where there are only vectors.

        Raises:
            RetrievalError: the shards hold another sample there, or no picture.
            ShardError: a shard is missing or damaged.
        """
        row, key, reader = int(samples.rows[number]), samples.key(number), self.reader
        found = reader.key(row) if 0 <= row < reader.starts[-1] else "no sample"
        if found != key:
            raise RetrievalError(
                f"row {row:,} of {reader.store} is '{found}'; expected '{key}', as the index has "
                "it; give the shards that were embedded (--data)"
            )
        if self.view is None:
            return None
        if reader.manifest.block_rows is not None:
            pixels = reader.read(self.view.name, np.array([row]))[0]
            return Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).convert(
                "RGB"
            )
        where = f"{reader.store} sample '{key}': view '{self.view.name}'"
        try:  # as it is stored: the training's reader would turn no picture by its EXIF either
            with Image.open(BytesIO(self._bytes(row)), formats=["JPEG", "PNG"]) as image:
                return image.convert("RGB")
        except (ValueError, BOMB, *PILLOWS) as fault:
            raise RetrievalError(
                f"{where} is damaged ({fault}); expected a JPEG or a PNG; run `heron shards verify`"
            ) from None

    def _bytes(self, row: int) -> bytes:
        """The file of a sample's picture, as it is in its tar."""
        reader = self.reader
        assert self.view is not None
        shard = int(np.searchsorted(reader.starts, row, side="right")) - 1
        known, index = reader.shards[shard], reader.indexes[shard]
        at = row - int(reader.starts[shard]), reader.manifest.views.index(self.view)
        with (
            reader.store.local(known.file, known.bytes, known.sha256) as held,
            held.path.open("rb", buffering=0) as stream,
        ):
            return os.pread(stream.fileno(), int(index.lengths[at]), int(index.offsets[at]))
