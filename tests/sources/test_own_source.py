"""Sources of others, by dotted path: they build as ours do, and what is wrong is said."""

import sys
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from heron.base.errors import ShardError, SourceError
from heron.cli.main import main
from heron.data.dataset import build_data
from heron.data.options import Data
from heron.shards.build import build
from heron.shards.manifest import load_manifest
from heron.shards.verify import verify
from heron.sources import make_source

DATA = Path(__file__).parents[2] / "docs" / "data.md"


def documented() -> str:
    """The source that the documentation shows."""
    lines = DATA.read_text().splitlines()
    start = lines.index("    from typing import ClassVar")
    shown = list(takewhile(lambda line: not line or line.startswith("    "), lines[start:]))
    assert len(shown) <= 31, "30 lines, and the blank one that ends them"
    return textwrap.dedent("\n".join(shown))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package outside of the repository, forgotten afterwards."""
    package = tmp_path / "elsewhere" / "my_lab"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sources.py").write_text(documented())
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file may change within its second
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


def test_the_documented_source(lab: Path, tmp_path: Path) -> None:
    words = "shards build my_lab.sources.Blobs --rows 500 --quiet --shard-rows 256 --out"
    assert words.partition(" --quiet")[0] in DATA.read_text()
    for workers in ("1", "2"):
        assert main([*words.split(), str(tmp_path / workers), "--workers", workers]) == 0
    manifest = load_manifest(tmp_path / "1")
    assert manifest == load_manifest(tmp_path / "2") and verify(tmp_path / "2").ok
    assert manifest.rows("train") == 500 and manifest.built_from.source == "blobs"
    options = {"source": "my_lab.sources.Blobs", "rows": 500}
    given = {"path": str(tmp_path / "3"), "build": options, "views": [{"stored": "point"}]}
    build_data(Data.model_validate(given | {"batch": {"labelled": 8}}), progress=False)
    assert load_manifest(tmp_path / "3").built_from.options == manifest.built_from.options


def test_its_options_are_checked_as_ours_are(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["shards", "build", "my_lab.sources.Blobs", "--help"])
    assert "number of points (default: 1000)" in capsys.readouterr().out
    with pytest.raises(SourceError, match="Blobs has no option 'row'; did you mean 'rows'"):
        make_source("my_lab.sources.Blobs", {"row": 3})
    with pytest.raises(SourceError, match="Blobs: rows must be greater than 0, got 0"):
        make_source("my_lab.sources.Blobs", {"rows": 0})


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("my_lab.sorces.Blobs", "", "cannot import module 'my_lab.sorces' (ModuleNotFoundErr"),
        ("their_lab.Blobs", "", "); install its package, or put its folder on PYTHONPATH"),
        (
            "my_lab.sources.Blobs",
            "1 +",
            "cannot import module 'my_lab.sources' (SyntaxError",
        ),
        ("my_lab.sources.Blob", None, "has no 'Blob'; it must be a subclass of heron.s"),
        ("my_lab.sources.Blob", None, "did you mean 'Blobs'?"),
        ("my_lab.sources.Blobs", "", "has no 'Blobs'; it must be a subclass of heron.s"),
        ("my_lab.sources.View", None, "is the class View; it must be a subclass of heron.s"),
        ("my_lab.sources.Source", None, "is the class Source; it must be a subclass of heron.s"),
        ("my_lab.sources.Blobs", "Blobs = 3", "is 3; it must be a subclass of heron.s"),
        ("my_lab.sources.Blobs", "def read(", "Blobs must define read, which heron"),
        (
            "my_lab.sources.Blobs",
            "name: ",
            "has the name None, like a source of heron; define another",
        ),
        ("my_lab.sources.Blobs", '"blobs"', "has the name 'frames', like a source of heron"),
    ],
)
def test_what_is_no_source(
    lab: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: str,
    code: str | None,
    message: str,
) -> None:
    broken = {"def read(": "def reed(", "name: ": "nome: ", '"blobs"': '"frames"'}
    if code in broken:
        (lab / "sources.py").write_text(documented().replace(code, broken[code]))
    elif code is not None:
        (lab / "sources.py").write_text(code)
    with pytest.raises(SourceError) as fault:
        make_source(path, {})
    assert str(fault.value).startswith((path, path.split(".")[-1])) and message in str(fault.value)
    with pytest.raises(SystemExit):
        main(["shards", "build", path, "--out", str(tmp_path / "out")])
    assert str(fault.value) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["workers", "help", "source"])
def test_an_option_that_the_command_has(
    lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (lab / "sources.py").write_text(documented().replace("    rows: int", f"    {name}: int", 1))
    with pytest.raises(SystemExit) as status:
        main(["shards", "build", "my_lab.sources.Blobs", "--out", "out"])
    assert status.value.code == 2
    assert (
        f"Blobs: `heron shards build` already has an option named {name}" in capsys.readouterr().err
    )
    del sys.modules["my_lab.sources"]
    renamed = documented().replace("    rows: int", "    count: int").replace(".rows", ".count")
    (lab / "sources.py").write_text(renamed)
    words = ["shards", "build", "my_lab.sources.Blobs", "--count", "300"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["shards", "build", "face", "--out", "out"])
    assert "unknown source 'face'; did you mean 'faces'" in capsys.readouterr().err
    with pytest.raises(SourceError, match="unknown source 'face'; did you mean 'faces'"):
        make_source("face", {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("np.float32(noise", "np.float64(noise"), "view 'point' is float64 (256, 8), not fl"),
        (
            ("normal(size=8)", "normal(size=9)"),
            "9), not float32 (256, 8); this is a bug in the source",
        ),
        (('{"point": np', '{"dot": np'), "views must be point, got dot"),
        (("0 * labels", "np.nan * labels"), "row 0 has no view 'point'; every row needs it"),
        (("% 2", "% 3"), "labels must be 0 to 1, got 2 in row 2"),
        (("range(start, stop)]", "range(stop)][:3]"), "view 'point' is float32 (3, 8), not f"),
    ],
)
def test_rows_that_are_not_what_their_source_says(
    lab: Path, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    code = documented().replace("labels[:, None]", "0 * labels[:1, None]")
    assert change[0] in code
    (lab / "sources.py").write_text(code.replace(*change))
    source = make_source("my_lab.sources.Blobs", {})
    with pytest.raises(ShardError) as fault:
        build(source, tmp_path / "out", shard_rows=256, progress=False)
    assert str(fault.value).startswith("blobs, train-000000: ") and message in str(fault.value)
    assert not list((tmp_path / "out").glob("*.tar"))
