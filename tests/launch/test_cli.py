"""The command line: statuses, messages, and help of every verb."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from heron.launch.cli import VERBS, _parse, main
from heron.launch.report_verb import REPORT
from heron.shards.sources import SOURCES


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_build_verify_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, sheet = tmp_path / "faces", tmp_path / "sheet.png"
    build = ("shards", "build", "faces", "--out", out, "--train", 12, "--test", 4, "--size", 32)
    assert run(*build) == 0
    assert "train 12 rows in 1 shards, test 4 rows in 1 shards" in capsys.readouterr().out
    assert run(*build) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert run("shards", "verify", out) == 0
    assert "2 shards, 16 rows" in capsys.readouterr().out
    assert run("shards", "show", out, "--sheet", sheet, "--captions", "--count", 6) == 0
    shown = capsys.readouterr().out
    for text in ("image     32 × 32 × 3", "multi_label labels (40)", "Eyeglasses", "train: 12"):
        assert text in shown
    with Image.open(sheet) as image:
        assert image.width == 3 * 96
    data = bytearray((out / "train-000000.tar").read_bytes())
    data[600] ^= 255
    (out / "train-000000.tar").write_bytes(data)
    assert run("shards", "verify", out) == 1
    assert "train-000000.tar: altered" in capsys.readouterr().err


def test_expected_errors_are_a_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = ("shards", "build", "frames", "--out", tmp_path / "frames", "--quiet")
    assert run(*frames, "--train", 300, "--test", 20) == 0
    faces = (
        "shards",
        "build",
        "faces",
        "--quiet",
        "--train",
        1,
        "--test",
        0,
        "--size",
        32,
        "--out",
    )
    assert run(*faces, tmp_path / "faces") == 0
    show = ("shards", "show", tmp_path / "faces", "--sheet")
    (file := tmp_path / "file").write_text("")
    for words, message in [
        (("shards", "verify", tmp_path), "no such file; expected a manifest"),
        (("shards", "show", tmp_path / "none"), "no such file; expected a manifest"),
        (("shards", "show", tmp_path / "frames", "--sheet", "x.png"), "no view of images"),
        ((*show, tmp_path / "x.txt"), "x.txt: a contact sheet cannot be .txt; expected .png, .jpg"),
        ((*show, tmp_path / "x.png", "--count", 0), "of 0 pictures of split 'train' would be emp"),
        ((*show, tmp_path / "none" / "x.png"), "No such file or directory"),
        ((*faces, file), "file: a file lies there; expected a folder, new or old; choose another"),
        ((*faces, file / "x"), "x: a file lies there; expected a folder"),
        ((*frames, "--train", 400), "another build: its train is 300, this one's 400"),
        ((*frames, "--train", "many"), "frames: train: Input should be a valid integer"),
        ((*frames, "--classes", "41"), "frames: classes: Input should be less than or equal"),
        (
            ("shards", "build", "arrays", "--out", tmp_path, "--npz", tmp_path / "no.npz"),
            "arrays: npz: Path does not point to a file",
        ),
    ]:
        capsys.readouterr()
        assert run(*words) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert run(*frames, "--train", 400, "--test", 20, "--seed", 2, "--overwrite") == 0


def test_a_reader_that_has_read_enough(tmp_path: Path) -> None:
    """`heron shards show | head` is no error; 141 is what a shell gives for SIGPIPE."""
    frames = ("shards", "build", "frames", "--out", tmp_path / "frames", "--quiet")
    assert run(*frames, "--train", 30, "--test", 2) == 0
    command = [sys.executable, "-m", "heron.launch.cli", "shards", "show", str(tmp_path / "frames")]
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (found.returncode, found.stderr) == (141, b"")


def test_a_pipe_that_breaks_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setitem(VERBS, "report", REPORT._replace(run=fails))
    assert run("report", "study") == 1
    assert capsys.readouterr().err == "error: [Errno 32] Broken pipe\n"


def test_help_of_every_verb_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [["shards"], ["shards", "build"], ["shards", "verify"], ["shards", "show"], []]
    for words in [*pages, *(["shards", "build", name] for name in SOURCES)]:
        with pytest.raises(SystemExit) as status:
            main([*words, "--help"])
        assert status.value.code == 0
        page = capsys.readouterr().out
        assert "usage: heron" in page
        assert len(words) < 2 or "example" in page
    with pytest.raises(SystemExit) as status:
        main(["shards", "build", "nothing"])
    assert status.value.code == 2


def test_overrides_stand_anywhere_and_nothing_else_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["embed", "runs/faces", "a=1", "--out", "x", "b.c=2", "--quiet", "d=3"]
    assert _parse(words).overrides == ["a=1", "b.c=2", "d=3"]
    for stray in ("--colour=red", "stray"):
        with pytest.raises(SystemExit):
            _parse([*words, stray])
        assert f"unrecognized arguments: {stray}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        _parse(["index", "embeddings", "--out", "x", "b.c=2"])


@pytest.mark.parametrize(
    "verb", ["embed", "index", "query", "negatives", "serve", "reproduce", "report"]
)
def test_help_of_a_verb_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main([verb, "--help"])
    assert status.value.code == 0
    assert f"examples:\n  heron {verb} " in capsys.readouterr().out
