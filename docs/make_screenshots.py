"""Photographs what people see, of drawn data alone: `python docs/make_screenshots.py [NAME ...]`.

Each function below makes a surface, whose pictures, at two widths on light and dark ground, go to
build/screenshots, or to the folder of HERON_SCREENSHOTS. A small run, its index and a study are
made first, in a minute or two on a core.
"""

import io
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
from rich.text import Text

ROOT = Path(__file__).parent.parent
OUT = Path(os.environ.get("HERON_SCREENSHOTS") or ROOT / "build" / "screenshots")
WIDTHS = {1400: 100, 390: 44}  # of a page in pixels, and of a terminal in columns
SCHEMES = "light", "dark"
SMALL = (
    *("data.build.train=240", "data.build.test=90", "data.protocol.labelled=60", "train.epochs=3"),
    *("data.batch.labelled=20", "data.batch.unlabelled=40", "evaluate.seeds=1"),
    *("train.evaluate_every_epochs=1", "train.cpu_threads=1", "run.dir=runs/faces"),
)
AFTER = (  # what is made of the run
    "embed runs/faces --out embeddings/faces",
    "index embeddings/faces --out indexes/faces",
    "negatives embeddings/faces --out reports/faces",
    "shards show data/faces --sheet sheet.png",
)
CONTROL = re.compile(r"\n|\r|\x1b\[\d*[A-HJKf]|\x1b\[\?\d+[hl]|\x1b\[[\d;]*m|[^\n\r\x1b]+")
Place = str | Callable[[int, str], str]  # the address of a page, or that at a width and a scheme


def photograph(place: Place, name: str, out: Path = OUT, ready: str = "html") -> list[Path]:
    """Photographs a page in whole, at each width and in each scheme, once `ready` is there.

    Ends with a line for each fault that axe-core finds on it.
    """
    from playwright.sync_api import sync_playwright

    from tests.axe import violations

    out.mkdir(parents=True, exist_ok=True)
    made, faults = list[Path](), list[str]()
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in SCHEMES:
                page = browser.new_page(
                    viewport={"width": width, "height": 1000},
                    color_scheme="dark" if scheme == "dark" else "light",
                )
                page.goto(place if isinstance(place, str) else place(width, scheme))
                page.wait_for_selector(ready)
                made.append(out / f"{name}-{width}-{scheme}.png")
                page.screenshot(path=made[-1], full_page=True)
                if ready != "svg":  # no terminal
                    faults += [f"{made[-1].stem}: {fault}" for fault in violations(page)]
                page.close()
        browser.close()
    if faults:
        raise SystemExit("\n".join(faults))
    return made


def heron(folder: Path, *words: str, columns: int = 100) -> str:
    """Runs a verb on a terminal of so many columns, and returns what it wrote there."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "TERM": "xterm-256color"}
    main, other = pty.openpty()
    command = [sys.executable, "-m", "heron", *words]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=other, stderr=other)
    os.close(other)
    written = b""
    with suppress(OSError):  # which says that the other end has closed
        while part := os.read(main, 65_536):
            written += part
    os.close(main)
    process.wait()
    return written.decode()


def last_screen(written: str) -> str:
    """Returns the lines that a terminal shows in the end, with their colours, of what was written.

    rich moves the cursor to where its bar began, clears the line and writes it anew.
    """
    lines, row = [""], 0
    for code in CONTROL.findall(written):
        if code == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif code.endswith("A"):
            row = max(0, row - int(code[2:-1] or 1))
        elif code == "\x1b[2K":
            lines[row] = ""
        elif code.endswith("m") or not code.startswith(("\x1b", "\r")):
            lines[row] += code
    return "\n".join(lines)


@cache
def made() -> Path:
    """Returns a folder with a small run on drawn faces, its embeddings, index and reports."""
    folder = Path(tempfile.mkdtemp(prefix="heron-screenshots-"))
    told = heron(folder, "pretrain", "faces", *SMALL)
    (folder / "pretrain.txt").write_bytes(told.encode())  # its \r stay
    for words in AFTER:
        told = heron(folder, *words.split())
        if "next: " not in told:
            raise SystemExit(f"heron {words} failed:\n{told}")
    return folder


def report() -> None:
    """The report of the run."""
    page = made() / "runs/faces/report.html"
    photograph(page.as_uri(), "report", ready="html[data-drawn]")


def negatives() -> None:
    """The report of hard and false negatives."""
    page = made() / "reports/faces/report.html"
    photograph(page.as_uri(), "negatives", ready="html[data-drawn]")


def sheet() -> None:
    """The contact sheet, which is a picture already, and has one scheme."""
    OUT.mkdir(parents=True, exist_ok=True)
    with Image.open(made() / "sheet.png") as picture:
        for width in WIDTHS:
            height = math.ceil(picture.height * width / picture.width)
            picture.convert("RGB").resize((width, height)).save(OUT / f"sheet-{width}.png")


def study() -> None:
    """The report of a study whose numbers are made up: three seeds of six sizes."""
    from tests.studies.made import negatives as made_up

    with tempfile.TemporaryDirectory() as name:
        folder = made_up(Path(name) / "study", title="A study of made-up numbers")
        heron(Path(name), "report", "study")
        photograph((folder / "report/report.html").as_uri(), "study", ready="html[data-drawn]")


def terminal() -> None:
    """A training run as it ended, a mistyped verb, the list of runs and a report's table."""
    from tests.studies.made import negatives as made_up

    folder = made()
    if not (folder / "study").exists():
        made_up(folder / "study")
    words: dict[str, tuple[str, ...]] = {
        "mistyped": ("pretrian", "faces"),
        "runs": ("runs", "runs"),
        "study-table": ("report", "study"),
    }
    told = (folder / "pretrain.txt").read_bytes().decode()
    photograph(lambda width, scheme: _drawn(folder, told, width, scheme), "pretrain", ready="svg")
    for name, given in words.items():

        def drawn(width: int, scheme: str, given: tuple[str, ...] = given) -> str:
            shown = heron(folder, *given, columns=WIDTHS[width])
            return _drawn(folder, f"$ heron {' '.join(given)}\n{shown}", width, scheme)

        photograph(drawn, name, ready="svg")


def _drawn(folder: Path, written: str, width: int, scheme: str) -> str:
    """Returns the address of a terminal's output as SVG, in a page as wide as the window."""
    console = Console(record=True, width=WIDTHS[width], file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(last_screen(written)))
    theme = MONOKAI if scheme == "dark" else DEFAULT_TERMINAL_THEME
    svg = console.export_svg(title="heron", theme=theme)
    path = folder / f"terminal-{width}-{scheme}.html"
    path.write_text(
        f"<!doctype html><style>body {{ margin: 0 }} svg {{ width: 100% }}</style>{svg}"
    )
    return path.as_uri()


def serve() -> None:
    """The web page of the index, as it is when it is opened."""
    folder = made()
    process = subprocess.Popen(
        [sys.executable, "-m", "heron", "serve", "indexes/faces", "--port", "0"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        photograph(told.rpartition(" at ")[2].strip(), "serve")
    finally:
        process.terminate()
        process.wait()


SURFACES = (report, study, negatives, sheet, terminal, serve)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for surface in SURFACES:
        if not sys.argv[1:] or surface.__name__ in sys.argv[1:]:
            surface()
    if made.cache_info().currsize:
        shutil.rmtree(made())
