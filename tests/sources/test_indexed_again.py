"""Tars that are indexed twice, and what was there keeps."""

from pathlib import Path

import pytest
from PIL import Image

from heron.base.errors import ShardError, SourceError
from heron.shards.build import build
from heron.shards.show import save_sheet
from heron.sources import make_source
from tests.shards.others import cats, npy, run, write_tar, write_wds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_wds(tmp_path / "cats-train-0000.tar", cats(0, 5))
    write_wds(tmp_path / "cats-train-0001.tar", cats(5, 4))
    write_wds(tmp_path / "cats-validation-0000.tar", cats(9, 3))
    return tmp_path


def test_a_former_index_is_kept_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, image=["jpg"], label="cls")
    names = [path.name for path in folder.iterdir() if path.suffix != ".tar"]
    before = {name: (folder / name).read_bytes() for name in names}
    assert len(before) == 4
    run(folder, image=["jpg"], overwrite=True)
    assert f"the former index is now in {folder / 'index-1'}" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (folder / "index-1").iterdir()} == before
    run(folder, image=["jpg"], label="cls", overwrite=True)
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert (folder / "index-2" / "manifest.json").exists()


def test_a_picture_of_a_sheet_s_name_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "near.png").write_bytes(b"a photograph")
    save_sheet(Image.new("RGB", (4, 4)), path)
    assert (tmp_path / "near-1.png").read_bytes() == b"a photograph"
    out, error = capsys.readouterr()
    assert not out and error == f"the former {path} is now {tmp_path / 'near-1.png'}\n"
    with Image.open(path) as picture:
        assert picture.size == (4, 4)


def test_again_with_other_options_and_beside_builds_of_ours(folder: Path) -> None:
    run(folder, image=["jpg"], label="cls")
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert str(run(folder, image=["jpg"], label="cls")).startswith(f"{folder}: train 9 rows")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    with pytest.raises(ShardError, match="was indexed with other options; --overwrite indexes it"):
        run(folder, image=["jpg"])
    (folder / "cats-train-0001.tar").unlink()
    with pytest.raises(ShardError, match="was indexed with other tars; --overwrite"):
        run(folder, image=["jpg"], label="cls")
    assert run(folder, image=["jpg"], overwrite=True).manifest.rows("train") == 5
    assert (folder / "index-1" / "cats-train-0001.index.npz").exists()
    assert not (folder / "cats-train-0001.index.npz").exists()
    with pytest.raises(SourceError, match="choose another --out, a new folder or one of"):
        build(make_source("faces", {"train": 2}), folder, progress=False, overwrite=True)
    (folder / "manifest.json").unlink()
    with pytest.raises(ShardError, match="but neither manifest.json nor build.json"):
        build(make_source("faces", {"train": 2}), folder, progress=False, overwrite=True)
    assert (folder / "cats-train-0000.tar").exists()
    build(
        make_source("faces", {"train": 2, "test": 0, "size": 32}), folder / "ours", progress=False
    )
    with pytest.raises(
        ShardError, match="has a build of Heron, from faces, which is already indexed"
    ):
        run(folder / "ours", image=["jpg"], overwrite=True)
    (folder / "ours" / "manifest.json").rename(folder / "ours" / "build.json")
    with pytest.raises(ShardError, match="has an unfinished build of Heron"):
        run(folder / "ours", image=["jpg"])


def test_a_build_keeps_indexed_tars_whose_manifest_cannot_be_read(tmp_path: Path) -> None:
    """Nobody can tell whose they are: they are moved aside, all together."""
    out = tmp_path / "out"
    out.mkdir()
    samples = [("a.x.npy", npy([1, 2], "f4")), ("a.labels.npy", npy([0], "f4"))]
    tar = write_tar(out / "train-000000.tar", samples)
    run(out, vector=["x.npy", "labels.npy"])
    (out / "manifest.json").write_text("{")
    before = tar.read_bytes()
    build(make_source("faces", {"train": 2, "test": 0}), out, progress=False, overwrite=True)
    kept = tmp_path / "out-1"
    assert (kept / "train-000000.tar").read_bytes() == before
    assert {path.name for path in kept.iterdir()} >= {"manifest.json", "train-000000.index.npz"}


def test_overwrite_mends_a_manifest_that_cannot_be_read(folder: Path) -> None:
    whole = run(folder, image=["jpg"], label="cls").manifest
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ShardError, match="not JSON .*; build or index it again with --overwrite"):
        run(folder, image=["jpg"], label="cls")
    assert run(folder, image=["jpg"], label="cls", overwrite=True).manifest == whole
