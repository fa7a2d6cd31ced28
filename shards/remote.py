"""A folder behind a URL: its files are fetched whole, and again where a connection fails."""

import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urljoin, urlsplit

from heron.shards.body import Body, Damaged, Slow, Unwritable, timely
from heron.shards.errors import RESTORE, ShardError, shown

BLOCK = 8 * 2**20  # bytes of a read; of protocols that do not stream, also of a request
DAMAGED = 2  # a file with other bytes than expected is fetched so many times
MOST_BYTES = 2**30  # of a file of which nobody knows the size
PORTS = {"http": 80, "https": 443}
HOPS = 5  # redirects within a host that are followed
EXTRA = "pip install 'heron-pretrain[remote]'"
# What waiting does not mend, by name: the libraries that define them may not be installed.
HOPELESS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "ParamValidationError",
    "InvalidURL",
    "ClientConnectorCertificateError",
    "SSLCertVerificationError",
}
BUGS = (TypeError, AttributeError, LookupError, NotImplementedError, ValueError, ImportError)
# In the name of an option, or of a query of a URL.
SECRET = re.compile("key|secret|token|pass|auth|sig|cred|connection_string", re.I)
PASSING = (408, 425, 429)  # statuses below 500 that may go away

T = TypeVar("T")
log = logging.getLogger("heron")


@dataclass(frozen=True)
class Retry:
    """How often to try, and how long to wait: for a byte, and between two attempts.

    The pause doubles from `pause_s` up to `longest_s`; a random half of it keeps processes apart.
    An attempt ends where fewer than `slowest` bytes a second come over `timeout_s`.
    """

    attempts: int = 5
    pause_s: float = 0.5
    longest_s: float = 30.0
    timeout_s: float = 60.0
    slowest: float = 10_000

    def pause(self, failed: int) -> float:
        """Returns the seconds to wait after so many failed attempts."""
        whole = min(self.longest_s, self.pause_s * 2.0 ** (failed - 1))
        return whole * random.uniform(0.5, 1)  # noqa: S311


class Missing(ShardError):
    """There is no such file; `found` says what there is not, without its address."""

    found = "no such file"


class TooLong(ShardError):
    """A file has more bytes than it may have; no more of them were fetched."""


class Remote:
    """The files of a folder that fsspec can reach.

    A redirect to another host is followed where the options say `allow_redirects: true` alone.
    It pickles as its URL and options; every process connects on its own, since connections and
    their threads do not survive a fork.
    """

    def __init__(
        self, url: str, options: dict[str, Any] | None = None, retry: Retry | None = None
    ) -> None:
        """Names a folder, with fsspec's `options`; nothing is opened before the first file."""
        self.url = url.rstrip("/")
        protocol = self.url.partition("://")[0]
        self._http, self._s3 = protocol in ("http", "https"), protocol in ("s3", "s3a")
        self.options = options or {}
        self.retry = retry or Retry()
        self._opened: tuple[int, Any, str] | None = None  # process, file system, path of the root

    def __getstate__(self) -> dict[str, Any]:
        """Returns all but the connection."""
        return self.__dict__ | {"_opened": None}

    def __repr__(self) -> str:
        """Returns the address alone: options may hold secrets."""
        return f"Remote({self.where()!r})"

    def where(self, name: str = "") -> str:
        """Returns the address of a file, without passwords, for messages."""
        shown = re.sub(r"//[^/@]*@", "//", self._split()[0])
        return f"{shown}/{name}" if name else shown

    def fetch(
        self,
        name: str,
        stream: BinaryIO,
        size: int | None = None,
        sha256: str | None = None,
        limit: int | None = None,
    ) -> None:
        """Writes a whole file to a stream that is at its beginning.

        What came before a connection broke is kept where the server can send the rest. Raises
        Missing, TooLong where it has more than `limit` bytes, ShardError where it cannot be had or
        is another, OSError of the stream.
        """
        most = MOST_BYTES if limit is None else limit
        body = Body(stream, size, sha256)

        def attempt() -> None:
            for chunk in timely(self._chunks(name, body), self.retry.slowest, self.retry.timeout_s):
                if size is None and body.written + len(chunk) > most:
                    raise TooLong(
                        f"{self.where(name)}: more than {most:,} bytes came; expected {most:,} at "
                        f"most; {RESTORE}"
                    )
                body.write(chunk)
            body.check()

        try:
            self._persist(name, attempt, body)
        except Unwritable as fault:
            assert isinstance(fault.__cause__, OSError)
            raise fault.__cause__ from None

    def names(self) -> set[str] | None:
        """Returns the names of all files, or None where the protocol lists no folders."""
        if self._http:
            return None

        def attempt() -> set[str]:
            fs, root = self._connect()
            ls = partial(self._call, fs.ls) if fs.async_impl else fs.ls
            return {path.rpartition("/")[2] for path in ls(root, detail=False)}

        return self._persist("", attempt)

    def _persist(self, name: str, attempt: Callable[[], T], body: Body | None = None) -> T:
        """Tries until it works, or cannot."""
        where, attempts, damaged = self.where(name), self.retry.attempts, 0
        for number in range(1, attempts + 1):
            try:
                return attempt()
            except (Unwritable, ShardError):
                raise
            except Exception as fault:  # each library has its own
                last = self._words(fault)
                damaged += isinstance(fault, Damaged)
                if damaged == DAMAGED:
                    raise ShardError(f"{where}: {last}; {RESTORE}") from None
                if (final := self._final(fault, name, last)) is not None:
                    raise final from (fault if isinstance(fault, BUGS) else None)
                if body is not None and (isinstance(fault, Damaged) or _status(fault) == 416):
                    body.restart()
            if number < attempts:
                pause = self.retry.pause(number)
                line = "%s: %s; attempt %d of %d follows in %.1f s"
                log.warning(line, where, last, number + 1, attempts, pause)
                time.sleep(pause)
        raise ShardError(
            f"{where}: failed {attempts} times, the last time with: {last}; expected the whole "
            "file; see that the server can be reached, and start again: what was fetched before "
            "is kept"
        )

    def _chunks(self, name: str, body: Body) -> Iterator[bytes]:
        """Yields the bytes from where the body is, or all where the server gives no part."""
        fs, root = self._connect()
        path = self._join(root, name)
        if self._http:
            yield from self._stream(fs, name, body)
        elif fs.async_impl:
            size = body.size if body.size is not None else int(self._call(fs.info, path)["size"])
            while body.written < size:
                end = min(body.written + BLOCK, size)
                chunk = self._call(fs.cat_file, path, start=body.written, end=end)
                yield chunk
                if body.written < end:  # the file is shorter than it should be
                    return
        else:
            with fs.open(path, "rb") as stream:
                stream.seek(body.written)
                while chunk := stream.read(BLOCK):
                    yield chunk

    def _stream(self, fs: Any, name: str, body: Body) -> Iterator[bytes]:
        """Streams one request: a part of it that came is not asked for again."""
        headers = {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        if body.written:
            headers["Range"] = f"bytes={body.written}-"
        # A size spares the request that asks for it; block_size 0 means to stream.
        ask = {"block_size": 0, "size": 1, "headers": headers}
        ask |= {"allow_redirects": fs.kwargs.get("allow_redirects", False)}
        path = self._join("", name)
        stream = fs.open(path, "rb", **ask)
        for _ in range(HOPS):
            if 300 <= stream.r.status < 400:
                stream.close()
                path = self._redirected(name, path, stream.r.headers.get("Location", ""))
                stream = fs.open(path, "rb", **ask)
        with closing(stream):
            if 300 <= stream.r.status < 400:
                raise ShardError(
                    f"{self.where(name)}: {HOPS} redirects, and another; expected the file; give "
                    "the address where it lies"
                )
            if (coding := stream.r.headers.get("Content-Encoding", "identity")) != "identity":
                raise ShardError(
                    f"{self.where(name)}: the server sent Content-Encoding {shown(coding)}; "
                    "expected the bytes of the file as they are; turn compression off at the server"
                )
            sent = stream.r.headers.get("Content-Range", "")
            if body.written and stream.r.status != 206:
                body.restart()
            elif body.written and not sent.startswith(f"bytes {body.written}-"):
                raise Damaged(f"asked from byte {body.written}, the server sent {sent!r}")
            while chunk := stream.read(BLOCK):
                yield chunk

    def _redirected(self, name: str, path: str, location: str) -> str:
        """Returns where a redirect leads within the host; ShardError where it leaves it."""
        target = urljoin(path, location)
        here, there = (
            (one.scheme, one.hostname, one.port or PORTS.get(one.scheme))
            for one in map(urlsplit, (path, target))
        )
        upgraded = here == ("http", there[1], 80) and there == ("https", here[1], 443)
        if here == there or upgraded:
            return target
        raise ShardError(
            f"{self.where(name)}: the server redirects to {there[0]}://{there[1]}:{there[2]}; "
            "expected the file at its own host; give the address where it lies, or allow it with "
            "data.storage_options: {allow_redirects: true}"
        )

    def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls an asynchronous file system; S3 has timeouts of its own, for a byte."""
        longest = self.retry.timeout_s + (BLOCK / self.retry.slowest if self._s3 else 0)
        return function(*args, timeout=longest, **kwargs)

    def _connect(self) -> tuple[Any, str]:
        """Returns the file system of this process, and the folder's path there."""
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                from fsspec.core import url_to_fs

                options = {**self._patience(), **self.options, "skip_instance_cache": True}
                fs, root = url_to_fs(self.url, **options)
            except ImportError as fault:
                raise ShardError(
                    f"{self.where()}: {fault or 'a package is missing'}; install what reads "
                    f"this protocol: {EXTRA} has s3 and https"
                ) from None
            except (ValueError, TypeError) as fault:
                raise ShardError(
                    f"{self.where()}: {self._words(fault)}; expected a local folder, or a URL "
                    "and options that fsspec knows, such as s3://bucket/folder"
                ) from None
            if hasattr(fs, "retries"):
                fs.retries = 1  # ours are the only ones, so that each is counted and reported
            self._opened = os.getpid(), fs, root.rstrip("/")
        return self._opened[1], self._opened[2]

    def _patience(self) -> dict[str, Any]:
        """Returns the timeouts, in each protocol's words; options of the same name win."""
        seconds = self.retry.timeout_s
        if self._http:
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
            return {"client_kwargs": {"timeout": timeout, **self.options.get("client_kwargs", {})}}
        if self._s3:
            return {
                "config_kwargs": {
                    "connect_timeout": seconds,
                    "read_timeout": seconds,
                    "retries": {"total_max_attempts": 1},
                    **self.options.get("config_kwargs", {}),
                }
            }
        return {}

    def _split(self) -> tuple[str, str]:
        """Splits the URL from the query that signs it, which only HTTP has."""
        address, mark, query = self.url.partition("?") if self._http else (self.url, "", "")
        return address.rstrip("/"), mark + query

    def _join(self, root: str, name: str) -> str:
        address, query = self._split()
        return f"{address}/{name}{query}" if self._http else f"{root}/{name}"

    def _words(self, fault: BaseException) -> str:
        """Returns a fault on one line, without secrets."""
        if isinstance(fault, Damaged | Slow):
            return str(fault)
        if isinstance(fault, TimeoutError) and not str(fault):
            return f"nothing came for {self.retry.timeout_s:g} s"
        status = _status(fault)
        text = f"HTTP {status} {fault.message}" if hasattr(fault, "message") and status else ""
        line = " ".join((text or f"{type(fault).__name__}: {fault}").split())
        for secret in self._secrets():
            line = line.replace(secret, "…")
        return line[:300]

    def _secrets(self) -> list[str]:
        """Returns what must not be shown: of the URL, and the options that look like it."""
        secrets = [self._split()[1].lstrip("?"), *re.findall(r"//([^/@]*)@", self._split()[0])]
        left: list[tuple[str, Any]] = list(self.options.items())
        while left:
            key, value = left.pop()
            if isinstance(value, dict):
                left += [(f"{key}.{name}", item) for name, item in value.items()]
            elif isinstance(value, str) and SECRET.search(key):
                secrets.append(value)
        return [secret for secret in secrets if secret]

    def _final(self, fault: Exception, name: str, words: str) -> ShardError | None:
        """Returns the error to stop with, or None where another attempt may help."""
        where, status = self.where(name), _status(fault)
        kinds = {kind.__name__ for kind in type(fault).__mro__}
        if isinstance(fault, FileNotFoundError) or status == 404:
            detail = words.partition(": ")[2]
            found = f"no such file ({detail})" if " " in detail else "no such file"
            missing = Missing(f"{where}: {found}; the manifest lists it; {RESTORE}")
            missing.found = found
            return missing
        if isinstance(fault, TimeoutError | Damaged) or status == 416:
            return None
        if isinstance(fault, PermissionError) or status in (401, 403) or "NoCred" in str(kinds):
            return ShardError(
                f"{where}: not allowed ({words}); expected credentials that may read it; set the "
                "environment variables of the protocol (AWS_ACCESS_KEY_ID, …) or storage options "
                "(anon: true for public buckets)"
            )
        refused = status is not None and 400 <= status < 500 and status not in PASSING
        if refused or kinds & HOPELESS or isinstance(fault, BUGS):
            return ShardError(
                f"{where}: {words}; expected a file; check the address and the storage options"
            )
        return None


def _status(fault: BaseException) -> int | None:
    """Returns the HTTP status behind a fault of any library, where there is one."""
    for one in (fault, fault.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):  # botocore
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        for found in (response, getattr(response, "status_code", None), getattr(one, "status", 0)):
            if isinstance(found, int) and found >= 400:
                return found
    return None
