"""Fetches whole files of a folder behind a URL, with retries where a connection fails."""

import logging
import os
import random
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urljoin, urlsplit

from heron.base.artefact import sha256
from heron.base.errors import RESTORE, ShardError, short_repr
from heron.shards.body import Body, Damaged, Slow, Unwritable, enforce_speed

BLOCK = 8 * 2**20  # bytes per read, and per request where the protocol does not stream
MAX_DAMAGED = 2  # downloads with the wrong bytes before it gives up
MAX_UNSIZED_BYTES = 2**30  # of a file of unknown size
PORTS = {"http": 80, "https": 443}
MAX_REDIRECTS = 5  # followed within a host
EXTRA = "pip install 'heron-pretrain[remote]'"
# Errors that a retry cannot mend, by name, as the libraries that define them may be missing.
FATAL_ERRORS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "ParamValidationError",
    "InvalidURL",
    "ClientConnectorCertificateError",
    "SSLCertVerificationError",
}
BUGS = (TypeError, AttributeError, LookupError, NotImplementedError, ValueError, ImportError)
# Matches the names of options and of URL query parameters that hold secrets.
SECRET = re.compile("key|secret|token|pass|auth|sig|cred|connection_string", re.I)
TRANSIENT = (408, 425, 429)  # HTTP statuses below 500 that may go away

T = TypeVar("T")
log = logging.getLogger("heron")


@dataclass(frozen=True)
class Retry:
    """How often to try, and how long to wait for bytes and between attempts.

    The pause doubles from `pause_s` to `longest_s`, with up to half taken off at random, so that
    processes do not retry in step. An attempt ends below `slowest` bytes a second over `timeout_s`.
    """

    attempts: int = 5
    pause_s: float = 0.5
    longest_s: float = 30.0
    timeout_s: float = 60.0
    slowest: float = 10_000

    def pause(self, failed: int) -> float:
        """Returns the seconds to wait after `failed` failed attempts."""
        delay = min(self.longest_s, self.pause_s * 2.0 ** (failed - 1))
        return delay * random.uniform(0.5, 1)  # noqa: S311


class Missing(ShardError):
    """There is no such file; `reason` is the message without the address."""

    reason = "no such file"


class TooLong(ShardError):
    """A file is longer than allowed; the rest of it was not fetched."""


class Remote:
    """The files of a folder that fsspec can reach.

    Redirects to another host are followed only with the option `allow_redirects: true`. It pickles
    as its URL and options; each process connects on its own, since connections and their threads
    do not survive a fork.
    """

    def __init__(
        self, url: str, options: dict[str, Any] | None = None, retry: Retry | None = None
    ) -> None:
        """Takes the folder's URL and fsspec's `options`; connects at the first request."""
        self.url = url.rstrip("/")
        protocol = self.url.partition("://")[0]
        self._http, self._s3 = protocol in ("http", "https"), protocol in ("s3", "s3a")
        self.options = options or {}
        self.retry = retry or Retry()
        self._connection: tuple[int, Any, str] | None = None  # process id, file system, root path

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the connection."""
        return self.__dict__ | {"_connection": None}

    def __repr__(self) -> str:
        """Returns the address only, as options may hold secrets."""
        return f"Remote({self.where()!r})"

    def where(self, name: str = "") -> str:
        """Returns the address of a file, without passwords, for messages."""
        address = re.sub(r"//[^/@]*@", "//", self._split_query()[0])
        return f"{address}/{name}" if name else address

    def fetch(
        self,
        name: str,
        stream: BinaryIO,
        size: int | None = None,
        sha256: str | None = None,
        limit: int | None = None,
    ) -> None:
        """Writes a whole file to a stream that is at its beginning.

        After a broken connection it continues where it stopped, if the server can send the rest.
        Raises Missing, TooLong where the file has more than `limit` bytes, ShardError where it
        cannot be fetched or has other bytes than expected, and OSErrors of the stream.
        """
        max_bytes = MAX_UNSIZED_BYTES if limit is None else limit
        body, retry = Body(stream, size, sha256), self.retry

        def attempt() -> None:
            for chunk in enforce_speed(self._chunks(name, body), retry.slowest, retry.timeout_s):
                if size is None and body.written + len(chunk) > max_bytes:
                    raise TooLong(
                        f"{self.where(name)}: more than {max_bytes:,} bytes arrived, which is the "
                        f"limit; {RESTORE}"
                    )
                body.write(chunk)
            body.check()

        try:
            self._with_retries(name, attempt, body)
        except Unwritable as fault:
            assert isinstance(fault.__cause__, OSError)
            raise fault.__cause__ from None

    def put(self, name: str, path: Path) -> None:
        """Puts a whole local file, and reads it back to compare its size and checksum.

        Puts it again where it came altered; after a kill it may be cut. Raises ShardError.
        """
        size, checksum = path.stat().st_size, sha256(path)
        timeout = self.retry.timeout_s + size / self.retry.slowest

        def attempt() -> None:
            fs, root = self._connect()
            target = self._join(root, name)
            fs.put_file(str(path), target, **({"timeout": timeout} if fs.async_impl else {}))
            with open(os.devnull, "wb") as sink:
                body = Body(sink, size, checksum)
                for chunk in self._chunks(name, body):
                    body.write(chunk)
                body.check()

        try:
            self._with_retries(name, attempt)
        except Missing as fault:
            raise ShardError(
                f"cannot write {self.where(name)}: {fault.reason}; make the bucket or folder "
                "first, or choose another --out"
            ) from None

    def remove(self, names: Collection[str]) -> None:
        """Removes files of the folder."""

        def attempt() -> None:
            fs, root = self._connect()
            fs.rm([self._join(root, name) for name in sorted(names)])

        if names:
            self._with_retries("", attempt)

    def names(self) -> set[str] | None:
        """Returns the names of all files, or None where the protocol lists no folders."""
        if self._http:
            return None

        def attempt() -> set[str]:
            fs, root = self._connect()
            ls = partial(self._call, fs.ls) if fs.async_impl else fs.ls
            return {path.rpartition("/")[2] for path in ls(root, detail=False)}

        return self._with_retries("", attempt)

    def _with_retries(self, name: str, attempt: Callable[[], T], body: Body | None = None) -> T:
        """Repeats `attempt` until it succeeds; ShardError where no retry is left or can help."""
        where, attempts, damaged_attempts = self.where(name), self.retry.attempts, 0
        for number in range(1, attempts + 1):
            try:
                return attempt()
            except (Unwritable, ShardError):
                raise
            except Exception as fault:  # each library has its own
                reason = self._describe(fault)
                damaged_attempts += isinstance(fault, Damaged)
                if damaged_attempts == MAX_DAMAGED:
                    raise ShardError(f"{where}: {reason}; {RESTORE}") from None
                if (error := self._fatal_error(fault, name, reason)) is not None:
                    raise error from (fault if isinstance(fault, BUGS) else None)
                if body is not None and (isinstance(fault, Damaged) or _status(fault) == 416):
                    body.restart()
            if number < attempts:
                pause = self.retry.pause(number)
                message = "%s: %s; attempt %d of %d follows in %.1f s"
                log.warning(message, where, reason, number + 1, attempts, pause)
                time.sleep(pause)
        raise ShardError(
            f"{where}: failed {attempts} times, the last time with: {reason}; check that the "
            "server can be reached, and start again: what was fetched before is kept"
        )

    def _chunks(self, name: str, body: Body) -> Iterator[bytes]:
        """Yields the bytes that the body lacks, or all of them where the server sends no ranges."""
        fs, root = self._connect()
        path = self._join(root, name)
        if self._http:
            yield from self._stream_http(fs, name, body)
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

    def _stream_http(self, fs: Any, name: str, body: Body) -> Iterator[bytes]:
        headers = {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        if body.written:
            headers["Range"] = f"bytes={body.written}-"
        # A given size spares fsspec a request for it; block_size 0 means to stream.
        arguments = {"block_size": 0, "size": 1, "headers": headers}
        arguments |= {"allow_redirects": fs.kwargs.get("allow_redirects", False)}
        path = self._join("", name)
        stream = fs.open(path, "rb", **arguments)
        for _ in range(MAX_REDIRECTS):
            if 300 <= stream.r.status < 400:
                stream.close()
                path = self._follow_redirect(name, path, stream.r.headers.get("Location", ""))
                stream = fs.open(path, "rb", **arguments)
        with closing(stream):
            if 300 <= stream.r.status < 400:
                raise ShardError(
                    f"{self.where(name)}: more than {MAX_REDIRECTS} redirects; use the final "
                    "address of the file"
                )
            if (encoding := stream.r.headers.get("Content-Encoding", "identity")) != "identity":
                raise ShardError(
                    f"{self.where(name)}: the server sent Content-Encoding {short_repr(encoding)}, "
                    "but files must come as they are; turn compression off at the server"
                )
            content_range = stream.r.headers.get("Content-Range", "")
            if body.written and stream.r.status != 206:
                body.restart()
            elif body.written and not content_range.startswith(f"bytes {body.written}-"):
                raise Damaged(f"asked from byte {body.written}, the server sent {content_range!r}")
            while chunk := stream.read(BLOCK):
                yield chunk

    def _follow_redirect(self, name: str, path: str, location: str) -> str:
        """Returns the target of a redirect; ShardError where it leaves the host."""
        target = urljoin(path, location)
        old, new = (
            (parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme))
            for parts in map(urlsplit, (path, target))
        )
        upgraded = old == ("http", new[1], 80) and new == ("https", old[1], 443)
        if old == new or upgraded:
            return target
        raise ShardError(
            f"{self.where(name)}: the server redirects to {new[0]}://{new[1]}:{new[2]}, another "
            "host; use the final address of the file, or allow it with data.storage_options: "
            "{allow_redirects: true}"
        )

    def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls an asynchronous file system with a timeout; S3 also has its own, for each byte."""
        timeout = self.retry.timeout_s + (BLOCK / self.retry.slowest if self._s3 else 0)
        return function(*args, timeout=timeout, **kwargs)

    def _connect(self) -> tuple[Any, str]:
        """Returns this process's file system, and the folder's path in it."""
        if self._connection is None or self._connection[0] != os.getpid():
            try:
                from fsspec.core import url_to_fs

                options = {**self._timeout_options(), **self.options, "skip_instance_cache": True}
                fs, root = url_to_fs(self.url, **options)
            except ImportError as fault:
                raise ShardError(
                    f"{self.where()}: {fault or 'a package is missing'}; install what reads "
                    f"this protocol: {EXTRA} has s3 and https"
                ) from None
            except (ValueError, TypeError) as fault:
                raise ShardError(
                    f"{self.where()}: {self._describe(fault)}; use a local folder, or a URL and "
                    "options that fsspec knows, such as s3://bucket/folder"
                ) from None
            if hasattr(fs, "retries"):
                fs.retries = 1  # only ours count, so that each is reported
            self._connection = os.getpid(), fs, root.rstrip("/")
        return self._connection[1], self._connection[2]

    def _timeout_options(self) -> dict[str, Any]:
        """Returns the protocol's timeout options; the user's options of the same name win."""
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

    def _split_query(self) -> tuple[str, str]:
        """Splits the URL into address and signing query, which only HTTP has."""
        address, mark, query = self.url.partition("?") if self._http else (self.url, "", "")
        return address.rstrip("/"), mark + query

    def _join(self, root: str, name: str) -> str:
        address, query = self._split_query()
        return f"{address}/{name}{query}" if self._http else f"{root}/{name}"

    def _describe(self, fault: BaseException) -> str:
        """Describes an error on one line, without secrets."""
        if isinstance(fault, Damaged | Slow):
            return str(fault)
        if isinstance(fault, TimeoutError) and not str(fault):
            return f"nothing arrived for {self.retry.timeout_s:g} s"
        status = _status(fault)
        text = f"HTTP {status} {fault.message}" if hasattr(fault, "message") and status else ""
        line = " ".join((text or f"{type(fault).__name__}: {fault}").split())
        for secret in self._find_secrets():
            line = line.replace(secret, "…")
        return line[:300]

    def _find_secrets(self) -> list[str]:
        """Returns the secrets in the URL, and the options whose names suggest one."""
        address, query = self._split_query()
        secrets = [query.lstrip("?"), *re.findall(r"//([^/@]*)@", address)]
        pending: list[tuple[str, Any]] = list(self.options.items())
        while pending:
            key, value = pending.pop()
            if isinstance(value, dict):
                pending += [(f"{key}.{name}", item) for name, item in value.items()]
            elif isinstance(value, str) and SECRET.search(key):
                secrets.append(value)
        return [secret for secret in secrets if secret]

    def _fatal_error(self, fault: Exception, name: str, reason: str) -> ShardError | None:
        """Returns the error to give up with, or None where another attempt may help."""
        where, status = self.where(name), _status(fault)
        kinds = {kind.__name__ for kind in type(fault).__mro__}
        if isinstance(fault, FileNotFoundError) or status == 404:
            detail = reason.partition(": ")[2]
            problem = f"no such file ({detail})" if " " in detail else "no such file"
            missing = Missing(f"{where}: {problem}, but the manifest lists it; {RESTORE}")
            missing.reason = problem
            return missing
        if isinstance(fault, TimeoutError | Damaged) or status == 416:
            return None
        if isinstance(fault, PermissionError) or status in (401, 403) or "NoCred" in str(kinds):
            return ShardError(
                f"{where}: not allowed ({reason}); the credentials must allow it: set "
                "the environment variables of the protocol (AWS_ACCESS_KEY_ID, …) or storage "
                "options (anon: true for public buckets)"
            )
        refused = status is not None and 400 <= status < 500 and status not in TRANSIENT
        if refused or kinds & FATAL_ERRORS or isinstance(fault, BUGS):
            return ShardError(
                f"cannot read {where}: {reason}; check the address and the storage options"
            )
        return None


def _status(fault: BaseException) -> int | None:
    for error in (fault, fault.__cause__):
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        codes = response, getattr(response, "status_code", None), getattr(error, "status", None)
        for code in codes:
            if isinstance(code, int) and code >= 400:
                return code
    return None
