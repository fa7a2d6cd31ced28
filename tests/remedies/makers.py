"""Commands that are refused, each with what its error proposes; and files that they read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from scipy.io import savemat

from heron.cli.main import main
from tests.graphs import write_tu
from tests.shards.others import cats, jpeg, write_wds

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 3)).astype(np.float32)
CLASSES = np.arange(40) % 3
NUMBERS = [f"{n}.5,{n + 2}.25,{'abc'[n % 3]}" for n in range(40)]
MANY = [f"w{n},{n}.5,{'abc'[n % 3]}" for n in range(1200)]
MEAN = ("--missing", "mean")
BUILD_FRAMES = ("shards", "build", "frames", "--train", 300, "--test", 0)
FIELD = ("--label", "json:t")
CATS = ("--image", "jpg", "--label", "cls")
WITH_TEXTS = [
    {"__key__": f"{n:04}", "jpg": jpeg(n), "txt": f"a cat, number {n}"} for n in range(300)
]


class Case(NamedTuple):
    """A command that is refused, and what its error says to add, or to put in its place."""

    said: str  # of the message as the source has it, without its values
    make: Callable[[Path], Sequence[Any]]  # writes files, and returns the words of the command
    more: Sequence[Any]  # words that are added
    without: Sequence[Any] = ()  # words that are left out
    given: Sequence[Any] = ()  # a command that comes before
    before: Sequence[Any] = ()  # a command that the error says to run, before the other words


def call(words: Sequence[Any]) -> int:
    try:
        return main([str(word) for word in words])
    except SystemExit as fault:  # of words that the parser refuses
        return int(fault.code or 0)


def rows(*lines: Any) -> str:
    return "".join(f"{line}\n" for line in lines)


def table(text: str, *words: Any) -> Callable[[Path], Sequence[Any]]:
    def make(folder: Path) -> Sequence[Any]:
        (folder / "t.csv").write_text(text)
        return ["shards", "build", "table", "--csv", folder / "t.csv", *words]

    return make


def arrays(*words: Any, **values: Any) -> Callable[[Path], Sequence[Any]]:
    def make(folder: Path) -> Sequence[Any]:
        np.savez(folder / "a.npz", **values)
        return ["shards", "build", "arrays", "--npz", folder / "a.npz", *words]

    return make


def mat(*words: Any, **values: Any) -> Callable[[Path], Sequence[Any]]:
    def make(folder: Path) -> Sequence[Any]:
        savemat(folder / "m.mat", values)
        return ["shards", "build", "mat", "--mat", folder / "m.mat", *words]

    return make


def parquet(*words: Any, **columns: Any) -> Callable[[Path], Sequence[Any]]:
    def make(folder: Path) -> Sequence[Any]:
        pyarrow.parquet.write_table(pa.table(columns), folder / "p.parquet")
        return ["shards", "build", "parquet", "--data", folder / "p.parquet", *words]

    return make


def pictures(*places: str, words: Sequence[Any] = ()) -> Callable[[Path], Sequence[Any]]:
    def make(folder: Path) -> Sequence[Any]:
        for number, place in enumerate(places):
            (folder / "tree" / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / "tree" / place).write_bytes(jpeg(number))
        return ["shards", "build", "folder", "--folder", folder / "tree", *words]

    return make


def tar(samples: Sequence[Any], *words: Any) -> Callable[[Path], Sequence[Any]]:
    def make(folder: Path) -> Sequence[Any]:
        (folder / "tars").mkdir()
        write_wds(folder / "tars" / "all.tar", samples)
        return ["shards", "index", folder / "tars", *words]

    return make


def indexed(*words: Any) -> Callable[[Path], Sequence[Any]]:
    """Words on tars that are indexed."""

    def make(folder: Path) -> Sequence[Any]:
        assert call(tar(cats(0, 3), *CATS)(folder)) == 0
        return [folder / "tars" if word == "TARS" else word for word in words]

    return make


def strays(*words: Any) -> Callable[[Path], Sequence[Any]]:
    def make(folder: Path) -> Sequence[Any]:
        (folder / "strays").mkdir()
        (folder / "strays" / "photos.tar").write_bytes(b"")
        return words

    return make


def attributed(folder: Path) -> Path:
    graphs = write_tu(folder / "rings")
    (graphs / "rings_node_attributes.txt").write_text("1\n")
    return graphs


def other_table(folder: Path) -> Path:
    (folder / "u.csv").write_text(rows("1.25,2.5", "3.25,0.5"))
    return folder / "u.csv"


def frames_in(folder: Path) -> Path:
    assert call([*BUILD_FRAMES, "--quiet", "--out", folder / "frames"]) == 0
    return folder / "frames"


def cell_of(*values: Any) -> Any:
    cell = np.empty((1, len(values)), object)
    cell[0, :] = values
    return cell


def faces(*words: Any) -> Callable[[Path], Sequence[Any]]:
    def make(folder: Path) -> Sequence[Any]:
        build = ["shards", "build", "faces", "--train", 8, "--test", 4, "--size", 32, "--quiet"]
        assert call([*build, "--out", folder / "faces"]) == 0
        return [folder / "faces" if word == "FACES" else word for word in words]

    return make


def also(folder: Path, name: str, first: int = 0) -> Sequence[Any]:
    write_wds(folder / "tars" / name, cats(first, 3))
    return []
