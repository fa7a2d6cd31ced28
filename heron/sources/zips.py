"""Opens, lists and reads what a publisher packed, and tells what a file is by its first bytes."""

import bz2
import gzip
import io
import lzma
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

from heron.base.errors import DOWNLOAD_AGAIN, SourceError
from heron.shards.picture import MAGIC, SUFFIXES
from heron.sources.matlab import MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO

ZIP = b"PK\x03\x04"  # how a zip begins
PACKERS: dict[str, tuple[bytes | tuple[bytes, ...], Any]] = {
    "gzip": (b"\x1f\x8b", gzip.open),
    "bzip2": (tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)), bz2.open),
    "xz": (b"\xfd7zXZ\0", lzma.open),
}
PACKED = (".gz", ".bz2", ".xz", ".zip")
MAX_MEMBER_BYTES = 1 << 27  # of a member; CelebA's longest has 26 MB
HTML = "an HTML page (a download quota page?)"
READ = "; read it with `heron shards build "
AS_CSV = "; save it as CSV, and pass that"
FOLDER = f"{READ}folder --folder FOLDER`, of folders of classes"
KINDS = {  # how a file that is no table begins, and what it is
    rb"PAR1|ARROW1": f"a Parquet or Arrow file{READ}parquet --data {{path}}`",
    rb"\x93NUMPY": f"an array of NumPy{READ}arrays --npy x={{path}} labels=FILE`",
    rb"\x89HDF|MATLAB 5": f"a MATLAB or HDF5 file{READ}mat --mat {{path}}`",
    rb"(?i)(\s*%.*\n|\s)*@relation": f"an ARFF file{READ}mulan --arff {{path}} --xml LABELS.xml`",
    rb"\x80[\x02-\x05]": f"a pickle, which may run any code as it is opened{AS_CSV}",
    rb"\xd0\xcf\x11\xe0": f"a workbook of Excel{AS_CSV}",
    rb"SQLite format 3|%PDF": f"a data base of SQLite, or a PDF{AS_CSV}",
    rb"\s*(\[\s*[\[{\]\"]|\{\s*[\"}])": f"JSON{AS_CSV}",
    rb"(?s).{257}ustar": "a tar; unpack it, or index it with `heron shards index FOLDER`",
}
CONTENTS = {  # what a zip is by a name in it
    r"xl/workbook\.xml": f"a workbook of Excel{AS_CSV}",
    r".*\.npy": f"an archive of NumPy{READ}arrays --npz {{path}}`",
    rf"(?i).*\.({'|'.join(SUFFIXES)})": f"a zip of pictures{READ}folder --folder {{path}}`",
}


def refuse_other_kinds(path: Path) -> None:
    """Raises a SourceError that names what a file is, and what reads it, if it is not a table."""
    with open_unpacked(path) as stream:
        head = stream.read(512)
    found = [kind for start, kind in KINDS.items() if re.match(start, head)]
    if is_html(head):
        found.append(f"{HTML}, or XML; {DOWNLOAD_AGAIN}")
    if b"\0" in head:  # a text may begin with BM
        found += [f"a picture ({kind}){FOLDER}" for kind, mark in MAGIC.items() if mark.match(head)]
    if head.startswith(ZIP):
        names = list_zip(open_zip(path, "a table"), path)
        found += [
            kind for name, kind in CONTENTS.items() if any(re.fullmatch(name, n) for n in names)
        ]
        if len(names) != 1:
            found.append(f"a zip of {len(names)} files; unpack it, and pass those that are tables")
    if found:
        raise SourceError(f"{path.name} is no table but {found[0].format(path=path)}")


UNPACK_ERRORS = (OSError, EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError)


class Unpacked(io.RawIOBase):
    """What a file unpacks to, read no further than a limit, so that a bomb does no harm."""

    def __init__(self, path: Path, packer: str, stream: Any) -> None:
        """Takes the file, what packed it, and the stream that unpacks it."""
        self.path, self.packer, self.stream, self.position = path, packer, stream, 0
        self.limit = max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * path.stat().st_size)

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads bytes; SourceError where the file is damaged, or unpacks to too many."""
        try:
            data = self.stream.read(len(buffer))
        except (*UNPACK_ERRORS, zipfile.BadZipFile) as fault:
            raise SourceError(
                f"{self.path.name}: damaged {self.packer} ({fault}); {DOWNLOAD_AGAIN}"
            ) from None
        self.position += len(data)
        if self.position > self.limit:
            raise SourceError(
                f"{self.path.name} unpacks to more than {self.limit:,} bytes, the limit; unpack it "
                "yourself, and pass the file"
            )
        buffer[: len(data)] = data
        return len(data)


def open_unpacked(path: Path) -> io.BufferedReader:
    """Opens a file for its bytes, unpacked if it is by gzip, bzip2, xz, or in a zip by itself."""
    with path.open("rb") as stream:
        head = stream.read(10)
    for packer, (magic, unpack) in PACKERS.items():
        if head.startswith(magic):
            return io.BufferedReader(Unpacked(path, packer, unpack(path)))
    if head.startswith(ZIP):
        archive = open_zip(path, "a table, or a zip of one")
        names = list_zip(archive, path)
        if len(names) == 1 and not any(re.fullmatch(kind, names[0]) for kind in CONTENTS):
            return io.BufferedReader(Unpacked(path, "zip", archive.open(names[0])))
    return path.open("rb")


def stem_of(path: Path) -> str:
    """Returns the name of a file without its suffix, nor that of what packed it."""
    return (path.with_suffix("") if path.suffix.lower() in PACKED else path).stem


def open_zip(path: Path, expected: str) -> zipfile.ZipFile:
    """Opens a zip; SourceError says what the file is instead of what is `expected`."""
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as fault:
        with path.open("rb") as stream:
            head = stream.read(64)
        actual = (
            HTML
            if is_html(head)
            else f"no zip, or a damaged one ({fault}; it begins with {head[:8]!r})"
        )
        raise SourceError(
            f"{path.name}: {actual}; it must be {expected}; {DOWNLOAD_AGAIN}"
        ) from None


def list_zip(archive: zipfile.ZipFile, path: Path) -> list[str]:
    """Lists the files of a zip in its order, without hidden ones and the __MACOSX folder."""
    members = []
    for info in archive.infolist():
        parts = info.filename.split("/")
        if ".." in parts or not parts[0] or "\\" in info.filename:
            raise SourceError(
                f"{path.name}: the path {info.filename!r} may lead out of its folder; a path must "
                f"be FOLDER/NAME without '..' or a backslash; {DOWNLOAD_AGAIN} from its publisher"
            )
        if info.is_dir() or parts[0] == "__MACOSX" or parts[-1].startswith("."):
            continue
        if info.flag_bits & 1:
            raise SourceError(
                f"{path.name}: {info.filename} is encrypted; unpack it and pass the files"
            )
        members.append(info.filename)
    return members


def read_zip(archive: zipfile.ZipFile, path: Path, member: str) -> bytes:
    """Reads a file of at most MAX_MEMBER_BYTES in a zip, and verifies its checksum."""
    if (size := archive.getinfo(member).file_size) > MAX_MEMBER_BYTES:
        raise SourceError(
            f"{path.name}: {member} has {size:,} bytes unpacked, and the limit is "
            f"{MAX_MEMBER_BYTES:,}; {DOWNLOAD_AGAIN} from its publisher"
        )
    try:
        return archive.read(member)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as fault:
        raise SourceError(
            f"cannot read {member} of {path.name} ({fault}); {DOWNLOAD_AGAIN}"
        ) from None


class Tree:
    """The files of a folder, or of a zip, in the order of their paths, without hidden ones.

    Where all of a zip lies in one folder, paths begin below it. `empty` are folders without a file.
    """

    def __init__(self, path: Path, expected: str = "a folder of pictures, or a zip of one") -> None:
        """Lists the files; SourceError, which says what is `expected`, where a zip is damaged."""
        self.path, self.prefix, self._zip, self.empty = path, "", None, list[str]()
        if path.is_dir():
            paths = []
            for folder, folders, files in os.walk(path):
                folders[:] = [name for name in folders if not name.startswith(".")]
                shown = [name for name in files if not name.startswith(".")]
                top = Path(folder).relative_to(path)
                paths += [(top / name).as_posix() for name in shown]
                if not shown and not folders:
                    self.empty.append(top.as_posix() + "/")
        else:
            self._zip = open_zip(path, expected)
            paths = list_zip(self._zip, path)
            tops = {name.partition("/")[0] for name in paths if "/" in name}
            if len(tops) == 1 and all("/" in name for name in paths):
                self.prefix = f"{tops.pop()}/"
        paths = [name.removeprefix(self.prefix) for name in paths]
        self.paths = sorted(paths, key=lambda name: name.split("/"))

    def read(self, name: str) -> bytes:
        """Returns the bytes of a file."""
        if self._zip is None:
            return (self.path / name).read_bytes()
        return read_zip(self._zip, self.path, self.prefix + name)


def is_html(data: bytes) -> bool:
    """Returns whether a file begins as an HTML page, which was downloaded in its place."""
    return data[:64].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<")
