"""What share of the lines of each room of `heron/` the tests run, from the JSON of coverage.

    python -m tests.coverage_table build/coverage/lines.json

`make coverage` calls it. Lines are statements, counted once whichever process ran them; rooms are
those of `tests.house`, the least covered first.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROW = "{:22} {:>5} {:>7} {:>7} {:>6}"


def room(path: str) -> str:
    """Returns the room of a file: `heron.data`, or the file itself if it stands alone."""
    return ".".join(Path(path).with_suffix("").parts[:2])


def table(files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each room, and one for all.

    Args:
        files: what coverage says of each file, by its path from the root of the checkout.
    """
    count, lines, run = Counter[str](), Counter[str](), Counter[str]()
    for path, found in files.items():
        for name in (room(path), "total"):
            count[name] += 1
            lines[name] += found["summary"]["num_statements"]
            run[name] += found["summary"]["covered_lines"]
    share = {name: run[name] / lines[name] if lines[name] else 1.0 for name in count}
    yield ROW.format("room", "files", "lines", "run", "share")
    for name in sorted(count, key=lambda name: (name == "total", share[name], name)):
        figures = f"{lines[name]:,}", f"{run[name]:,}", f"{share[name]:.1%}"
        yield ROW.format(name, count[name], *figures)


if __name__ == "__main__":
    print(*table(json.loads(Path(sys.argv[1]).read_text())["files"]), sep="\n")
