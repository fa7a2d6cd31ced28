"""Small sources and folders for the tests of shards."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from heron.shards.index import ShardIndex
from heron.shards.source import Rows, Source
from heron.sources import make_source

ARFF = """@relation tiny
% a comment
@attribute height numeric
@attribute 'arm span' real
@attribute calm {0,1}
@attribute keen {0,1}

@data
1.5,2,0,1
-1,0.25,1,1

{0 4, 2 1}
"""
XML = """<?xml version="1.0" encoding="utf-8"?>
<labels xmlns="http://mulan.sourceforge.net/labels">
<label name="calm"></label><label name="keen"></label>
</labels>"""


def arrays_source(folder: Path, rows: int = 40, **options: object) -> Source:
    random = np.random.default_rng(0)
    path = folder / "tiny.npz"
    np.savez(
        path,
        view1=random.normal(2, 3, (rows, 5)).astype("f4"),
        view2=random.normal(size=(rows, 3)),
        labels=random.integers(0, 4, rows),
        split=np.array(["train"] * (rows - 8) + ["test"] * 8),
    )
    return make_source("arrays", {"npz": path, **options})


def mulan_options(
    folder: Path, arff: str = ARFF, xml: str = XML, name: str = "tiny"
) -> dict[str, object]:
    (folder / f"{name}.arff").write_bytes(arff.encode(errors="surrogateescape"))
    (folder / "tiny.xml").write_text(xml)
    return {"arff": [folder / f"{name}.arff"], "xml": folder / "tiny.xml"}


def whole(source: Source, split: str) -> Rows:
    return source.read(split, 0, source.splits[split])


def bomb() -> bytes:
    """A PNG of a few bytes that says that it has four billion pixels."""
    header = b"IHDR" + (1 << 16).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + zlib.crc32(header).to_bytes(4, "big")


def arrays_of(index: ShardIndex) -> dict[str, Any]:
    """What an index is written as."""
    return {name: array for name, array in vars(index).items() if array is not None}
