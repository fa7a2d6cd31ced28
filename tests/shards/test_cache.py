"""The cache: who waits, what goes, what stays, and what is never left behind."""

import errno
import hashlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import heron.shards.cache
from heron.base.artefact import sha256
from heron.base.errors import ShardError
from heron.shards.cache import LocalFile, ShardCache
from heron.shards.store import open_store
from tests.shards.servers import web

SIZE = 1000
FILES = [bytes([number]) * SIZE for number in range(8)]
SUMS = [hashlib.sha256(data).hexdigest() for data in FILES]


def writer(data: bytes, calls: list[str] | None = None) -> Callable[[BinaryIO], None]:
    def fetch(stream: BinaryIO) -> None:
        if calls is not None:
            calls.append(hashlib.sha256(data).hexdigest())
        stream.write(data)

    return fetch


def take(cache: ShardCache, number: int, calls: list[str] | None = None) -> LocalFile:
    held = cache.get(SUMS[number], SIZE, writer(FILES[number], calls))
    assert held.path.read_bytes() == FILES[number]
    return held


def kept(cache: ShardCache) -> set[int | str]:
    """The files of the cache: their numbers, or names of what should not be there."""
    names = {path.name for path in cache.folder.iterdir()} - {"lock"}
    return {SUMS.index(name) if name in SUMS else name for name in names}


def test_the_least_recently_used_file_goes_first(tmp_path: Path) -> None:
    cache, calls = ShardCache(tmp_path, 3 * SIZE), list[str]()
    for number in (0, 1, 2, 0, 0):
        take(cache, number, calls).close()
    assert calls == SUMS[:3]
    take(cache, 3).close()
    assert kept(cache) == {0, 2, 3}
    take(cache, 4).close()
    assert kept(cache) == {0, 3, 4}


def test_what_is_in_use_stays_and_a_full_cache_says_so(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3 * SIZE, patience_s=0)
    first, second, third = (take(cache, number) for number in (0, 1, 2))
    again = take(cache, 0)
    with pytest.raises(
        ShardError,
        match=r"cache .* is full: 3,000 of 3,000 bytes are in use \(3 files\), 1,000 more are "
        r"needed; raise data.cache.bytes, or open fewer shards at once: lower data.canonical_str",
    ):
        take(cache, 3)
    assert kept(cache) == {0, 1, 2}
    first.close()
    first.close()
    with pytest.raises(ShardError, match="is full"):  # it is held again
        take(cache, 3)
    again.close()
    take(cache, 3).close()
    assert kept(cache) == {1, 2, 3}
    second.close()
    third.close()
    with pytest.raises(ShardError, match=r"a file of 3,001 bytes; the limit is 3,000; raise data"):
        cache.get("f" * 64, 3001, writer(b""))
    assert kept(cache) == {1, 2, 3}


def test_who_finds_it_full_waits_for_others_to_close(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, SIZE, patience_s=20)
    held, found = take(cache, 0), list[LocalFile]()
    waiting = threading.Thread(target=lambda: found.append(take(cache, 1)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and not found
    held.close()
    waiting.join(20)
    assert found and kept(cache) == {1}
    found[0].close()


def test_one_fetches_while_others_wait_for_it(tmp_path: Path) -> None:
    cache, calls, begun, go = (
        ShardCache(tmp_path, SIZE),
        list[int](),
        threading.Event(),
        threading.Event(),
    )

    def fetch(stream: BinaryIO) -> None:
        calls.append(1)
        begun.set()
        assert go.wait(20)
        stream.write(FILES[0])

    found = list[LocalFile]()
    threads = [
        threading.Thread(target=lambda: found.append(cache.get(SUMS[0], SIZE, fetch)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(calls) == 1 and len(found) == 4 and kept(cache) == {0}
    for held in found:
        held.close()


def test_a_file_that_came_between_two_looks_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, calls, look, looks = (
        ShardCache(tmp_path, SIZE),
        list[str](),
        ShardCache._open_cached,
        list[int](),
    )

    def blind_once(self: ShardCache, *asked: Any) -> LocalFile | None:
        looks.append(1)
        return look(self, *asked) if len(looks) > 1 else None

    take(cache, 0, calls).close()
    monkeypatch.setattr(ShardCache, "_open_cached", blind_once)
    take(cache, 0, calls).close()
    assert calls == [SUMS[0]] and len(looks) == 2 and kept(cache) == {0}


def test_a_file_that_was_altered_in_place_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, calls, read = ShardCache(tmp_path, 3 * SIZE), list[str](), list[Path]()

    def counted(path: Path) -> str:
        read.append(path)
        return sha256(path)

    monkeypatch.setattr("heron.base.artefact.sha256", counted)
    for _ in range(4):
        take(cache, 0, calls).close()
    assert calls == SUMS[:1] and read == [tmp_path / SUMS[0]]  # it is read once
    held = take(cache, 0)
    with (tmp_path / SUMS[0]).open("r+b") as stream:
        stream.seek(500)
        stream.write(b"x")
    for _ in range(3):
        take(cache, 0, calls).close()  # which compares the bytes
    assert calls == SUMS[:1] * 2 and kept(cache) == {0} and len(read) == 3
    assert f"{tmp_path / SUMS[0]} is not as it was fetched, so it is fetched again" in caplog.text
    held.close()
    identity = cache.get("f" * 64, SIZE, writer(FILES[1], calls), of_content=False)
    identity.close()
    cache.get("f" * 64, SIZE, writer(FILES[1], calls), of_content=False).close()
    assert calls[2:] == SUMS[1:2] and len(read) == 3


def test_a_cached_file_that_was_cut_or_altered_is_fetched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, calls = ShardCache(tmp_path, 3 * SIZE), list[str]()
    take(cache, 0, calls).close()
    (tmp_path / SUMS[0]).write_bytes(FILES[0][:-1])
    take(cache, 0, calls).close()
    assert (
        calls == [SUMS[0]] * 2 and "is not as it was fetched, so it is fetched again" in caplog.text
    )
    (tmp_path / SUMS[0]).write_bytes(FILES[1])
    with take(cache, 0, calls) as held:
        assert held.path.read_bytes() == FILES[0]
    assert calls == [SUMS[0]] * 3


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3 * SIZE)

    def fetch(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise ShardError("no more")

    with pytest.raises(ShardError, match="no more"):
        cache.get(SUMS[0], SIZE, fetch)
    assert kept(cache) == set()


def die(cache: ShardCache) -> None:
    def fetch(stream: BinaryIO) -> None:
        stream.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    cache.get(SUMS[0], SIZE, fetch)


def test_what_a_killed_process_left_is_replaced_or_makes_room(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, SIZE, patience_s=0)
    part = SUMS[0] + ".part"
    killed = multiprocessing.get_context("spawn").Process(target=die, args=(cache,))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and kept(cache) == {part}
    assert (tmp_path / part).stat().st_size == SIZE  # the room that it took
    take(cache, 0).close()
    assert kept(cache) == {0}
    (tmp_path / part).write_bytes(b"old" * 100)
    take(cache, 1).close()
    assert kept(cache) == {1}


def test_a_full_disk_names_the_folder_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    cache = ShardCache(tmp_path / "cache", 3 * SIZE)
    take(cache, 0).close()
    with web({"a.tar": FILES[1]}) as site:
        store = open_store(site.url, cache)
        monkeypatch.setattr(heron.shards.cache, "FileIO", Full)
        with pytest.raises(
            ShardError,
            match=r"cache .*cache: the disk is full \([\d,]+ bytes are free\) for a file of 1,000 "
            r"bytes; free some space, lower data.cache.bytes, or set HERON_CACHE to",
        ):
            store.local("a.tar", SIZE, SUMS[1])
        assert kept(cache) == {0} and site.count("a.tar") == 1  # no network mends it
        monkeypatch.undo()
        store.local("a.tar", SIZE, SUMS[1]).close()
    assert kept(cache) == {0, 1}


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardError, match=r"set data\.cache\.dir or HERON_CACHE to another folder"):
        take(ShardCache(tmp_path / "file", SIZE), 0)


def test_the_default_folder_and_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERON_CACHE", str(tmp_path / "shards"))
    cache = ShardCache()
    assert cache.folder == tmp_path / "shards" and not cache.folder.exists()
    assert 0 < cache.limit <= 100e9
    monkeypatch.delenv("HERON_CACHE")
    assert ShardCache().folder == Path.home() / ".cache/heron/shards"
    take(cache, 0).close()
    copy = pickle.loads(pickle.dumps(cache))
    assert vars(copy) == vars(cache)
    with (
        take(copy, 0) as held,
        pytest.raises(TypeError, match="a file that is in use cannot be pickled"),
    ):
        pickle.dumps(held)


def work(url: str, cache: ShardCache, order: list[int], answers: Any) -> None:
    """In another process: take every file, and report what was evicted, and what was wrong."""
    evicted: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            evicted.extend(map(str, record.args or ()) if "evicted" in record.msg else ())

    logging.getLogger("heron").addHandler(Note())
    logging.getLogger("heron").setLevel(logging.DEBUG)
    store, wrong = open_store(url, cache), list[str]()
    for number in order:
        with store.local(f"train-{number}.tar", SIZE, SUMS[number]) as held:
            inode = held.path.stat().st_ino
            if held.path.read_bytes() != FILES[number] or held.path.stat().st_ino != inode:
                wrong.append(f"bytes of {number}")
    answers.put((evicted, wrong))


def test_processes_share_a_cache_that_is_too_small_for_them(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3 * SIZE, patience_s=60)
    spawn = multiprocessing.get_context("spawn")
    with web({f"train-{n}.tar": data for n, data in enumerate(FILES)}) as site:
        held = open_store(site.url, cache).local("train-0.tar", SIZE, SUMS[0])
        inode, answers = held.path.stat().st_ino, spawn.SimpleQueue()
        orders = [
            [(start + step * i) % 8 for i in range(16)]
            for start, step in ((0, 1), (7, 7), (3, 5), (2, 3))
        ]
        workers = [
            spawn.Process(target=work, args=(site.url, cache, order, answers)) for order in orders
        ]
        for worker in workers:
            worker.start()
        most = 0
        while any(worker.is_alive() for worker in workers):
            with cache._locked():  # so that no file moves while they are counted
                most = max(most, sum(state.st_size for _, state in cache._files()))
            workers[0].join(0.002)
            if not workers[0].is_alive():
                next((w for w in workers if w.is_alive()), workers[0]).join(0.002)
        assert [worker.exitcode for worker in workers] == [0] * 4
        reports = [answers.get() for _ in workers]
        assert held.path.stat().st_ino == inode and site.count("train-0.tar") == 1
        held.close()
        assert [wrong for _, found in reports for wrong in found] == []
        assert 2 * SIZE <= most <= 3 * SIZE
        evicted = Counter(name for names, _ in reports for name in names)
        for number, checksum in enumerate(SUMS):  # fetched again only after it had been evicted
            there = (tmp_path / checksum).exists()
            assert site.count(f"train-{number}.tar") == evicted[checksum] + there
    assert len(kept(cache)) == 3 and all(isinstance(name, int) for name in kept(cache))


def test_a_finalizer_does_not_wait_for_the_lock_of_its_own_thread(tmp_path: Path) -> None:
    """Rubbish may be collected at any moment, and an unpacked matrix of MATLAB with it."""
    cache = ShardCache(tmp_path / "cache")
    cache.folder.mkdir()
    (cache.folder / ("0" * 64)).write_bytes(b"left")
    with cache._locked():
        cache.clear(wait=False)  # returns
    assert (cache.folder / ("0" * 64)).exists()
    cache.clear(wait=False)
    assert not (cache.folder / ("0" * 64)).exists()
