"""Makes an index's folder: hidden while it is written, renamed when complete, and by one build."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from heron.pipeline.config.errors import RetrievalError

LOCK = ".lock"


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Makes a hidden folder beside `out`, renamed to `out` on success and removed otherwise.

    Raises:
        RetrievalError: `out` is not empty, or another build is writing it or has just written it.
    """
    _refuse_taken(out)
    target = out.resolve()  # a link may lead to another disk
    if target == Path.cwd():
        raise RetrievalError(f"{out} is the folder that you are in; expected another (--out)")
    work = target.with_name(f".{target.name}.part")
    with _lock(work):
        try:
            _refuse_taken(out)  # by a build that ended before this one had the lock
            for path in work.iterdir():  # left by a build that was killed
                if path.name != LOCK:
                    path.unlink()
            yield work
            _rename(work, target)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        (target / LOCK).unlink()  # held until now: no other build has come between


def _refuse_taken(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RetrievalError(
            f"{out} is there already; expected a new or an empty folder; give another folder "
            "(--out), or remove it"
        )


def _lock(work: Path) -> IO[str]:
    """Makes a folder and opens its lock file, locked until it is closed."""
    while True:
        work.mkdir(parents=True, exist_ok=True)
        try:
            lock = (work / LOCK).open("w")
        except FileNotFoundError:  # another build has just renamed or removed the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(work / LOCK)):
                return lock
        except FileNotFoundError:  # as above, between the opening and the lock
            pass
        except OSError:
            lock.close()
            raise RetrievalError(
                f"{work} is being written by another build; wait for it, or give another folder "
                "(--out)"
            ) from None
        lock.close()


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
