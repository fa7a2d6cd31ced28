"""The source `captions`: pictures with a text beside each, or named by a CSV."""

from pathlib import Path

import pytest

from heron.base.errors import SourceError
from heron.shards.build import build
from heron.shards.verify import verify
from heron.sources import make_source
from tests.shards.tiny import whole
from tests.sources.test_parquet import picture


def folder(path: Path, count: int = 4) -> Path:
    made = path / "birds"
    for n in range(count):
        (made / "deep").mkdir(parents=True, exist_ok=True)
        stem = made / ("deep" if n % 2 else ".") / f"bird {n}"
        stem.with_suffix(".png").write_bytes(picture(n))
        stem.with_suffix(".txt").write_text(f"\ufeffbird number {n}\n", encoding="utf-8")
    return made


def test_a_text_beside_each_picture(tmp_path: Path) -> None:
    made = folder(tmp_path)
    (made / ".hidden").write_bytes(b"")
    source = make_source("captions", {"folder": made})
    assert [(v.name, v.kind, v.shape) for v in source.views] == [
        ("image", "image", (8, 9, 3)),
        ("caption", "text", (-1,)),
    ]
    rows = whole(source, "all")
    assert rows.views["caption"] == [f"bird number {n}".encode() for n in (0, 2, 1, 3)]
    assert rows.views["image"] == [picture(n) for n in (0, 2, 1, 3)]
    assert rows.keys == ["bird_0", "bird_2", "deep-bird_1", "deep-bird_3"]
    build(source, tmp_path / "out", progress=False)
    assert verify(tmp_path / "out").ok


def test_a_csv_names_pictures_and_several_captions(tmp_path: Path) -> None:
    made, listed = folder(tmp_path), tmp_path / "captions.csv"
    listed.write_text('file,caption\nbird 0.png,"red, small"\nbird 0.png,a bird\nbird 2.png,two\n')
    source = make_source("captions", {"folder": made, "csv": listed})
    rows = whole(source, "all")
    assert rows.views["caption"] == [b"red, small", b"a bird", b"two"]
    assert rows.keys == ["bird_0-0", "bird_0-1", "bird_2-2"]
    build(source, tmp_path / "out", progress=False)
    for text, message in (
        (
            "bird 9.png,nine\n",
            "a picture in birds, and its caption, got \\['bird 9\\.png', 'nine'\\]",
        ),
        ("../a.png,nine\n", "row 1: '../a.png' is outside birds"),
        ("bird 0.png, \n", "bird 0.png has an empty caption"),
        ("file,caption\n", "has no rows; write file,caption on each line"),
        ('bird 0.png,"a\n', "which must be a CSV file in UTF-8"),
    ):
        (tmp_path / "a.png").write_bytes(picture(1))
        listed.write_text(text)
        with pytest.raises(SourceError, match=message):
            _ = make_source("captions", {"folder": made, "csv": listed}).splits


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "lone.txt",
            b"alone",
            "lone\\.txt is not a pair; every name needs a picture \\(\\.jpg",
        ),
        ("bird 0.jpg", b"", "bird 0\\.jpg and bird 0\\.png and bird 0\\.txt is not a pair"),
        ("bird 2.txt", b"\xff", "bird 2.txt is not UTF-8"),
        ("bird 2.txt", b" ", "bird 2.png has an empty caption; move it"),
        ("bird 2.png", b"GIF89a", "bird 2.png is a damaged GIF .its header cannot be read"),
    ],
)
def test_faults(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    made = folder(tmp_path)
    (made / name).write_bytes(data)
    with pytest.raises(SourceError, match=message):
        _ = make_source("captions", {"folder": made}).splits


@pytest.mark.parametrize("picture_suffix", [".png", ".PNG"])
def test_suffixes_in_capitals(tmp_path: Path, picture_suffix: str) -> None:
    for n, stem in enumerate("Ab"):
        (tmp_path / f"{stem}{picture_suffix}").write_bytes(picture(n))
        (tmp_path / f"{stem}.TXT").write_text(f"bird {n}")
    source = make_source("captions", {"folder": tmp_path})
    assert whole(source, "all").views["caption"] == [b"bird 0", b"bird 1"]
    before = source.input_files()
    (tmp_path / "b.TXT").write_text("bird 2")
    assert make_source("captions", {"folder": tmp_path}).input_files() != before


def test_a_first_line_that_names_another_kind_of_file_is_no_header(tmp_path: Path) -> None:
    made, listed = folder(tmp_path), tmp_path / "captions.csv"
    (made / "a.gif").write_bytes(b"GIF89a")
    listed.write_text("a.gif,one\nbird 0.png,two\n")
    with pytest.raises(SourceError, match=r"a.gif is a damaged GIF"):
        _ = make_source("captions", {"folder": made, "csv": listed}).splits


def test_bad_lines_of_a_csv_are_named_at_once_and_may_be_left_out(tmp_path: Path) -> None:
    made, listed = folder(tmp_path), tmp_path / "captions.csv"
    (made / "cut.png").write_bytes(picture(1)[:-20])
    listed.write_text("bird 0.png,one\nbird 9.png,nine\ncut.png,two\n../a.png,no\nbird 2.png,x,y\n")
    (tmp_path / "a.png").write_bytes(picture(1))
    options = {"folder": made, "csv": listed}
    with pytest.raises(
        SourceError, match="row 4: '\\.\\./a\\.png' is outside birds; captions\\.csv, row 5"
    ):
        _ = make_source("captions", options).splits
    source = make_source("captions", options | {"on_error": "skip"})
    manifest = build(source, tmp_path / "out", progress=False)
    assert manifest.rows("all") == 1 and verify(tmp_path / "out").ok
    assert manifest.skipped is not None and manifest.skipped.count == 4
