"""Rows by number: what is read is what was stored, wherever it lies."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.model_selection import StratifiedKFold

from heron.base.errors import ConfigError, ShardError
from heron.data.batches import Batch, batches
from heron.data.options import Data, Protocol
from heron.data.protocol import assign
from heron.data.random_keys import rng_keys
from heron.data.reader import Reader
from heron.data.streams import ShardBatches
from heron.data.views import Views
from heron.experiment.open_data import open_data
from heron.shards.build import build
from heron.sources import make_source
from tests.evaluation.known import write
from tests.experiments import frames


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """700 training rows in three shards, the last block of each shorter than the rest."""
    folder = tmp_path_factory.mktemp("vectors") / "frames"
    options = {"train": 700, "test": 90, "classes": 4, "seed": 2}
    build(make_source("frames", options), folder, shard_rows=256, progress=False)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "faces"
    build(make_source("faces", {"train": 24, "test": 6, "size": 32}), folder, progress=False)
    return folder


def test_vectors_are_those_of_the_source(vectors: Path) -> None:
    reader = Reader(vectors)
    stored = make_source("frames", {"train": 700, "test": 90, "classes": 4, "seed": 2})
    whole = stored.read("train", 0, 700)
    rows = np.random.default_rng(0).permutation(700)[:333]
    assert np.array_equal(reader.read("view1", rows), np.asarray(whole.views["view1"])[rows])
    assert np.array_equal(reader.labels(rows), whole.labels[rows])
    targets = reader.targets(rows)
    assert np.array_equal(targets.argmax(1), whole.labels[rows])
    assert (targets.sum(1) == 1).all()
    test = reader.split_rows("test")
    assert test.tolist() == list(range(700, 790))
    only = make_source("frames", {"train": 700, "test": 90, "classes": 4, "seed": 2}).read(
        "test", 0, 90
    )
    assert np.array_equal(reader.read("view2", test), np.asarray(only.views["view2"]))


def test_images_are_decoded_and_scaled(images: Path) -> None:
    reader = Reader(images)
    pixels = reader.read("image", np.array([5, 0, 29]))
    assert pixels.shape == (3, 32, 32, 3)
    assert pixels.dtype == np.uint8
    assert not np.array_equal(pixels[0], pixels[1])
    assert reader.sample_key(0) != reader.sample_key(5)


def test_a_missing_shard_and_one_of_another_size_are_named(vectors: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in vectors.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    tar = copy / "train-000001.tar"
    whole = tar.read_bytes()
    tar.write_bytes(whole[:-100])
    with pytest.raises(
        ShardError, match=r"train-000001.tar has \d+ bytes, but the manifest says \d+"
    ):
        Reader(copy)
    tar.unlink()
    with pytest.raises(ShardError, match=r"train-000001.tar is missing, but the manifest lists it"):
        Reader(copy)
    tar.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ShardError, match=r"train-000001.tar is missing, but the manifest lists it"):
        Reader(copy)
    assert len(Reader(copy, "skip").lost) > 0


def test_a_damaged_picture_is_named(images: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in images.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    reader = Reader(copy)
    offset = int(reader.indexes[0].offsets[3, reader.indexes[0].column("jpg")])
    tar = copy / reader.shards[0].file
    data = bytearray(tar.read_bytes())
    data[offset : offset + 20] = bytes(20)
    tar.write_bytes(bytes(data))
    with pytest.raises(ShardError, match="sample 000004: view 'image' is not a JPEG"):
        Reader(copy).read("image", np.array([2, 3]))


def test_a_fault_in_a_worker_keeps_its_message(tmp_path: Path) -> None:
    config = frames(tmp_path, data={"views": [{"stored": "view1"}] * 2})
    build(
        make_source("frames", {"train": 300, "test": 70, "classes": 4, "seed": 1}), config.data.path
    )
    streams = open_data(config)
    index, tar = streams.reader.indexes[0], Path(config.data.path, streams.reader.shards[0].file)
    for offset in index.offsets[:, 0].tolist():  # of blocks that are longer than they were:
        data = bytearray(tar.read_bytes())
        at = data.index(b"'shape': (", offset) + len("'shape': (")
        data[at] += 1
        tar.write_bytes(bytes(data))
    with pytest.raises(ShardError, match=r"^[^\n]*is too short or too long[^\n]*$"):
        list(batches(ShardBatches(streams, 0, 0, 1), 0, 2, workers=1))


def test_roles_are_apart_and_make_up_the_split(vectors: Path) -> None:
    reader = Reader(vectors)
    counted = assign(reader, "train", Protocol(labelled=50, test="test"))
    again = assign(reader, "train", Protocol(labelled=50, test="test"))
    other = assign(reader, "train", Protocol(labelled=50, fold=1, test="test"))
    assert np.array_equal(counted.labelled, again.labelled)
    assert not np.array_equal(counted.labelled, other.labelled)
    both = np.sort(np.concatenate([counted.labelled, counted.unlabelled]))
    assert both.tolist() == list(range(700))
    assert counted.test.tolist() == list(range(700, 790))

    folds = [assign(reader, "train", Protocol(folds=5, fold=k)) for k in range(5)]
    everything = np.sort(np.concatenate([roles.labelled for roles in folds]))
    assert everything.tolist() == list(range(700))
    for roles in folds:  # stratified: every class is there in its proportion
        share = np.bincount(reader.labels(roles.labelled), minlength=4) * 5
        assert np.abs(share - np.bincount(reader.labels(np.arange(700)))).max() <= 5
        assert np.array_equal(roles.test, roles.unlabelled)


def test_folds_are_scikit_learn_s_of_whole_label_vectors(tmp_path: Path) -> None:
    """As in HeroCon's Scene protocol; one vector is rarer than the folds."""
    y = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 0]], np.uint8)[np.arange(40) % 3]
    y[7] = 1
    np.savez(tmp_path / "mine.npz", view1=np.ones((40, 2), np.float32), labels=y)
    build(make_source("arrays", {"npz": tmp_path / "mine.npz"}), tmp_path / "mine", progress=False)
    reader = Reader(tmp_path / "mine")
    numbers = [int("".join(map(str, row)), 2) for row in y]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = list(StratifiedKFold(4).split(np.zeros(40), numbers))
    for fold, (_, chosen) in enumerate(expected):
        roles = assign(reader, "all", Protocol(folds=4, fold=fold, test="unlabelled"))
        assert roles.labelled.tolist() == chosen.tolist()
    with pytest.raises(
        ConfigError, match=", but no label vector occurs that often; use 14 or fewer"
    ):
        assign(reader, "all", Protocol(folds=15))
    assert len(assign(reader, "all", Protocol(folds=14)).labelled) > 0


def test_protocols_that_cannot_be_are_refused(vectors: Path) -> None:
    reader = Reader(vectors)
    with pytest.raises(ConfigError, match="but every row is labelled; use a split: train, test"):
        assign(reader, "train", Protocol())
    with pytest.raises(
        ConfigError, match="data\\.protocol\\.folds is 600, but no label vector occurs"
    ):
        assign(reader, "train", Protocol(folds=600))


def test_global_batches_are_the_same_for_any_processes_and_workers(tmp_path: Path) -> None:
    config = frames(tmp_path)
    assert config.data.build is not None
    build(
        make_source("frames", {"train": 300, "test": 70, "classes": 4, "seed": 1}), config.data.path
    )
    streams = open_data(config)

    def global_batch(world: int, workers: int) -> list[torch.Tensor]:
        parts = [
            list(batches(ShardBatches(streams, 0, rank, world), 0, 3, workers))
            for rank in range(world)
        ]
        return [
            torch.cat(
                [p[t].stored["view1"][: p[t].labelled] for p in parts]
                + [p[t].stored["view1"][p[t].labelled :] for p in parts]
            )
            for t in range(3)
        ]

    expected = global_batch(1, 0)
    for world, workers in ((2, 0), (3, 0), (1, 2), (2, 2)):
        for one, other in zip(expected, global_batch(world, workers), strict=True):
            assert torch.equal(one, other)


def test_random_keys_are_those_of_each_stream_s_epoch(tmp_path: Path) -> None:
    """Over a labelled epoch of six steps and an unlabelled one of eleven, and into the next."""
    config = frames(tmp_path)
    build(
        make_source("frames", {"train": 300, "test": 70, "classes": 4, "seed": 1}), config.data.path
    )
    streams = open_data(config)
    assert streams.labelled is not None and streams.unlabelled is not None
    assert (streams.labelled.steps_per_epoch, streams.unlabelled.steps_per_epoch) == (6, 11)
    read = list(batches(ShardBatches(streams, 5, 0, 1), 0, 13, 0))
    for t, batch in enumerate(read):
        epochs = np.repeat([t // 6, t // 11], batch.sizes)
        expected = rng_keys(5, epochs, batch.indices.numpy())
        assert batch.rng_keys.numpy().tolist() == expected.tolist(), t
        planned = np.concatenate([streams.labelled.batch_rows(t), streams.unlabelled.batch_rows(t)])
        assert batch.indices.tolist() == planned.tolist()
        assert batch.labelled == 10 and not batch.lost
        assert torch.equal(batch.targets, torch.from_numpy(streams.targets(planned[:10])))


def test_views_follow_the_sample_not_its_neighbours(images: Path, tmp_path: Path) -> None:
    reader = Reader(images)
    views = [{"stored": "image", "augment": ["crop"]}, {"stored": "image", "augment": ["color"]}]
    data = Data.model_validate({"path": str(images), "batch": {"labelled": 1}, "views": views})
    make_views = Views(reader, data, torch.device("cpu"))

    def batch(rows: list[int]) -> Batch:
        numbers = torch.tensor(rows)
        stored = {"image": torch.from_numpy(reader.read("image", numbers.numpy()))}
        return Batch(
            stored, torch.empty(0), numbers, rng_keys(0, numbers * 0, numbers), [len(rows)]
        )

    together, alone = make_views(batch([1, 2, 3]), True), make_views(batch([3]), True)
    plain = make_views(batch([3]), False)
    for view in range(2):
        assert together[view].shape == (3, 3, 32, 32)
        torch.testing.assert_close(together[view][2:], alone[view], rtol=0, atol=1e-6)
        assert not torch.allclose(alone[view], plain[view], atol=0.01)
        assert alone[view].min() >= 0
        assert alone[view].max() <= 1
    assert torch.equal(plain[0], plain[1])


def test_a_flip_mirrors_about_half_of_the_images(images: Path) -> None:
    reader = Reader(images)
    views = [{"stored": "image", "augment": ["flip"]}] * 2
    data = Data.model_validate({"path": str(images), "batch": {"labelled": 1}, "views": views})
    numbers = torch.arange(24)
    stored = {"image": torch.from_numpy(reader.read("image", numbers.numpy()))}
    batch = Batch(stored, torch.empty(0), numbers, rng_keys(0, numbers * 0, numbers), [24])
    make_views = Views(reader, data, torch.device("cpu"))
    (plain,) = make_views(batch, train=False, first=1)
    flipped = []
    for x in make_views(batch, train=True):
        mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(x, plain, strict=True)]
        same = [torch.equal(a, b) for a, b in zip(x, plain, strict=True)]
        assert all(a != b for a, b in zip(mirrored, same, strict=True))
        assert 6 <= sum(mirrored) <= 18
        flipped.append(mirrored)
    assert flipped[0] != flipped[1]


@pytest.mark.parametrize("kind", ["multi_label", "multi_class", "hierarchical", "complementary"])
def test_the_truth_of_rows_is_what_was_written(kind: str, tmp_path: Path) -> None:
    """In the order that is asked for; a row without a label is 0, an unknown label NaN."""
    known, rows = write(tmp_path, kind, whole=False), np.array([70, 1, 44, 46, 20, 3, 0])
    unlabelled = np.isnan(known.y[rows]).all(1)
    assert unlabelled.sum() == 3
    expected = np.where(unlabelled[:, None], 0, known.y[rows])
    np.testing.assert_array_equal(Reader(tmp_path / "known").ground_truth(rows), expected)
