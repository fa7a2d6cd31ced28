"""Tars of others: every dialect is read, and whatever WebDataset loses is an error."""

import gzip
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from heron.base.errors import ShardError
from heron.shards.tarball import read_contents
from tests.shards.others import info, write_tar

FILES = [(f"{n:03d}.{suffix}", bytes([n]) * 700) for n in range(3) for suffix in ("jpg", "cls")]
LONG = "folder/" * 20 + "k" * 90 + ".jpg"


def read(tar: Path) -> dict[str, dict[str, bytes]]:
    data = tar.read_bytes()
    return {
        key: {suffix: data[at : at + length] for suffix, (at, length) in members.items()}
        for key, members in read_contents(tar).samples.items()
    }


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_of_each_format(tmp_path: Path, form: int) -> None:
    tar = write_tar(tmp_path / "a.tar", FILES, form)
    assert read(tar) == {
        f"{n:03d}": {"jpg": bytes([n]) * 700, "cls": bytes([n]) * 700} for n in range(3)
    }


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_floating_times_and_names_in_utf_8(tmp_path: Path, form: int) -> None:
    files = [info(n, p, mtime=1.5) for n, p in ((LONG, b"a"), ("été/ñ.jpg", b"b"), ("z.jpg", b"c"))]
    assert read(write_tar(tmp_path / "a.tar", files, form)) == {
        LONG.removesuffix(".jpg"): {"jpg": b"a"},
        "été/ñ": {"jpg": b"b"},
        "z": {"jpg": b"c"},
    }


def test_keys_as_webdataset_makes_them(tmp_path: Path) -> None:
    files = [
        info("./", type=tarfile.DIRTYPE),
        info("./dir.d/", type=tarfile.DIRTYPE),
        info("./dir.d/1.left.JPG", b"l"),
        info("./dir.d/1.right.jpg", b"r"),
        info("./dir.d/._1.right.jpg", b"of a Mac"),
        info(".DS_Store", b"of a Mac"),
        info("README", b"text"),
        info("2.", b"no suffix"),
    ]
    tar = write_tar(tmp_path / "a.tar", files)
    found = read_contents(tar)
    assert read(tar) == {"dir.d/1": {"left.jpg": b"l", "right.jpg": b"r"}}
    assert found.strays == ["dir.d/._1.right.jpg", ".DS_Store", "README", "2."]


def test_padding_of_any_size_and_global_headers(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    with tarfile.open(tar, "w", pax_headers={"comment": "of a commit"}) as stream:
        stream.addfile(*_open("a.jpg", b"x"))
    plain = tar.read_bytes().rstrip(b"\0")
    for blocks in (2, 3, 5000):
        tar.write_bytes(plain + bytes(-len(plain) % 512) + bytes(512 * blocks))
        assert read(tar) == {"a": {"jpg": b"x"}}
    tar.write_bytes(plain + bytes(-len(plain) % 512) + bytes(512))
    with pytest.raises(ShardError, match="a.tar is cut inside its end mark"):
        read_contents(tar)


def _open(name: str, payload: bytes) -> tuple[tarfile.TarInfo, BytesIO]:
    return info(name, payload)[0], BytesIO(payload)


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d[: 512 * 3 + 100], "is cut inside a header (byte 1536); get it again"),
        (lambda d: d[: 512 * 3], "has no end mark: it is cut short, or unfinished (byte 1536)"),
        (lambda d: d[: 512 * 3 + 600], "is cut inside '000.cls' (700 bytes, of which it has 88"),
        (lambda d: d[: 512 * 18], "has no end mark"),
        (lambda d: flip(d, 512 * 3), "has a bad header (bad checksum) (byte 1536)"),
        (lambda d: flip(d, 0), "is not a tar (it begins with b'100.jpg"),
        (lambda d: b"", "is empty (0 bytes)"),
        (
            lambda d: b"<html>quota exceeded",
            "is not a tar (it begins with b'<html>quota exce'); ge",
        ),
        (
            gzip.compress,
            "is compressed by gzip (gunzip), and a compressed tar cannot be read at random",
        ),
        (
            lambda d: d + d,
            "continues after its end mark (byte 9216): two tars concatenated? readers",
        ),
    ],
)
def test_damage(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    tar = write_tar(tmp_path / "a.tar", FILES)
    tar.write_bytes(damage(tar.read_bytes()))
    with pytest.raises(ShardError) as raised:
        read_contents(tar)
    assert str(raised.value).startswith(f"a.tar {message}")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            [*FILES, *FILES[:2]],
            "a.tar sample 000 occurs again after 002: a duplicate key, or its files",
        ),
        ([FILES[0], FILES[2], FILES[1]], "sample 000 occurs again after 001"),
        (
            [FILES[0], *FILES],
            "a.tar sample 000: member 'jpg' occurs twice; a key ends at the first dot of",
        ),
        ([("a.jpg", b""), ("a.JPG", b"")], "a.tar sample a: member 'jpg' occurs twice"),
        (
            [("../x.jpg", b"")],
            "a.tar has '../x.jpg' (byte 0), a path out of its folder or with '\\'",
        ),
        ([*FILES, ("/etc/x.jpg", b"")], "a.tar has '/etc/x.jpg' (byte 9216), a path out of"),
        ([("a/../../x.jpg", b"")], "a.tar has 'a/../../x.jpg' (byte 0)"),
        ([("a//x.jpg", b"")], "a.tar has 'a//x.jpg' (byte 0)"),
        ([(r"a\x.jpg", b"")], "a.tar has 'a\\\\x.jpg' (byte 0)"),
        ([info("a.jpg", type=tarfile.LNKTYPE)], "'a.jpg' is a hard link; pack it again with tar -"),
        ([info("a.jpg", type=tarfile.SYMTYPE)], "'a.jpg' is a symbolic link; pack it again with"),
        (
            [info("a.jpg", type=tarfile.FIFOTYPE)],
            "'a.jpg' is not a file (type b'6'); pack it again without",
        ),
        ([info("a.jpg", type=b"S")], "'a.jpg' is a sparse file; pack it again without tar --sp"),
        (
            [info("a.jpg", pax_headers={"GNU.sparse.major": "1"})],
            "a.tar has a sparse file; pack it again without tar --sparse",
        ),
        ([info("a.jpg", pax_headers={"size": "99999"})], "is cut inside 'a.jpg' (99,999 bytes"),
        ([info("a.jpg", pax_headers={"size": "-512"})], "has a pax header of size b'-512'"),
        ([info("a.jpg", pax_headers={"size": "9" * 5000})], "has a pax header of size b'999999"),
        (
            [("a\nb.jpg", b"")],
            r"a.tar has 'a\nb.jpg' (byte 0), a name with control characters; rename it",
        ),
        ([("a\u2028.jpg", b"")], "a.tar has 'a\\u2028.jpg' (byte 1024)"),
        ([info("a.jpg", pax_headers={"path": "a\0.jpg"})], "a.tar has 'a\\x00.jpg' (byte 1024)"),
        ([info("x", b"12 path=a.b\nyz", type=b"x")], "has a bad pax header (byte 512)"),
        ([info("x", b"99 path=a.b\n", type=b"x")], "has a bad pax header (byte 512)"),
        ([info("x", b"hello", type=b"x")], "has a bad pax header (byte 512)"),
        ([info("x", b"12 path=a.b\n", type=b"g"), *FILES], "has a global header that names files"),
        ([info("x", b"a.jpg\0", type=b"L")], "ends between a long name and its file (byte 1024)"),
    ],
)
def test_what_readers_would_lose(
    tmp_path: Path, files: list[tuple[str | tarfile.TarInfo, bytes]], message: str
) -> None:
    tar = write_tar(tmp_path / "a.tar", files)
    with pytest.raises(ShardError) as raised:
        read_contents(tar)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", encoding="latin-1", format=0) as tar:
        tar.addfile(*_open("é.jpg", b"x"))
    with pytest.raises(ShardError, match=r"has b'\\xe9.jpg' \(byte 0\), a name that is not UTF-8"):
        read_contents(tmp_path / "a.tar")


def test_a_member_that_ends_where_the_file_does(tmp_path: Path) -> None:
    """A cut that leaves the last payload whole, and its padding not."""
    tar = write_tar(tmp_path / "a.tar", FILES)
    tar.write_bytes(tar.read_bytes()[: 512 * 16 + 700])
    with pytest.raises(ShardError, match="a.tar has no end mark: it is cut short, or unfinished"):
        read_contents(tar)
