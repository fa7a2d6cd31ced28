"""Labels of tars of others: numbers, names, fields of JSON, arrays; and what is none."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base.errors import ShardError, SourceError
from heron.shards.annotation import Annotation
from heron.shards.manifest import load_manifest
from heron.shards.show import show
from heron.shards.verify import verify
from heron.sources.layout import Layout
from tests.shards.others import cats, jpeg, labels, npy, run, write_tar, write_wds

ONES, NAMES = [[1, 0, 1], [0, 0, 0], [0, 1, 0]], ["a", "b", "c"]


@pytest.mark.parametrize(
    ("label", "payloads", "kind", "names", "rows"),
    [
        ("cls", [b"2", b"0\n", b" 1"], "multi_class", ["0", "1", "2"], [2, 0, 1]),
        ("kind.txt", [b"cat\n", "été".encode(), b"cat"], "multi_class", ["cat", "été"], [0, 1, 0]),
        ("json:k", [b'{"k": 1}', b'{"k": 0}', b'{"k": 1}'], "multi_class", ["0", "1"], [1, 0, 1]),
        ("json:k", [b'{"k": "b"}', b'{"k": "a"}', b'{"k":"b"}'], "multi_class", "ab", [1, 0, 1]),
        ("JSON:k", [json.dumps({"k": row}).encode() for row in ONES], "multi_label", "012", ONES),
        (
            "json:k",
            [b'{"k": ["c", "a"]}', b'{"k": []}', b'{"k": ["b"]}'],
            "multi_label",
            NAMES,
            ONES,
        ),
        ("labels.npy", [npy(row) for row in ONES], "multi_label", "012", ONES),
        ("npy", [npy([row], "f4") for row in ONES], "multi_label", "012", ONES),
        ("npy", [npy(row, "?") for row in ONES], "multi_label", "012", ONES),
        ("npy", [npy(1), npy([0], "u1"), npy([[2]], "i2")], "multi_class", "012", [1, 0, 2]),
        (None, [b""] * 3, "none", [], [-1, -1, -1]),
    ],
)
def test_labels(
    tmp_path: Path,
    label: str | None,
    payloads: list[bytes],
    kind: str,
    names: list[str],
    rows: list[Any],
) -> None:
    suffix = (label or "txt").partition(":")[0]
    files = [
        file
        for n, payload in enumerate(payloads)
        for file in ((f"{n}.jpg", jpeg(n)), (f"{n}.{suffix}", payload))
    ]
    write_tar(tmp_path / "a.tar", files)
    outcome = run(tmp_path, image=["jpg"], label=label)
    assert (outcome.manifest.labels.kind, outcome.manifest.labels.names) == (kind, list(names))
    assert labels(tmp_path) == rows
    assert verify(tmp_path).ok
    assert f"{kind} labels" in show(tmp_path)


@pytest.mark.parametrize(
    ("label", "payloads", "message"),
    [
        ("cls", [b"0", b"cat"], "a.tar sample 1 member 'cls' must be a class number, got b'cat'"),
        ("cls", [b"0", "²".encode()], "a class number"),
        ("cls", [b"0", b""], "a.tar sample 1 member 'cls' must be a class number, got b''; fix"),
        ("cls", [b"0", b"-2"], "a.tar sample 1 member 'cls' must be a class number"),
        ("cls", [b"0", b"-1"], "1 has no label: 'cls' is -1, not a class number; or use --minus-"),
        (
            "cls",
            [b"0", None],
            "sample 1 has no label: 'cls' is missing; it has ['jpg']; treat it as unlabelled with",
        ),
        (
            "cls",
            [b"0", b"100000"],
            "label_names: no names, but the label of sample 1 is one of 100,",
        ),
        ("txt", [b"a", b" "], "member 'txt' is empty, but must be a class name"),
        ("txt", [b"a", b"\xff"], "member 'txt' must be UTF-8, got b'\\xff'"),
        (
            "txt",
            [b"a", b"ca\xef\xbb\xbft"],
            "label: sample 1 has the name 'ca\\ufefft', which has control characters or byte "
            "order marks",
        ),
        (
            "json:k",
            [b'{"k": "a"}', b'{"k": "b\\ud800"}'],
            r"label: sample 1 has the name 'b\ud800'",
        ),
        ("json:k", [b"{", b"{}"], "sample 0 member 'json' must be JSON, got b'{'"),
        ("json:k", [b"[1]", b"{}"], "member 'json' must be fields, got [1]"),
        (
            "json:k",
            [b'{"j": 1}', b"{}"],
            "has no label: 'json' has no field 'k', only j; treat it as",
        ),
        (
            "json:k",
            [b'{"k": 0.5}', b"{}"],
            "has 'k' = 0.5, which must be a class number, a class name",
        ),
        ("json:k", [b'{"k": [2, 3]}', b"{}"], "has 'k' = [2, 3], which must be a class number"),
        (
            "json:k",
            [b'{"k": 1}', b'{"k": "a"}'],
            "label: sample 0 has a class number, but sample 1 a class name; all labels must be of "
            "one kind",
        ),
        ("json:k", [b'{"k": [1]}', b'{"k": [1, 0]}'], "label: sample 0 has 1 values of 0 and 1"),
        ("json:k", [b'{"k": []}', b'{"k": []}'], "label: every list is empty; remove --label"),
        ("npy", [npy([0.5, 1]), b""], "must be a class number, or a vector of 0 and 1"),
        ("npy", [npy([None, 1]), b""], "an array of Python objects is a pickle, never decoded"),
        ("npy", [b"hello", b""], "a.tar sample 0 member 'npy' is not an array of numbers (npy"),
        ("npy", [npy([255, 255], "u1"), b""], "has no label: 'npy' is 255 throughout; treat it as"),
        ("pkl", [b"", b""], "label: no label can be read from 'pkl'; use cls, cls2, class"),
        ("json", [b"", b""], "label: 'json' must have a field with json, and only with json"),
        ("cls:k", [b"", b""], "label: 'cls:k' must have a field with json"),
    ],
)
def test_labels_that_are_none(
    tmp_path: Path, label: str, payloads: list[bytes | None], message: str
) -> None:
    suffix = label.partition(":")[0]
    files = [(f"{n}.jpg", jpeg(n)) for n in range(2)]
    files += [(f"{n}.{suffix}", p) for n, p in enumerate(payloads) if p is not None]
    write_tar(tmp_path / "a.tar", sorted(files))
    with pytest.raises((ShardError, SourceError)) as raised:
        run(tmp_path, image=["jpg"], label=label)
    assert message in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar"}


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    names, mark = tmp_path / "names.txt", b"\xef\xbb\xbf"
    files = [(f"{n}.txt", mark * n + b"cat") for n in range(2)]
    write_tar(tmp_path / "a.tar", sorted(files + [(f"{n}.jpg", jpeg(n)) for n in range(2)]))
    options: dict[str, Any] = {"image": ["jpg"], "label": "txt", "label_names": names}
    for data, message in [
        (
            mark + b"cat\ndog\xe2\x80\xa8cow\n",
            r"line 2 of .* is 'dog\\u2028cow'; every line must have a",
        ),
        (
            b"cat\n" + mark + b"dog\n",
            r"line 2 of .* is '\\ufeffdog'; every line must have a unique name",
        ),
    ]:
        names.write_bytes(data)
        with pytest.raises(SourceError, match=message):
            run(tmp_path, **options)
    names.write_bytes(mark + b"cat\r\ndog")
    assert run(tmp_path, **options).manifest.labels.names == ["cat", "dog"]
    assert labels(tmp_path) == [0, 0]


def test_unlabelled_samples_and_given_names(tmp_path: Path) -> None:
    payloads = [b'{"k": "dog"}', b'{"k": null}', b"{}", b'{"k": "cat"}']
    files = [(f"{n}.json", p) for n, p in enumerate(payloads)] + [
        (f"{n}.jpg", jpeg(n)) for n in range(5)
    ]
    write_tar(tmp_path / "a.tar", sorted(files))
    options: dict[str, Any] = {"image": ["jpg"], "label": "json:k", "missing_label": "unlabelled"}
    names = tmp_path / "names.txt"
    for text, message in [
        (
            "dog\n\ncat\n",
            "label_names: line 2 of .*names.txt is ''; every line must have a unique name",
        ),
        ("dog\ncat\ndog\n", "line 3 of .*names.txt is 'dog'"),
        (
            "dog\nbird\n",
            "label_names: no line for 'cat' of sample 3; add every name that labels use",
        ),
    ]:
        names.write_text(text)
        with pytest.raises(SourceError, match=message):
            run(tmp_path, **options, label_names=names)
    names.write_text("dog\nbird\ncat\n")
    assert run(tmp_path, **options, label_names=names).manifest.labels.names[1] == "bird"
    assert labels(tmp_path) == [0, -1, -1, 2, -1]
    assert verify(tmp_path).ok and "33.3" not in show(tmp_path)
    with pytest.raises(SourceError, match="label: no sample has 'json:kind'; use another, or none"):
        run(tmp_path, **(options | {"label": "json:kind"}), overwrite=True)
    assert load_manifest(tmp_path).labels.names[1] == "bird"  # what was there stays


def test_numbers_with_names(tmp_path: Path) -> None:
    write_wds(tmp_path / "a.tar", cats(0, 3))
    names = tmp_path / "names.txt"
    names.write_text("tabby\ntiger\n")
    with pytest.raises(SourceError, match="label_names: 2 names, but the label of sample 000002 i"):
        run(tmp_path, image=["jpg"], label="cls", label_names=names)
    names.write_text("tabby\ntiger\nsiamese\nmanx\n")
    found = run(tmp_path, image=["jpg"], label="cls", label_names=names).manifest
    assert found.labels.names == ["tabby", "tiger", "siamese", "manx"]
    assert found.built_from.files[0].name == "names.txt"


@pytest.mark.parametrize(
    ("option", "payload", "expected"),
    [
        ("cls", b"-1", ("class name", ["-1"])),
        ("json:y", b'{"y": 1}', ("class name", ["1"])),
        ("json:y", b'{"y": [-1, 1, -1]}', ("vector of 0 and 1", [0, 1, 0])),
        ("npy", npy(np.array([1.0, -1.0])), ("vector of 0 and 1", [1, 0])),
        ("npy", npy(np.array([-1, -1])), ("vector of 0 and 1", [0, 0])),
    ],
)
def test_labels_of_minus_one_and_one(
    option: str, payload: bytes, expected: tuple[str, list[object]]
) -> None:
    assert tuple(Annotation(option, "no").read(payload)) == expected
    with pytest.raises(ValueError, match="must be -1 or 1, because of --minus-one no, got"):
        Annotation("cls", "no").read(b"0")


def test_names_of_many_classes_are_read_at_once(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(30_000)]
    (tmp_path / "names.txt").write_text("\n".join(names))
    began = time.process_time()
    assert Layout(label_names=tmp_path / "names.txt").names == names
    assert time.process_time() - began < 2  # comparing each with all others takes longer
    (tmp_path / "names.txt").write_text("a\nb\na")
    with pytest.raises(
        SourceError, match="line 3 of .* is 'a'; every line must have a unique name without"
    ):
        _ = Layout(label_names=tmp_path / "names.txt").names
