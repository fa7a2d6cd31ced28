"""Files that are tables, packed or not, and those that are something else, which is named."""

import bz2
import gzip
import io
import lzma
import re
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from heron.base.errors import SourceError
from heron.cli.main import main
from heron.sources import make_source, zips
from tests.shards.others import jpeg
from tests.shards.tiny import whole
from tests.sources.test_odd_tables import CODES, FRAME, NUMBERS, ROWS, build, csv, table


def zipped(text: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside/t.csv", text)
    return stream.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zip": lambda data: zipped(data.decode()),
}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("quoting", [0, 2])
def test_packed(suffix: str, quoting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = PACKERS[suffix](csv(quoting=quoting).encode())
    source = table(tmp_path, data, f"t.csv.{suffix}")
    assert source.dataset == "t"
    found = np.asarray(whole(source, "all").views["features"])
    np.testing.assert_array_equal(found, NUMBERS.to_numpy(np.float32))
    cut = table(tmp_path, data[: len(data) // 2], f"cut.{suffix}")
    with pytest.raises(
        SourceError, match=f"cut.{suffix}: .*(damaged|cut short).*download it again"
    ):
        _ = cut.splits
    monkeypatch.setattr(zips, "MAX_UNPACKED_BYTES", 1000)
    monkeypatch.setattr(zips, "MAX_UNPACKED_RATIO", 1)
    with pytest.raises(SourceError, match="unpacks to more than 1,000 bytes, the limit"):
        _ = table(tmp_path, data, f"bomb.{suffix}").splits


def test_a_zip_of_two_tables_is_for_the_user_to_unpack(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("a.csv", csv())
        archive.writestr("b.csv", csv())
    with pytest.raises(SourceError, match="no table but a zip of 2 files; unpack it, and pass"):
        _ = make_source("table", {"csv": str(tmp_path / "t.zip")}).splits


def arrays_of(name: str, folder: Path) -> bytes:
    """A file of another kind, as its library writes it."""
    path = folder / "made"
    if name in ("npz", "npy"):
        save = np.savez if name == "npz" else np.save
        with path.open("wb") as stream:
            values = {"x": NUMBERS.to_numpy(), "labels": np.arange(ROWS) % 2}
            save(stream, **values) if name == "npz" else save(stream, values["x"])
    elif name == "parquet":
        NUMBERS.assign(y=CODES).to_parquet(path)
    elif name == "pickle":
        FRAME.to_pickle(path)
    elif name == "mat":
        from scipy.io import savemat

        savemat(path, {"X": NUMBERS.to_numpy(), "Y": np.arange(ROWS) % 2}, appendmat=False)
    elif name == "pictures.zip":
        with zipfile.ZipFile(path, "w") as archive:
            for n in range(4):
                archive.writestr(f"{'ab'[n % 2]}/{n}.jpg", jpeg(n))
    elif name == "xlsx":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("[Content_Types].xml", "<Types/>")
            archive.writestr("xl/workbook.xml", "<workbook/>")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("npz", "an archive of NumPy"),
        ("parquet", "a Parquet or Arrow file"),
        ("mat", "a MATLAB or HDF5 file"),
        ("pictures.zip", "a zip of pictures"),
    ],
)
def test_what_another_source_reads_is_read_by_it(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"t.{name.rpartition('.')[2]}"
    (tmp_path / file).write_bytes(arrays_of(name, tmp_path))
    assert build(tmp_path, ["--quiet"], file) == 1
    told = capsys.readouterr().err
    assert f"{file} is no table but {said}; read it with `heron shards build " in told
    command = re.search("`heron (.*?)`", told)
    assert command is not None
    words = shlex.split(command[1])
    assert main([*words, "--out", str(tmp_path / "p"), "--quiet"]) == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("npy", "an array of NumPy; read it with `heron shards build arrays --npy x="),
        ("pickle", "a pickle, which may run any code as it is opened; save it as CSV"),
        ("xlsx", "a workbook of Excel; save it as CSV"),
        (jpeg(1), "a picture (JPEG); read it with `heron shards build folder"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        ('[{"a": 1, "kind": 2}]', "JSON; save it as CSV"),
        ('{"a": 1, "kind": 2}\n', "JSON; save it as CSV"),
        ("% a\n@relation x\n@attribute", "an ARFF file; read it with `heron shards build mulan"),
        (b"\x89HDF\r\n\x1a\n" + bytes(20), "a MATLAB or HDF5 file"),
        (gzip.compress(b"x" * 257 + b"ustar", mtime=0), "a tar; unpack it, or index it with"),
    ],
)
def test_what_is_no_table_is_named(data: str | bytes, said: str, tmp_path: Path) -> None:
    if isinstance(data, str) and data in ("npy", "pickle", "xlsx"):
        data = arrays_of(data, tmp_path)
    with pytest.raises(SourceError) as fault:
        _ = table(tmp_path, data).splits
    assert f"t.csv is no table but {said}" in str(fault.value) and "latin" not in str(fault.value)


@pytest.mark.parametrize("text", ["BMI,kind\n1.5,a\n2.5,b\n", "[a],kind\n1.5,a\n2.5,b\n"])
def test_and_a_table_is_a_table(text: str, tmp_path: Path) -> None:
    assert table(tmp_path, text).splits == {"all": 2}


def test_a_text_that_begins_like_bzip2_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(csv(FRAME.rename(columns={"a": "BZh code"})))
    assert build(tmp_path, []) == 0
    (tmp_path / "u.csv").write_bytes(bz2.compress(csv().encode(), 3))
    assert (
        main(
            ["shards", "build", "table", "--csv", str(tmp_path / "u.csv")]
            + ["--out", str(tmp_path / "u")]
        )
        == 0
    )
