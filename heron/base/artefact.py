"""Artefacts: folders with a manifest that has the checksum of every file, and its own.

Data sets, checkpoints, embeddings and indexes have a manifest. It lists the size and checksum of
each file, the fingerprints of what the artefact was made from, and its own fingerprint.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from heron.base.atomic import cache_folder, save_json
from heron.base.errors import HeronError, ShardError, explain, short_repr

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 2**20  # largest manifest: some 200,000 shards
MAX_VERIFIED_BYTES = 8 * 2**20  # of the record of verified files: some 130,000 files
VERIFIED_FILE = "verified"  # name of that record in the cache folder
INT64_MAX = 2**63 - 1  # of an int64

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}$")]  # not a path
Count = Annotated[int, Field(ge=0, le=INT64_MAX)]
_verified_here: set[str] = set()  # by this process, as the cache folder may be read-only


class Record(BaseModel):
    """A part of a manifest: immutable, strictly typed, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FileSum(Record):
    """The size and checksum of a file as it was written."""

    bytes: Count
    sha256: Sha256

    @classmethod
    def of(cls, path: Path) -> Self:
        """Returns the size and checksum of an existing file."""
        return cls(bytes=path.stat().st_size, sha256=sha256(path))

    def fault(self, path: Path, read: bool = True) -> str:
        """Returns how a file differs from what was written, or "".

        The size is always compared, the checksum only with `read`. A file that once passed is not
        read again while its inode, size and modification time stay the same.
        """
        try:
            status = path.stat()
        except OSError as error:
            return f"{path}: {error.strerror}"
        if status.st_size != self.bytes:
            return f"{path} has {status.st_size:,} bytes instead of {self.bytes:,}"
        state = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, self.sha256
        line = hashlib.sha256(repr(state).encode()).hexdigest()
        if not read or line in _verified_here or line in _verified_lines():
            return ""
        try:
            digest = sha256(path)
        except OSError as error:
            return f"{path}: {error.strerror}"
        if digest != self.sha256:
            return (
                f"{path} was altered: its sha256 is {digest[:12]}… instead of {self.sha256[:12]}…"
            )
        _mark_verified(line)
        return ""


class Artefact(Record):
    """A manifest with a fingerprint: the sha256 of its canonical JSON without that field.

    A subclass states what it is, its error type, how to make it again, and the versions it reads.
    """

    description: ClassVar[str]
    error: ClassVar[type[HeronError]] = ShardError
    remedy: ClassVar[str]
    version_key: ClassVar[str] = "format"
    versions: ClassVar[tuple[int, ...]]

    fingerprint: Fingerprint | Literal[""] = ""  # "" until it is written

    @classmethod
    def parse(cls, data: bytes, where: str) -> Self:
        """Parses the manifest at `where`, a path or a URL; raises `error` where it is invalid."""

        def invalid(fault: object) -> HeronError:
            return cls.error(f"cannot read {cls.description} {where}: {fault}; {cls.remedy}")

        try:
            tree = parse_json(data)
        except ValueError as fault:
            raise invalid(fault) from None
        version = tree.get(cls.version_key) if isinstance(tree, dict) else None
        if type(version) is not int or version not in cls.versions:
            supported = " or ".join(map(str, cls.versions))
            raise cls.error(
                f"{where}: {cls.version_key} is {short_repr(version)}, but this version of heron "
                f"reads {supported}; {cls.remedy}"
            )
        stated, computed = tree.get("fingerprint"), fingerprint(tree)
        if stated != computed:
            raise invalid(f"its fingerprint is {short_repr(stated)}, its content has {computed}")
        try:
            record = cls.model_validate_json(data, strict=True)
        except ValidationError as fault:
            raise invalid(describe_errors(fault)) from None
        return record.model_copy(update={"fingerprint": computed})

    @classmethod
    def read(cls, path: Path, remedy: str = "") -> Self:
        """Reads a file of at most `MAX_MANIFEST_BYTES`; `remedy` tells how to mend a failure."""
        try:
            with path.open("rb") as stream:
                data = stream.read(MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError:
            fault = f"has no {path.name}" if path.parent.is_dir() else "does not exist"
            raise cls.error(
                f"cannot read {cls.description}: {path.parent} {fault}; {remedy or cls.remedy}"
            ) from None
        except OSError as error:
            raise cls.error(
                f"cannot read {cls.description} {path}: {error.strerror}; {remedy or cls.remedy}"
            ) from None
        return cls.parse(data, str(path))

    def sealed(self) -> Self:
        """Returns the manifest with its fingerprint."""
        return self.model_copy(update={"fingerprint": fingerprint(self.model_dump(mode="json"))})

    def write(self, path: Path, several: bool = False) -> Self:
        """Adds the fingerprint, writes the manifest atomically, and returns it: `atomic_write`."""
        sealed = self.sealed()
        save_json(path, sealed.model_dump(mode="json"), several)
        return sealed

    def check_files(self, folder: Path, files: Mapping[str, FileSum], read: bool = True) -> None:
        """Raises `error` if a file is missing or differs from its sum: see `FileSum.fault`."""
        if faults := [f for name, file in files.items() if (f := file.fault(folder / name, read))]:
            raise self.error(f"{'; '.join(faults[:5])}; restore it, or {self.remedy}")


def fingerprint(tree: Mapping[str, Any]) -> str:
    """Returns the sha256 of the canonical JSON of a tree without its own fingerprint."""
    content = {key: value for key, value in tree.items() if key != "fingerprint"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def parse_json(data: bytes) -> Any:
    """Parses UTF-8 JSON of unique keys and finite numbers; ValueErrors have a text of one line."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ValueError(f"more than {MAX_MANIFEST_BYTES:,} bytes")
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_unique_keys,
            parse_float=_finite_float,
            parse_constant=_finite_float,
        )
    except json.JSONDecodeError as fault:
        raise ValueError(f"not JSON (line {fault.lineno}: {fault.msg})") from None
    except UnicodeDecodeError as fault:
        raise ValueError(f"not JSON (not UTF-8 at byte {fault.start})") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        (duplicate, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {short_repr(duplicate)} occurs twice")
    return mapping


def _finite_float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.20} is not a finite number")
    return number


def describe_errors(fault: Exception) -> str:
    """Returns the first few errors of a ValidationError, or the text of any other, on one line."""
    if not isinstance(fault, ValidationError):
        return str(fault)
    lines = [
        error["msg"].removeprefix("Value error, ")  # our own texts are complete
        if error["type"] == "value_error"
        else explain(error, ".".join(map(str, error["loc"])))
        for error in fault.errors()[:5]
    ]
    return "; ".join(lines)


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _verified_lines() -> frozenset[str]:
    path = cache_folder() / VERIFIED_FILE
    try:
        state = path.stat()
        return _lines(path, state.st_mtime_ns, state.st_size)
    except (OSError, ValueError):
        return frozenset()


@lru_cache(1)  # many files are looked up in a row
def _lines(path: Path, mtime_ns: int, size: int) -> frozenset[str]:
    with path.open() as stream:
        return frozenset(stream.read(MAX_VERIFIED_BYTES).split())


def _mark_verified(line: str) -> None:
    """Records a state in a single write; a record that is full starts over."""
    _verified_here.add(line)
    path = cache_folder() / VERIFIED_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        full = path.exists() and path.stat().st_size > MAX_VERIFIED_BYTES - 100
        with path.open("w" if full else "a") as stream:
            stream.write(f"{line}\n")
    except OSError:
        return  # only means that other processes read the file again
