"""Builds the data set of a run if it is missing, opens it, and assigns roles to its rows."""

import os
from collections.abc import Sequence
from pathlib import Path

from heron.base.errors import ConfigError, ShardError
from heron.data.batches import worker_count
from heron.data.decoders import decoder_for_views
from heron.data.options import Data
from heron.data.plan import MAX_STREAMS, default_streams
from heron.data.protocol import assign, drop_partial, hide_labels, hide_views, read_roles
from heron.data.reader import MAX_OPEN_SHARDS, Reader
from heron.data.rows import Roles
from heron.shards.build import build
from heron.shards.cache import ShardCache
from heron.shards.manifest import View
from heron.shards.mixture import MixedStore
from heron.shards.store import Store, is_remote, open_store
from heron.sources import make_source


def build_data(data: Data, progress: bool = True) -> None:
    """Builds the data set of `data.build` unless it exists."""
    if data.build is not None:
        options = dict(data.build)
        source = options.pop("source", None)
        if not isinstance(source, str):
            raise ConfigError("data.build has no 'source'; add one, e.g. source: faces")
        if "://" in data.path:
            raise ConfigError(
                f"data.build builds into a folder, but data.path is {data.path}; build there "
                "first, copy the folder, and remove data.build"
            )
        build(make_source(source, options), Path(data.path), progress=progress)


def open_reader(data: Data, known: Sequence[View] = ()) -> Reader:
    """Opens the shards, with decoders that give pictures at the size that the views need.

    `known`: see `Reader`. Raises ConfigError if a stored view is missing or does not fit its
    options, or no data set is named; ShardError if the data set is missing or damaged.
    """
    if not all(data.paths):
        raise ConfigError(
            "the run trained on tars without an index (data.webdataset) and names no data set; "
            "pass one with the same members: data.path=FOLDER"
        )
    cache = ShardCache(data.cache.dir, data.cache.bytes)
    store: Store = open_store(data.paths[0], cache, data.storage_options)
    if data.sources is not None:
        stores = [open_store(source.path, cache, data.storage_options) for source in data.sources]
        store = MixedStore(stores, [source.weight for source in data.sources])
    reader = Reader(store, data.on_error, known=known)
    if data.fingerprint not in (None, fingerprint := reader.manifest.fingerprint):
        raise ShardError(
            f"{store} has the fingerprint {fingerprint}, but data.fingerprint pins "
            f"{data.fingerprint}; restore that data set, or pin this one"
        )
    if any(is_remote(path) for path in data.paths):
        reader.max_open_shards = _max_open_shards(reader, data, cache.limit)
    prepare_decoders(reader, data)
    if data.protocol.hide_views:
        hide_views(reader, data.protocol.hide_views, data.protocol)
    return reader


def load_or_assign_roles(reader: Reader, data: Data) -> Roles:
    """Returns the roles of a run's rows, and hides labels in the reader as the protocol says.

    Raises the errors of `read_roles`, or of `assign` and `drop_partial`.
    """
    if data.roles is not None:
        return read_roles(reader, data, Path(data.roles))
    roles = assign(reader, data.split, data.protocol)
    if data.protocol.hide_labels:
        hide_labels(reader, roles.labelled, data.protocol)
    stored = list(dict.fromkeys(view.stored for view in data.views))
    return drop_partial(reader, roles, stored, data.protocol)


def prepare_decoders(reader: Reader, data: Data) -> None:
    """Makes a reader decode pictures at the size that the views need; errors: `open_reader`."""
    for name in dict.fromkeys(view.stored for view in data.views):
        reader.decoders[name] = decoder_for_views(reader.manifest, reader.view(name), data)
    if data.decode_size is not None and not any(
        decoder.varying for decoder in reader.decoders.values()
    ):
        raise ConfigError(
            f"data.decode_size is {data.decode_size}, but no view has pictures of several sizes"
        )


def _max_open_shards(reader: Reader, data: Data, limit: int) -> int:
    """Returns how many cached shards a process may keep open: half of the cache must stay free."""
    largest = max(shard.bytes for shard in reader.shards)
    total = sum(shard.bytes for shard in reader.shards)
    batch_sizes = data.batch.labelled, data.batch.unlabelled
    default_count = sum(
        MAX_STREAMS if rows == "all" else default_streams(rows) for rows in batch_sizes if rows
    )
    streams = data.canonical_streams or default_count
    needed = min(total, 2 * streams * largest)
    if limit < needed:
        raise ConfigError(
            f"data.cache.bytes must be {needed:,} or more, because up to {2 * streams} shards of "
            f"{largest:,} bytes are read at a time by {streams} canonical streams; got {limit:,}: "
            "raise it, or lower data.canonical_streams"
        )
    if total <= limit:
        return MAX_OPEN_SHARDS
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * (worker_count(data) + 1)
    return max(1, min(MAX_OPEN_SHARDS, limit // (2 * processes * largest)))
