"""Atomic writes: whole under its name, or not there, and what was there stays."""

import errno
import os
from pathlib import Path

import pytest

from heron.shards.atomic import atomic_write
from heron.shards.errors import ShardError
from tests.shards.others import jpeg, run, write_tar


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with atomic_write(path) as stream:
        stream.write(b"old")
        assert not path.exists()
    for fault in (KeyboardInterrupt(), OSError(errno.EIO, "no disk"), ValueError("no number")):
        with pytest.raises(type(fault)), atomic_write(path) as stream:
            stream.write(b"half")
            raise fault
    with (
        pytest.raises(ShardError, match="the disk is full; free some space"),
        atomic_write(path),
    ):
        raise OSError(errno.ENOSPC, "no space left")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    with atomic_write(path) as stream:
        stream.write(b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_who_writes_a_file_at_the_same_time_does_not_spoil_it(tmp_path: Path) -> None:
    """As a worker does that outlives the driver that was killed, while the next build runs."""
    path = tmp_path / "a.tar"
    with atomic_write(path, several=True) as orphan:
        orphan.write(b"who")
        orphan.flush()
        with atomic_write(path, several=True) as stream:
            stream.write(b"whole")
        assert path.read_bytes() == b"whole"
        orphan.write(b"le")
    assert path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_tar(tmp_path / "a.tar", [("0.jpg", jpeg(0))])
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ShardError, match="the disk is full; free some space"):
            run(tmp_path, image=["jpg"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
    assert run(tmp_path, image=["jpg"]).manifest.rows("all") == 1
