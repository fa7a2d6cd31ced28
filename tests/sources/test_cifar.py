"""The source `cifar`: both archives as they are, and what it says of a bad one."""

import gzip
import io
import os
import pickle
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base.errors import SourceError
from heron.cli.main import main
from heron.shards.build import build
from heron.shards.manifest import load_manifest
from heron.shards.show import contact_sheet
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.sources import make_source, zips
from tests.shards.tiny import whole
from tests.sources.pickles import Call, dumps2

Files = dict[str, bytes]
TEN = [b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship"]
TEN += [b"truck"]
ORDER = [4, 1, 5, 2, 3]  # of the batches in an archive: none
PIXELS = np.random.default_rng(0).integers(0, 256, (320, 3072)).astype(np.uint8)
DUMPS: list[Callable[[Any], bytes]] = [dumps2, partial(pickle.dumps, protocol=4)]


def batch(pixels: Any, **labels: Any) -> dict[bytes, Any]:
    names = [b"%d.png" % n for n in range(300)]
    found = {b"batch_label": b"a batch", b"data": pixels, b"filenames": names}
    return found | {name.encode(): label for name, label in labels.items()}


def ten(dumps: Callable[[Any], bytes] = dumps2) -> Files:
    """Five batches of four rows and a test batch of ten."""
    files = {
        f"data_batch_{n}": dumps(
            batch(PIXELS[4 * n - 4 : 4 * n], labels=[n % 10, 2 * n % 10, 3, 9])
        )
        for n in ORDER
    }
    meta = {b"num_cases_per_batch": 10_000, b"label_names": TEN, b"num_vis": 3072}
    files["batches.meta"] = dumps(meta)
    files["test_batch"] = dumps(batch(PIXELS[20:30], labels=list(range(10))))
    return files | {"readme.html": b"<html>"}


def hundred(
    dumps: Callable[[Any], bytes] = dumps2, changes: dict[bytes, Any] | None = None
) -> Files:
    """200 rows to train on, two a class, and 100 to test on; class n is in coarse class n % 20."""
    fine = np.arange(200) % 100
    train = batch(PIXELS[:200], fine_labels=fine.tolist(), coarse_labels=(fine % 20).tolist())
    test = batch(
        PIXELS[200:300], fine_labels=fine[:100].tolist(), coarse_labels=(fine[:100] % 20).tolist()
    )
    meta = {
        b"fine_label_names": [b"fine%d" % n for n in range(100)],
        b"coarse_label_names": [b"coarse%d" % n for n in range(20)],
    }
    return {
        "file.txt~": b"",
        "meta": dumps(meta),
        "test": dumps(test),
        "train": dumps(train | (changes or {})),
    }


def pack(path: Path, files: Files, folder: str = "cifar-python") -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        top = tarfile.TarInfo(folder)
        top.type = tarfile.DIRTYPE
        tar.addfile(top)
        for name, data in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def source(folder: Path, files: Files, **options: object) -> Source:
    return make_source("cifar", {"path": pack(folder / "cifar.tar.gz", files), **options})


def fault(source: Source, out: Path) -> str:
    with pytest.raises(SourceError) as raised:
        build(source, out, progress=False)
    return str(raised.value)


@pytest.mark.parametrize("dumps", DUMPS)
def test_ten_classes(tmp_path: Path, dumps: Callable[[Any], bytes]) -> None:
    ten_classes = source(tmp_path, ten(dumps))
    assert ten_classes.splits == {"train": 20, "test": 10} and ten_classes.dataset == "cifar-10"
    assert ten_classes.labels.kind == "multi_class"
    assert ten_classes.labels.names == [name.decode() for name in TEN]
    rows = whole(ten_classes, "train")
    assert rows.labels.tolist()[:8] == [1, 2, 3, 9, 2, 4, 3, 9]  # batches in order of their numbers
    image = np.asarray(rows.views["image"])
    assert image.dtype == np.uint8 and image.shape == (20, 32, 32, 3)
    for row, y, x, channel in [(0, 0, 0, 0), (3, 5, 31, 1), (19, 30, 2, 2)]:
        assert image[row, y, x, channel] == PIXELS[row, 1024 * channel + 32 * y + x]
    for start, stop in [(0, 4), (3, 13), (19, 20)]:
        part = ten_classes.read("train", start, stop)
        np.testing.assert_array_equal(part.views["image"], image[start:stop])
        np.testing.assert_array_equal(part.labels, rows.labels[start:stop])
    merged = source(tmp_path, ten(dumps), merge=True)
    assert merged.splits == {"all": 30}
    assert merged.read("all", 18, 22).labels.tolist() == [3, 9, 0, 1]


def test_animals_and_vehicles(tmp_path: Path) -> None:
    tree = source(tmp_path, ten(), label_kind="hierarchical")
    assert tree.labels.levels is not None and tree.labels.levels[0] == ["animal", "vehicle"]
    assert tree.labels.names[:3] == ["vehicle/airplane", "vehicle/automobile", "animal/bird"]
    vehicles = [0, 1, 8, 9]
    expected = [[int(number in vehicles), number] for number in range(10)]
    assert whole(tree, "test").labels.tolist() == expected


@pytest.mark.parametrize("dumps", DUMPS)
def test_a_hundred_classes_in_twenty(tmp_path: Path, dumps: Callable[[Any], bytes]) -> None:
    tree = source(tmp_path, hundred(dumps))
    assert tree.splits == {"train": 200, "test": 100} and tree.dataset == "cifar-100"
    assert tree.labels.levels is not None and len(tree.labels.levels[0]) == 20
    assert tree.labels.names[42] == "coarse2/fine42"
    labels = tree.read("train", 140, 144).labels
    assert labels.tolist() == [[0, 40], [1, 41], [2, 42], [3, 43]]
    flat = source(tmp_path, hundred(dumps), label_kind="multi_class")
    assert flat.labels.names[42] == "fine42"
    assert flat.read("test", 98, 100).labels.tolist() == [98, 99]


def test_built_verified_and_shown_from_the_command_line(tmp_path: Path) -> None:
    path, out = pack(tmp_path / "cifar-100-python.tar.gz", hundred()), tmp_path / "out"
    words = ["shards", "build", "cifar", "--path", str(path), "--out", str(out), "--quiet"]
    assert main([*words, "--merge", "true"]) == 0
    manifest = load_manifest(out)
    assert manifest.rows("all") == 300 and manifest.block_rows == 256
    assert manifest.members == ["image.npy", "labels.npy"]
    assert manifest.built_from.options["path"] == path.name
    assert verify(out).ok
    contact_sheet(out, tmp_path / "sheet.png", count=5)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ["batches.meta", "data_batch_3"])
def test_a_pickle_that_calls_something_is_not_executed(
    tmp_path: Path, protocol: int, name: str
) -> None:
    command = f"touch {tmp_path / 'executed'}"
    evil = pickle.dumps(Call(os.system, command), protocol)
    message = fault(source(tmp_path, ten() | {name: evil}), tmp_path / "out")
    assert not (tmp_path / "executed").exists()
    assert message == (
        f"cifar.tar.gz, {name}: a pickle with the global 'posix.system'; it may have lists, texts, "
        "numbers and arrays of bytes only; it was not executed; download it again from its "
        "publisher"
    )
    pickle.loads(evil)
    assert (tmp_path / "executed").exists()  # so it was a danger


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


BAD: list[tuple[Files, str]] = [
    ({"test_batch": b""}, "test_batch: a pickle cut short or damaged ("),
    ({"test_batch": cut(ten()["test_batch"])}, "test_batch: a pickle cut short or damaged ("),
    ({"test_batch": b"<html>quota"}, "test_batch: an HTML page (a download quota"),
    ({"test_batch": dumps2([])}, "test_batch has no 'data', only no dict; down"),
    (
        {"test_batch": dumps2(batch(PIXELS[:1], label=[1]))},
        "test_batch has no 'labels', only batch_label, data, filenames, label",
    ),
    (
        {"test_batch": dumps2(batch(PIXELS[:2, :99], labels=[1, 2]))},
        "test_batch: 'data' must be bytes [rows, 3072], of 32 × 32 pixels in three channels, got "
        "(2",
    ),
    ({"test_batch": dumps2(batch([1], labels=[1]))}, "'data' must be bytes [rows, 3072]"),
    (
        {"test_batch": dumps2(batch(PIXELS[:2].astype("f4"), labels=[1, 2]))},
        "test_batch: a pickle with an array of dtype b'f4'; it may have lists, texts, numbers",
    ),
    (
        {"test_batch": dumps2(batch(PIXELS[:3], labels=[1, 2]))},
        "test_batch: 'labels' must be a list of 3 numbers from 0 to 9, a label for each row of",
    ),
    (
        {"data_batch_2": dumps2(batch(PIXELS[:3], labels=[0, 10, 0]))},
        "data_batch_2: 'labels' must be a list of 3 numbers from 0 to 9",
    ),
    (
        {"data_batch_2": dumps2(batch(PIXELS[:1], labels=[-1]))},
        "'labels' must be a list of 1 numbers from 0 to 9",
    ),
    ({"data_batch_2": dumps2(batch(PIXELS[:1], labels=[b""]))}, "'labels' must be a list"),
    ({"batches.meta": dumps2({b"label_names": 3})}, "meta: 'label_names' is not a list of names"),
    ({"batches.meta": dumps2({b"label_names": [b"a"] * 10})}, "two labels have the name 'a'"),
    ({"batches.meta": dumps2({b"label_names": TEN[:9]})}, "download it aga"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_files(tmp_path: Path, changes: Files, message: str) -> None:
    found = fault(source(tmp_path, ten() | changes), tmp_path / "out")
    assert found.startswith("cifar.tar.gz") and message in found


def test_classes_that_make_no_tree(tmp_path: Path) -> None:
    torn = hundred(changes={b"coarse_labels": [n % 20 for n in range(199)] + [0]})
    message = "cifar.tar.gz: class 'fine99' is in 2 coarse classes, not in one; download"
    assert message in fault(source(tmp_path, torn), tmp_path / "out")
    assert source(tmp_path, torn, label_kind="multi_class").splits["train"] == 200
    lone = {name: hundred()[name] for name in ("meta", "train")}
    lone["test"] = lone["train"] = dumps2(batch(PIXELS[:1], fine_labels=[7], coarse_labels=[7]))
    message = "cifar.tar.gz: class 'fine0' is in 0 coarse classes"
    assert message in fault(source(tmp_path, lone), tmp_path / "out")
    other = ten() | {"batches.meta": dumps2({b"label_names": [*TEN[:9], b"unicorn"]})}
    tree = source(tmp_path, other, label_kind="hierarchical")
    assert "cifar.tar.gz: class 'unicorn' is neither animal nor" in fault(tree, tmp_path / "out")


def archive_fault(folder: Path, data: bytes) -> str:
    (folder / "cifar.tar.gz").write_bytes(data)
    return fault(make_source("cifar", {"path": folder / "cifar.tar.gz"}), folder / "out")


def test_bad_archives(tmp_path: Path) -> None:
    good = pack(tmp_path / "good.tar.gz", ten()).read_bytes()
    flipped = bytearray(good)
    flipped[-6] ^= 1  # of the checksum, behind all files
    plain = gzip.decompress(good)
    broken = "cifar.tar.gz is cut short, damaged or not an archive ("
    for data, message in [
        (good[: len(good) // 2], "damaged gzip (Compressed file ended before"),
        (good[:-100], "damaged gzip (Compressed file ended before"),
        (bytes(flipped), "damaged gzip (CRC check failed"),
        (b"", f"{broken}empty file"),
        (b"<!DOCTYPE html><html>quota exceeded</html>", broken),
        (gzip.compress(b"hello" * 500), f"{broken}invalid header"),
        (gzip.compress(plain[: len(plain) // 2]), f"{broken}unexpected end of data"),
    ]:
        found = archive_fault(tmp_path, data)
        assert message in found and found.endswith("download it again"), found


def test_archives_of_something_else(tmp_path: Path) -> None:
    files = ten()
    del files["data_batch_1"], files["test_batch"]
    message = "no data_batch_1, test_batch, so this is not the whole Python version of cifar-10"
    assert message in fault(source(tmp_path, files), tmp_path / "out")
    message = "cifar.tar.gz: no file of CIFAR; pass another --path: cifar-10-python.tar.gz or"
    assert message in fault(source(tmp_path, {"hello": b""}), tmp_path / "out")
    with pytest.raises(SourceError, match="path: path does not point to a file"):
        make_source("cifar", {"path": tmp_path / "nothing"})


def test_paths_in_an_archive_lead_nowhere(tmp_path: Path) -> None:
    (inside := tmp_path / "a" / "b").mkdir(parents=True)
    path = pack(inside / "cifar.tar.gz", ten(), folder="../../../..")
    assert make_source("cifar", {"path": path}).splits == {"train": 20, "test": 10}
    path = pack(inside / "cifar.tar.gz", ten(), folder="/etc")
    assert make_source("cifar", {"path": path}).splits == {"train": 20, "test": 10}
    assert [p.name for p in tmp_path.rglob("*")] == ["a", "b", "cifar.tar.gz"]
    twice = ten() | {"other/test_batch": ten()["test_batch"]}
    message = "cifar.tar.gz, test_batch occurs twice; download it again"
    assert fault(source(tmp_path, twice), tmp_path / "out") == message


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
def test_a_link_is_no_file(tmp_path: Path, kind: bytes) -> None:
    files = ten()
    del files["test_batch"]
    (folder := tmp_path / "c").mkdir()
    (folder / "x.tar").write_bytes(gzip.decompress(pack(tmp_path / "x", files).read_bytes()))
    with tarfile.open(folder / "x.tar", "a") as tar:
        info = tarfile.TarInfo("cifar-python/test_batch")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    found = archive_fault(tmp_path, gzip.compress((folder / "x.tar").read_bytes()))
    assert found.startswith("cifar.tar.gz: no test_batch, so this is not the whole")


@pytest.mark.parametrize("member", ["test_batch", "readme.html", "name"])
def test_a_bomb_is_not_set_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    monkeypatch.setattr(zips, "MAX_UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(zips, "MAX_UNPACKED_RATIO", 2)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        info = tarfile.TarInfo("x" * (4 << 20) if member == "name" else member)
        info.size = 4 << 20
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    found = archive_fault(tmp_path, gzip.compress(stream.getvalue()))
    assert found.startswith("cifar.tar.gz unpacks to more than 1,048,576 bytes, the limit")


def test_a_sparse_file_is_not_filled_with_zeros(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo("test_batch")
        info.pax_headers = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.name": "test_batch",
            "GNU.sparse.size": str(1 << 50),
            "GNU.sparse.map": f"{(1 << 50) - 1},1",
        }
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    found = archive_fault(tmp_path, gzip.compress(stream.getvalue()))
    assert "damaged or not an archive (a sparse file)" in found
