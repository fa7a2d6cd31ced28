"""What a build puts behind a URL: shards that are whole, each with a record; the manifest is last.

A shard is written to a temporary folder of the machine that makes it. Its index and its tar are put
and read back, and only then its record: a shard without one is not there, whatever else is.
"""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Literal, Self

import numpy as np

from heron.base.artefact import Artefact, Count, Fingerprint
from heron.base.errors import ShardError
from heron.shards.manifest import Shard, index_name
from heron.shards.remote import Missing
from heron.shards.source import Source
from heron.shards.store import RemoteStore, open_store
from heron.shards.write_shard import BlockMoments, Made, ShardPlan, make_shard

RECORD = ".made.json"  # ends the name of a shard's record, until the manifest is there


class ShardRecord(Artefact):
    """A shard that lies behind a URL, whole, and what the manifest says of its rows."""

    description: ClassVar[str] = "the record of a shard of an unfinished build"
    remedy: ClassVar[str] = "remove it, and run the same build again"
    versions: ClassVar[tuple[int, ...]] = (1,)

    format: Literal[1] = 1
    made_from: Fingerprint  # of what was built: the source, its options, its files
    shard: Shard
    blocks: dict[Count, list[tuple[Count, list[float], list[float]]]]  # rows, mean, squares
    words: dict[str, dict[str, Count]]

    @classmethod
    def of(cls, made: Made, made_from: str) -> Self:
        """Returns the record of a shard of a build."""
        blocks = {
            column: [(b.rows, b.mean.tolist(), b.squares.tolist()) for b in some]
            for column, some in made.blocks.items()
        }
        words = {name: dict(counts) for name, counts in made.words.items()}
        return cls(made_from=made_from, shard=made.shard, blocks=blocks, words=words)

    def made(self) -> Made:
        """Returns what was recorded, to the last digit."""
        blocks = {
            column: [BlockMoments(rows, np.array(m), np.array(s)) for rows, m, s in some]
            for column, some in self.blocks.items()
        }
        return Made(
            self.shard, blocks, {name: Counter(words) for name, words in self.words.items()}
        )


def open_folder(url: str, overwrite: bool = False) -> RemoteStore:
    """Opens the folder at a URL; ShardError where it cannot be written to as asked."""
    store = open_store(url)
    assert isinstance(store, RemoteStore)
    if overwrite:
        raise ShardError(
            f"{store}: --overwrite moves a folder aside, which object stores cannot do; "
            "choose another --out, or remove what is there"
        )
    if url.startswith(("http://", "https://")):
        raise ShardError(
            f"{store}: files cannot be put by HTTP; choose another --out: a folder, or a URL "
            "that can be written to, such as s3://bucket/folder"
        )
    return store


def record_name(tar: str) -> str:
    """Returns the name of a shard's record: `train-000000.made.json`."""
    return tar.removesuffix(".tar") + RECORD


def put_shard(source: Source, store: RemoteStore, made_from: str, shard: ShardPlan) -> Made:
    """Makes a shard and puts it, unless its record of the same build is there.

    Others may be putting the same shard: the bytes are the same.
    """
    name = record_name(shard.file)
    try:
        record = ShardRecord.parse(store.read_bytes(name), store.where(name))
        if record.made_from == made_from:
            return record.made()
    except Missing:
        pass
    with TemporaryDirectory(prefix="heron-") as temporary:
        local = Path(temporary)
        made = make_shard(source, local, shard)
        store.put(local / index_name(shard.file))
        store.put(local / shard.file)
        ShardRecord.of(made, made_from).write(local / name)
        store.put(local / name)
    return made
