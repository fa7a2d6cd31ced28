"""The API of one index: what the page asks of it, each request bounded before it is used."""

import asyncio
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from io import BytesIO, StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from PIL import Image

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.answer import Answer, Flags, Relation
from heron.pipeline.retrieval.filters import filter_mask
from heron.pipeline.retrieval.map import GRID, MAX_CORNERS, SampleMap
from heron.pipeline.retrieval.query import Retriever
from heron.pipeline.retrieval.samples import Samples
from heron.pipeline.serve.admission import BINARY, Admission, Limits, Uploads
from heron.shards.errors import HeronError

MAX_HITS = 200
MAX_TEXT = 500  # characters of a key or a filter
EXAMPLES = 20  # samples of one query
SUGGESTED = 20  # keys that begin with what was typed, or hold it
THUMBNAIL_PIXELS = 256  # longest side of a picture that is sent
THUMBNAILS = 2_000  # pictures that are kept
OUTLINES = 4  # whose samples are kept
FACETS = 300  # labels that are counted
COLOURS = 11  # classes that have a colour of their own on the map
EXPORTED = 4096  # keys of an export that are sent at a time
EXPECTED = (HeronError, OSError)
Text = Annotated[str, Query(max_length=MAX_TEXT)]
Keys = Annotated[list[Text], Query(min_length=1, max_length=EXAMPLES)]
Count = Annotated[int, Query(ge=1, le=MAX_HITS)]
Outline = Annotated[str, Query(max_length=12 * MAX_CORNERS)]


class Bounds:
    """What all indexes of a server share: how much of each kind of work runs at once."""

    def __init__(self, limits: Limits) -> None:
        """Begins with nothing under way."""
        self.limits, self.uploaded = limits, Uploads(limits)
        self.searching = Admission("searches", limits.searches, limits.waiting)
        # A page asks for 200 pictures.
        self.drawing = Admission("pictures", limits.searches, limits.waiting * 10)
        self.encoding = Admission("uploads", 1, limits.waiting)


def index_routes(retriever: Retriever, bounds: Bounds, indexes: Sequence[str]) -> APIRouter:
    """Returns the routes of one index; `indexes` are the names of all that are served."""
    routes, samples, chosen = APIRouter(), retriever.samples, Chosen(retriever)
    facts = about(retriever, bounds.limits, chosen.map) | {"indexes": indexes}
    samples.keys_with("", 1)  # sorts the keys now: a first request would stop all others
    _ = samples.close_difference  # compares pairs of labels, for seconds

    @routes.get("/about")
    async def describe() -> dict[str, Any]:
        return facts

    _add_samples(routes, retriever, bounds, chosen)
    _add_queries(routes, retriever, bounds, chosen)
    _add_choices(routes, samples, bounds, chosen)
    return routes


def _add_samples(routes: APIRouter, retriever: Retriever, bounds: Bounds, chosen: "Chosen") -> None:
    """Adds what is asked of single samples: keys, labels, a random one, pictures."""
    samples, threaded = retriever.samples, asyncio.to_thread
    generator = np.random.default_rng()
    thumbnail = lru_cache(THUMBNAILS)(lambda number: _thumbnail(retriever, number))

    def number_of(number: int) -> int:
        if not 0 <= number < len(samples):
            text = f"no sample has the number {number}; found {len(samples):,} samples"
            raise HTTPException(404, text)
        return number

    @routes.get("/samples")
    async def suggest(part: Text = "") -> dict[str, list[str]]:
        async with bounds.searching():
            return {"keys": await threaded(samples.keys_with, part, SUGGESTED)}

    @routes.get("/sample/{number}")
    async def sample(number: int) -> dict[str, Any]:
        found = number_of(number)
        return {"key": samples.key(found), "labels": samples.label_names(found)}

    @routes.get("/random")
    async def draw(where: Text = "") -> dict[str, str]:
        async with bounds.searching():
            flags = await threaded(chosen.flags, where, "")
        numbers = len(samples) if flags is None else np.flatnonzero(flags)
        return {"key": samples.key(int(generator.choice(numbers)))}

    @routes.get("/picture/{number}")
    async def picture(number: int) -> Response:
        number_of(number)
        async with bounds.drawing():
            data = await threaded(thumbnail, number)
        if data is None:
            raise HTTPException(404, f"sample {samples.key(number)} has no picture")
        # The page's addresses name the index: what a cache holds is of the same one.
        return Response(data, 200, {"Cache-Control": "private, max-age=3600"}, "image/jpeg")


def _add_queries(routes: APIRouter, retriever: Retriever, bounds: Bounds, chosen: "Chosen") -> None:
    """Adds the queries: by samples, by words, by a file."""
    samples, threaded = retriever.samples, asyncio.to_thread

    def plain(answer: Answer) -> dict[str, Any]:
        """The answer for JSON; the query says whether it has labels, be it none of them."""
        found, query = answer.plain(), answer.query
        own = query.sample_numbers
        found["query"]["labelled"] = bool(own) and bool(samples.known[own].all())
        found["query"]["keys"] = [samples.key(number) for number in query.examples]
        return found

    async def answered(
        admitted: Admission, lasso: str, find: Callable[[Flags | None], Answer]
    ) -> dict[str, Any]:
        async with admitted():
            return await threaded(lambda: plain(find(chosen.inside(lasso))))

    @routes.get("/neighbours")
    async def neighbours(
        key: Keys,
        k: Count = 24,
        where: Text = "",
        relation: Relation = "neighbours",
        lasso: Outline = "",
    ) -> dict[str, Any]:
        def find(among: Flags | None) -> Answer:
            if len(key) == 1:
                return retriever.by_key(key[0], k, where, relation, among=among)
            if relation != "neighbours":
                raise RetrievalError(
                    f"relation '{relation}' with {len(key)} keys; expected one key; ask for "
                    "neighbours, or by one of them"
                )
            return retriever.by_keys(key, k, where, among)

        return await answered(bounds.searching, lasso, find)

    @routes.get("/text")
    async def by_text(
        text: Text, k: Count = 24, where: Text = "", lasso: Outline = ""
    ) -> dict[str, Any]:
        def find(among: Flags | None) -> Answer:
            return retriever.by_text(text, k, where, among=among)

        return await answered(bounds.encoding, lasso, find)

    @routes.post("/upload")
    async def upload(
        request: Request, k: Count = 24, where: Text = "", lasso: Outline = ""
    ) -> dict[str, Any]:
        async with bounds.uploaded(request) as data:

            def find(among: Flags | None) -> Answer:
                return retriever.by_file(data, k, where, name="the upload", among=among)

            return await answered(bounds.encoding, lasso, find)


def _add_choices(routes: APIRouter, samples: Samples, bounds: Bounds, chosen: "Chosen") -> None:
    """Adds what is asked of all that are chosen: label counts, keys, the map and its colours."""
    threaded = asyncio.to_thread

    @routes.get("/facets")
    async def facets(where: Text = "", lasso: Outline = "") -> dict[str, Any]:
        def count() -> dict[str, Any]:
            flags = chosen.flags(where, lasso)
            allowed = len(samples) if flags is None else int(flags.sum())
            return {"allowed": allowed, "counts": samples.label_counts(flags)[:FACETS]}

        async with bounds.searching():
            return await threaded(count)

    @routes.get("/export")
    async def export(
        format: Literal["csv", "json"], where: Text = "", lasso: Outline = ""
    ) -> Response:
        async with bounds.searching():
            flags = await threaded(chosen.flags, where, lasso)
        numbers = np.arange(len(samples)) if flags is None else np.flatnonzero(flags)
        kind = {"csv": "text/csv; charset=utf-8", "json": "application/json"}[format]
        named = {"Content-Disposition": f'attachment; filename="keys.{format}"'}
        keys = (samples.key(number) for number in numbers.tolist())
        return StreamingResponse(lines_of(keys, format), 200, named, kind)

    @routes.get("/map")
    async def coordinates() -> Response:
        return _binary(chosen.drawn().bytes)

    @routes.get("/colours")
    async def colours(label: Annotated[int | None, Query(ge=0)] = None) -> Response:
        async with bounds.searching():
            return _binary(await threaded(chosen.colours, label))


class Chosen:
    """Which samples of an index pass a filter and lie in an outline on its map."""

    def __init__(self, retriever: Retriever) -> None:
        """Reads the map, where there is one."""
        self.samples, self.map = retriever.samples, SampleMap.of(retriever.index)
        self._kept = lru_cache(OUTLINES)(lambda outline: self.drawn().inside(outline))

    def drawn(self) -> SampleMap:
        """Returns the map, or raises a RetrievalError where there is none."""
        if self.map is None:
            raise RetrievalError("this index has no map; expected one; build it with `heron index`")
        return self.map

    def inside(self, outline: str) -> Flags | None:
        """Returns which samples lie in an outline, [N]; None: no outline is given."""
        return self._kept(outline) if outline else None

    def flags(self, where: str, outline: str) -> Flags | None:
        """Returns which samples pass both, [N]; None: all do."""
        passed = filter_mask(where, self.samples) if where.strip() else None
        inside = self.inside(outline)
        found = passed if inside is None else inside if passed is None else passed & inside
        if found is not None and not found.any():
            raise RetrievalError(
                "no sample passes the filter and lies in the outline; ask for less"
            )
        return found

    def colours(self, label: int | None) -> bytes:
        """Returns a byte a sample: 1 with the label, 0 without, 255 unknown; None: of classes.

        Of classes it is the place among the most frequent ones, or `COLOURS` for all others.
        """
        samples = self.samples
        if label is None and not samples.exclusive or (label or 0) >= len(samples.names):
            raise RetrievalError(
                f"there is no label {label}; expected 0 to {len(samples.names) - 1}, the number of "
                "one of the labels"
            )
        if label is None:
            places = np.full(len(samples.names), COLOURS, np.uint8)
            places[classes(samples.label_counts())] = np.arange(min(COLOURS, len(places)))
            found = places[samples.targets.argmax(1)]
        else:
            found = samples.targets[:, label].copy()
        found[~samples.known] = 255
        return bytes(found)


def classes(counts: Sequence[int]) -> list[int]:
    """Returns the numbers of the most frequent classes, which have colours of their own."""
    return np.argsort(-np.asarray(counts), kind="stable")[:COLOURS].tolist()  # type: ignore[no-any-return]


def lines_of(keys: Iterator[str], format: Literal["csv", "json"]) -> Iterator[str]:
    """Yields keys as a column of CSV or a list of JSON, some at a time."""
    writer = csv.writer(out := StringIO())
    out.write("[" if format == "json" else "key\r\n")
    for number, key in enumerate(keys, 1):
        if format == "csv":
            writer.writerow([key])
        else:
            out.write(f"{',' if number > 1 else ''}\n{json.dumps(key)}")
        if number % EXPORTED == 0:
            yield out.getvalue()
            out.seek(0)
            out.truncate()
    yield out.getvalue() + ("\n]\n" if format == "json" else "")


def _binary(data: bytes) -> Response:
    return Response(data, 200, {"Cache-Control": "private, max-age=3600"}, BINARY)


def about(retriever: Retriever, limits: Limits, drawn: SampleMap | None) -> dict[str, Any]:
    """Returns what the page says of the index, and what it may ask for."""
    manifest, samples = retriever.index.manifest, retriever.samples
    recall = manifest.recall
    measured = "not measured"
    if recall is not None:
        measured = f"{recall.value:.3f} at {recall.k}, of {recall.queries:,} held-out queries"
    pictures = texts = False
    with suppress(*EXPECTED):
        pictures = retriever.has_pictures
    with suppress(*EXPECTED):
        texts = retriever.takes_text
    return manifest.model_dump(include={"kind", "metric", "layer", "dim", "count"}) | {
        "data": Path(retriever.data).name,
        "recall": measured,
        "names": samples.names,
        "exclusive": samples.exclusive,
        "facets": FACETS,
        "classes": classes(samples.label_counts()) if samples.exclusive else [],
        "close": samples.close_distance,
        "map": drawn
        and {
            "how": drawn.how,
            "grid": GRID,
            "corners": MAX_CORNERS,
            "regions": [region.model_dump() for region in drawn.regions],
        },
        "of": manifest.fingerprint[7:19],
        "longest": MAX_TEXT,
        "pictures": pictures,
        "texts": texts,
        "upload_bytes": limits.upload_bytes,
    }


def _thumbnail(retriever: Retriever, number: int) -> bytes | None:
    """The picture of a sample as a JPEG that is small enough for a page."""
    picture = retriever.picture(number)
    if picture is None:
        return None
    picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), Image.Resampling.LANCZOS)
    picture.save(out := BytesIO(), "JPEG", quality=90, subsampling=0)  # colours of small pictures
    return out.getvalue()
