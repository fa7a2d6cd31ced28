"""Tars of others with texts: indexed, verified, read as tokens, streamed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base.errors import ConfigError, ShardError, SourceError
from heron.cli.main import main
from heron.data.dataset import open_reader
from heron.data.decoders import TextDecoder
from heron.data.reader import Reader
from heron.shards.manifest import View, load_manifest
from heron.shards.texts import MAX_TEXT_BYTES, read_text
from heron.shards.verify import verify
from tests.data import endless
from tests.shards.others import jpeg, run, write_tar

COLOURS = "red", "green", "blue"


def caption(number: int) -> str:
    return f"a {COLOURS[number % 3]} cat, number {number}"


def sample(number: int, text: bytes | None = None) -> list[tuple[str, bytes]]:
    fields = {"caption": caption(number), "kind": COLOURS[number % 3]}
    return [
        (f"{number:04d}.jpg", jpeg(number)),
        (f"{number:04d}.txt", caption(number).encode() if text is None else text),
        (f"{number:04d}.json", json.dumps(fields).encode()),
    ]


def opened(folder: Path, views: list[dict[str, Any]]) -> Reader:
    data = {"path": str(folder), "views": views, "webdataset": None, "batch": {"labelled": 8}}
    return open_reader(endless.config(folder, **data).data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tars as those that collect pictures from the web write them."""
    (tmp_path / "web").mkdir()
    for first in (0, 30):
        files = [file for number in range(first, first + 30) for file in sample(number)]
        write_tar(tmp_path / "web" / f"{first:05d}.tar", files)
    return tmp_path / "web"


@pytest.mark.parametrize(("text", "name"), [("txt", "text"), ("json:caption", "caption")])
def test_texts_are_indexed_where_they_lie(folder: Path, text: str, name: str) -> None:
    words = ["--image", "jpg", "--text", text, "--label", "json:kind", "--quiet"]
    assert main(["shards", "index", str(folder), *words]) == 0
    manifest = load_manifest(folder)
    view = manifest.views[1]
    assert (view.name, view.kind, view.shape) == (name, "text", (-1,))
    assert verify(folder).ok
    words_of = json.loads((folder / f"{name}.tokenizer.json").read_text())["model"]["vocab"]
    assert set(COLOURS) < set(words_of)
    views = [{"stored": "image", "size": 8}, {"stored": name, "tokens": 40}]
    reader = opened(folder, views)
    rows = np.array([33, 1])
    wanted = np.full((2, 40), -1)
    for row, number in zip(wanted, rows, strict=True):
        TextDecoder(40).decode(caption(int(number)).encode(), row)
    np.testing.assert_array_equal(reader.read(name, rows), wanted)


def test_texts_are_streamed(folder: Path) -> None:
    stream = {"labelled": [f"{folder}/*.tar"], "image": ["jpg"], "text": ["txt"], "vector": {}}
    stream |= {"labelled": [str(tar) for tar in sorted(folder.glob("*.tar"))]}
    config = endless.config(
        folder,
        webdataset=stream | {"label": "json:kind", "classes": list(COLOURS)},
        views=[{"stored": "image", "size": 8}, {"stored": "text", "tokens": 40}],
    )
    seen = set()
    for batch in endless.steps(config, 5):
        assert batch.stored["text"].shape == (8, 40)
        for row, target in zip(batch.stored["text"], batch.targets, strict=True):
            text = bytes((row[row > 0] - 1).tolist()).decode()
            assert COLOURS[int(target.argmax())] in text
            seen.add(text)
    assert len(seen) == 40 and seen < {caption(number) for number in range(60)}


def test_labels_that_look_like_texts_are_refused(folder: Path) -> None:
    with pytest.raises(SourceError, match="60 names in 60 labels.* this looks like text: .*--text"):
        run(folder, image=["jpg"], label="txt")
    (names := folder / "names").write_text("\n".join(caption(n) for n in range(60)))
    assert (
        len(run(folder, image=["jpg"], label="txt", label_names=names).manifest.labels.names) == 60
    )


def test_the_case_of_a_member_that_holds_a_field(folder: Path) -> None:
    assert run(folder, image=["jpg"], text=["JSON:caption"]).manifest.views[1].member == "json"


def test_long_texts_are_cut_between_characters() -> None:
    assert read_text("é".encode() * MAX_TEXT_BYTES) == "é" * (MAX_TEXT_BYTES // 2)
    assert read_text(b"a" + "é".encode() * MAX_TEXT_BYTES) == "a" + "é" * (MAX_TEXT_BYTES // 2 - 1)
    with pytest.raises(ValueError, match="must be UTF-8"):
        read_text("é".encode("latin-1") * (MAX_TEXT_BYTES + 1))


def test_half_a_character_is_no_text(folder: Path) -> None:
    half = [("90.jpg", jpeg(90)), ("90.json", b'{"caption": "a \\ud83d"}')]
    write_tar(folder / "00090.tar", [*half, *sample(91)])
    told = "00090\\.tar sample 90 member 'json' has half a character \\(a lone surrogate\\) in"
    with pytest.raises(ShardError, match=told):
        run(folder, image=["jpg"], text=["json:caption"])
    outcome = run(folder, image=["jpg"], text=["json:caption"], on_error="skip")
    skipped = outcome.manifest.skipped
    assert skipped is not None and skipped.count == 1


@pytest.mark.parametrize(
    ("text", "given", "told"),
    [
        ("txt", b"\xff\xfe\xfa", "member 'txt' must be UTF-8, got b'\\\\xff\\\\xfe\\\\xfa'"),
        ("json:title", b"", "member 'json' must be JSON with a string called 'title', got .*"),
        ("wav", b"", "no such view can be read from 'wav'; use txt"),
    ],
)
def test_what_is_no_text(folder: Path, text: str, given: bytes, told: str) -> None:
    write_tar(folder / "00090.tar", sample(90, given))
    with pytest.raises((ShardError, SourceError), match=told):
        run(folder, image=["jpg"], text=[text])


def test_a_field_is_of_texts_alone() -> None:
    with pytest.raises(ValueError, match="view 'v': only texts can be a field of JSON"):
        View(name="v", kind="vector", shape=(5,), dtype="float32", field="caption")


def test_an_altered_text_is_found(folder: Path) -> None:
    run(folder, image=["jpg"], text=["txt"])
    tar = folder / "00000.tar"
    data = tar.read_bytes()
    tar.write_bytes(data.replace(caption(3).encode(), caption(3).encode()[:-1] + b"\xff"))
    assert any("must be UTF-8" in fault for fault in verify(folder).faults)
    with pytest.raises(ConfigError, match="tokenizer"):
        views = [{"stored": "image"}, {"stored": "text", "tokenizer": str(folder / "no.json")}]
        opened(folder, views)
