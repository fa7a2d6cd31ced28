"""Tars without an index that are refused, or skipped."""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from braceexpand import braceexpand

from heron.api.job import pretrain
from heron.base.errors import HeronError, ShardError
from heron.data.tars import expand
from heron.experiment.config import parse_config
from heron.experiment.open_data import open_data
from tests.data.endless import ROWS, config, numbers, payload, steps
from tests.experiments import merge
from tests.shards import others

MEMBER = 512 * 4  # bytes of a small file, its header and a pax header with its time
FAULTS: dict[
    str, tuple[Callable[[bytes], bytes], str]
] = {  # what becomes of a-01.tar, what is said
    "cut in a file": (
        lambda data: data[: MEMBER - 512],
        r"is not a whole tar \(unexpected end of data\)",
    ),
    "cut in a sample": (
        lambda data: data[: 5 * MEMBER],
        r"is cut short: it has no end mark \(byte 10240\)",
    ),
    "cut in its end": (
        lambda data: data[: 2 * ROWS * MEMBER + 512],
        r"is cut short: it has no end mark \(byte 40960\)",
    ),
    "a bad header": (
        lambda data: data[: 4 * MEMBER] + b"x" * 512 + data[4 * MEMBER + 512 :],
        r"has a bad header, or continues after its end mark \(byte 8192\)",
    ),
    "compressed": (lambda data: b"\x1f\x8b" + data, "is compressed by gzip \\(gunzip\\)"),
    "empty": (lambda data: b"", r"is not a whole tar \(empty file\)"),
    "no sample": (lambda data: bytes(10240), "has no samples"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_tar_is_named_and_stops_or_is_counted(tars: Path, name: str) -> None:
    damage, message = FAULTS[name]
    path = tars / "a-01.tar"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ShardError, match=f"a-01.tar:? {message}"):
        steps(config(tars), 5)
    found = steps(config(tars, on_error="skip", max_bad_fraction=0.3), 6)
    lost = {key: fault for batch in found for key, fault in batch.lost.items()}
    assert len(lost) == 1 and all(key < 0 and "a-01.tar" in fault for key, fault in lost.items())
    with pytest.raises(
        ShardError, match="read 1 of 4 tars, which is more than data\\.max_bad_fraction"
    ):
        steps(config(tars, on_error="skip", max_bad_fraction=0.2), 6)


BAD: dict[str, tuple[dict[str, Any], str]] = {  # a sample's members, and what is said of it
    "a missing member": ({"cls": "1"}, r"lacks 'npy'; it has \['cls'\]"),
    "no label": ({"npy": None, "txt": "a"}, r"has no label 'cls'; it has \['npy', 'txt'\]"),
    "a class beyond": ({"npy": None, "cls": "3"}, "is of class 3, which is not one of the 3"),
    "a word": ({"npy": None, "cls": "cat"}, "must be a class number"),
    "another width": ({"npy": [1.0], "cls": "1"}, "member 'npy' must be float32 \\(6,\\)"),
    "no number": ({"npy": [np.nan] * 6, "cls": "1"}, "has NaN or infinite values"),
    "a pickle": (
        {"npy": np.array([{}] * 6, object), "cls": "1"},
        "an array of Python objects is a pickle, never decoded",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_sample_is_named_and_gives_its_place_to_the_next(tars: Path, name: str) -> None:
    members, message = BAD[name]
    good = {"npy": None, "cls": "0"}
    files = [(f"bad.{suffix}", payload(value, 7)) for suffix, value in members.items()]
    files += [(f"good.{suffix}", payload(value, 99)) for suffix, value in good.items()]
    others.write_tar(tars / "a-04.tar", files)
    more = {"labelled": f"{tars}/a-{{00..04}}.tar", "shuffle": 0}
    with pytest.raises(ShardError, match=f"a-04.tar sample bad: .*{message}"):
        steps(config(tars, webdataset=more), 5)
    given = config(tars, webdataset=more, on_error="skip", max_bad_fraction=0.1)
    found = steps(given, 12)
    lost = {key: fault for batch in found for key, fault in batch.lost.items()}
    assert len(lost) == 1  # met twice, and one
    assert 99 in numbers(found) and all(np.isfinite(numbers(found)))
    with pytest.raises(
        ShardError, match="read 1 samples, which is more than data\\.max_bad_fraction"
    ):
        steps(config(tars, webdataset=more, on_error="skip", max_bad_fraction=0.01), 12)


def test_skipped_samples_are_told_and_counted_by_the_run(
    tars: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tars / "a-01.tar").unlink()
    result = pretrain(config(tars, on_error="skip", max_bad_fraction=0.3))
    assert result["skipped_rows"] == 1
    said = capsys.readouterr().out
    assert f"skipped: {tars}/a-01.tar: No such file or directory" in said
    assert "labelled: 8 samples a batch of 4 tars without an index, by passes over each" in said
    assert "an endless stream: its batches depend on the numbers of processes and of work" in said
    assert "no protocol applies, and samples have no numbers; nothing is scored" in said


def test_where_no_sample_can_be_read_a_run_ends(tars: Path) -> None:
    nothing = {"labelled": f"{tars}/b-{{00..03}}.tar", "samples_per_epoch": 10**9}
    given = config(tars, webdataset=nothing, on_error="skip", max_bad_fraction=1.0)
    with pytest.raises(ShardError, match="allows, or 1,000 in a row; the last error"):
        steps(given, 1)
    gone = {"labelled": f"{tars}/gone-{{00..03}}.tar"}
    with pytest.raises(ShardError, match="a reading process found no sample in its tars"):
        steps(config(tars, webdataset=gone, on_error="skip", max_bad_fraction=1.0), 1)


def test_a_command_that_fails_is_named(tars: Path) -> None:
    failing = {"labelled": f"pipe:cat {tars}/a-00.tar; exit 3", "resampled": True}
    with pytest.raises(
        ShardError, match="^pipe:cat .*: the command ended with status 3 instead of 0"
    ):
        steps(config(tars, webdataset=failing), 9)
    failing["labelled"] = "pipe:no-such-command-here 2>/dev/null"
    with pytest.raises(ShardError, match=r"\(empty file\); the command ended with status 127"):
        steps(config(tars, webdataset=failing), 1)


def test_a_sparse_file_is_refused(tars: Path) -> None:
    """A kilobyte of tar would be ten gigabytes of zeros in memory."""
    size = {"GNU.sparse.realsize": "9999999999", "GNU.sparse.name": "x.npy"}
    info, _ = others.info("x.npy", bytes(512))
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"} | size
    data = b"0\n".ljust(512, b"\0") + bytes(1024)
    (tars / "a-00.tar").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + data)
    with pytest.raises(ShardError, match="'x\\.npy' is a sparse file, not a plain one"):
        steps(config(tars), 5)


def test_links_and_long_tars_are_refused(tars: Path) -> None:
    others.write_tar(tars / "a-00.tar", [others.info("x.npy", type=tarfile.SYMTYPE, linkname="y")])
    with pytest.raises(ShardError, match=r"a-00.tar: 'x.npy' is a symbolic link"):
        steps(config(tars), 5)
    with pytest.raises(ShardError, match="has more than 5,000 bytes"):
        steps(config(tars, webdataset={"labelled": f"{tars}/a-01.tar", "tar_bytes": 5000}), 5)


REFUSED = [
    ({"negatives": {"mine": 2}}, "negatives.mine is 2, but data.webdataset streams samples with"),
    ({"objective": {"pico": {}}}, "objective.pico remembers rows, but .* no row comes back under"),
    ({"evaluate": {"baselines": True}}, "evaluate.baselines is true, but"),
    ({"data": {"protocol": {"complementary": 1}}}, "chosen by row number; remove it"),
    ({"data": {"roles": "x"}}, "data.roles is x, but .* samples have no numbers"),
    ({"data": {"protocol": {"hide_labels": 0.5}}}, "hide_labels is 0.5, but .* by row number"),
    ({"data": {"protocol": {"partial_rows": "drop"}}}, "partial_rows is drop, but .* as unreadabl"),
    ({"data": {"canonical_streams": 2}}, "canonical_streams is 2, but .* nothing plans the order"),
    ({"data": {"standardise": True}}, "there are no statistics but those of data.path"),
    ({"data": {"batch": {"labelled": "all"}}}, "'all', but .* the number of samples is"),
    ({"data": {"batch": {"unlabelled": 4}}}, "unlabelled is 4, and .*unlabelled has no tars"),
    ({"data": {"batch": {"labelled": 41}}}, "data\\.batch\\.labelled must be 2 to 40"),
    ({"data": {"path": "x"}}, "webdataset sets image, vector, label or classes, but path is set"),
    ({"data": {"webdataset": None}}, "path is missing; set it to a folder or URL of shards:"),
    (
        {"data": {"webdataset": {"vector": None}}},
        "webdataset has neither image nor vector; name the",
    ),
    (
        {"data": {"webdataset": {"classes": None}}},
        "has label cls and 0 classes; set both or neither,",
    ),
    ({"data": {"webdataset": {"label": "pyd"}}}, "label: no label can be read from 'pyd'"),
    ({"data": {"webdataset": {"vector": {"pth": 3}}}}, "no such view can be read from 'pth'"),
    ({"data": {"webdataset": {"labelled": "a-{0..99999999}.tar"}}}, "more than 1,048,576 tars"),
    ({"data": {"webdataset": {"labelled": "https://h/a.tar?X-Amz-Signature=1"}}}, "credentials in"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_needs_an_index_is_refused_by_name(
    tars: Path, changes: dict[str, Any], message: str
) -> None:
    tree = config(tars).model_dump(mode="json", exclude_defaults=True)
    if "objective" in changes:
        tree["objective"] = None
    with pytest.raises(HeronError, match=message):
        open_data(parse_config(merge(tree, changes)))


@pytest.mark.parametrize(
    "many",
    [
        "{0..999999}{a,b}.tar",
        "{a,b-{0..9999}-{0..9999}}.tar",
        "{{a..z}{a..z}{a..z}{a..z}{a..z},0}",
        "{0..9}" * 10_000,
        "{" * 10_000 + "0,1" + "}{0..9}" * 10_000,
    ],
)
def test_braces_may_not_stand_for_endlessly_many_tars(many: str) -> None:
    with pytest.raises(ValueError, match="more than 1,048,576 tars; the limit is 1,048,576"):
        expand([many])


def test_braces_may_not_be_nested_without_end() -> None:
    with pytest.raises(ValueError, match="the braces are nested too deeply; use fewer levels"):
        expand(["{" * 5000 + "}" * 5000])


@pytest.mark.parametrize(
    "text",
    [
        "a.tar",
        "a-{000..012}-{a,b}.tar",
        "{a-{0..99},b-{0..99},c-{0..99}}/{0..9..3}.tar",
        "{99999999..0..1000000}",
        "{Y..c}{c..Y..2}{b..b}",
        "{a}{}{x,}{,,}{-3..3}{3..-3..-2}{1..3..0}",
        r"a\{b,{c,\,d}\}{0..2}",
        "a,b{c{d,e},{f{0..2},g}}",
    ],
)
def test_as_many_are_counted_as_braces_stand_for(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(braceexpand(text))
    monkeypatch.setattr("heron.data.tars.MAX_TARS", len(found))
    assert expand([text]) == found
    monkeypatch.setattr("heron.data.tars.MAX_TARS", len(found) - 1)
    with pytest.raises(ValueError, match="more than"):
        expand([text])
