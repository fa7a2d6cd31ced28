"""The store: a data set is the same one in a folder and behind a URL."""

import hashlib
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from heron.base.errors import ShardError
from heron.cli.main import main
from heron.shards.build import build
from heron.shards.cache import ShardCache
from heron.shards.index import ShardIndex
from heron.shards.manifest import load_manifest
from heron.shards.remote import Missing, Retry
from heron.shards.show import contact_sheet, show
from heron.shards.store import LocalStore, RemoteStore, open_store
from heron.shards.verify import verify
from heron.sources import make_source
from tests.shards.servers import web

ONCE = Retry(attempts=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six faces for training in two shards, two for a test."""
    out = tmp_path_factory.mktemp("built") / "faces"
    options = {"train": 6, "test": 2, "size": 32}
    build(make_source("faces", options), out, shard_rows=3, progress=False)
    return out


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "faces"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of a folder that is not there yet."""
    yield "memory://heron/set"
    files = fsspec.filesystem("memory")
    if files.exists("/heron"):
        files.rm("/heron", recursive=True)


def upload(folder: Path, url: str) -> None:
    fsspec.filesystem("memory").pipe(
        {f"/{url.partition('://')[2]}/{path.name}": path.read_bytes() for path in folder.iterdir()}
    )


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_local_folder_is_used_in_place(folder: Path, own_cache: Path) -> None:
    for place in (folder, str(folder), f"file://{folder}"):
        store = open_store(place)
        assert isinstance(store, LocalStore) and str(store) == str(folder)
        assert pickle.loads(pickle.dumps(store)) == store
        shard = load_manifest(store).splits["train"][0]
        with store.local(shard.file, shard.bytes, shard.sha256) as held:
            assert held.path == folder / shard.file == Path(store.where(shard.file))
        with store.local_copies({shard.file: shard.bytes}) as there:
            assert there == folder
        assert store.exists("manifest.json") and not store.exists("build.json")
        assert store.names() == {path.name for path in folder.iterdir()}
    assert not own_cache.exists()


def test_a_remote_folder_is_fetched_into_the_cache(
    folder: Path, memory: str, own_cache: Path
) -> None:
    upload(folder, memory)
    store = open_store(memory + "/")
    assert isinstance(store, RemoteStore) and str(store) == memory
    manifest = load_manifest(store)
    assert manifest == load_manifest(folder) and not own_cache.exists()
    again = pickle.loads(pickle.dumps(store))
    for shard in manifest.splits["train"]:
        with again.local(shard.file, shard.bytes, shard.sha256) as held:
            assert held.path == own_cache / shard.sha256
            assert held.path.read_bytes() == (folder / shard.file).read_bytes()
        with again.local(shard.index_file, shard.index_bytes, shard.index_sha256) as held:
            ours, theirs = ShardIndex.read(held.path), ShardIndex.read(folder / shard.index_file)
            assert ours.keys.tolist() == theirs.keys.tolist()
    assert len(pickle.dumps(again)) < 1000
    with pytest.raises(Missing, match=f"^{memory}/no.tar: no such file, but the manifest lists it"):
        store.local("no.tar", 1, "0" * 64)


@pytest.mark.parametrize("name", ["../x.tar", "/etc/passwd", "a/b.tar", "..", "", ".part", "a\n"])
def test_names_that_leave_the_folder(name: str, folder: Path) -> None:
    for store in (open_store(folder), open_store("memory://none")):
        with pytest.raises(ShardError, match="use a name without a path"):
            store.read_bytes(name)
        with pytest.raises(ShardError, match="use a name without a path"):
            store.local(name, 1, "0" * 64)


def test_sets_with_the_same_names_do_not_meet_and_equal_shards_are_kept_once(
    tmp_path: Path,
) -> None:
    one, other, common = b"one" * 100, b"two" * 100, b"common"
    cache = ShardCache(tmp_path / "small", 10_000)
    files = {"x/a.tar": one, "y/a.tar": other, "x/b.tar": common, "y/c.tar": common}
    with web(files) as site:
        for path, data in files.items():
            place, _, name = path.partition("/")
            with open_store(f"{site.url}/{place}", cache).local(name, len(data), sha(data)) as held:
                assert held.path.read_bytes() == data
        assert [path for path, _ in site.requests] == ["x/a.tar", "y/a.tar", "x/b.tar"]
    assert {path.name for path in cache.folder.iterdir()} - {"lock"} == {
        sha(data) for data in (one, other, common)
    }


def test_manifests_that_are_not_there(tmp_path: Path, memory: str) -> None:
    for place in (str(tmp_path / "none"), memory):
        with pytest.raises(
            ShardError,
            match="no such file; pass a folder that `heron shards build` or `heron shards index` "
            "made",
        ):
            load_manifest(place)
    (tmp_path / "half").mkdir()
    (tmp_path / "half/build.json").write_text("{}")
    upload(tmp_path / "half", memory)
    for place in (str(tmp_path / "half"), memory):
        with pytest.raises(
            ShardError, match=f"{place}/manifest.json: an unfinished build; run the"
        ):
            load_manifest(place)
    (tmp_path / "half/manifest.json").write_bytes(b"\xff")
    upload(tmp_path / "half", memory)
    for place in (str(tmp_path / "half"), memory):
        with pytest.raises(
            ShardError, match=f"^cannot read the manifest {place}/manifest.json: not JSON"
        ):
            load_manifest(place)


def test_verify_says_the_same_of_a_url_whatever_is_cached(
    folder: Path, memory: str, own_cache: Path
) -> None:
    upload(folder, memory)
    assert verify(memory).ok and not own_cache.exists()
    store = open_store(memory)
    for shard in load_manifest(store).splits["train"]:
        store.local(shard.file, shard.bytes, shard.sha256).close()
    data = bytearray((folder / "train-000000.tar").read_bytes())
    data[600] ^= 255
    (folder / "train-000000.tar").write_bytes(data)
    data = bytearray((folder / "train-000001.tar").read_bytes())
    (folder / "train-000001.tar").write_bytes(data[:1500])
    (folder / "test-000000.index.npz").unlink()
    (folder / "stray.tar").write_bytes(b"")
    fsspec.filesystem("memory").rm("/heron", recursive=True)
    upload(folder, memory)
    here, there = verify(folder), verify(memory)
    assert len(here.faults) >= 5 and here == there
    for text in ("stray.tar: extra", "0.tar: altered", "1,500 bytes", "test-000000.index.npz: mis"):
        assert text in str(there)


def test_show_says_the_same_of_a_url(folder: Path, memory: str, tmp_path: Path) -> None:
    upload(folder, memory)
    assert show(memory) == show(folder).replace(str(folder), memory)
    for place, sheet in ((folder, "here.png"), (memory, "there.png")):
        contact_sheet(place, tmp_path / sheet)
    assert (tmp_path / "here.png").read_bytes() == (tmp_path / "there.png").read_bytes()


def test_the_command_line_takes_urls(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"faces/{path.name}": path.read_bytes() for path in folder.iterdir()}
    with web(files) as site:
        url, sheet = f"{site.url}/faces", str(tmp_path / "x.png")
        assert main(["shards", "verify", url]) == 0
        shown = capsys.readouterr().out
        assert "3 shards, 8 rows" in shown and "extra files were not looked for" in shown
        assert main(["shards", "show", url, "--sheet", sheet, "--count", "2"]) == 0
        assert f"MB in {url}" in capsys.readouterr().out and Path(sheet).exists()
        whole = site.files["faces/train-000001.tar"]
        site.files["faces/train-000001.tar"] += bytes(9)
        assert main(["shards", "verify", url]) == 1
        error = capsys.readouterr().err
        assert f"{url}/train-000001.tar: more than {len(whole):,} bytes arrived" in error
        assert "1 error;" in error
        del site.files["faces/train-000001.tar"]
        assert main(["shards", "verify", url]) == 1
        assert "train-000001.tar: missing, but the manifest lists it" in capsys.readouterr().err
        assert main(["shards", "show", f"{site.url}/none"]) == 1
        error = capsys.readouterr().err
        assert error.startswith(
            f"error: cannot read the manifest {site.url}/none/manifest.json: no such file; pass"
        )
    for url, text in (("xyz://b", "Protocol not known: xyz"), ("memory://none", "no such file")):
        assert main(["shards", "verify", url]) == 1
        assert url in (error := capsys.readouterr().err) and text in error


@pytest.mark.parametrize("start", ["", "file://", "memory://", "http://"])
def test_a_place_with_a_zero_byte(start: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shards", "verify", f"{start}a\0b"]) == 1
    error = capsys.readouterr().err
    assert error == (f"error: '{start}a\\x00b' is not a folder or a URL: it has a zero byte\n")
