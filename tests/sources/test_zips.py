"""A publisher's zips: what is listed, and what is said of a bad one."""

import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from heron.base.errors import SourceError
from heron.sources.zips import is_html, list_zip, open_zip, read_zip


def zipped(*members: str, method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip whose files hold 90 bytes each."""
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name in members:
            archive.writestr(zipfile.ZipInfo(name), b"payload..." * 9, method)
    return stream.getvalue()


def contents(path: Path) -> dict[str, bytes]:
    with open_zip(path, "a zip of ours") as archive:
        return {member: read_zip(archive, path, member) for member in list_zip(archive, path)}


def changed(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_files_in_their_order(tmp_path: Path, method: int) -> None:
    names = ["b/", "b/2.jpg", "a/.hidden", "a/1.jpg", "__MACOSX/1.jpg", "..c", "d..e.txt"]
    (path := tmp_path / "x.zip").write_bytes(zipped(*names, method=method))
    assert contents(path) == dict.fromkeys(["b/2.jpg", "a/1.jpg", "d..e.txt"], b"payload..." * 9)


GOOD, PACKED = zipped("a/1.jpg", "2.jpg"), zipped("1.jpg", method=zipfile.ZIP_DEFLATED)
ENTRY = GOOD.index(b"PK\x01\x02")  # of the first file, in the directory at the end
NO_ZIP, AGAIN = "it must be a zip of ours; download it again", "); download it ag"
BAD = [
    (b"<html>quota</html>", f"x.zip: an HTML page (a download quota page?); {NO_ZIP}"),
    (b"\xef\xbb\xbf\r\n <!doctype html>", "x.zip: an HTML page (a download quota page?)"),
    (
        b"7z\xbc\xaf" + bytes(99),
        "; it begins with b'7z\\xbc\\xaf\\x00\\x00\\x00\\x00')",
    ),
    (b"", f"; it begins with b''); {NO_ZIP}"),
    (GOOD[:-9], "x.zip: no zip, or a damaged one (File is not a zip file; it begins with"),
    (GOOD[:9], "x.zip: no zip, or a damaged one (File is not a zip file; it begins with"),
    (changed(GOOD, ENTRY, 0), "x.zip: no zip, or a damaged one (Bad magic number for central"),
    (
        changed(GOOD, 60, 0),
        f"cannot read a/1.jpg of x.zip (Bad CRC-32 for file 'a/1.jpg'{AGAIN}",
    ),
    (
        changed(GOOD, 0, 0),
        f"cannot read a/1.jpg of x.zip (Bad magic number for file header{AGAIN}",
    ),
    (changed(PACKED, 36, 255), "cannot read 1.jpg of x.zip (Error -3 while decompressing data"),
    (changed(GOOD, ENTRY + 10, 97), "cannot read a/1.jpg of x.zip (That compression method is"),
    (
        changed(GOOD, ENTRY + 8, 1),
        "x.zip: a/1.jpg is encrypted; unpack it and pass the files",
    ),
    (
        zipped("a/../../1.jpg"),
        "x.zip: the path 'a/../../1.jpg' may lead out of its folder; a path must be FOLDER/NAME "
        "without '..' or a backslash; download it again from its publisher",
    ),
    (zipped("../"), "x.zip: the path '../' may lead out of its folder"),
    (zipped("/etc/1.jpg"), "x.zip: the path '/etc/1.jpg' may lead out of its folder"),
    (
        zipped("..\\1.jpg"),
        "x.zip: the path '..\\\\1.jpg' may lead out of its folder",
    ),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_bad_zips(tmp_path: Path, data: bytes, message: str) -> None:
    (path := tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(SourceError) as fault:
        contents(path)
    assert message in str(fault.value)


def test_a_list_is_no_page() -> None:
    assert not is_html(b"4\nBald <b>") and not is_html(b"")
