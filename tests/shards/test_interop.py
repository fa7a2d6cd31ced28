"""Our tars in the hands of others, and theirs in ours: webdataset, datasets, GNU tar."""

import gc
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from heron.shards.build import build
from heron.shards.index import ShardIndex
from heron.shards.manifest import load_manifest
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.sources import make_source
from heron.sources.foreign import index
from heron.sources.layout import Layout
from tests.shards.others import cats, jpeg, write_tar, write_wds
from tests.shards.tiny import whole

# Both leave tars open to the garbage collector: warn where that is expected, not in other tests.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FACES = {"train": 7, "test": 2, "size": 32}
FRAMES = {"train": 300, "test": 20}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of pictures and one of vectors in blocks, of several shards each."""
    folder = tmp_path_factory.mktemp("ours")
    build(make_source("faces", FACES), folder / "faces", shard_rows=4, progress=False)
    build(make_source("frames", FRAMES), folder / "frames", shard_rows=256, progress=False)
    return folder


def tars(folder: Path, split: str = "train") -> list[str]:
    return [str(folder / shard.file) for shard in load_manifest(folder).splits[split]]


def faces_are_all_there(samples: list[dict[str, Any]]) -> None:
    """Every face once, in its order, with its pixels and its labels."""
    rows = whole(make_source("faces", FACES), "train")
    assert [sample["__key__"] for sample in samples] == rows.keys
    for sample, stored, labels in zip(samples, rows.views["image"], rows.labels, strict=True):
        with Image.open(BytesIO(stored)) as picture:
            np.testing.assert_array_equal(np.asarray(sample["jpg"]), np.asarray(picture))
        np.testing.assert_array_equal(sample["labels.npy"], labels[None])


def frames_are_all_there(samples: list[dict[str, Any]]) -> None:
    """Every block once, in its order."""
    source: Source = make_source("frames", FRAMES)
    rows = whole(source, "train")
    assert [sample["__key__"] for sample in samples] == ["train-000000", "train-000001"]
    assert [len(sample["labels.npy"]) for sample in samples] == [256, 44]
    for name, expected in [*rows.views.items(), ("labels", rows.labels)]:
        found = np.concatenate([sample[f"{name}.npy"] for sample in samples])
        np.testing.assert_array_equal(found, expected)


def plain(folder: Path) -> list[dict[str, Any]]:
    webdataset = pytest.importorskip("webdataset")
    samples = webdataset.WebDataset(tars(folder), shardshuffle=False)
    # Its own decoder of npy would read pickles too.
    found = list(samples.decode(webdataset.handle_extension("npy", load), "rgb8"))
    gc.collect()
    return found


def load(payload: bytes) -> Any:
    return np.load(BytesIO(payload), allow_pickle=False)


def test_webdataset_reads_pictures(ours: Path) -> None:
    faces_are_all_there(plain(ours / "faces"))


def test_webdataset_reads_blocks(ours: Path) -> None:
    frames_are_all_there(plain(ours / "frames"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`load_dataset` of a library that asks nobody for anything."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()

    def load_dataset(*words: str, **options: Any) -> Any:
        return datasets.load_dataset(*words, cache_dir=str(tmp_path / "cache"), **options)

    yield load_dataset
    gc.collect()


@pytest.mark.parametrize("streaming", [True, False])
def test_datasets_reads_pictures_and_blocks(
    ours: Path, hub: Callable[..., Any], streaming: bool
) -> None:
    for name in ("faces", "frames"):
        files = {"train": tars(ours / name), "test": tars(ours / name, "test")}
        found = hub("webdataset", data_files=files, streaming=streaming)
        rows = list(found["train"])
        if name == "faces":
            assert rows[0]["jpg"].size == (32, 32) and len(list(found["test"])) == 2
            faces_are_all_there(rows)
        else:
            frames_are_all_there(rows)


def test_datasets_finds_the_splits_of_a_folder_by_itself(
    ours: Path, hub: Callable[..., Any]
) -> None:
    """The manifest and the indexes beside the tars do not disturb it."""
    found = hub(str(ours / "faces"))
    assert {split: len(rows) for split, rows in found.items()} == {"train": 7, "test": 2}


def test_datasets_and_we_read_the_same_of_tars_of_others(
    tmp_path: Path, hub: Callable[..., Any]
) -> None:
    """Pictures with JSON beside them, as on the Hub."""
    data = tmp_path / "data"
    data.mkdir()
    samples = [
        {"__key__": f"{n:05d}", "jpg": jpeg(n), "json": {"label": n % 2, "caption": f"cat {n}"}}
        for n in range(6)
    ]
    write_wds(data / "train-00000.tar", samples[:4])
    write_wds(data / "test-00000.tar", samples[4:])
    index(data, Layout(image=["jpg"], label="json:label"), progress=False)
    found = hub(str(data))
    for split, shards in load_manifest(data).splits.items():
        (shard,) = shards
        ours = ShardIndex.read(data / shard.index_file)
        assert ours.keys.tolist() == [row["__key__"] for row in found[split]]
        assert ours.labels.tolist() == [row["json"]["label"] for row in found[split]]


def files(count: int = 5) -> list[tuple[str, bytes]]:
    return [
        file
        for n in range(count)
        for file in ((f"{n:04d}.cls", str(n % 3).encode()), (f"{n:04d}.jpg", jpeg(n)))
    ]


def by_gnu_tar(folder: Path, form: str, *words: str) -> None:
    """Pack with the tar of the system, from a folder of files."""
    if shutil.which("tar") is None:
        pytest.skip("no tar on this system")
    version = subprocess.run(["tar", "--version"], capture_output=True, text=True, check=True)
    if "GNU tar" not in version.stdout:
        pytest.skip("the tar of this system is not GNU's")
    loose = folder.parent / "loose"
    loose.mkdir()
    for name, payload in files():
        (loose / name).write_bytes(payload)
    names = words or tuple(name for name, _ in files())
    command = ["tar", f"--format={form}", "-cf", str(folder / "a.tar"), "-C", str(loose), *names]
    subprocess.run(command, check=True)


def by_webdataset(folder: Path, **options: Any) -> None:
    samples = [{**cat, "__key__": cat["__key__"][2:]} for cat in cats(0, 5)]
    write_wds(folder / "a.tar", samples, **options)


WRITERS: dict[str, Callable[[Path], object]] = {
    "webdataset": by_webdataset,  # its times have a fraction, which takes pax headers
    "webdataset, whole seconds": lambda f: by_webdataset(f, mtime=0),
    "tarfile": lambda f: write_tar(f / "a.tar", files()),
    "tarfile, ustar": lambda f: write_tar(f / "a.tar", files(), tarfile.USTAR_FORMAT),
    "tarfile, gnu": lambda f: write_tar(f / "a.tar", files(), tarfile.GNU_FORMAT),
    "tar, gnu": lambda f: by_gnu_tar(f, "gnu"),
    "tar, pax": lambda f: by_gnu_tar(f, "pax"),
    "tar, ustar": lambda f: by_gnu_tar(f, "ustar"),
    "tar, v7": lambda f: by_gnu_tar(f, "v7"),
    "tar, a whole folder": lambda f: by_gnu_tar(f, "gnu", "--sort=name", "."),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_tars_of_every_writer_are_read_as_webdataset_reads_them(
    tmp_path: Path, writer: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    WRITERS[writer](folder)
    manifest = index(folder, Layout(image=["jpg"], label="cls"), progress=False).manifest
    assert manifest.rows("all") == 5 and verify(folder).ok
    data, found = (folder / "a.tar").read_bytes(), ShardIndex.read(folder / "a.index.npz")
    columns = found.keys, found.offsets[:, 0], found.lengths[:, 0], found.labels
    ours = [
        (key, data[at : at + size], str(label).encode())
        for key, at, size, label in zip(*(column.tolist() for column in columns), strict=True)
    ]
    webdataset = pytest.importorskip("webdataset")
    theirs = webdataset.WebDataset(str(folder / "a.tar"), shardshuffle=False)
    assert ours == [(s["__key__"].removeprefix("./"), s["jpg"], s["cls"]) for s in theirs]
    assert [key for key, *_ in ours] == [f"{n:04d}" for n in range(5)]
    gc.collect()


def test_our_own_tars_are_indexed_as_those_of_others(ours: Path, tmp_path: Path) -> None:
    """A set of ours whose manifest and indexes are lost."""
    for tar in tars(ours / "faces"):
        shutil.copy(tar, tmp_path)
    manifest = index(tmp_path, Layout(image=["jpg"], label="labels.npy"), progress=False).manifest
    rows = whole(make_source("faces", FACES), "train")
    indexes = [ShardIndex.read(tmp_path / s.index_file) for s in manifest.splits["train"]]
    np.testing.assert_array_equal(np.concatenate([i.labels for i in indexes]), rows.labels)
    assert [key for i in indexes for key in i.keys.tolist()] == rows.keys
