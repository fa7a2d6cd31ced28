"""Atomic writes: whole under its name, or not there, and what was there stays."""

import errno
import os
from pathlib import Path

import pytest

from heron.base.atomic import Kept, aside_name, atomic_write, locked, named, new_folder, set_aside
from heron.base.errors import InUse, ShardError, SourceError
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
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar"]
    assert run(tmp_path, image=["jpg"]).manifest.rows("all") == 1


@pytest.mark.parametrize("plan", [b"", b"\xff", b"[1]", b"3", b"[" * 100_000])
def test_what_is_kept_without_a_plan_is_removed(plan: bytes, tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept", {"seed": 0})
    kept.put("plan", plan)
    kept.put("part", b"1")
    again = Kept(tmp_path / "kept", {"seed": 0})
    assert not again.goes_on and again.get("part") is None
    assert [path.name for path in again.folder.iterdir()] == ["plan"]


def test_other_settings_are_told_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Kept(tmp_path / "kept", {"layout": "\x1b[2J\n"})
    Kept(tmp_path / "kept", {"layout": "a"})
    said = f"with other settings (layout \\x1b[2J\\n), is now in {tmp_path / 'kept-1'}\n"
    assert capsys.readouterr().out == f"what was unfinished, {said}"


@pytest.mark.parametrize("out", [".", "..", "../site", "link", "new/deep"])
def test_a_new_folder_may_be_the_current_one(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` has no name to put another beside; the folder that one is in is not replaced."""
    inside = tmp_path / ("above/site" if out == "../site" else "site")
    (inside / "below").mkdir(parents=True) if out == ".." else inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    if out == "link":
        (tmp_path / "other disk").mkdir()
        (inside / "link").symlink_to(tmp_path / "other disk")
    if out == "..":
        monkeypatch.chdir(inside / "below")
        with (
            pytest.raises(SourceError, match=r"\.\. is not empty and is the current folder or one"),
            new_folder(Path(out), True, SourceError),
        ):
            pytest.fail("it holds the current folder")
        return
    with pytest.raises(OSError, match="no disk"), new_folder(Path(out), False, SourceError):
        raise OSError("no disk")
    with new_folder(Path(out), False, SourceError) as folder:
        (folder / "data").mkdir()
        (folder / "data" / "a.json").write_text("{}")
        (folder / "index.html").write_text("a page")
    assert Path(out, "index.html").read_text() == "a page"
    assert Path(out, "data", "a.json").read_text() == "{}"
    left = [path.name for path in (*tmp_path.rglob("*"), *inside.iterdir())]
    assert not [name for name in left if name.endswith(".part")]
    if inside.samefile(out):
        assert Path.cwd() == inside and sorted(os.listdir()) == ["data", "index.html"]
        with (
            pytest.raises(SourceError, match=r"not empty .* choose another --export$"),
            new_folder(Path(out), True, SourceError, "--export"),
        ):
            pytest.fail("it is not empty")
        with pytest.raises(ShardError, match="the current folder or one above it, which cannot be"):
            set_aside(Path(out))


def test_the_name_beside_a_folder_that_is_given_without_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faces" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "faces" / "deep")
    assert named(Path("..")) == tmp_path / "faces" and named(Path("a/b")) == Path("a/b")
    assert aside_name(Path("..")) == tmp_path / "faces-1"
    assert aside_name(Path(".")) == tmp_path / "faces" / "deep-1"
    (tmp_path / "faces" / "deep" / "a.onnx").touch()
    assert aside_name(Path("a.onnx")) == Path("a-1.onnx")
    with pytest.raises(IsADirectoryError), atomic_write(Path(".")) as stream:
        stream.write(b"a file")
    assert sorted(path.name for path in (tmp_path / "faces").rglob("*")) == ["a.onnx", "deep"]


@pytest.mark.parametrize("name", ["x" * 250, "/"])
def test_what_has_no_room_for_a_lock_beside_it_is_locked(tmp_path: Path, name: str) -> None:
    refused = pytest.raises(InUse, match="is being written by process")
    with locked(tmp_path / name), refused, locked(tmp_path / name):
        pass
