"""The API of one index, as the page uses it; every request is bounded before it is used."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from io import BytesIO, StringIO
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from PIL import Image

from heron.base.errors import HeronError, RetrievalError, csv_line
from heron.retrieval.answer import Answer, Flags, Relation
from heron.retrieval.filters import filter_mask
from heron.retrieval.map import GRID, MAX_CORNERS, SampleMap
from heron.retrieval.query import Retriever
from heron.retrieval.samples import Samples
from heron.serve.admission import BINARY, Admission, Limits, Uploads

MAX_HITS = 200
MAX_TEXT = 500  # characters of a key or a filter
MAX_EXAMPLES = 20  # samples of one query
MAX_FILES = 64  # of one upload: a view has one
SUGGESTIONS = 20  # keys that contain what was typed
THUMBNAIL_PIXELS = 256  # longest side of a picture that is sent
CACHED_THUMBNAILS = 2_000
CACHED_OUTLINES = 4
FACETS = 300  # labels that are counted
COLOURS = 11  # classes that have a colour of their own on the map
EXPORT_CHUNK = 4096  # keys of an export that are sent at a time
EXPECTED = (HeronError, OSError)
Text = Annotated[str, Query(max_length=MAX_TEXT)]
Keys = Annotated[list[Text], Query(min_length=1, max_length=MAX_EXAMPLES)]
Names = Annotated[Sequence[Text], Query(max_length=MAX_FILES)]
Sizes = Annotated[Sequence[Annotated[int, Query(ge=0)]], Query(max_length=MAX_FILES)]
Count = Annotated[int, Query(ge=1, le=MAX_HITS)]
Outline = Annotated[str, Query(max_length=12 * MAX_CORNERS)]


class Bounds:
    """How much of each kind of work runs at once; all indexes of a server share it."""

    def __init__(self, limits: Limits) -> None:
        """Starts with nothing running."""
        self.limits, self.uploads = limits, Uploads(limits)
        self.searching = Admission("searches", limits.searches, limits.waiting)
        # One page requests up to 200 pictures of each view.
        self.drawing = Admission("pictures", limits.searches, limits.waiting * 60)
        self.encoding = Admission("uploads", 1, limits.waiting)
        # Each chunk is admitted: one that waits is never refused, as its answer has begun.
        self.exporting = Admission("exports", limits.searches, 2 * limits.connections)


def index_routes(retriever: Retriever, bounds: Bounds, indexes: Sequence[str]) -> APIRouter:
    """Returns the routes of one index; `indexes` names all indexes of the server."""
    routes, samples, selection = APIRouter(), retriever.samples, Selection(retriever)
    description = about(retriever, bounds.limits, selection.map) | {"indexes": indexes}
    samples.keys_with("", 1)  # sorts the keys now: in a first request it would block all others
    _ = samples.close_difference  # compares pairs of labels, which takes seconds

    @routes.get("/about")
    async def describe() -> dict[str, Any]:
        return description

    _add_sample_routes(routes, retriever, bounds, selection)
    _add_query_routes(routes, retriever, bounds, selection)
    _add_selection_routes(routes, samples, bounds, selection)
    return routes


def _add_sample_routes(
    routes: APIRouter, retriever: Retriever, bounds: Bounds, selection: "Selection"
) -> None:
    samples, in_thread = retriever.samples, asyncio.to_thread
    generator = np.random.default_rng()
    thumbnail = lru_cache(CACHED_THUMBNAILS)(lambda *of: picture_bytes(retriever, *of))

    def check_number(number: int) -> None:
        if not 0 <= number < len(samples):
            text = f"no sample has the number {number}; there are {len(samples):,} samples"
            raise HTTPException(404, text)

    @routes.get("/samples")
    async def suggest(part: Text = "") -> dict[str, list[str]]:
        async with bounds.searching():
            return {"keys": await in_thread(samples.keys_with, part, SUGGESTIONS)}

    @routes.get("/sample/{number}")
    async def sample(number: int) -> dict[str, Any]:
        check_number(number)
        return {"key": samples.key(number), "labels": samples.label_names(number)}

    @routes.get("/random")
    async def draw(where: Text = "") -> dict[str, str]:
        async with bounds.searching():
            flags = await in_thread(selection.flags, where, "")
        numbers = len(samples) if flags is None else np.flatnonzero(flags)
        return {"key": samples.key(int(generator.choice(numbers)))}

    @routes.get("/picture/{number}")
    async def picture(number: int, view: Text = "") -> Response:
        check_number(number)
        async with bounds.drawing():
            data = await in_thread(thumbnail, number, view)
        if data is None:
            raise HTTPException(404, f"sample {samples.key(number)} has no picture")
        # Safe to cache: the page's URLs of pictures name the index by its fingerprint.
        return Response(data, 200, {"Cache-Control": "private, max-age=3600"}, "image/jpeg")


def _add_query_routes(
    routes: APIRouter, retriever: Retriever, bounds: Bounds, selection: "Selection"
) -> None:
    samples, in_thread = retriever.samples, asyncio.to_thread

    def to_json(answer: Answer) -> dict[str, Any]:
        """Adds keys and labels of the query's samples, and the texts and numbers of all."""
        tree: dict[str, Any] = answer.plain() | {"values": {}}
        query = answer.query
        own = query.sample_numbers
        tree["query"]["labelled"] = bool(own) and bool(samples.known[own].all())
        tree["query"]["keys"] = [samples.key(number) for number in query.examples]
        with suppress(*EXPECTED):  # without the shards there is nothing to show
            tree["values"] = retriever.values([*own, *(hit.number for hit in answer.hits)])
        return tree

    async def search(
        admission: Admission, lasso: str, find: Callable[[Flags | None], Answer]
    ) -> dict[str, Any]:
        async with admission():
            return await in_thread(lambda: to_json(find(selection.inside(lasso))))

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
                    f"relation '{relation}' needs one key, got {len(key)}; ask for neighbours, or "
                    "send one key"
                )
            return retriever.by_keys(key, k, where, among)

        return await search(bounds.searching, lasso, find)

    @routes.get("/text")
    async def by_text(
        text: Text, k: Count = 24, where: Text = "", lasso: Outline = ""
    ) -> dict[str, Any]:
        def find(among: Flags | None) -> Answer:
            return retriever.by_text(text, k, where, among=among)

        return await search(bounds.encoding, lasso, find)

    @routes.post("/upload")
    async def upload(
        request: Request,
        k: Count = 24,
        where: Text = "",
        lasso: Outline = "",
        view: Names = (),  # of each file of the body, one after another
        size: Sizes = (),  # in bytes
    ) -> dict[str, Any]:
        async with bounds.uploads(request) as data:

            def find(among: Flags | None) -> Answer:
                files = files_of(data, view, size)
                return retriever.by_file(files, k, where, name="the upload", among=among)

            return await search(bounds.encoding, lasso, find)


def _add_selection_routes(
    routes: APIRouter, samples: Samples, bounds: Bounds, selection: "Selection"
) -> None:
    in_thread = asyncio.to_thread

    @routes.get("/facets")
    async def facets(where: Text = "", lasso: Outline = "") -> dict[str, Any]:
        def count() -> dict[str, Any]:
            flags = selection.flags(where, lasso)
            allowed = len(samples) if flags is None else int(flags.sum())
            return {"allowed": allowed, "counts": samples.label_counts(flags)[:FACETS]}

        async with bounds.searching():
            return await in_thread(count)

    @routes.get("/export")
    async def export(
        format: Literal["csv", "json"], where: Text = "", lasso: Outline = ""
    ) -> Response:
        async with bounds.searching():
            flags = await in_thread(selection.flags, where, lasso)
        numbers = range(len(samples))
        media_type = {"csv": "text/csv; charset=utf-8", "json": "application/json"}[format]
        headers = {"Content-Disposition": f'attachment; filename="keys.{format}"'}
        chunks = lines_of(
            map(samples.key, numbers if flags is None else compress(numbers, flags)), format
        )

        async def admitted() -> AsyncIterator[str]:
            """Yields each chunk after its turn, so that slow readers keep no other export out."""
            while True:
                async with bounds.exporting():
                    chunk = await in_thread(next, chunks, None)
                if chunk is None:
                    return
                yield chunk

        return StreamingResponse(admitted(), 200, headers, media_type)

    @routes.get("/map")
    async def coordinates() -> Response:
        return _binary(selection.required_map().bytes)

    @routes.get("/colours")
    async def colours(label: Annotated[int | None, Query(ge=0)] = None) -> Response:
        async with bounds.searching():
            return _binary(await in_thread(selection.colours, label))


class Selection:
    """Selects the samples of an index that pass a filter and lie in an outline on its map."""

    def __init__(self, retriever: Retriever) -> None:
        """Reads the map, if the index has one."""
        self.samples, self.map = retriever.samples, retriever.index.sample_map()
        self._inside = lru_cache(CACHED_OUTLINES)(lambda x: self.required_map().inside(x))

    def required_map(self) -> SampleMap:
        """Returns the map, or raises a RetrievalError if there is none."""
        if self.map is None:
            raise RetrievalError(
                "this index has no map; build it again with `heron index`, without --map none"
            )
        return self.map

    def inside(self, outline: str) -> Flags | None:
        """Returns which samples lie in an outline, [N]; None without an outline."""
        return self._inside(outline) if outline else None

    def flags(self, where: str, outline: str) -> Flags | None:
        """Returns which samples pass the filter and lie in the outline, [N]; None: all do."""
        passed = filter_mask(where, self.samples) if where.strip() else None
        inside = self.inside(outline)
        flags = passed if inside is None else inside if passed is None else passed & inside
        if flags is not None and not flags.any():
            raise RetrievalError("no sample passes the filter and is inside the outline; widen one")
        return flags

    def colours(self, label: int | None) -> bytes:
        """Returns one byte per sample: 1 with the label, 0 without it, 255 if that is unknown.

        Without a label, the byte is the rank of the sample's class among the most frequent ones,
        `COLOURS` for all other classes, and 255 if the class is unknown.
        """
        samples = self.samples
        if label is None and not samples.exclusive or (label or 0) >= len(samples.names):
            raise RetrievalError(
                f"label must be the number of a label, 0 to {len(samples.names) - 1}, got {label}"
            )
        if label is None:
            class_codes = np.full(len(samples.names), COLOURS, np.uint8)
            class_codes[classes(samples.label_counts())] = np.arange(min(COLOURS, len(class_codes)))
            codes = class_codes[samples.targets.argmax(1)]
        else:
            codes = samples.targets[:, label].copy()
        codes[~samples.known] = 255
        return bytes(codes)


def classes(counts: Sequence[int]) -> list[int]:
    """Returns the numbers of the most frequent classes, which have colours of their own."""
    return np.argsort(-np.asarray(counts), kind="stable")[:COLOURS].tolist()  # type: ignore[no-any-return]


def lines_of(keys: Iterator[str], format: Literal["csv", "json"]) -> Iterator[str]:
    """Yields keys as a CSV column or a JSON list, `EXPORT_CHUNK` keys at a time."""
    (out := StringIO()).write("[" if format == "json" else "key\r\n")
    for number, key in enumerate(keys, 1):
        if format == "csv":
            out.write(f"{csv_line([key])}\r\n")
        else:
            out.write(f"{',' if number > 1 else ''}\n{json.dumps(key)}")
        if number % EXPORT_CHUNK == 0:
            yield out.getvalue()
            out.seek(0)
            out.truncate()
    yield out.getvalue() + ("\n]\n" if format == "json" else "")


def files_of(data: bytes, views: Sequence[str], sizes: Sequence[int]) -> bytes | dict[str, bytes]:
    """Cuts a body into the files of some views; without names it is one file of any view.

    Raises a RetrievalError if a view is named twice, or the sizes are not those of the body.
    """
    if not views and not sizes:
        return data
    if len(views) != len(sizes) or len(set(views)) < len(views) or sum(sizes) != len(data):
        raise RetrievalError(
            "a body must have a `view` and a `size` for each file, each view once, and the files "
            f"one after another, got {len(data):,} bytes for {', '.join(views) or 'no view'}, of "
            f"{', '.join(map(str, sizes)) or 'no'} bytes"
        )
    ends = np.cumsum(sizes).tolist()
    return {n: data[e - s : e] for n, s, e in zip(views, sizes, ends, strict=True)}


def _binary(data: bytes) -> Response:
    return Response(data, 200, {"Cache-Control": "private, max-age=3600"}, BINARY)


def about(retriever: Retriever, limits: Limits, sample_map: SampleMap | None) -> dict[str, Any]:
    """Describes the index for the page, with the limits of what the page may request."""
    manifest, samples = retriever.index.manifest, retriever.samples
    recall = "not measured"
    if (measured := manifest.recall) is not None:
        recall = f"{measured.value:.3f} at {measured.k}, of {measured.queries:,} held-out queries"
    pictures, inputs, texts = list[str](), dict[str, str](), False
    with suppress(*EXPECTED):
        pictures = retriever.picture_views
    with suppress(*EXPECTED):
        inputs = retriever.inputs
    with suppress(*EXPECTED):
        texts = retriever.takes_text
    return manifest.model_dump(include={"kind", "metric", "layer", "dim", "count"}) | {
        "data": Path(retriever.data).name,
        "recall": recall,
        "names": samples.names,
        "exclusive": samples.exclusive,
        "facets": FACETS,
        "classes": classes(samples.label_counts()) if samples.exclusive else [],
        "close": samples.close_distance,
        "map": sample_map
        and {
            "how": sample_map.how,
            "grid": GRID,
            "corners": MAX_CORNERS,
            "regions": [region.model_dump() for region in sample_map.regions],
        },
        "of": manifest.fingerprint[7:19],
        "longest": MAX_TEXT,
        "pictures": bool(pictures),
        "picture_views": pictures,
        "inputs": [{"name": name, "kind": kind} for name, kind in inputs.items()],
        "texts": texts,
        "upload_bytes": limits.upload_bytes,
    }


def picture_bytes(retriever: Retriever, number: int, view: str) -> bytes | None:
    """Returns the picture of a sample as a JPEG small enough for the page; None without one."""
    picture = retriever.picture(number, view)
    return None if picture is None else jpeg(picture)


def jpeg(picture: Image.Image) -> bytes:
    """Returns a picture as a JPEG, no larger than the page shows it."""
    picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), Image.Resampling.LANCZOS)
    # Without chroma subsampling, which would blur the colours of small pictures.
    picture.save(out := BytesIO(), "JPEG", quality=90, subsampling=0)
    return out.getvalue()
