"""Fifty clients of `heron serve` at once, for a minute: no error, and how long an answer takes.

    python -m benchmarks.serve
    python -m benchmarks.serve --index indexes/faces --seconds 60 --json serve.json

The server is a process of its own; a client is a thread with a connection of its own, which sends
its next request when the last one is answered. One in ten asks for suggestions, three for a picture
where there are any, the others for 24 neighbours of a random sample, every second of those with a
filter and a relation where there are labels. Clients share the machine with the server, and their
own work is part of what is measured. Without --index one is made of drawn vectors, without labels.

Then, over drawn faces: 24 cached pictures over one connection, and an honest client beside 500 slow
ones, which send nothing, or a byte a second, or read nothing, and come back when they are dropped.
"""

import argparse
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from benchmarks.slow_clients import KINDS, SlowClients
from benchmarks.table import Table
from benchmarks.vectors import write_embeddings
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.shards.build import build
from heron.sources import make_source

START_S = 120  # for the server to load what it needs
FACES, PICTURES = 200, 24  # drawn ones, and how many a page shows at first
WAIT_S = 1.0  # an honest client may wait no longer beside the slow ones


class Client(Thread):
    """A client that sends requests until its time is over."""

    def __init__(self, netloc: str, about: dict[str, Any], number: int, until: float) -> None:
        super().__init__()
        self._line = HTTPConnection(netloc, timeout=30)
        self._about, self._until, self._random = about, until, random.Random(number)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.faults: Counter[str] = Counter()

    def run(self) -> None:
        while time.perf_counter() < self._until:
            kind, path = self._request()
            begin = time.perf_counter()
            try:
                self._line.request("GET", path)
                answer = self._line.getresponse()
                text = answer.read()
                if answer.status != 200:
                    self.faults[f"{answer.status} {text[:200].decode()}"] += 1
                    continue
            except (OSError, HTTPException) as fault:
                self.faults[repr(fault)] += 1
                self._line.close()
                continue
            self.seconds[kind].append(time.perf_counter() - begin)
        self._line.close()

    def _request(self) -> tuple[str, str]:
        draw, about = self._random, self._about
        number, share = draw.randrange(about["count"]), draw.random()
        if share < 0.1:
            return "suggestions", f"/api/samples?part={quote(about['keys'][number % 20][:-1])}"
        if share < 0.4 and about["pictures"]:
            return "picture", f"/api/picture/{number}"
        parameters = {"key": draw.choice(about["keys"]), "k": 24}
        if about["names"] and share > 0.7:
            name = draw.choice(about["names"]).replace("'", "''")
            parameters |= {"where": f"not '{name}'", "relation": "hard"}
            return "filtered", f"/api/neighbours?{urlencode(parameters)}"
        return "neighbours", f"/api/neighbours?{urlencode(parameters)}"


@contextmanager
def serving(index: Path) -> Iterator[str]:
    """Runs `heron serve` in a process of its own; yields its address, such as `127.0.0.1:41234`."""
    words = [sys.executable, "-m", "heron", "serve", str(index), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if (match := re.search(r"http://\S+", line)) is None:
                raise SystemExit(f"the server ended with {process.wait(START_S)}: {line}")
            yield urlsplit(match[0]).netloc
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def measure(netloc: str, clients: int, seconds: float) -> dict[str, Any]:
    """Runs the clients; returns the seconds of each kind of request, and the faults."""
    about = get(netloc, "/api/about")
    # Keys are drawn beforehand, since each costs a request.
    about["keys"] = [get(netloc, "/api/random")["key"] for _ in range(200)]
    until = time.perf_counter() + seconds
    crew = [Client(netloc, about, number, until) for number in range(clients)]
    for client in crew:
        client.start()
    for client in crew:
        client.join()
    seconds_by_kind: dict[str, list[float]] = defaultdict(list)
    for client in crew:
        for kind, values in client.seconds.items():
            seconds_by_kind[kind] += values
    faults = sum((client.faults for client in crew), Counter[str]())
    return {"count": about["count"], "took": seconds_by_kind, "faults": faults}


def get(netloc: str, path: str) -> Any:
    line = HTTPConnection(netloc, timeout=START_S)
    line.request("GET", path)
    answer = json.loads(line.getresponse().read())
    line.close()
    return answer


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", type=Path, help="folder of an index (default: a drawn one)")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=100_000, help="vectors of a drawn index")
    parser.add_argument("--slow", type=int, default=500, help="slow clients beside an honest one")
    parser.add_argument("--small", action="store_true", help="three seconds, of 2,000 vectors")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    arguments = parser.parse_args(words)
    if arguments.small:
        arguments.seconds, arguments.rows = 3.0, 2_000
    with tempfile.TemporaryDirectory() as scratch:
        index = arguments.index or drawn_index(Path(scratch), arguments.rows)
        with serving(index) as netloc:
            load = measure(netloc, arguments.clients, arguments.seconds)
        with serving(faces_index(Path(scratch))) as netloc:
            picture_seconds = time_pictures(netloc)
            seconds_each = arguments.seconds / len(KINDS)
            slow_runs = {
                kind: honest_waits(netloc, arguments.slow, kind, seconds_each) for kind in KINDS
            }
    numbers: dict[str, Any] = {"clients": arguments.clients, "seconds": arguments.seconds}
    numbers |= {"count": load["count"], "faults": dict(load["faults"])}
    print(f"{load['count']:,} vectors, {arguments.clients} clients, {arguments.seconds:g} s\n")
    head = ["request", "answers", "per second", "p50 ms", "p99 ms", "most ms"]
    print(f"{Table.row(head)}\n{'|---' * len(head)}|")
    all_seconds = [x for values in load["took"].values() for x in values]
    for kind, seconds in [*sorted(load["took"].items()), ("all", all_seconds)]:
        cuts = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else seconds * 99
        row = {"answers": len(seconds), "p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}
        numbers[kind] = row | {"most_ms": max(seconds) * 1e3}
        cells = [kind, f"{len(seconds):,}", f"{len(seconds) / arguments.seconds:,.0f}"]
        cells += [f"{cuts[49] * 1e3:.0f}", f"{cuts[98] * 1e3:.0f}", f"{max(seconds) * 1e3:.0f}"]
        print(Table.row(cells))
    numbers |= {
        "pictures_ms": statistics.median(picture_seconds) * 1e3,
        "pictures_most_ms": max(picture_seconds) * 1e3,
    }
    print(
        f"\n{PICTURES} cached pictures over one connection: p50 {numbers['pictures_ms']:.0f} ms, "
        f"most {max(picture_seconds) * 1e3:.0f} ms\n"
    )
    head = [
        f"{arguments.slow} slow ones",
        "dropped",
        "honest answers",
        "failed",
        "p50 ms",
        "most ms",
    ]
    print(f"{Table.row(head)}\n{'|---' * len(head)}|")
    for kind, (waits, faults, dropped) in slow_runs.items():
        load["faults"] += faults
        row = {"dropped": dropped, "answers": len(waits), "failed": faults.total()}
        numbers[kind] = row | {
            "p50_ms": statistics.median(waits) * 1e3,
            "most_ms": max(waits) * 1e3,
        }
        print(Table.row([kind, *(f"{number:,.0f}" for number in numbers[kind].values())]))
    for fault, count in load["faults"].most_common(5):
        print(f"{count:,} × {fault}")
    slow = sum(wait > WAIT_S for waits, *_ in slow_runs.values() for wait in waits)
    print(f"\n{load['faults'].total():,} errors; {slow:,} waits of more than {WAIT_S:g} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")
    # A short run on a busy machine shows that it answers, not how fast.
    return 1 if load["faults"] or (slow and not arguments.small) else 0


def time_pictures(netloc: str) -> list[float]:
    """Returns the seconds that a page's pictures take over one connection, for several loads."""
    line, seconds = HTTPConnection(netloc, timeout=START_S), []
    for _ in range(21):
        begin = time.perf_counter()
        for number in range(PICTURES):
            line.request("GET", f"/api/picture/{number}")
            answer = line.getresponse()
            assert answer.read() and answer.status == 200
        seconds.append(time.perf_counter() - begin)
    line.close()
    return seconds[1:]  # the first time they are made


def honest_waits(
    netloc: str, slow: int, kind: str, seconds: float
) -> tuple[list[float], Counter[str], int]:
    """Returns an honest client's seconds for each answer, on a new connection each; the faults; and
    how often slow clients were dropped."""
    crowd = SlowClients(netloc, slow, kind)
    crowd.start()
    waits, faults, until = [], Counter[str](), time.perf_counter() + seconds
    while time.perf_counter() < until:
        for path in ("/", "/api/picture/3", "/api/neighbours?key=000007"):
            begin, line = time.perf_counter(), HTTPConnection(netloc, timeout=START_S)
            try:
                line.request("GET", path)
                answer = line.getresponse()
                if not answer.read() or answer.status != 200:
                    faults[f"{answer.status} beside slow clients"] += 1
            except (OSError, HTTPException) as fault:
                faults[f"{fault!r} beside slow clients"] += 1
            line.close()
            waits.append(time.perf_counter() - begin)
            time.sleep(0.02)
    crowd.end()
    return waits, faults, crowd.dropped


def faces_index(folder: Path) -> Path:
    """Builds an index of drawn vectors over drawn faces."""
    build(make_source("faces", {"train": FACES, "test": 0}), folder / "faces", progress=False)
    keys = [f"{number:06d}" for number in range(1, FACES + 1)]
    write_embeddings(folder / "of faces", FACES, 128, str(folder / "faces"), keys)
    opened = Embeddings.open(folder / "of faces")
    build_index(opened, folder / "index of faces", kind="flat", progress=False)
    return folder / "index of faces"


def drawn_index(folder: Path, rows: int) -> Path:
    """Builds an index of drawn vectors of 128 dimensions."""
    write_embeddings(folder / "vectors", rows, 128)
    build_index(Embeddings.open(folder / "vectors"), folder / "index", progress=False)
    return folder / "index"


if __name__ == "__main__":
    sys.exit(main())
