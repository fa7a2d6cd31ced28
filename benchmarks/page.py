"""How long the page of `heron serve` takes to show results and map, and to search.

    python -m benchmarks.page
    python -m benchmarks.page --small

One index has 120,000 drawn vectors of 128 numbers with 40 labels, another a million of 16 with as
many labels. Searches are timed over one connection, 24 results of random samples, medians of 100
after 10 that are not counted. The page is loaded in Chromium, each time in a new window with an
empty cache, and records when its results and its map were drawn, from the start of the navigation:
medians of 5. If all points take longer than a frame, some are drawn first, and all once the map is
still. Without a GPU the processor draws the points.
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
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index

LABELS = 40
WHERE = "'label 3' and not 'label 20'"
SEARCHES: dict[str, dict[str, str]] = {
    "neighbours": {},
    "with a filter": {"where": WHERE},
    "hard negatives": {"relation": "hard"},
    "false negatives": {"relation": "false"},
}


def searches(netloc: str, times: int) -> dict[str, float]:
    """Returns median milliseconds of each kind of search, and of counting filtered labels."""
    line, medians = HTTPConnection(netloc, timeout=START_S), {}
    keys = [get(netloc, "/api/random")["key"] for _ in range(times + 10)]
    paths = {
        kind: [f"/api/neighbours?{urlencode({'key': key, 'k': 24} | options)}" for key in keys]
        for kind, options in SEARCHES.items()
    }
    paths["labels counted"] = [f"/api/facets?{urlencode({'where': WHERE})}"] * (times + 10)
    for kind, requests in paths.items():
        seconds = []
        for path in requests:
            begin = time.perf_counter()
            line.request("GET", path)
            answer = line.getresponse()
            assert answer.read() and answer.status == 200
            seconds.append(time.perf_counter() - begin)
        medians[kind] = 1e3 * statistics.median(seconds[10:])
    line.close()
    return medians


def loads(netloc: str, times: int) -> dict[str, Any]:
    """Returns median seconds until results and map are drawn, and the map's note."""
    seconds: dict[str, list[float]] = {"results": [], "map": [], "whole map": []}
    software_gl = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", *software_gl]
        )
        for _ in range(times + 1):
            context = browser.new_context(
                viewport={"width": 1400, "height": 1000},
                bypass_csp=True,  # to wait for the marks
            )
            page = context.new_page()
            page.goto(f"http://{netloc}/?key=00000007")
            for name, values in seconds.items():
                if (
                    name == "whole map"
                    and "While it moves" not in page.locator("#map-note").inner_text()
                ):
                    values.append(seconds["map"][-1])
                    continue
                mark = f"performance.getEntriesByName('{name}')[0]?.startTime"
                page.wait_for_function(mark, timeout=60_000)
                values.append(page.evaluate(mark) / 1e3)
            note = page.locator("#map-note").inner_text()
            context.close()
        browser.close()
    return {name: statistics.median(values[1:]) for name, values in seconds.items()} | {
        "note": note
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="2,000 and 5,000 vectors, once")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    arguments = parser.parse_args(words)
    sizes = [(120_000, 128), (1_000_000, 16)]
    times, queries = 5, 100
    if arguments.small:
        sizes, times, queries = [(2_000, 128), (5_000, 16)], 1, 3
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for rows, dim in sizes:
            folder = Path(scratch) / str(rows)
            write_embeddings(folder / "vectors", rows, dim, labels=LABELS)
            embeddings = Embeddings.open(folder / "vectors")
            build_index(embeddings, folder / "index", kind="flat", progress=False)
            index = Index.open(folder / "index")
            with serving(folder / "index") as netloc:
                results = {"map built": index.manifest.seconds["map"]}
                numbers[f"{rows:,} x {dim}"] = (
                    results | searches(netloc, queries) | loads(netloc, times)
                )
    head = ["", *numbers]
    print(f"{Table.row(head)}\n{'|---' * len(head)}|")
    for name in next(iter(numbers.values())):
        cells = [results[name] for results in numbers.values()]
        unit = "s" if name in ("results", "map", "whole map", "map built") else "ms"
        shown = [cell if isinstance(cell, str) else f"{cell:.3g} {unit}" for cell in cells]
        print(Table.row([name, *shown]))
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
