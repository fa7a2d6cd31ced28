"""Every option that names what is written makes the folders that are not there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from heron.cli.main import main
from tests.remedies.test_remedies import place  # noqa: F401  # a run, its embeddings and its index

FACES = ("--train", "4", "--test", "0", "--size", "32", "--quiet")
WRITTEN = {
    "predict": ("predict RUN --role test --out", "preds.csv", ()),
    "predict, parquet": ("predict RUN --role test --out", "preds.parquet", ()),
    "export": ("export RUN --out", "model.pt2", ()),
    "save": ("save RUN --out", "model", ()),
    "embed": ("embed RUN --split test --out", "embeddings", ()),
    "index": ("index EMBEDDINGS --out", "index", ()),
    "query": ("query INDEX --key 000001 --sheet", "near.png", ()),
    "show": ("shards show SHARDS --sheet", "faces.jpg", ()),
    "negatives": ("negatives EMBEDDINGS --out", "report", ()),
    "serve": ("serve INDEX --export", "site", ()),
    "init": ("init SHARDS --out", "mine.yaml", ()),
    "launchers": ("launchers", "launch", ()),
    "build": ("shards build faces --out", "faces", FACES),
    "protocol": ("shards protocol RUN/config.yaml", "roles", ()),
}


def words_of(place: Path, name: str, file: Path) -> Sequence[str]:  # noqa: F811
    there = {"RUN": "run", "EMBEDDINGS": "embeddings", "INDEX": "index", "SHARDS": "faces"}
    command, _, more = WRITTEN[name]
    words = [str(place / there[w]) if w in there else w for w in command.split()]
    words = [word.replace("RUN/", f"{place / 'run'}/") for word in words]
    return [*words, str(file), *more]


@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_made(name: str, place: Path, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "new" / "deep" / WRITTEN[name][1]
    assert main([*words_of(place, name, file)]) == 0
    assert file.exists()


@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - {"launchers", "protocol", "embed"}))
def test_a_file_in_its_place_is_named_in_one_line(
    name: str,
    place: Path,  # noqa: F811
    tmp_path: Path,
    capsys: Any,
) -> None:
    (tmp_path / "notes").write_text("the user's")
    assert main([*words_of(place, name, tmp_path / "notes" / "deep" / WRITTEN[name][1])]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and "notes is a file, not a folder; choose another " in error
    assert (tmp_path / "notes").read_text() == "the user's"
