"""Tars whose index is interrupted: those that were read are not read again."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heron.base.artefact import sha256
from heron.base.atomic import Kept, kept_in_cache
from heron.base.errors import ShardError
from heron.cli.main import main
from heron.shards.tarball import read_contents
from heron.sources import foreign
from heron.sources.layout import Layout
from heron.sources.survey import Survey, dump, load, survey_tar
from tests.shards.others import cats, jpeg, run, write_tar, write_wds

OPTIONS: dict[str, Any] = {"image": ["jpg"], "label": "cls"}


def tars(folder: Path) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"cats-train-{number:04d}.tar" for number in range(4)]
    for number, path in enumerate(paths):
        write_wds(path, cats(5 * number, 5))
    return paths


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".tar"}


def kept(folder: Path) -> Path:
    return kept_in_cache("tars", folder)


def interrupted(folder: Path) -> list[Path]:
    """Tars of which one has an error, so that what was found in the others is kept."""
    paths = tars(folder)
    good = paths[1].read_bytes()
    write_tar(paths[1], [("7.jpg", jpeg(0)), ("7.cls", b"seven")])
    with pytest.raises(ShardError, match="must be a class number"):
        run(folder, **OPTIONS)
    paths[1].write_bytes(good)
    return paths


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tars that are read."""
    names = list[str]()

    def noting(layout: Any, tar: Path) -> Any:
        names.append(tar.name)
        return survey_tar(layout, tar)

    monkeypatch.setattr(foreign, "survey_tar", noting)
    return names


KILLED = """
import os, signal, sys
from heron.cli.main import main
from heron.base.atomic import Kept
put = Kept.put
def killing(kept, name, data):
    put(kept, name, data)
    if name.startswith("cats-train-0001"):
        os.kill(os.getpid(), signal.SIGKILL)
Kept.put = killing
main(sys.argv[1:])
"""


def test_a_killed_index_reads_the_rest(
    tmp_path: Path, read: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = tars(folder := tmp_path / "cats")
    words = ["shards", "index", str(folder), "--image", "jpg", "--label", "cls"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words, "--quiet"], check=False)
    assert killed.returncode == -signal.SIGKILL and not (folder / "manifest.json").exists()
    assert main(words) == 0
    assert read == [path.name for path in paths[2:]]
    assert "an unfinished index goes on: 2 of 4 tars are read" in capsys.readouterr().out
    found = files(folder)
    assert not kept(folder).exists()
    (aside := tmp_path / "aside").mkdir()
    for name in found:
        (folder / name).rename(aside / name)
    run(folder, **OPTIONS)
    assert files(folder) == found


def test_a_tar_that_is_mended_is_read_alone(tmp_path: Path, read: list[str]) -> None:
    paths = interrupted(folder := tmp_path / "cats")
    assert len(read) == 4
    (kept(folder) / "half").write_bytes(b"")
    path = next(kept(folder).glob("cats-train-0003*"))
    path.write_bytes(path.read_bytes()[:-1])
    read.clear()
    assert run(folder, **OPTIONS).manifest.rows("train") == 20
    assert read == [paths[1].name, paths[3].name]


def test_a_tar_of_the_same_size_and_time_is_read_again(tmp_path: Path) -> None:
    """As `rsync --times` restores one from a good copy."""
    paths = interrupted(folder := tmp_path / "cats")
    status, data = paths[0].stat(), bytearray(paths[0].read_bytes())
    label, _ = read_contents(paths[0]).samples["000000"]["cls"]
    data[label] = ord("2")
    paths[0].write_bytes(data)
    os.utime(paths[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run(folder, **OPTIONS).manifest.splits["train"][0].sha256 == sha256(paths[0])


def test_what_comes_with_the_tars_is_not_what_was_kept(
    tmp_path: Path, read: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A stranger's folder says nothing of its tars, and nothing is written where it leads."""
    paths = interrupted(stranger := tmp_path / "stranger")
    (mine := tmp_path / "mine").mkdir()
    for path in paths:
        path.rename(mine / path.name)
    (home := tmp_path / "home").mkdir()
    (home / ".unsaved.part").write_text("mine")
    kept(stranger).rename(home / "kept")
    (mine / ".index.kept").symlink_to(home / "kept")
    read.clear()
    run(mine, **OPTIONS)
    assert len(read) == 4 and "goes on" not in capsys.readouterr().out
    assert [*(home / "kept").glob("cats-train-*")] and (home / ".unsaved.part").exists()


@pytest.mark.parametrize("data", [b"", b"{}\n", b"[]\n", b"\xff\n", b"[" * 100_000])
def test_what_another_version_kept_is_not_used(
    data: bytes, tmp_path: Path, read: list[str]
) -> None:
    paths = interrupted(folder := tmp_path / "cats")
    plan = Kept.__new__(Kept)  # only to put a file with its checksum
    plan.folder = kept(folder)
    name = next(plan.folder.glob("cats-train-0000*")).name
    plan.put(name, data)
    read.clear()
    run(folder, **OPTIONS)
    assert read == [paths[0].name, paths[1].name]


def test_a_cache_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HERON_CACHE", str(tmp_path / "file" / "cache"))
    interrupted(folder := tmp_path / "cats")
    assert run(folder, **OPTIONS).manifest.rows("train") == 20


def test_bad_samples_are_skipped_only_where_they_may_be(tmp_path: Path, read: list[str]) -> None:
    paths = tars(folder := tmp_path / "cats")
    write_tar(paths[1], [*((f"{n}.jpg", jpeg(n)) for n in (6, 7)), ("7.cls", b"1")])
    with pytest.raises(ShardError, match="has no label"):
        run(folder, **OPTIONS)
    read.clear()
    assert run(folder, **OPTIONS, on_error="skip").manifest.rows("train") == 16
    assert read == [paths[1].name]


def test_other_options_read_all(
    tmp_path: Path, read: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = tars(folder := tmp_path / "cats")
    paths[2].write_bytes(b"")
    with pytest.raises(ShardError):
        run(folder, **OPTIONS)
    write_wds(paths[2], cats(10, 5))
    read.clear()
    run(folder, image=["jpg"])
    assert len(read) == 4
    said = "what was unfinished, with other settings (label cls), is now in"
    assert f"{said} {kept(folder)}-1\n" in capsys.readouterr().out


def test_what_is_kept_of_a_tar_is_what_was_found(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [
        ("é.jpg", jpeg(0)), ("é.json", b'{"kind": ["b", "a"]}'), (".hidden", b""),
        ("b.jpg", jpeg(1, 4, 6)), ("b.json", b'{"kind": null}'), ("c.json", b"{}"),
    ])  # fmt: skip
    layout = Layout.of({"image": ["jpg"], "label": "json:kind", "on_error": "skip",
                        "missing_label": "unlabelled"})  # fmt: skip
    found = survey_tar(layout, tmp_path / "a.tar")
    assert isinstance(found, Survey) and found.skipped and found.strays and None in found.labels
    again = load(dump(found))
    assert again is not None and vars(again).keys() == vars(found).keys()
    for name, value in vars(found).items():
        if name != "index":
            assert getattr(again, name) == value
    assert found.index.keys.tolist() == again.index.keys.tolist()
    assert found.index.crc32.tolist() == again.index.crc32.tolist()
