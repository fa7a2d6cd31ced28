"""The bytes of shards are fixed: what an earlier version wrote, a later one writes."""

import hashlib
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from heron.shards.build import build
from heron.shards.index import ShardIndex
from heron.shards.manifest import Labels, View, index_name
from heron.sources import Rows, Source


class Fixed(Source):
    """Rows that are counted, not drawn, so that no machine rounds them otherwise."""

    name: ClassVar[str] = "fixed"
    block_rows: ClassVar[int | None] = 4
    key: str = "{:06d}"

    @property
    def views(self) -> list[View]:
        return [
            View(name="view1", kind="vector", shape=(3,), dtype="float32"),
            View(name="pixels", kind="image", shape=(2, 2, 1), dtype="uint8"),
        ]

    @property
    def labels(self) -> Labels:
        return Labels(kind="multi_class", names=["a", "b", "c"])

    @property
    def splits(self) -> dict[str, int]:
        return {"train": 10, "test": 3}

    def read(self, split: str, start: int, stop: int) -> Rows:
        rows = np.arange(start, stop)
        vectors = (rows[:, None] + np.array([0, 0.5, 1000])).astype(np.float32)
        pixels = (rows[:, None, None, None] + np.zeros((1, 2, 2, 1))).astype(np.uint8)
        return Rows({"view1": vectors, "pixels": pixels}, rows % 3)


class Pictures(Fixed):
    """The same as a tar sample a row; its files grow past a block of a tar."""

    name: ClassVar[str] = "pictures"
    block_rows: ClassVar[int | None] = None

    @property
    def views(self) -> list[View]:
        shape = (2, 2, 3)
        return [View(name=n, kind="image", shape=shape, dtype="uint8") for n in ("z", "left")]

    def read(self, split: str, start: int, stop: int) -> Rows:
        rows = range(start, stop)
        pictures: list[bytes] = [bytes([row]) * (row * 200) for row in rows]
        keys = [self.key.format(row) for row in rows]
        return Rows({"z": pictures, "left": pictures[::-1]}, np.array(rows) % 3, keys)


DIGESTS = {
    "fixed": {
        "test-000000.tar": "78fb0e1efbc362a2582dcf59692d9ee94b806e358b53465fcaec6ab4011abb30",
        "train-000000.tar": "342459b17182b6aeb4a9250acc6a33df724dfa3602f81183a9e4c970fc1242cf",
        "train-000001.tar": "05cc6d349459ceb6f08c0d119932365fbaa808485e2799b68f94b9760c650833",
    },
    "pictures": {
        "test-000000.tar": "4d51bff2de3887326a25cc9593d992ce2a12e860f693e1c2e7bfb293f4aa5179",
        "train-000000.tar": "3a00b129528dd93487110c17c580ed05b2548bf65baa13d6395907740621b670",
        "train-000001.tar": "5bd252cd6f3085e3cacf87c4cdcbcb92b8b1fec674108e6bf165a2652c60fabb",
    },
}


@pytest.mark.parametrize("source", [Fixed, Pictures])
def test_the_bytes_of_shards(source: type[Source], tmp_path: Path) -> None:
    build(source.model_validate({}), tmp_path, shard_rows=8, progress=False)
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tmp_path.glob("*.tar"))
    }
    assert found == DIGESTS[source.name]
    for tar in tmp_path.glob("*.tar"):
        index, data = ShardIndex.read(tmp_path / index_name(tar.name)), tar.read_bytes()
        places = zip(index.offsets.flat, index.lengths.flat, index.crc32.flat, strict=True)
        assert all(crc == zlib.crc32(data[at : at + size]) for at, size, crc in places)


def test_a_key_that_no_tar_can_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name is too long"):
        build(Pictures.model_validate({"key": "k" * 99 + "{}"}), tmp_path, progress=False)
    assert not list(tmp_path.glob("*.tar"))
