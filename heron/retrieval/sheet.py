"""Draws an answer as a contact sheet: the query, then the hits, with scores and labels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont, ImageOps

from heron.base.errors import RetrievalError
from heron.retrieval.answer import Answer, Hit
from heron.retrieval.query import Retriever
from heron.shards.show import PICTURES

CELL, PAD, LINE = 176, 6, 14  # pixels: a picture's side, the gap, a line of text
INK, SAME, MORE, LESS, MARK = "#1d2433", "#5b6270", "#1a6b3c", "#a3262a", "#1f5fbf"


@dataclass(frozen=True)
class Tile:
    """A picture on a sheet, with the text below it."""

    picture: Image.Image | None  # None leaves a gap
    lines: Sequence[tuple[str, str]]  # texts, which are wrapped, and their colours
    marked: bool = False  # whether it is framed, as a query is


def draw_tiles(tiles: Sequence[Tile], across: int) -> Image.Image:
    """Draws tiles on a sheet, `across` to a row; each row is as high as its longest text needs."""
    font = _font()
    texts = [
        [(line, ink) for text, ink in tile.lines for line in _wrap(text, font)] for tile in tiles
    ]
    rows = [range(i, min(i + across, len(tiles))) for i in range(0, len(tiles), across)]
    pitch = CELL + PAD
    heights = [pitch + max(len(texts[n]) for n in row) * LINE + 2 * PAD for row in rows]
    width = min(across, len(tiles)) * pitch + PAD
    sheet = Image.new("RGB", (width, sum(heights) + PAD), "white")
    pen, top = ImageDraw.Draw(sheet), PAD
    for row, height in zip(rows, heights, strict=True):
        for column, number in enumerate(row):
            left, tile = PAD + column * pitch, tiles[number]
            if tile.picture is not None:
                fitted = ImageOps.contain(tile.picture.convert("RGB"), (CELL, CELL))
                margins = (CELL - fitted.width) // 2, (CELL - fitted.height) // 2
                sheet.paste(fitted, (left + margins[0], top + margins[1]))
            if tile.marked:
                box = left - 4, top - 4, left + CELL + 3, top + CELL + 3
                pen.rectangle(box, outline=MARK, width=4)
            for line, (text, ink) in enumerate(texts[number]):
                pen.text((left + 2, top + CELL + PAD + line * LINE), text, fill=ink, font=font)
        top += height
    return sheet


@cache
def _font() -> ImageFont.FreeTypeFont:
    """Returns the font that comes with matplotlib: it has more scripts than Pillow's own."""
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", 11)


def _wrap(text: str, font: ImageFont.FreeTypeFont) -> Iterator[str]:
    """Yields lines that fit a tile, broken between words or within a word that is too long."""
    line = ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if font.getlength(longer) <= CELL - 4:
            line = longer
            continue
        if line:
            yield line
        line = ""
        for letter in word:
            if font.getlength(line + letter) > CELL - 4:
                yield line
                line = ""
            line += letter
    yield line


def draw_answer(
    retriever: Retriever, answer: Answer, picture: Image.Image | None = None
) -> Image.Image:
    """Draws an answer as a sheet: the query, framed, then the hits with score, key and labels.

    `picture` shows a query that is no sample. Raises a RetrievalError if the samples have no
    pictures, and the errors of `SamplePictures.of`.
    """
    query = answer.query
    if query.number is not None:
        picture = retriever.picture(query.number)
    tiles = [Tile(picture, list(_query_lines(answer)), True)]
    for i, hit in enumerate(answer.hits):
        picture = retriever.picture(hit.number)
        if picture is None and not retriever.picture_views:
            raise RetrievalError(
                f"{retriever.data} has no view of pictures with 1 or 3 channels, which a sheet "
                "needs; remove --sheet"
            )
        tiles.append(Tile(picture, list(_hit_lines(answer, i + 1, hit))))
    return draw_tiles(tiles, across=min(6, len(tiles)))


def _query_lines(answer: Answer) -> Iterator[tuple[str, str]]:
    relation = {"neighbours": "neighbours", "hard": "hard negatives", "false": "false negatives"}
    yield f"query {answer.query.key}", MARK
    where = f" where {answer.where}" if answer.where else ""
    yield f"{relation[answer.relation]}{where}", INK
    if answer.query.labels:
        yield ", ".join(answer.query.labels), SAME
        yield "below: = both, + only the hit, − only the query", SAME


def _hit_lines(answer: Answer, position: int, hit: Hit) -> Iterator[tuple[str, str]]:
    yield f"{position}   {hit.score:.4f}   {hit.key}", INK
    if hit.label_distance is None:  # one of the two has no labels to compare
        yield ", ".join(hit.labels) or "no labels", SAME
        return
    query_labels, hit_labels = answer.query.labels, hit.labels
    for sign, names, ink in (
        ("=", [name for name in hit_labels if name in query_labels], SAME),
        ("+", [name for name in hit_labels if name not in query_labels], MORE),
        ("−", [name for name in query_labels if name not in hit_labels], LESS),
    ):
        if names:
            yield f"{sign} {', '.join(names)}", ink


def check_sheet(path: Path) -> None:
    """Refuses a file name that a sheet cannot have, before the work of drawing it."""
    if path.suffix.lower() not in PICTURES:
        raise RetrievalError(
            f"{path}: a sheet cannot be {path.suffix or 'a file with no suffix'}; give --sheet a "
            f"name that ends with {' or '.join(PICTURES)}"
        )
