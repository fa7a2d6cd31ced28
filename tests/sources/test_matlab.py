"""MATLAB files: what others wrote is read as they meant it, in bounded memory, or refused."""

import errno
import gc
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.io
import scipy.sparse
from numpy.typing import NDArray

from heron.base.errors import ShardError, SourceError
from heron.sources.matlab import MatlabFile
from tests.sources.matlab_files import (
    WRITERS,
    v5_header,
    v5_matrix,
    write_elements,
    write_v5,
    write_v73,
)

Array = NDArray[Any]
TYPES = ["f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8"]


@pytest.fixture(autouse=True)
def scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "unpacked"


def numbers(rows: int, columns: int, dtype: str = "f4") -> Array:
    values = np.random.default_rng(rows).integers(0, 100, (rows, columns))
    return values.astype(dtype) + (0.5 if "f" in dtype else 0)


def assert_reads(path: Path, arrays: dict[str, Array]) -> None:
    file = MatlabFile(path)
    assert list(file.variables) == list(arrays)
    for name, array in arrays.items():
        assert file.shape(name) == array.shape
        np.testing.assert_array_equal(file.matrix(name), array)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compressed", [False, True])
def test_v5_of_every_type_and_size(tmp_path: Path, compressed: bool, order: str) -> None:
    arrays = {kind: numbers(5, 3, kind) for kind in TYPES}
    arrays |= {"longer_name": numbers(33, 20), "one": numbers(1, 1), "two": numbers(2, 1, "i2")}
    arrays |= {"line": numbers(1, 9), "abcde": numbers(7, 1, "u1")}
    write_v5(tmp_path / "a.mat", arrays, compressed, order)
    assert_reads(tmp_path / "a.mat", arrays)


@pytest.mark.parametrize("compressed", [False, True])
def test_v5_as_scipy_writes_and_reads_it(tmp_path: Path, compressed: bool) -> None:
    arrays = {kind: numbers(9, 4, kind) for kind in TYPES}
    scipy.io.savemat(tmp_path / "theirs.mat", arrays, do_compression=compressed)
    assert_reads(tmp_path / "theirs.mat", arrays)
    write_v5(tmp_path / "ours.mat", arrays, compressed)
    for name, array in arrays.items():
        read = scipy.io.loadmat(tmp_path / "ours.mat", variable_names=[name])[name]
        np.testing.assert_array_equal(read, array)


def test_doubles_stored_as_bytes(tmp_path: Path) -> None:
    """MATLAB stores whole numbers in the smallest type that holds them."""
    labels = numbers(50, 1, "u1")
    write_elements(tmp_path / "a.mat", iter([v5_matrix("labels", labels, kind=6)]), True)
    file = MatlabFile(tmp_path / "a.mat")
    assert file.variables["labels"].kind == "double" and file.matrix("labels").dtype == np.uint8
    np.testing.assert_array_equal(file.matrix("labels"), labels)
    np.testing.assert_array_equal(scipy.io.loadmat(tmp_path / "a.mat")["labels"], labels)


@pytest.mark.parametrize("chunks", [(1, 1000), (3, 7), (20, 1), (20, 1000), None])
def test_v73_of_any_chunks(tmp_path: Path, chunks: tuple[int, int] | None) -> None:
    arrays = {"wide": numbers(1000, 20), "whole": numbers(9, 1, "f8"), "u1": numbers(3, 2, "u1")}
    write_v73(tmp_path / "a.mat", arrays, chunks)
    read = MatlabFile(tmp_path / "a.mat")
    assert sorted(read.variables) == sorted(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read.matrix(name), array)


@pytest.mark.parametrize("form", WRITERS)
def test_memory_is_bounded(tmp_path: Path, form: str, scratch_folder: Path) -> None:
    array = np.broadcast_to(np.arange(32, dtype="f4"), (200_000, 32))  # 26 MB
    WRITERS[form](tmp_path / "a.mat", {"X1": array, "last": numbers(2, 2)})
    tracemalloc.start()
    try:
        matrix = MatlabFile(tmp_path / "a.mat").matrix("X1")
        assert matrix[-1].tolist() == list(range(32)) and matrix[:, 5].min() == 5
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_a_variable_that_is_not_asked_for_is_not_unpacked(
    tmp_path: Path, scratch_folder: Path
) -> None:
    noise = np.random.default_rng(0).normal(size=(1500, 400))  # several pieces of zlib data
    write_v5(tmp_path / "a.mat", {"noise": noise, "few": numbers(4, 2)}, compressed=True)
    data = bytearray((tmp_path / "a.mat").read_bytes())
    data[-5000:-4000] = bytes(1000)
    (tmp_path / "a.mat").write_bytes(data)
    file = MatlabFile(tmp_path / "a.mat")
    np.testing.assert_array_equal(file.matrix("few"), numbers(4, 2))
    with pytest.raises(SourceError, match=r"a.mat: noise is damaged \(Error -3 while decompress"):
        file.matrix("noise")
    assert len(unpacked(scratch_folder)) == 1
    del file
    assert unpacked(scratch_folder) == []


def unpacked(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != "lock"]


def v5(*elements: bytes) -> bytes:
    return v5_header() + b"".join(elements)


def zipped(data: bytes) -> bytes:
    packed = zlib.compress(data)
    return struct.pack("<II", 15, len(packed)) + packed


MATRIX = b"".join(v5_matrix("X1", numbers(5, 3)))
OTHER = b"".join(v5_matrix("X1", numbers(5, 3), flags=8))
NO_MATLAB = "a.mat is not a file of MATLAB v5 or v7.3"
BAD: list[tuple[bytes, str]] = [
    (b"", f"{NO_MATLAB}: it has 0 bytes, and begins with b''; save one"),
    (v5()[:90], f"{NO_MATLAB}: it has 90 bytes, and begins with b'MATLAB 5.0 MAT-f'"),
    (
        b"<!DOCTYPE html><html>",
        f"{NO_MATLAB}: it has 21 bytes, and begins with b'<!DOCTYPE html><'",
    ),
    (b"<!DOCTYPE html>" + b" " * 900, "begins with b'<!DOCTYPE html> '"),
    (bytes(200), "save one of MATLAB v4 again with `save -v7`, or download it again"),
    (v5()[:124] + b"\x00\x02IM", f"{NO_MATLAB}: it has 128 bytes"),
    (v5(), "a.mat has no variable X1, only none"),
    (v5(MATRIX.replace(b"X1", b"X9")), "a.mat has no variable X1, only X9"),
    (v5(MATRIX.replace(b"X1", b"/1")), "a.mat has no variable X1, only none"),
    (
        v5(MATRIX[:5]),
        "is cut short: it has 133 bytes, but its variable at byte 128 ends at 136",
    ),
    (v5(MATRIX[:30]), "a.mat is cut short: it has 158 bytes, but its variable at byte"),
    (
        v5(MATRIX[:-1]),
        "is cut short: it has 247 bytes, but its variable at byte 128 ends at 248",
    ),
    (v5(MATRIX, zipped(MATRIX)[:-1]), "bytes, but its variable at byte 248 ends at"),
    (v5(MATRIX, b"\x07" + bytes(7)), "a.mat is damaged at byte 248 (an element of type 7)"),
    (
        v5(struct.pack("<II", 15, 80), bytes(80)),
        "damaged at byte 128 (Error -3 while decompressing data",
    ),
    (
        v5(struct.pack("<II", 15, 0)),
        "is damaged at byte 128 (it ends too early), where a variable should",
    ),
    (
        v5(struct.pack("<II", 14, 8) + bytes(8)),
        "a.mat is damaged at byte 128 (unpack_from requires",
    ),
    (v5(zipped(MATRIX[:20])), "damaged at byte 128 (unpack_from requires a buffer of at least"),
    (
        v5(zipped(MATRIX[:-9])),
        "a.mat: X1 is damaged (5 of 60 bytes are missing); download it again",
    ),
    (v5(MATRIX[:48] + b"\x08" + MATRIX[49:]), "is damaged at byte 128 (numbers of type 8 in X1)"),
    (v5(MATRIX[:32] + b"\x06" + MATRIX[33:]), "(X1 of 6 × 3 in 60 bytes of float32), where a"),
    (
        v5(OTHER),
        "a.mat: X1 must be a matrix of real numbers, full and not empty, got complex single 5 ×",
    ),
    (v5(*v5_matrix("X1", numbers(5, 3), kind=1)), "a.mat: X1 must be a matrix of real numbers"),
    (v5(*v5_matrix("X1", numbers(0, 3))), "a.mat: X1 must be a matrix of real numbers"),
    (
        v5(*v5_matrix("X1", numbers(4, 6).reshape(4, 3, 2))),
        "got single 4 × 3 × 2",
    ),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_errors(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.mat").write_bytes(data)
    with pytest.raises(SourceError) as fault:
        MatlabFile(tmp_path / "a.mat").matrix("X1")
    assert message in str(fault.value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([1, "two"], "cell 1 × 2"),
        ({"a": 1}, "struct 1 × 1"),
        (scipy.sparse.eye_array(3, format="csc"), "sparse 3 × 3"),
        (np.ones((2, 2)) * 1j, "complex double 2 × 2"),
        ("text", "char 1 × 4"),
    ],
)
def test_other_classes(tmp_path: Path, value: object, kind: str) -> None:
    if kind.startswith("cell"):
        value = np.array(value, dtype=object)
    for compressed in (False, True):
        scipy.io.savemat(
            tmp_path / "a.mat", {"X1": value, "X2": numbers(2, 2)}, do_compression=compressed
        )
        file = MatlabFile(tmp_path / "a.mat")
        np.testing.assert_array_equal(file.matrix("X2"), numbers(2, 2))
        with pytest.raises(SourceError, match=f"full and not empty, got {kind}"):
            file.shape("X1")


def test_other_classes_of_v73(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    write_v73(path, {"X1": numbers(3, 2)})
    with h5py.File(path, "r+") as file:
        file.create_group("record").attrs["MATLAB_class"] = np.bytes_("struct")
        sparse = file.create_group("few")
        sparse.attrs["MATLAB_class"], sparse.attrs["MATLAB_sparse"] = np.bytes_("double"), 3
        file["complex"] = np.zeros((2, 3), [("real", "f8"), ("imag", "f8")])
        file["complex"].attrs["MATLAB_class"] = np.bytes_("double")
        file["text"] = np.zeros((4, 1), "u2")
        file["text"].attrs["MATLAB_class"] = np.bytes_("char")
        file["plain"] = np.ones((2, 3))
        file["elsewhere"] = h5py.ExternalLink("/etc/passwd", "/")
        file.create_group("#refs#")
        layout = h5py.VirtualLayout((2, 3), "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "b.mat", "X1", (2, 3))
        file.create_virtual_dataset("virtual", layout)
    read = MatlabFile(path)
    assert sorted(read.variables) == ["X1", "complex", "few", "plain", "record", "text", "virtual"]
    assert read.matrix("plain").shape == (3, 2) and read.matrix("plain").all()
    for name, kind in {
        "record": "struct empty",
        "few": "sparse double empty",
        "complex": "complex double 3 × 2",
        "text": "char 1 × 4",
        "virtual": "single in another file 3 × 2",
    }.items():
        with pytest.raises(
            SourceError, match=f"a matrix of real numbers, full and not empty, got {kind}"
        ):
            read.matrix(name)


def test_damaged_v73(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mat"
    write_v73(path, {"X1": np.random.default_rng(0).normal(size=(3000, 4))}, (4, 3000))
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    with pytest.raises(SourceError, match=r"a.mat: damaged HDF5 \(.*truncated.*; download it"):
        MatlabFile(path)
    path.write_bytes(data[:60_000] + bytes(500) + data[60_500:])
    with pytest.raises(SourceError, match=r"a.mat: X1 is damaged \(.*; download it again"):
        MatlabFile(path).matrix("X1")
    path.write_bytes(data)
    monkeypatch.setattr("heron.sources.matlab.MAX_CHUNK_BYTES", 90_000)
    with pytest.raises(
        SourceError, match="has chunks of 96,000 bytes, and the limit is 90,000; run"
    ):
        MatlabFile(path).matrix("X1")


def test_what_is_unpacked_is_shared_and_goes_with_its_last_user(
    tmp_path: Path, scratch_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, array = tmp_path / "a.mat", numbers(50, 4)
    write_v5(path, {"X1": array}, compressed=True)
    first, second = MatlabFile(path), MatlabFile(path)
    first.matrix("X1")
    (name,) = unpacked(scratch_folder)
    with monkeypatch.context() as patch:
        patch.setattr("heron.sources.matlab._unpack", lambda *_: pytest.fail("unpacked twice"))
        np.testing.assert_array_equal(second.matrix("X1"), array)
    del first
    gc.collect()
    assert unpacked(scratch_folder) == [name]
    write_v5(path, {"X1": array + 1}, compressed=True)  # a changed file has another
    third = MatlabFile(path)
    np.testing.assert_array_equal(third.matrix("X1"), array + 1)
    np.testing.assert_array_equal(second.matrix("X1"), array)
    assert len(unpacked(scratch_folder)) == 2
    del second, third
    gc.collect()
    assert unpacked(scratch_folder) == []


def test_what_a_killed_build_left_goes(tmp_path: Path, scratch_folder: Path) -> None:
    scratch_folder.mkdir(parents=True)
    for name in ("0" * 64, "1" * 64 + ".part"):
        (scratch_folder / name).write_bytes(b"half")
    write_v5(tmp_path / "a.mat", {"X1": numbers(5, 4)}, compressed=True)
    file = MatlabFile(tmp_path / "a.mat")
    np.testing.assert_array_equal(file.matrix("X1"), numbers(5, 4))
    assert len(unpacked(scratch_folder)) == 1


@pytest.mark.parametrize("form", ["v5", "v7.3"])
def test_what_would_fill_the_disk(
    tmp_path: Path, form: str, scratch_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, zeros = tmp_path / "a.mat", np.zeros((1000, 100))
    if form == "v5":
        write_v5(path, {"X1": zeros}, compressed=True)
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("X1", data=zeros.T, compression="gzip", chunks=(10, 1000))
    monkeypatch.setattr("heron.sources.matlab.MAX_UNPACKED_BYTES", 100_000)
    monkeypatch.setattr("heron.sources.matlab.MAX_UNPACKED_RATIO", 2)
    with pytest.raises(SourceError, match=r"X1 has 800,000 bytes unpacked, too many for a file of"):
        MatlabFile(path).matrix("X1")
    assert not scratch_folder.exists()


def test_a_full_disk(tmp_path: Path, scratch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_v5(tmp_path / "a.mat", {"X1": numbers(5, 4)}, compressed=True)
    file = MatlabFile(tmp_path / "a.mat")
    with monkeypatch.context() as patch:
        patch.setattr("heron.sources.matlab._unpack", full)
        with pytest.raises(ShardError) as fault:
            file.matrix("X1")
    assert str(fault.value).startswith(f"cache {scratch_folder}: the disk is full (")
    assert "for a file of 80 bytes; free some space" in str(fault.value)
    assert "or set HERON_CACHE to a folder on a larger disk" in str(fault.value)
    assert unpacked(scratch_folder) == []
    np.testing.assert_array_equal(file.matrix("X1"), numbers(5, 4))
