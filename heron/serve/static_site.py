"""The page of `heron serve` as files, for any web server: answers, map and pictures, made before.

A sample's neighbours, hard and false negatives are those that the server gives. What needs a search
of its own (filters, outlines, uploads, means of several samples) is not on such a page.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from heron.base.errors import RetrievalError
from heron.retrieval.answer import RELATIONS, Answer
from heron.retrieval.query import Retriever
from heron.serve.admission import Limits
from heron.serve.routes import EXPECTED, about, picture_bytes
from heron.serve.server import page_files

MAX_SAMPLES = 50_000  # three searches each; beyond it a server is the better way
HITS = 24  # of each relation
BLOCK = 100  # samples of a file: a query fetches one


def write_site(retriever: Retriever, folder: Path, update: Callable[[int], None]) -> None:
    """Writes the page of an index to an empty folder; `update` is told of samples as they are done.

    Raises a RetrievalError if there are more than `MAX_SAMPLES` samples, or a single one.
    """
    samples = retriever.samples
    if len(samples) > MAX_SAMPLES:
        raise RetrievalError(
            f"the index has {len(samples):,} samples, but a page of files can have at most "
            f"{MAX_SAMPLES:,}; run `heron serve` without --export"
        )
    if len(samples) < 2:
        raise RetrievalError("the index has only one sample, so there are no neighbours to show")
    _write_page(folder)
    (folder / "data").mkdir()
    _write_data(retriever, folder / "data", update)


def _write_page(folder: Path) -> None:
    for file in page_files("index.html").values():
        text = file.read_text()
        if file.name == "index.html":
            # The scripts look for the mark; the answers of the server's paths are files here.
            text = text.replace("<body>", "<body data-static>")
            text = text.replace('href="api/about"', 'href="data/about.json"')
        (folder / file.name).write_text(text)


def _write_data(retriever: Retriever, folder: Path, update: Callable[[int], None]) -> None:
    samples, sample_map = retriever.samples, retriever.index.sample_map()
    description = about(retriever, Limits(), sample_map)
    # What the page offers follows from its description: nothing here that needs a search.
    description |= {"static": True, "indexes": [""], "inputs": [], "texts": False, "hits": HITS}
    description["values"] = _has_values(retriever)
    _save(folder / "about.json", description)
    if sample_map is not None:
        (folder / "map.bin").write_bytes(sample_map.bytes)
    codes = [
        samples.targets[n].nonzero()[0].tolist() if samples.known[n] else None
        for n in range(len(samples))
    ]
    _save(folder / "samples.json", {"keys": [*map(samples.key, range(len(samples)))], "of": codes})
    for name in ("answers", "values"):
        (folder / name).mkdir()
    for first in range(0, len(samples), BLOCK):
        numbers = range(first, min(first + BLOCK, len(samples)))
        name = f"{first // BLOCK}.json"
        _save(folder / "answers" / name, [_answers(retriever, number) for number in numbers])
        if description["values"]:
            _save(folder / "values" / name, retriever.values(numbers))
        for number, view, data in _pictures(retriever, numbers, description["picture_views"]):
            file = folder / "pictures" / str(view) / str(first // BLOCK) / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        update(len(numbers))


def _has_values(retriever: Retriever) -> bool:
    """Returns whether samples have texts or numbers to show; without the shards they have none."""
    with suppress(*EXPECTED):
        return any(retriever.values([0]).values())
    return False


def _answers(retriever: Retriever, number: int) -> dict[str, Any]:
    """Returns what the server answers to the key of a sample, by relation; an error as its text."""
    samples, found = retriever.samples, dict[str, Any]()
    key, k = samples.key(number), min(HITS, len(samples) - 1)
    for relation in RELATIONS if samples.names and samples.known[number] else RELATIONS[:1]:
        try:
            found[relation] = _compact(retriever.by_key(key, k, relation=relation))
        except RetrievalError as error:  # such as no sample with other labels
            found[relation] = str(error)
    return found


def _compact(answer: Answer) -> dict[str, Any]:
    """Returns an answer without what the page has already: keys and labels of the hits."""
    hits = [(hit.number, float(f"{hit.score:.6g}"), hit.label_distance) for hit in answer.hits]
    return {
        "hits": hits,
        "compares": answer.query.compares,
        "allowed": answer.allowed,
        "far": answer.far,
        "close": answer.close,
        "instead": answer.instead,
    }


def _pictures(
    retriever: Retriever, numbers: range, views: list[str]
) -> Iterator[tuple[int, int, bytes]]:
    """Yields the pictures of samples as JPEG, with the number of the sample and of the view."""
    for number in numbers:
        for position, view in enumerate(views):
            # As the page asks: of one view, by no name.
            data = picture_bytes(retriever, number, view if len(views) > 1 else "")
            if data is not None:
                yield number, position, data


def _save(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, separators=(",", ":"), allow_nan=False))
