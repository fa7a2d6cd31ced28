"""Verify names every fault, its file and its sample."""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from heron.base.errors import ShardError
from heron.cli.main import main
from heron.shards.build import build
from heron.shards.index import ShardIndex
from heron.shards.show import contact_sheet
from heron.shards.verify import verify
from heron.shards.write_shard import npy
from heron.sources import make_source
from tests.sealed import seal
from tests.shards.tiny import arrays_of, arrays_source, bomb


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(arrays_source(tmp_path, 600), tmp_path / "v", shard_rows=512, progress=False)
    return tmp_path / "v"


def faults(folder: Path) -> str:
    report = verify(folder)
    assert not report.ok
    return "\n".join(report.faults)


def test_a_good_folder(folder: Path) -> None:
    report = verify(folder)
    assert report.ok and report.rows == 600
    assert str(report).startswith(
        "3 shards, 600 rows"
    ) and "everything is as the manifest says" in str(report)


def test_altered_cut_missing_and_extra_files_all_at_once(folder: Path) -> None:
    data = bytearray((folder / "train-000000.tar").read_bytes())
    data[-12000] ^= 1
    (folder / "train-000000.tar").write_bytes(data)
    data = bytearray((folder / "train-000001.tar").read_bytes())
    (folder / "train-000001.tar").write_bytes(data[:1500])
    (folder / "test-000000.index.npz").unlink()
    (folder / "stray-000000.tar").write_bytes(b"")
    found = faults(folder)
    assert "train-000000.tar: altered: its sha256 is" in found
    assert "train-000001.tar: 1,500 bytes instead of" in found
    assert "train-000001.tar is cut inside 'train-000002.view1.npy' (" in found
    assert "test-000000.index.npz: missing" in found
    assert "stray-000000.tar: extra" in found
    (folder / "test-000000.tar").unlink()
    assert "test-000000.tar: missing, but the manifest lists it" in faults(folder)


def rewrite(folder: Path, change: Callable[[list[tuple[str, bytes]]], None]) -> None:
    """Change the members of the first shard, and its checksum in the manifest with them."""
    path = folder / "train-000000.tar"
    with tarfile.open(path) as tar:
        members = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    change(members)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, BytesIO(payload))
    reseal(folder)


def reseal(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    shard = manifest["splits"]["train"][0]
    for key, name in (("", shard["file"]), ("index_", "train-000000.index.npz")):
        shard[f"{key}sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        shard[f"{key}bytes"] = (folder / name).stat().st_size
    seal(folder / "manifest.json", splits=manifest["splits"])


def nan_block() -> bytes:
    block = np.zeros((256, 5), "f4")
    block[7, 2] = np.nan
    return npy(block)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.extend(m[:3]),
            "train-000000.tar has 'train-000000.view2.npy' twice",
        ),
        (
            lambda m: m.insert(1, m[0]),
            "train-000000.tar has 'train-000000.view1.npy' twice",
        ),
        (
            lambda m: m.pop(1),
            "sample train-000000: no file 'train-000000.view2.npy' at byte 6656, as its index",
        ),
        (
            lambda m: m.append(("../x.npy", b"")),
            " has '../x.npy' (byte 26624), a path out of its",
        ),
        (
            lambda m: m.append(("x.pkl", b"")),
            "train-000000.tar has 'x.pkl', which its index does not list",
        ),
        (lambda m: m.append(("x", b"")), "has 'x', which its index does not list"),
        (lambda m: m.append(("x.npy", b"")), "has 'x.npy', which its index does not list"),
        (
            lambda m: m.__setitem__(0, (m[0][0], nan_block())),
            "sample train-000000: view 'view1', row 7 of the block, has NaN or infinite values",
        ),
        (
            lambda m: m.__setitem__(1, (m[1][0], npy(np.zeros((256, 4), "f4")))),
            "view 'view2' is float32 (256, 4), not float32 (256, 3)",
        ),
        (
            lambda m: m.__setitem__(2, (m[2][0], npy(np.zeros(256, "i8")))),
            "sample train-000000: its labels differ from those of the index",
        ),
        (
            lambda m: m.__setitem__(1, (m[1][0], b"hello")),
            "member 'view2.npy' ",
        ),
    ],
)
def test_what_checksums_cannot_find(
    folder: Path, change: Callable[[list[tuple[str, bytes]]], None], message: str
) -> None:
    rewrite(folder, change)
    assert message in faults(folder)


def test_damaged_tars(folder: Path) -> None:
    path = folder / "train-000000.tar"
    good = path.read_bytes()
    for data, message in [
        (good[:5000], "is cut inside 'train-000000.view1.npy' (5,248 bytes, of which"),
        (
            good[: good.rindex(b"train-000001.labels.npy")],
            "has no end mark: it is cut short, or unfinished",
        ),
        (b"<html>" + good[6:], "is not a tar (it begins with b'<html>000000.vie"),
        (b"", "is empty (0 bytes)"),
    ]:
        path.write_bytes(data)
        assert f"train-000000.tar {message}" in faults(folder)


def test_labels_and_counts_of_the_index(folder: Path) -> None:
    path = folder / "train-000000.index.npz"
    index = ShardIndex.read(path)
    np.savez(path, **{**arrays_of(index), "labels": index.labels + 3})
    reseal(folder)
    assert "index.npz: labels must be 0 to 3, got " in faults(folder)
    np.savez(path, **{**arrays_of(index), "offsets": index.offsets + 512})
    reseal(folder)
    assert ": 'train-000000.view1.npy' is not where its index says" in faults(folder)
    shutil.copy(folder / "train-000001.index.npz", path)
    reseal(folder)
    assert "train-000000.index.npz: 80 rows instead of 512" in faults(folder)


def test_a_member_that_is_larger_than_its_index_says(folder: Path) -> None:
    def change(members: list[tuple[str, bytes]]) -> None:
        members[0] = (members[0][0], members[0][1] + bytes(600))

    rewrite(folder, change)
    found = faults(folder)
    assert "train-000000: 'train-000000.view1.npy' is not where its index says" in found
    assert "member 'view1.npy' was altered: its crc32 differs" in found
    assert "an array of float32 (256, 5) at byte 0 is too short or too long" in found


def test_a_bomb_is_not_set_off(tmp_path: Path) -> None:
    build(make_source("faces", {"train": 2, "test": 0, "size": 32}), tmp_path, progress=False)
    rewrite(tmp_path, lambda members: members.__setitem__(0, (members[0][0], bomb())))
    found = faults(tmp_path)
    assert (
        "sample 000001: member 'jpg' must have 1 to 134,217,728 pixels, got 65536 × 65536" in found
    )


def test_a_picture_that_is_cut_or_damaged_behind_its_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(make_source("faces", {"train": 4, "test": 0, "size": 64}), tmp_path, progress=False)

    def change(members: list[tuple[str, bytes]]) -> None:
        (name, first), (other, second) = members[0], members[2]
        members[0] = (name, first[: len(first) // 2])
        half = len(second) // 2  # noise in the coded pixels, and whole markers
        members[2] = (other, second[:half] + bytes(range(1, 200)) + second[half + 199 :])

    assert main(["shards", "verify", str(tmp_path), "--decode"]) == 0
    rewrite(tmp_path, change)
    assert main(["shards", "verify", str(tmp_path)]) == 1
    found = capsys.readouterr().err
    assert (
        "train-000000.tar sample 000001: member 'jpg' is cut short; it must be a whole JPEG"
        in found
    )
    assert "000002: member 'jpg' is a damaged" not in found  # which its header does not show
    assert main(["shards", "verify", str(tmp_path), "--decode"]) == 1
    found = capsys.readouterr().err
    assert "sample 000001: member 'jpg' is cut short" in found
    assert "train-000000.tar sample 000002: member 'jpg' is a damaged JPEG (" in found
    with pytest.raises(
        ShardError, match="train-000000\\.tar sample 000001 is cut short; it must be a"
    ):
        contact_sheet(tmp_path, tmp_path / "sheet.png")


def test_images(tmp_path: Path) -> None:
    out = tmp_path / "faces"
    build(make_source("faces", {"train": 4, "test": 2, "size": 32}), out, progress=False)
    assert verify(out).ok
    bigger = make_source("faces", {"train": 1, "size": 64}).read("train", 0, 1).views["image"][0]
    assert isinstance(bigger, bytes)

    def change(members: list[tuple[str, bytes]]) -> None:
        members[0] = ("000001.jpg", b"<html>")
        members[2] = ("000002.jpg", bigger)
        members[4] = ("000005.jpg", members[4][1])  # the key of a face of the test split
        members[5] = ("000005.labels.npy", members[5][1])

    rewrite(out, change)
    found = faults(out)
    assert (
        "sample 000001: member 'jpg' is not a JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with "
        "b'<html>'" in found
    )
    assert "sample 000002: view 'image' must be (32, 32, 3), got (64, 64, 3)" in found
    assert "train-000000.tar has '000005.jpg', which its index does not list" in found
    path = out / "test-000000.index.npz"
    index = arrays_of(ShardIndex.read(path))
    np.savez(path, **{**index, "keys": np.array(["000001", "000006"])})
    found = faults(out)
    assert "test-000000.tar sample 000001: duplicate key: train-000000.tar has it too" in found
