"""Opens, lists and reads the zip files of a publisher."""

import os
import zipfile
import zlib
from pathlib import Path

from heron.shards.errors import DOWNLOAD_AGAIN, SourceError

ZIP = b"PK\x03\x04"  # how a zip begins
MAX_MEMBER_BYTES = 1 << 27  # of a member; CelebA's longest has 26 MB
HTML = "an HTML page (a download quota page?)"


def open_zip(path: Path, expected: str) -> zipfile.ZipFile:
    """Opens a zip; SourceError says what the file is instead of what is `expected`."""
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as fault:
        with path.open("rb") as stream:
            head = stream.read(64)
        if is_html(head):
            actual = HTML
        elif head.startswith(ZIP):
            actual = f"a zip cut short or damaged ({fault})"
        else:
            actual = f"not a zip (it begins with {head[:8]!r})"
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

    def __init__(self, path: Path) -> None:
        """Lists the files; SourceError where a zip is damaged."""
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
            self._zip = open_zip(path, "a folder of pictures, or a zip of one")
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
