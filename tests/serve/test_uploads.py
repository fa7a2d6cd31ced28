"""Uploads to the page's server: what finds itself, and what is refused."""

import pickle
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from heron.serve.admission import BINARY
from tests.serve.served import Site, picture
from tests.shards.tiny import bomb


def npy(array: Any, **options: Any) -> bytes:
    np.save(out := BytesIO(), array, **options)
    return out.getvalue()


def test_an_upload_finds_itself(faces: Site, frames: Site) -> None:
    found = faces.upload(picture(faces, 11), query="?k=3")
    assert found["hits"][0]["number"] == 11 and found["hits"][0]["score"] > 0.9999
    assert found["query"]["number"] is None and found["query"]["labelled"] is False
    own = faces.found.samples.label_names(11)[0]
    found = faces.upload(picture(faces, 11, "JPEG"), query=f"?k=3&where=not+{own}")
    assert 11 not in [hit["number"] for hit in found["hits"]]
    assert all(own not in hit["labels"] for hit in found["hits"])
    row = frames.found._encoder.model.reader.read("view1", np.array([5]))[0]
    for array in (row, row[None]):
        assert frames.upload(npy(array), query="?k=2")["hits"][0]["number"] == 5


def hostile(site: Site) -> dict[str, tuple[bytes, str]]:
    """Files that are not what they seem, and what is said of each."""
    jpeg, png = picture(site, 0, "JPEG"), picture(site, 0)
    Image.new("P", (32, 32)).save(gif := BytesIO(), "GIF")
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    return {
        "bomb": (bomb(), "pixels"),
        "truncated jpeg": (jpeg[: len(jpeg) // 2], "damaged"),
        "truncated png": (png[: len(png) // 2], "damaged"),
        "only a head": (jpeg[:20], "the file is"),
        "text": (b"not a picture at all\n" * 20, "is not a JPEG, PNG"),
        "svg": (svg, "is not a JPEG, PNG"),
        "gif": (gif.getvalue(), "which has no cosine"),
        "polyglot": (jpeg[:2] + b"/*<html><script>alert(1)</script>*/" + jpeg[20:], "the file"),
        "png, then jpeg": (png[:8] + jpeg, "the file"),
        "array": (npy(np.zeros(5)), "npy file"),
        "empty": (b"", "empty"),
    }


@pytest.mark.parametrize(
    "name",
    ["bomb", "truncated jpeg", "truncated png", "only a head", "text", "svg", "gif", "polyglot"]
    + ["png, then jpeg", "array", "empty"],
)
def test_hostile_pictures_are_refused(faces: Site, name: str) -> None:
    data, words = hostile(faces)[name]
    assert words in faces.upload(data, 400)["error"]


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


ARRAYS = {
    "pickled objects": (npy(np.array([Harm()], object), allow_pickle=True), "the file"),
    "a pickle": (pickle.dumps(Harm()), "npy file"),
    "another dimension": (npy(np.zeros(3)), "must have 273 numbers in each row, got 3"),
    "three axes": (npy(np.zeros((2, 2, 2))), "must have numbers"),
    "texts": (npy(np.array(["text"])), "must have numbers"),
    "truncated": (npy(np.zeros(400))[:90], "the file"),
    "a long head": (b"\x93NUMPY\x01\x00\xff\xff{", "the file"),
    "a zip": (b"PK\x03\x04" + bytes(60), "npy file"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_hostile_arrays_are_refused(frames: Site, name: str) -> None:
    data, words = ARRAYS[name]
    assert words in frames.upload(data, 400)["error"]


def test_values_that_are_not_finite_are_refused(frames: Site) -> None:
    row = np.array(frames.found._encoder.model.reader.read("view1", np.array([5]))[0])
    for value in (np.nan, np.inf):
        row[2] = value
        assert "not finite" in frames.upload(npy(row), 400)["error"]


def test_forms_are_refused_whether_sound_or_not(faces: Site) -> None:
    for kind in ("multipart/form-data; boundary=b", "multipart/form-data", "text/plain"):
        for body in (
            b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n--b--\r\n',
            b"-",
        ):
            words = faces.error("/api/upload", 415, method="POST", body=body, Content_Type=kind)
            assert f"must be '{BINARY}'" in words
    assert "one file, got 'none'" in faces.error("/api/upload", 415, method="POST", body=b"x")
