"""How a sheet of pictures is laid out."""

from heron.retrieval.sheet import CELL, Tile, _font, _wrap, draw_tiles


def test_text_on_a_sheet_is_broken_not_cut() -> None:
    text = "Smiling, " * 30 + "x" * 90 + " end"
    lines = list(_wrap(text, _font()))
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(_font().getlength(line) <= CELL for line in lines)
    tall = draw_tiles([Tile(None, [(text, "black")]), Tile(None, [("a", "black")])], 1)
    assert tall.height > 2 * CELL + 14 * len(lines)
