"""Rows that cannot be read: an error that names them, or skipped, counted and named."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heron.api.job import pretrain
from heron.base.errors import ShardError
from heron.data.batches import Batch, batches
from heron.data.open_shards import OpenShard
from heron.data.reader import Reader
from heron.data.rows import Listed, SkippedRows
from heron.data.streams import ShardBatches, Streams
from heron.experiment.config import Config, parse_config
from heron.experiment.open_data import open_data
from heron.shards.build import build
from heron.sources import make_source
from heron.training.tracking import read_metrics
from tests import ranks

FACES = {"train": 60, "test": 20, "size": 32}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pictures in six shards, and 20 of another split in two."""
    folder = tmp_path_factory.mktemp("whole") / "faces"
    build(make_source("faces", FACES), folder, shard_rows=10, progress=False)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    copy = tmp_path / "faces"
    copy.mkdir()
    for path in whole.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def config(folder: Path, **data: Any) -> Config:
    return parse_config(
        {
            "run": {"dir": str(folder.parent / "run")},
            "data": {
                "path": str(folder),
                "protocol": {"labelled": 20, "test": "test"},
                "batch": {"labelled": 8, "unlabelled": 16},
                "views": [{"stored": "image", "augment": ["crop"]}, {"stored": "image"}],
                "on_error": "skip",
                "max_bad_fraction": 0.5,
                **data,
            },
            "model": {"encoder": {"kind": "cnn", "channels": [4, 8]}, "projection_width": 4},
            "objective": {"bce": {}, "weighted_unsupervised": {}},
            "train": {"epochs": 2, "cpu_threads": 1},
            "evaluate": {"map_rows": 10},
        }
    )


def zero(folder: Path, row: int, at: int = 0, count: int = 20) -> str:
    """Damage a picture of split train; the key of its sample."""
    reader = Reader(folder)
    shard, sample = divmod(row, 10)
    index = reader.indexes[shard]
    tar = folder / reader.shards[shard].file
    data = bytearray(tar.read_bytes())
    start = int(index.offsets[sample, 0]) + at
    data[start : start + count] = bytes(count)
    tar.write_bytes(bytes(data))
    return str(index.keys[sample])


def epoch(streams: Streams, world: int = 1) -> Iterator[list[Batch]]:
    """The shares of all processes, batch by batch, of two epochs of the unlabelled stream."""
    assert streams.unlabelled is not None
    loaders = [ShardBatches(streams, 0, rank, world) for rank in range(world)]
    for t in range(2 * streams.unlabelled.steps_per_epoch):
        yield [next(batches(loader, t, t + 1, 0)) for loader in loaders]


def test_a_damaged_picture_gives_its_place_to_the_next_of_its_stream(folder: Path) -> None:
    zero(folder, 23)
    zero(folder, 24)
    even = {"batch": {"labelled": 8, "unlabelled": 20}}  # no row of 40 is left over
    streams = open_data(config(folder, **even))
    assert streams.unlabelled is not None
    rows = streams.unlabelled.by_shard.all_rows
    bad = sorted(set(rows.tolist()) & {23, 24}) or [23]
    sound = open_data(config(folder))
    seen: list[int] = []
    lost: dict[int, str] = {}
    for (batch,) in epoch(streams):
        seen += batch.indices[batch.labelled :].tolist()
        lost |= batch.lost
        targets = sound.reader.targets(batch.indices.numpy()[: batch.labelled])
        assert np.array_equal(batch.targets.numpy(), targets)  # labels moved with the rows
        again = streams.reader.read("image", batch.indices.numpy())
        assert torch.equal(batch.stored["image"], torch.from_numpy(again))
    assert set(lost) >= set(bad)
    assert not set(seen) & {23, 24}
    good = [row for row in rows.tolist() if row not in (23, 24)]
    assert set(seen) == set(good)  # nothing else was lost
    assert all("is not a JPEG, PNG, WebP" in fault for fault in lost.values())


def test_rows_that_are_skipped_are_those_of_any_number_of_processes(folder: Path) -> None:
    for row in (3, 17, 18, 19, 41):
        zero(folder, row)
    (folder / "train-000005.tar").unlink()
    one = [batch.indices.tolist() for (batch,) in epoch(open_data(config(folder)))]
    three = []
    for shares in epoch(open_data(config(folder)), world=3):
        labelled = [row for s in shares for row in s.indices[: s.labelled].tolist()]
        three.append(labelled + [row for s in shares for row in s.indices[s.labelled :].tolist()])
    assert one == three
    assert not {row for rows in one for row in rows} & {3, 17, 18, 19, 41, *range(50, 60)}


def test_skipped_rows_are_counted_named_and_told_by_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [zero(folder, row) for row in (7, 33)]
    (folder / "test-000001.tar").write_bytes(b"")
    pretrain(config(folder, workers=2, verify=False))
    told = capsys.readouterr().out
    for key in keys:
        assert f"sample {key}: view 'image' is not a JPEG" in told
    assert told.count("skipped row ") == 2
    assert "skipped 10 rows, 70 to 79: " in told
    assert "test-000001.tar has 0 bytes, but the manifest says" in told
    result = json.loads((folder.parent / "run" / "result.json").read_text())
    assert result["skipped_rows"] == 12
    assert result["steps"] == 4


def test_a_flipped_byte_costs_one_sample_where_checksums_are_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A JPEG with one wrong byte may well decode: only its checksum tells."""
    key = zero(folder, 11, at=700, count=1)
    with pytest.raises(ShardError, match=r"train-000001.tar was altered: .* names the sample"):
        pretrain(config(folder, on_error="raise"))
    pretrain(config(folder))
    told = capsys.readouterr().out
    assert f" sample {key}: member 'jpg' was altered: its crc32 differs; " in told
    assert told.count("skipped row") == 1


def test_by_default_the_first_fault_ends_the_run(folder: Path) -> None:
    key = zero(folder, 7)
    with pytest.raises(ShardError, match=f"sample {key}: view 'image' is not a JPEG"):
        pretrain(config(folder, on_error="raise", verify=False))
    (folder / "train-000002.tar").unlink()
    with pytest.raises(ShardError, match=r"train-000002.tar is missing, but the manifest lists it"):
        pretrain(config(folder, on_error="raise"))


def test_scores_of_too_few_rows_are_no_result(folder: Path) -> None:
    """Found in the evaluation: whoever looks for a result would take the run for done."""
    test = folder / "test-000000.tar"
    test.write_bytes(test.read_bytes().replace(b"\xff\xd8\xff", b"\0\0\0"))
    with pytest.raises(ShardError, match=r"cannot read 10 of the run's 80 rows,"):
        pretrain(config(folder, max_bad_fraction=0.12, verify=False))
    assert (folder.parent / "run" / "checkpoints" / "latest").exists()
    assert not (folder.parent / "run" / "result.json").exists()


def test_too_many_bad_rows_end_the_run(folder: Path) -> None:
    (folder / "train-000002.tar").unlink()
    with pytest.raises(
        ShardError,
        match=r"10 of the run's 80 rows, which is more than data.max_bad_fraction = 0.12",
    ):
        pretrain(config(folder, max_bad_fraction=0.12))
    for tar in folder.glob("train-*.tar"):
        tar.unlink()
    with pytest.raises(ShardError, match=r"cannot read 60 of the run's 80 rows,"):
        pretrain(config(folder))
    streams = open_data(config(folder))
    with pytest.raises(ShardError, match="cannot read any row of the labelled stream"):
        list(batches(ShardBatches(streams, 0, 0, 1), 0, 1, workers=0))


def test_a_file_cut_while_it_is_read_is_an_error_not_a_crash(folder: Path) -> None:
    reader = Reader(folder)
    reader.read("image", np.array([0]))
    tar = folder / "train-000000.tar"
    tar.write_bytes(tar.read_bytes()[:5000])
    with pytest.raises(ShardError, match="has \\d+ bytes, but the index says \\d+"):
        reader.read("image", np.array([9]))


def test_skipped_counts_a_row_once() -> None:
    skipped = SkippedRows(Listed.from_shards([np.arange(100)]), 0.02)
    assert skipped.add([{3: "a"}, {3: "a", 4: "b"}]) == ["skipped row 3: a", "skipped row 4: b"]
    assert skipped.add([{4: "b"}, {}, {200: "not of this run"}]) == []
    assert len(skipped) == 2
    skipped.refuse()
    assert skipped.add([{9: "c", 10: "c"}]) == ["skipped 2 rows, 9 to 10: c"]
    with pytest.raises(ShardError, match="cannot read 4 of the run's 100 rows"):
        skipped.refuse()


def test_a_damaged_block_costs_its_rows_alone(tmp_path: Path) -> None:
    folder = tmp_path / "frames"
    build(make_source("frames", {"train": 1024, "test": 0}), folder, progress=False)
    reader = Reader(folder)
    data = bytearray((folder / reader.shards[0].file).read_bytes())
    data[int(reader.indexes[0].offsets[1, 0])] = 0  # the magic of an npy file
    (folder / reader.shards[0].file).write_bytes(bytes(data))
    skipping = Reader(folder, "skip")
    rows = np.arange(0, 1024, 3)
    found = skipping.read("view1", rows)
    assert set(skipping.lost) == set(range(256, 512))
    assert all("sample train-000001: view 'view1'" in fault for fault in skipping.lost.values())
    sound = (rows < 256) | (rows >= 512)
    expected = (
        make_source("frames", {"train": 1024, "test": 0}).read("train", 0, 1024).views["view1"]
    )
    assert np.array_equal(found[sound], np.asarray(expected)[rows[sound]])
    with pytest.raises(ShardError, match="sample train-000001: view 'view1'"):
        Reader(folder).read("view1", rows)


def test_a_shard_that_cannot_be_opened_is_tried_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(folder, "skip")
    asked: list[str] = []
    local = reader.store.local

    def broken(name: str, size: int, checksum: str) -> Any:
        asked.append(name)
        if name == "train-000002.tar":
            raise ShardError("it is gone")
        return local(name, size, checksum)

    object.__setattr__(reader.store, "local", broken)
    reader.read("image", np.array([20, 3]))
    assert set(reader.lost) == set(range(20, 30))
    assert asked.count("train-000002.tar") == 1
    monkeypatch.undo()


def test_what_the_machine_lacks_is_no_fault_of_the_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(folder, "skip")

    def full(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("heron.data.open_shards.os.open", full)
    with pytest.raises(OSError, match="Too many open files"):
        reader.read("image", np.array([1]))
    assert not reader.lost


def test_a_picture_that_the_disk_does_not_give_is_lost_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(folder, "skip")
    payload = OpenShard.payload

    def failing(self: OpenShard, sample: int, column: int) -> bytes:
        if sample == 4:
            raise OSError(errno.EIO, "Input/output error")
        return payload(self, sample, column)

    monkeypatch.setattr(OpenShard, "payload", failing)
    reader.read("image", np.arange(10))
    assert set(reader.lost) == {4}


def ranks_run(path: str) -> dict[str, Any]:
    result = pretrain(config(Path(path)), overwrite=True)
    return {name: result[name] for name in ("f1_weighted", "skipped_rows")}


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def test_two_processes_skip_and_score_what_one_does(folder: Path) -> None:
    zero(folder, 11, at=700, count=1)
    zero(folder, 30)
    (folder / "test-000000.tar").write_bytes(b"")
    alone = pretrain(config(folder))
    expected = losses(folder.parent / "run")
    assert alone["skipped_rows"] == 12
    for found in ranks.run(2, ranks_run, str(folder)):
        assert found["skipped_rows"] == 12
        assert found["f1_weighted"] == pytest.approx(alone["f1_weighted"], abs=0.02)
    assert losses(folder.parent / "run") == pytest.approx(expected, rel=1e-4)
