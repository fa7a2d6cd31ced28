"""How long the page of `heron serve` takes: to its results, to its map, and for each search.

    python -m benchmarks.page
    python -m benchmarks.page --small

One index has 120,000 drawn vectors of 128 numbers with 40 labels, another a million of 16 with as
many labels. Searches are timed over one connection, 24 results of random samples, medians of 100
after 10 that are not counted. The page is loaded in Chromium, each time in a new window that has
nothing in its cache, and tells itself when its results and its map were drawn, after the beginning
of the navigation: medians of 5. Where all points take longer than a frame, some are drawn first,
and all once the map is still. Points are drawn by the processor where there is no GPU.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright

from benchmarks.serve import START_S, get, serving
from benchmarks.table import Table
from benchmarks.vectors import write_embeddings
from heron.pipeline.retrieval.build import build_index
from heron.pipeline.retrieval.embeddings import Embeddings

LABELS = 40
WHERE = "'label 3' and not 'label 20'"
ASKED: dict[str, dict[str, str]] = {
    "neighbours": {},
    "with a filter": {"where": WHERE},
    "hard negatives": {"relation": "hard"},
    "false negatives": {"relation": "false"},
}


def searches(place: str, times: int) -> dict[str, float]:
    """Median milliseconds of each kind of search, and of counting the labels that pass a filter."""
    line, found = HTTPConnection(place, timeout=START_S), {}
    keys = [get(place, "/api/random")["key"] for _ in range(times + 10)]
    paths = {
        kind: [f"/api/neighbours?{urlencode({'key': key, 'k': 24} | more)}" for key in keys]
        for kind, more in ASKED.items()
    }
    paths["labels counted"] = [f"/api/facets?{urlencode({'where': WHERE})}"] * (times + 10)
    for kind, asked in paths.items():
        took = []
        for path in asked:
            begin = time.perf_counter()
            line.request("GET", path)
            answer = line.getresponse()
            assert answer.read() and answer.status == 200
            took.append(time.perf_counter() - begin)
        found[kind] = 1e3 * statistics.median(took[10:])
    line.close()
    return found


def loads(place: str, times: int) -> dict[str, Any]:
    """Median seconds until results and map are drawn, and what the map says of itself."""
    seconds: dict[str, list[float]] = {"results": [], "map": [], "whole map": []}
    drawn = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", *drawn]
        )
        for _ in range(times + 1):
            context = browser.new_context(
                viewport={"width": 1400, "height": 1000},
                bypass_csp=True,  # to wait for the marks
            )
            page = context.new_page()
            page.goto(f"http://{place}/?key=00000007")
            for name, found in seconds.items():
                if (
                    name == "whole map"
                    and "While it moves" not in page.locator("#map-note").inner_text()
                ):
                    found.append(seconds["map"][-1])
                    continue
                mark = f"performance.getEntriesByName('{name}')[0]?.startTime"
                page.wait_for_function(mark, timeout=60_000)
                found.append(page.evaluate(mark) / 1e3)
            note = page.locator("#map-note").inner_text()
            context.close()
        browser.close()
    return {name: statistics.median(found[1:]) for name, found in seconds.items()} | {"note": note}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="2,000 and 5,000 vectors, once")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    asked = parser.parse_args(words)
    sizes = [(120_000, 128), (1_000_000, 16)]
    times, many = 5, 100
    if asked.small:
        sizes, times, many = [(2_000, 128), (5_000, 16)], 1, 3
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for rows, dim in sizes:
            folder = Path(scratch) / str(rows)
            write_embeddings(folder / "vectors", rows, dim, labels=LABELS)
            embeddings = Embeddings.open(folder / "vectors")
            index = build_index(embeddings, folder / "index", kind="flat", progress=False)
            with serving(folder / "index") as place:
                found = {"map built": index.manifest.seconds["map"]}
                numbers[f"{rows:,} x {dim}"] = found | searches(place, many) | loads(place, times)
    head = ["", *numbers]
    print(f"{Table.row(head)}\n{'|---' * len(head)}|")
    for name in next(iter(numbers.values())):
        cells = [found[name] for found in numbers.values()]
        unit = "s" if name in ("results", "map", "whole map", "map built") else "ms"
        shown = [one if isinstance(one, str) else f"{one:.3g} {unit}" for one in cells]
        print(Table.row([name, *shown]))
    if asked.json:
        asked.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
