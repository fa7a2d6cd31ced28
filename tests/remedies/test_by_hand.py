"""Remedies of several steps, or of what a command does not show: each is performed in words."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heron
from heron.base.errors import RetrievalError, ShardError, TrainingError
from heron.data.reader import Reader
from heron.distributed.watchdog import Watchdog
from heron.retrieval import index_plan
from heron.retrieval.build import build_index
from heron.retrieval.query import Retriever
from heron.serve.routes import Selection
from heron.shards.build import build
from heron.sources import make_source
from heron.training.earlier_run import begin_anew
from heron.training.run_lock import RunLock
from tests.remedies.makers import CATS, call, tar
from tests.retrieval.made import clustered, unlabelled
from tests.sealed import seal
from tests.shards.others import cats, write_wds
from tests.shards.servers import web

ROWS = 12


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    options = {"train": ROWS, "test": 0, "size": 32}
    build(make_source("faces", options), tmp_path / "faces", progress=False)
    return tmp_path / "faces"


@pytest.fixture
def index(faces: Path, tmp_path: Path) -> Path:
    """An index of vectors in memory, which are of the faces."""
    keys = Reader(faces).sample_keys(np.arange(ROWS))
    made = heron.Index.build(clustered(ROWS), keys=list(keys))
    made.save(tmp_path / "index")
    return tmp_path / "index"


def zero_a_picture(data: Path, row: int) -> str:
    """Damages a picture, and returns the key of its sample."""
    reader = Reader(data)
    path, offset = data / reader.shards[0].file, int(reader.indexes[0].offsets[row, 0])
    stored = bytearray(path.read_bytes())
    stored[offset : offset + 20] = bytes(20)
    path.write_bytes(bytes(stored))
    return reader.sample_key(row)


def test_shards_that_an_index_does_not_name(index: Path, faces: Path) -> None:
    with pytest.raises(RetrievalError, match="was built from vectors in memory and has no data"):
        Retriever.open(index).picture(3)
    assert Retriever.open(index, data=faces).picture(3) is not None


def test_an_address_that_an_index_names_and_the_user_gives(index: Path, faces: Path) -> None:
    with web({path.name: path.read_bytes() for path in faces.iterdir()}) as site:
        seal(index / "manifest.json", data=site.url)
        with pytest.raises(RetrievalError, match="is only fetched if you name it; add --d") as told:
            Retriever.open(index).picture(3)
        assert site.requests == []
        given = str(told.value).split("--data ")[1]
        assert Retriever.open(index, data=given).picture(3) is not None


def test_a_damaged_picture_is_named_by_verify(
    index: Path, faces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = zero_a_picture(faces, 3)
    with pytest.raises(RetrievalError, match="' is damaged .*run `heron shards verify`"):
        Retriever.open(index, data=faces).picture(3)
    assert call(["shards", "verify", faces]) == 1
    assert f"sample {key}" in capsys.readouterr().err


def test_an_altered_shard_s_sample_is_named_by_verify(
    faces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = zero_a_picture(faces, 3)
    with pytest.raises(ShardError, match="`heron shards verify` names the sample"):
        Reader(faces).verify_payloads()
    assert call(["shards", "verify", faces]) == 1
    assert f"sample {key}" in capsys.readouterr().err


def test_two_tars_one_after_the_other_are_packed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tar(cats(0, 6), *CATS)(tmp_path)
    path = tmp_path / "tars" / "all.tar"
    path.write_bytes(path.read_bytes() + write_wds(tmp_path / "b.tar", cats(6, 6)).read_bytes())
    capsys.readouterr()
    assert call(words) == 1
    assert "unpack it with tar --ignore-zeros, and pack it again" in capsys.readouterr().err
    (unpacked := tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "--ignore-zeros", "-xf", path, "-C", unpacked], check=True)
    names = sorted(file.name for file in unpacked.iterdir())
    subprocess.run(["tar", "-cf", path, "-C", unpacked, *names], check=True)
    assert call(words) == 0
    assert "12 rows" in capsys.readouterr().out


def test_an_index_without_a_map_is_built_again(tmp_path: Path) -> None:
    given, out = unlabelled(tmp_path / "e", clustered(60)), tmp_path / "index"
    build_index(given, out, map="none", progress=False)
    with pytest.raises(RetrievalError, match="this index has no map; build it again"):
        Selection(Retriever.open(out)).required_map()
    assert call(["index", given.folder, "--out", out, "--overwrite", "--quiet"]) == 0
    assert Selection(Retriever.open(out)).required_map().bytes


def test_a_machine_that_does_not_say_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    monkeypatch.setattr(index_plan, "Path", lambda _: tmp_path / "meminfo")
    given = unlabelled(tmp_path / "e", clustered(60))
    words: list[Any] = ["index", given.folder, "--out", tmp_path / "index", "--quiet"]
    assert call(words) == 1
    assert "/proc/meminfo has no MemAvailable; give --memory" in capsys.readouterr().err
    assert call([*words, "--memory", "2GB"]) == 0


def test_a_folder_of_a_run_that_is_being_trained_is_moved_after_its_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with RunLock(out / "run") as lock:
        lock.acquire(Watchdog(60))
        with pytest.raises(TrainingError, match="and --overwrite would move .* away"):
            begin_anew(out)
        begin_anew(tmp_path / "another")
    begin_anew(out)
    assert not (out / "run").exists()
