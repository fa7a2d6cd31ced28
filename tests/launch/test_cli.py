"""The command line: statuses, messages, and help of every verb."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
from PIL import Image
from pydantic import BaseModel

from heron.cli.arguments import ONE_EACH, Group, Override, Verb, parse
from heron.cli.main import VERBS, main


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_build_verify_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, sheet = tmp_path / "faces", tmp_path / "sheet.png"
    build = ("shards", "build", "faces", "--out", out, "--train", 12, "--test", 4, "--size", 32)
    assert run(*build) == 0
    assert "train 12 rows in 1 shard, test 4 rows in 1 shard" in capsys.readouterr().out
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
        (("shards", "verify", tmp_path), "no such file; pass a"),
        (("shards", "show", tmp_path / "none"), "no such file; pass a"),
        (("shards", "show", tmp_path / "frames", "--sheet", "x.png"), "no view of images"),
        ((*show, tmp_path / "x.txt"), "x.txt: a contact sheet must be one of .png, .jpg"),
        ((*show, tmp_path / "x.png", "--count", 0), "of 0 pictures of split 'train' would be emp"),
        ((*faces, file), "file is a file, not a folder; choose another"),
        ((*faces, file / "x"), "file is a file, not a folder; choose another --out"),
        ((*frames, "--train", 400), "another build: its train is 300, not 400"),
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
    command = [sys.executable, "-m", "heron", "shards", "show", str(tmp_path / "frames")]
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (found.returncode, found.stderr) == (141, b"")


def test_a_pipe_that_breaks_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(study: Path) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("heron.cli.main.VERBS", Group("", {"report": Verb(fails)}))
    assert run("report", "study") == 1
    assert capsys.readouterr().err == "error: [Errno 32] Broken pipe\n"


def verbs_of(group: Group, *path: str) -> Iterator[tuple[list[str], Verb | Group]]:
    """Every verb and every group, with the words that call it."""
    yield [*path], group
    for name, verb in group.verbs.items():
        if isinstance(verb, Group):
            yield from verbs_of(verb, *path, name)
        else:
            yield [*path, name], verb


PAGES = list(verbs_of(VERBS))


@pytest.mark.parametrize(("words", "verb"), PAGES, ids=[" ".join(words) for words, _ in PAGES])
def test_help_says_all(
    words: list[str],
    verb: Verb | Group,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every verb, or every argument and option with its meaning and default; and examples."""
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit) as status:
        main([*words, "--help"])
    assert status.value.code == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: {' '.join(['heron', *words])} ")
    assert f"\nexamples:\n  {' '.join(['heron', *words])} " in page
    if isinstance(verb, Group):
        assert re.findall(r"^  (\w+)  +\w", page, re.MULTILINE)[: len(verb.verbs)] == [*verb.verbs]
        return
    page = " ".join(page.split("examples:")[0].split())
    parameters = inspect.signature(verb.function).parameters.values()
    for parameter in parameters:
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert parameter.annotation.__metadata__[-1].replace("%%", "%") in page
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert f" --{parameter.name.replace('_', '-')}" in page
            shown = parameter.default not in (parameter.empty, None, "", ())
            if shown and not isinstance(parameter.default, bool):
                assert (
                    f"{parameter.annotation.__metadata__[-1]} (default: {parameter.default})"
                    in page
                )
    for name, field in (verb.model.model_fields if verb.model else {}).items():
        assert f" --{name.replace('_', '-')} " in page and field.description
        assert " ".join(field.description.split()) in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: COMMAND (see `heron --help`)"),
        ("--verison", "unknown option '--verison'; the command comes first (see `heron --help`)"),
        ("embd", "unknown command 'embd'; did you mean 'embed'? (see `heron --help`)"),
        (
            "shards build nothing",
            "unknown source 'nothing'; choose one of mulan, arrays, mat, parquet, table",
        ),
        ("embed runs/faces", "the following arguments are required: --out (see `heron embed --h"),
        ("embed run --out x --colour=red", "unrecognized arguments: --colour=red (see"),
        (
            "embed run --out x --rloe test",
            "unrecognized arguments: --rloe test; did you mean --role?",
        ),
        ("index emb --out x =stray", "unrecognized arguments: =stray (see"),
        ("embed run --out x stray", "argument OVERRIDES: must be key=value, got 'stray' (see"),
        (
            "embed run --out x --role tests",
            "argument --role: must be 'labelled', 'unlabelled', 'test' or",
        ),
        (
            "embed run --out x --layers hidden head",
            "argument --layers: must be 'hidden', 'projection' or 'weight'",
        ),
        (
            "shards build frames --out x --train many",
            "argument --train: must be a valid integer, got 'many'",
        ),
        (
            "shards build frames --out x --classes 41",
            "argument --classes: must be less than or equal to 40, got '41'",
        ),
        (
            "shards build arrays --out x --npz no.npz",
            "argument --npz: path does not point to a file (got 'no.npz')",
        ),
        (
            "shards index . --prefix-keys perhaps",
            "argument --prefix-keys: must be a valid boolean, got 'perhaps'",
        ),
        ("index folder --out x b.c=2", "unrecognized arguments: b.c=2 (see `heron index --help`)"),
        ("index folder --out x --k ten", "argument --k: must be a valid integer, got 'ten'"),
        ("index folder --out x --recall", "argument --recall: expected one argument (see"),
        (
            "compare --config scene --folds 0",
            "argument --folds: must be greater than",
        ),
        ("pretrain", "the following arguments are required: CONFIG (see `heron pretrain --help`)"),
        ("serve", "the following arguments are required: INDEX (see `heron serve --help`)"),
        ("query --file a.jpg", "the following arguments are required: INDEX (see `heron query"),
        (
            "query folder",
            "pass exactly one of --key, --file, --text and --vector (see `heron query --help`)",
        ),
        ("reproduce sceen", "argument TABLE: unknown table 'sceen'; did you mean 'scene'? (see"),
    ],
)
def test_a_wrong_argument_is_a_line_and_status_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(words.split())
    except SystemExit as stopped:
        status = stopped.code
    out, error = capsys.readouterr()
    assert status == 2 and not out
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "\udcff",
        "config scene opt\udcffim.lr=1",
        "config scene data.path=data/\udcff",
        "index folder --out x --memory \udcff",
        "serve folder --host \udcff",
    ],
)
def test_bytes_that_are_not_utf8_are_named(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They ended in a traceback of the socket's, or in "unable to parse raw data"."""
    assert main(words.split()) == 2
    out, error = capsys.readouterr()
    word = ascii(words.split()[-1])
    assert error.startswith(f"error: argument {word} is not UTF-8; pass text or") and not out
    assert error.count("\n") == 1


def test_arguments_are_those_of_the_function() -> None:
    """Of their types; overrides stand anywhere; what is not given is left to the function."""

    def verb(
        run: Annotated[Path, "run"],
        *overrides: Annotated[Override, "changes"],
        out: Annotated[Path, "folder"],
        names: Annotated[tuple[str, ...], "names"] = (),
        file: Annotated[tuple[str, ...], ONE_EACH, "a file, and another"] = (),
        share: Annotated[float | None, "share"] = None,
        dry_run: Annotated[bool, "run nothing"] = False,
        **more: str,
    ) -> None:
        called.append((run, overrides, out, names, file, share, dry_run, more))

    class Model(BaseModel):
        rows: int = 3
        merge: bool = False

    called: list[object] = []
    words = "--file f r a=1 --file=g --out x b.c=2 --dry-run d=3 --names m n --share .5"
    words += " --names o --merge true"
    parse("heron verb", Verb(verb, Model), words.split())()
    parse("heron verb", Verb(verb, Model), ["r", "--out", "x"])()
    assert called == [
        (
            Path("r"),
            ("a=1", "b.c=2", "d=3"),
            Path("x"),
            ["m", "n", "o"],
            ["f", "g"],
            0.5,
            True,
            {"merge": True},
        ),
        (Path("r"), (), Path("x"), (), (), None, False, {}),
    ]
