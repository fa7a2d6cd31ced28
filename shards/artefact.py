"""Artefacts: folders that hold a manifest, which vouches for every file beside it and for itself.

A data set, a checkpoint, embeddings and an index each have one. It lists size and checksum of the
files, names the fingerprints of what it was made from, and has a fingerprint of its own.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from heron.shards.atomic import save_json
from heron.shards.errors import HeronError, ShardError, shown

MANIFEST = "manifest.json"
MOST_BYTES = 64 * 2**20  # of a manifest: some 200,000 shards
MOST_REMEMBERED = 8 * 2**20  # bytes of what is remembered to be whole: some 130,000 files
VERIFIED = "verified"  # where it is remembered, in the cache's folder
LARGEST = 2**63 - 1  # int64's

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}$")]  # and no path
Count = Annotated[int, Field(ge=0, le=LARGEST)]
_found_whole: set[str] = set()  # by this process: the cache's folder may not be writable


class Record(BaseModel):
    """A part of a manifest: unknown keys are errors, types are exact, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FileSum(Record):
    """A file as it was written: its size and checksum."""

    bytes: Count
    sha256: Sha256

    @classmethod
    def of(cls, path: Path) -> Self:
        """Reads a file to its end."""
        return cls(bytes=path.stat().st_size, sha256=sha256(path))

    def fault(self, path: Path, read: bool = True) -> str:
        """Returns what of a file is not as it was written, or "".

        The size is always compared. The checksum is compared with `read`, once: a file that was
        found whole is not read again while its inode, size and time of modification stay.
        """
        try:
            found = path.stat()
        except OSError as error:
            return f"{path}: {error.strerror}"
        if found.st_size != self.bytes:
            return f"{path} has {found.st_size:,} bytes; expected {self.bytes:,}"
        state = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, self.sha256
        line = hashlib.sha256(repr(state).encode()).hexdigest()
        if not read or line in _found_whole or line in _remembered():
            return ""
        try:
            digest = sha256(path)
        except OSError as error:
            return f"{path}: {error.strerror}"
        if digest != self.sha256:
            return f"{path} is altered: its sha256 is {digest[:12]}…; expected {self.sha256[:12]}…"
        _remember(line)
        return ""


class Artefact(Record):
    """A manifest with a fingerprint: the sha256 of its canonical JSON without that field.

    A subclass says what it is, its error, how it is made again, and the versions that it reads;
    one of `unsealed` is from before there were fingerprints, and is given one when it is read.
    """

    what: ClassVar[str]
    error: ClassVar[type[HeronError]] = ShardError
    again: ClassVar[str]
    version_key: ClassVar[str] = "format"
    versions: ClassVar[tuple[int, ...]]
    unsealed: ClassVar[tuple[int, ...]] = ()

    fingerprint: Fingerprint | Literal[""] = ""  # "": not written yet

    @classmethod
    def parse(cls, data: bytes, where: str) -> Self:
        """Parses what came from `where`, a path or a URL; `error` says what is wrong with it."""

        def refused(fault: object) -> HeronError:
            return cls.error(f"{where}: {fault}; expected {cls.what}; {cls.again}")

        try:
            tree = parse_json(data)
        except ValueError as fault:
            raise refused(fault) from None
        version = tree.get(cls.version_key) if isinstance(tree, dict) else None
        if type(version) is not int or version not in cls.versions:
            reads = " or ".join(map(str, cls.versions))
            raise cls.error(
                f"{where}: {cls.version_key} is {shown(version)}; this version of heron reads "
                f"{reads}; {cls.again}"
            )
        stated, found = tree.get("fingerprint"), fingerprint(tree)
        if stated != found and not (version in cls.unsealed and stated is None):
            raise refused(f"its fingerprint is {shown(stated)}, its content has {found}")
        try:
            record = cls.model_validate_json(data, strict=True)
        except ValidationError as fault:
            raise refused(in_words(fault)) from None
        return record.model_copy(update={"fingerprint": found})

    @classmethod
    def read(cls, path: Path, remedy: str = "") -> Self:
        """Reads a file of at most `MOST_BYTES`; `remedy` is what to do where there is none."""
        try:
            with path.open("rb") as stream:
                data = stream.read(MOST_BYTES + 1)
        except OSError as error:
            raise cls.error(
                f"{path} cannot be read: {error.strerror}; expected {cls.what}; "
                f"{remedy or cls.again}"
            ) from None
        return cls.parse(data, str(path))

    def sealed(self) -> Self:
        """Returns the manifest with its fingerprint."""
        return self.model_copy(update={"fingerprint": fingerprint(self.model_dump(mode="json"))})

    def write(self, path: Path) -> Self:
        """Writes the manifest with its fingerprint, whole or not at all, and returns it."""
        sealed = self.sealed()
        save_json(path, sealed.model_dump(mode="json"))
        return sealed

    def check_files(self, folder: Path, files: Mapping[str, FileSum], read: bool = True) -> None:
        """Raises `error` where a file is missing or not as it was written: see `FileSum.fault`."""
        if faults := [f for name, file in files.items() if (f := file.fault(folder / name, read))]:
            raise self.error(f"{'; '.join(faults[:5])}; bring it back, or {self.again}")


def fingerprint(tree: Mapping[str, Any]) -> str:
    """Returns the sha256 of the canonical JSON of a tree without its own fingerprint."""
    content = {key: value for key, value in tree.items() if key != "fingerprint"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def parse_json(data: bytes) -> Any:
    """Parses JSON in UTF-8 with no key twice and no number that is not finite.

    Raises ValueError for anything else, in one line.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES:,} bytes")
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_no_key_twice,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except json.JSONDecodeError as fault:
        raise ValueError(f"not JSON (line {fault.lineno}: {fault.msg})") from None
    except UnicodeDecodeError as fault:
        raise ValueError(f"not JSON (no UTF-8 at byte {fault.start})") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(twice)} is there twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.20} is no finite number")
    return number


def in_words(fault: Exception) -> str:
    """Returns the first few things that are wrong with a record, on one line; else its text."""
    if not isinstance(fault, ValidationError):
        return str(fault)
    lines = [
        error["msg"].removeprefix("Value error, ")  # ours, which say all
        if error["type"] == "value_error"
        else f"{'.'.join(map(str, error['loc']))}: {error['msg']}, found {shown(error['input'])}"
        for error in fault.errors()[:5]
    ]
    return "; ".join(lines)


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def cache_folder() -> Path:
    """Returns the folder for what may be fetched or found out again."""
    return Path(os.environ.get("HERON_CACHE") or "~/.cache/heron/shards").expanduser().absolute()


def _remembered() -> frozenset[str]:
    """Returns which states of files were found whole; none where that cannot be read."""
    path = cache_folder() / VERIFIED
    try:
        state = path.stat()
        return _lines(path, state.st_mtime_ns, state.st_size)
    except (OSError, ValueError):
        return frozenset()


@lru_cache(1)  # many files are asked for in a row
def _lines(path: Path, mtime_ns: int, size: int) -> frozenset[str]:
    with path.open() as stream:
        return frozenset(stream.read(MOST_REMEMBERED).split())


def _remember(line: str) -> None:
    """Adds a state, in one write; where too much is remembered, it begins anew."""
    _found_whole.add(line)
    path = cache_folder() / VERIFIED
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        full = path.exists() and path.stat().st_size > MOST_REMEMBERED - 100
        with path.open("w" if full else "a") as stream:
            stream.write(f"{line}\n")
    except OSError:
        return  # another process reads the file again
