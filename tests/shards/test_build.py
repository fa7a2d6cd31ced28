"""Builds: the same bytes whoever writes, resumed where they stopped, whole or not there."""

import errno
import json
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from heron.base.atomic import locked
from heron.base.errors import ShardError, SourceError
from heron.base.workers import Processes
from heron.shards.build import build
from heron.shards.manifest import Labels, View, load_manifest
from heron.shards.source import Rows, Source
from heron.shards.verify import verify
from heron.shards.write_shard import Moments
from heron.sources import make_source
from heron.sources.xrmb import Frames
from tests.shards.tiny import arrays_source


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_one_worker_and_two_write_the_same_bytes(tmp_path: Path) -> None:
    source = make_source("frames", {"train": 600, "test": 100, "seed": 3})
    for workers in (1, 2):
        build(
            source,
            tmp_path / str(workers),
            shard_rows=256,
            executor=Processes(workers),
            progress=False,
        )
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert list(one) == list(two) and one == two
    assert len(one) == 2 * 4 + 1  # tars, indexes, manifest; no journal, no leftovers
    other = make_source("frames", {"train": 600, "test": 100, "seed": 4})
    build(other, tmp_path / "4", shard_rows=256, progress=False)
    assert contents(tmp_path / "4")["train-000000.tar"] != one["train-000000.tar"]


class Failing(Frames):
    """Frames whose second shard cannot be read."""

    def read(self, split: str, start: int, stop: int) -> Rows:
        if start >= 256:
            raise OSError(errno.ENOSPC, "no space left")
        return super().read(split, start, stop)


def test_an_interrupted_build_goes_on(tmp_path: Path) -> None:
    options = {"train": 600, "test": 0}
    with pytest.raises(ShardError, match="train-000001.tar: the disk is full; .*finished is k"):
        build(Failing.model_validate(options), tmp_path / "a", shard_rows=256, progress=False)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"build.json", "train-000000.tar", "train-000000.index.npz"}
    with pytest.raises(ShardError, match="an unfinished build.*run the same"):
        verify(tmp_path / "a")
    (tmp_path / "a" / ".train-000001.tar.part").write_bytes(b"of a build that was killed")
    before = (tmp_path / "a" / "train-000000.tar").stat().st_mtime_ns
    build(make_source("frames", options), tmp_path / "a", shard_rows=256, progress=False)
    assert (tmp_path / "a" / "train-000000.tar").stat().st_mtime_ns == before
    build(make_source("frames", options), tmp_path / "b", shard_rows=256, progress=False)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert verify(tmp_path / "a").ok


def test_a_finished_build_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    first = build(arrays_source(tmp_path), out)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    assert build(arrays_source(tmp_path), out) == first
    assert "complete: train 32 rows in 1 shard, test 8 rows in 1 shard; nothing to do" in (
        capsys.readouterr().out
    )
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times


def test_an_option_that_came_later_has_its_default_in_an_older_folder(tmp_path: Path) -> None:
    first = build(make_source("frames", {"train": 300}), tmp_path / "out", progress=False)
    options = {k: v for k, v in first.built_from.options.items() if k != "test"}
    older = first.built_from.model_copy(update={"options": options})
    first.model_copy(update={"built_from": older}).write(tmp_path / "out" / "manifest.json")
    build(make_source("frames", {"train": 300}), tmp_path / "out", progress=False)
    with pytest.raises(ShardError, match="another build: its test is 5000, not 7"):
        build(make_source("frames", {"train": 300, "test": 7}), tmp_path / "out", progress=False)


def test_another_build_in_the_folder_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = make_source("frames", {"train": 300, "test": 0})
    build(source, out, progress=False)
    other = make_source("frames", {"train": 300, "test": 0, "seed": 1})
    with pytest.raises(ShardError, match="another build: its seed is 0, not 1.*--overwrite"):
        build(other, out, progress=False)
    with pytest.raises(ShardError, match="its shard_rows is 8192, not 256"):
        build(source, out, shard_rows=256, progress=False)
    with pytest.raises(ShardError, match="its source is 'frames', not 'faces'"):
        build(make_source("faces", {"train": 2}), out, progress=False)
    build(other, out, shard_rows=256, progress=False, overwrite=True)
    assert verify(out).ok and (out / "train-000001.tar").exists()

    class Newer(Frames):
        version = 2

    newer = Newer.model_validate({"train": 300, "test": 0, "seed": 1})
    with pytest.raises(ShardError, match="version 1 of the source 'frames' made its rows, not ver"):
        build(newer, out, shard_rows=256, progress=False)

    build(arrays_source(tmp_path), tmp_path / "arrays", progress=False)
    with pytest.raises(ShardError, match="its input files had other bytes"):
        build(arrays_source(tmp_path, 50), tmp_path / "arrays", progress=False)


def test_an_unfinished_build_with_other_options_is_moved_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one that failed, and is run again with the option that its error named."""
    out = tmp_path / "a"

    def attempt(train: int) -> None:
        with pytest.raises(ShardError, match="disk is full"):
            source = Failing.model_validate({"train": train, "test": 0})
            build(source, out, shard_rows=256, progress=False)

    attempt(600)
    before = contents(out)
    attempt(600)  # the same goes on
    assert contents(out) == before and not capsys.readouterr().out
    attempt(700)
    told = capsys.readouterr().out
    assert f"the unfinished build, with other options or files, in {out} is now in {out}-1" in told
    assert contents(tmp_path / "a-1") == before
    for tar in out.glob("*.tar"):
        tar.unlink()
    attempt(600)  # nothing was finished: there is nothing to keep
    assert not (tmp_path / "a-2").exists() and contents(out) == before


def test_folders_and_lengths_that_cannot_be(tmp_path: Path) -> None:
    source = make_source("frames", {"train": 300})
    with pytest.raises(ShardError, match="block_rows = 256, got 300; try 256"):
        build(source, tmp_path / "a", shard_rows=300, progress=False)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "photos.tar").write_bytes(b"")
    with pytest.raises(ShardError, match="has photos.tar but neither manifest.json nor"):
        build(source, tmp_path / "b", progress=False)


def test_names_that_would_be_paths_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path, out = tmp_path / "bad.npz", tmp_path / "a" / "out"
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"split": np.array(["../esc", "b"])}, {}, "'../esc' cannot name a view or a split"),
        ({"split": np.array(["train set", "b"])}, {}, "'train set' cannot name a view or a split"),
        (
            {"split": np.array(["a" * 41, "b"])},
            {},
            "rename it to 1 to 40 letters, digits, '-' and '_'",
        ),
        ({"my view": np.zeros((2, 2))}, {}, "'my view' cannot name a view or a split"),
        ({}, {"label_names": ["x", "x"]}, "two labels have the name 'x'; names must be unique"),
        ({"y": np.array([0, 1]), "labels": np.zeros((2, 2))}, {"labels_name": "y"}, "share a name"),
    ]
    for change, options, message in cases:
        np.savez(path, **({"x": np.zeros((2, 2)), "labels": np.array([0, 1])} | change))
        with pytest.raises(SourceError) as fault:
            build(make_source("arrays", {"npz": path, **options}), out, progress=False)
        assert str(fault.value).startswith("bad.npz: ") and message in str(fault.value)
        assert list(tmp_path.iterdir()) == [path]


def test_a_source_is_sent_to_workers_without_its_data(tmp_path: Path) -> None:
    source = arrays_source(tmp_path, 5000, view_names=["view2"], ignore=["view1"], seed=3)
    assert source.splits["test"] == 8 and source.labels.names and source.views  # all are cached
    sent = pickle.dumps(source)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert type(received) is type(source) and received.options() == source.options()
    assert pickle.loads(pickle.dumps(arrays_source(tmp_path))).view_names is None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = make_source("frames", {"train": 300})
    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ShardError, match="out/build.json: the disk is full"):
            build(source, tmp_path / "out", progress=False)
    assert not list((tmp_path / "out").glob("*.tar"))


def test_moments_of_blocks_are_moments_of_the_whole() -> None:
    values = np.random.default_rng(0).normal(1e4, 0.1, (700, 3)).astype("f4")
    moments = Moments()
    for start in range(0, 700, 256):
        moments.add(values[start : start + 256])
    np.testing.assert_allclose(moments.mean, values.astype("f8").mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.std, values.astype("f8").std(0), rtol=1e-9)


class Dying(Frames):
    """Frames whose second shard ends its process, in the midst of the others."""

    def read(self, split: str, start: int, stop: int) -> Rows:
        if start == 256:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(split, start, stop)


def test_a_killed_worker_is_named_and_nothing_is_left_half_written(tmp_path: Path) -> None:
    source = Dying.model_validate({"train": 2000, "test": 0})
    with pytest.raises(ShardError, match=r"^train-000001.tar: the process .* ended by SIGKILL"):
        build(source, tmp_path, shard_rows=256, executor=Processes(2), progress=False)
    assert not list(tmp_path.glob(".*.part")) and (tmp_path / "build.json").exists()


@pytest.mark.parametrize("state", ["complete", "damaged", "unfinished", "others"])
def test_overwrite_moves_the_whole_build_aside(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it holds: damaged manifests, tars of others, a folder in place of a shard."""
    out = tmp_path / "out"
    source, other = (
        make_source("frames", {"train": 600, "test": 0, "seed": seed}) for seed in (0, 1)
    )
    build(source, out, shard_rows=256, progress=False)
    if state == "damaged":
        (out / "manifest.json").write_text("{")
    if state == "unfinished":
        built_from = load_manifest(out).built_from.model_dump(mode="json")
        (out / "build.json").write_text(json.dumps(built_from))
        (out / "manifest.json").unlink()
        (out / "train-000002.tar").unlink()  # its index came first
    if state == "others":
        (out / "trip-000000.tar").write_bytes(b"a user's")
    before = contents(out)
    if state != "unfinished":  # which needs no option
        with pytest.raises(ShardError, match="--overwrite"):
            build(other, out, progress=False)
        assert contents(out) == before
    build(other, out, overwrite=True, progress=False)
    assert contents(tmp_path / "out-1") == before
    assert f"the earlier build in {out} is now in {out}-1" in capsys.readouterr().out
    names = {f"train-000000{end}" for end in (".tar", ".index.npz")} | {"manifest.json"}
    assert verify(out).ok and set(contents(out)) == names


def test_overwrite_may_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    source, other = (
        make_source("frames", {"train": 300, "test": 0, "seed": seed}) for seed in (0, 1)
    )
    build(source, out, progress=False)
    before = contents(out)
    for name in ("rename", "mkdir"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                build(other, out, overwrite=True, progress=False)
        assert before in [contents(f) for f in (out, tmp_path / "out-1") if f.is_dir()]
    build(other, out, overwrite=True, progress=False)
    assert verify(out).ok and before in [contents(f) for f in tmp_path.glob("out-*")]


def test_a_build_that_waits_for_a_folder_finds_the_new_one(tmp_path: Path) -> None:
    """And not the one that was moved away while it waited."""
    out = tmp_path / "out"
    source, other = (
        make_source("frames", {"train": 300, "test": 0, "seed": seed}) for seed in (0, 1)
    )
    build(source, out, progress=False)
    waiting = threading.Thread(target=build, args=(source, out), kwargs={"progress": False})
    with locked(out):
        waiting.start()
        time.sleep(0.3)
        out.rename(tmp_path / "moved")
        out.mkdir()
    waiting.join(60)
    assert verify(out).ok and verify(tmp_path / "moved").ok
    build(other, out, overwrite=True, progress=False)


def interrupt(*_: object, **__: object) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


def test_numbers_whose_mean_float32_cannot_compute_with(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("a,b,kind\n1,1e35,x\n2,2e35,y\n")
    source = make_source("table", {"csv": str(tmp_path / "mine.csv")})
    with pytest.raises(ShardError) as fault:
        build(source, tmp_path / "out", progress=False)
    assert str(fault.value) == (
        "view 'features': the mean of column 1 is 1.5e+35, beyond ±1e+30; scale the column, or "
        "remove it"
    )


class Sounds(Source):
    name: ClassVar[str] = "sounds"
    block_rows: ClassVar[int | None] = None
    views: ClassVar[list[View]] = [
        View(name="a", kind="vector", shape=(2,), dtype="float32", member="sound.npy")
    ]
    labels: ClassVar[Labels] = Labels(kind="none", names=[])
    splits: ClassVar[dict[str, int]] = {"all": 3}

    def read(self, split: str, start: int, stop: int) -> Rows:
        values = np.arange(start, stop, dtype="f4")[:, None] + np.zeros((1, 2), "f4")
        return Rows({"a": values}, np.full(len(values), -1), [f"k{n}" for n in range(start, stop)])


def test_a_vector_that_names_its_member(tmp_path: Path) -> None:
    (view,) = build(Sounds(seed=0), tmp_path, shard_rows=3, progress=False).views
    assert (view.member, view.mean) == ("sound.npy", [1.0, 1.0])
    assert verify(tmp_path).ok
