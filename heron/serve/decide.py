"""A page to go through the labels that an audit lists, with a key for each decision."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response
from PIL import Image

from heron.base.decisions import CHOICES, DECIDED, LISTED, Decision, read_decisions, write_decisions
from heron.base.errors import RetrievalError
from heron.retrieval.pictures import SamplePictures
from heron.retrieval.samples import Samples
from heron.serve.admission import BINARY
from heron.serve.routes import CACHED_THUMBNAILS, EXPECTED, Bounds, jpeg

MAX_LINES = 100_000  # that the page is sent
Choice = Literal["", "right", "wrong", "unknown", "drop", "skip"]  # "": not decided any more
Shown = tuple[SamplePictures, Samples]


class Decisions:
    """The labels that an audit lists, and what was decided on each.

    A decision is in decisions.csv, beside them, before it is answered, so that a page that is
    opened again goes on there. Decisions on labels that are not listed any more stay in it.
    """

    def __init__(self, folder: Path) -> None:
        """Reads both files; RetrievalError if one is not what an audit or this page wrote."""
        self.folder, self._file = folder, folder / DECIDED
        if not (folder / LISTED).is_file():
            raise RetrievalError(
                f"{folder} has no {LISTED}: its audit had no labels to judge; open its report.html"
            )
        self._seen = self._state()
        self.lines = read_decisions(folder / LISTED, "the audit's", RetrievalError, "")[:MAX_LINES]
        earlier: dict[tuple[str, str], Decision] = {}
        if self._file.exists():
            kept = read_decisions(self._file, "the audit's", RetrievalError, "")
            earlier = {(line.key, line.label): line for line in kept}
        for number, line in enumerate(self.lines):  # a decision is on what a label was then
            known = earlier.get((line.key, line.label))
            if known is not None and (known.given, known.likely) == (line.given, line.likely):
                self.lines[number] = line._replace(decision=known.decision)
                del earlier[line.key, line.label]
        self._others, self._lock = earlier, Lock()

    def _state(self) -> list[tuple[int, int] | None]:
        """Returns what tells whether somebody else has written one of the files."""
        found = []
        for path in (self.folder / LISTED, self._file):
            there = path.stat() if path.exists() else None
            found.append(None if there is None else (there.st_ino, there.st_mtime_ns))
        return found

    def decide(self, number: int, choice: str) -> int:
        """Writes a decision; returns how many lines have one."""
        with self._lock:
            if self._state() != self._seen:
                raise RetrievalError(
                    f"{LISTED} or {DECIDED} was changed meanwhile; stop heron serve and start it "
                    "again, so that it reads them"
                )
            lines = [*self.lines]
            lines[number] = lines[number]._replace(decision=choice)
            decided = [line for line in lines if line.decision]
            others = {k: x for k, x in self._others.items() if k != lines[number][:2]}
            write_decisions(self._file, [*others.values(), *decided])
            self.lines, self._others, self._seen = lines, others, self._state()
            return len(decided)


def decision_routes(
    decisions: Decisions, shown: Shown | None, why: str, bounds: Bounds
) -> APIRouter:
    """Returns the routes of the page; without `shown`, it says `why` there are no pictures."""
    routes, in_thread, count = APIRouter(), asyncio.to_thread, len(decisions.lines)
    lock = Lock()  # a reader of shards is for one thread at a time
    views = [*shown[0].views] if shown else []

    def number_of(line: int) -> int | None:
        """Returns the number of a line's sample; None if it cannot be shown."""
        if not 0 <= line < count:
            raise HTTPException(404, f"no line has the number {line}; there are {count:,} lines")
        with suppress(RetrievalError):
            return shown[1].find(decisions.lines[line].key) if shown else None
        return None

    def draw(line: int, view: str) -> bytes | None:
        if shown is None or (number := number_of(line)) is None:
            return None
        with lock:
            picture: Image.Image | None = shown[0].of(shown[1], number, view)
        return None if picture is None else jpeg(picture)

    thumbnail: Callable[[int, str], bytes | None] = lru_cache(CACHED_THUMBNAILS)(draw)

    @routes.get("/lines")
    async def lines() -> dict[str, Any]:
        described = {"name": decisions.folder.resolve().name, "views": views, "why": why}
        return described | {"choices": CHOICES, "lines": decisions.lines}

    @routes.get("/picture/{line}")
    async def picture(line: int, view: Annotated[str, Query(max_length=40)] = "") -> Response:
        number_of(line)
        async with bounds.drawing():
            data = await in_thread(thumbnail, line, view)
        if data is None:
            raise HTTPException(404, f"line {line} has no picture")
        return Response(data, 200, {"Cache-Control": "no-cache"}, "image/jpeg")

    @routes.get("/values/{line}")
    async def values(line: int) -> dict[str, Any]:
        number = number_of(line)

        def read() -> dict[str, Any]:
            with lock, suppress(*EXPECTED):
                return shown[0].values(shown[1], number) if shown and number is not None else {}
            return {}

        async with bounds.drawing():
            return {"values": await in_thread(read)}

    @routes.post("/decide/{line}")
    async def decide(request: Request, line: int, choice: Choice) -> dict[str, int]:
        if request.headers.get("content-type") != BINARY:  # no other origin's page can send it
            raise HTTPException(415, f"a decision must be sent as '{BINARY}'")
        number_of(line)
        async with bounds.searching():
            return {"decided": await in_thread(decisions.decide, line, choice)}

    return routes
