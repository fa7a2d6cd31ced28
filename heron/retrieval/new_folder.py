"""Makes an index's folder: hidden while it is written, renamed when it is complete."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from heron.config.errors import RetrievalError
from heron.shards.atomic import is_at, make_room, refuse_taken


@contextmanager
def new_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """Makes a hidden folder beside `out`, renamed to `out` on success and removed otherwise.

    With `overwrite`, what `out` held is moved aside on success. Raises a RetrievalError if `out` is
    not empty, or another build writes it or has just done so.
    """
    refuse_taken(out, overwrite, RetrievalError)
    target = out.resolve()  # a link may lead to another disk
    if target == Path.cwd():
        raise RetrievalError(f"{out} is the folder that you are in; expected another (--out)")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.part")
    with _lock(target.with_name(f".{target.name}.lock"), work):
        refuse_taken(
            out, overwrite, RetrievalError
        )  # by a build that ended before this one had the lock
        if work.is_dir():
            shutil.rmtree(work)  # left by a build that was killed
        work.mkdir()
        try:
            yield work
            if overwrite:
                make_room(out, overwrite, RetrievalError)
            _rename(work, target)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


@contextmanager
def _lock(path: Path, work: Path) -> Iterator[None]:
    """Holds a lock on a file beside the folder, so that removing the folder cannot free it."""
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RetrievalError(
                    f"{work} is being written by another build; wait for it, or give another "
                    "folder (--out)"
                ) from None
            if not is_at(path, file.fileno()):
                continue  # the build that held it has just ended, and removed it
            try:
                yield
            finally:
                path.unlink()
            return


def _rename(work: Path, target: Path) -> None:
    """Renames a folder; it may replace an empty one."""
    try:
        work.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise RetrievalError(
            f"{target} was written by another build meanwhile; expected a new or an empty folder; "
            "use that one, or build again with another folder (--out)"
        ) from None
