"""Files as strangers have them: each goes through its source at the first try, or names the way."""

import csv
import gzip
import io
import json
import re
import shlex
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io
import scipy.sparse

from heron.cli.main import main
from heron.data.reader import Reader
from heron.shards.manifest import load_manifest
from tests.retrieval.test_one_decoder import drawn, saved

ROWS = 30
DRAW = np.random.default_rng(0)
X = np.round(DRAW.normal(size=(ROWS, 4)), 3)
KIND = [("red", "green", "blue")[n % 3] for n in range(ROWS)]
NUMBER = [n % 3 for n in range(ROWS)]
Case = Callable[[Path], list[str]]  # writes files to a folder; returns the words of `shards`


def lines(separator: str = ",", decimal: str = ".", label: bool = True) -> list[str]:
    found = []
    for row, kind in zip(X, KIND, strict=True):
        cells = [f"{value}".replace(".", decimal) for value in row] + [kind] * label
        found.append(separator.join(cells))
    return found


def table(text: str | bytes, name: str = "t.csv", *words: str) -> Case:
    def write(folder: Path) -> list[str]:
        data = text if isinstance(text, bytes) else text.encode()
        (folder / name).write_bytes(data)
        return ["build", "table", "--csv", str(folder / name), *words]

    return write


def joined(head: str, rows: list[str], end: str = "\n") -> str:
    return end.join([head, *rows]) + end


def quoted_newlines() -> str:
    writer = csv.writer(out := io.StringIO(), quoting=csv.QUOTE_ALL)
    writer.writerow(["a\n(mm)", "b", "c", "d", "kind"])
    for row, kind in zip(X, KIND, strict=True):
        writer.writerow([*row, kind])
    return out.getvalue()


def mat(**variables: object) -> Case:
    def write(folder: Path) -> list[str]:
        scipy.io.savemat(folder / "d.mat", variables)
        return ["build", "mat", "--mat", str(folder / "d.mat")]

    return write


def cell(values: list[object]) -> object:
    found = np.empty((len(values), 1), object)
    found[:, 0] = values
    return found


def npz(**arrays: object) -> Case:
    def write(folder: Path) -> list[str]:
        np.savez(folder / "d.npz", **arrays)  # type: ignore[arg-type]
        return ["build", "arrays", "--npz", str(folder / "d.npz")]

    return write


def parquet(columns: dict[str, object], name: str = "d.parquet") -> Case:
    def write(folder: Path) -> list[str]:
        pq.write_table(pa.table(columns), folder / name)
        return ["build", "parquet", "--data", str(folder / name)]

    return write


def picture(number: int, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    return saved(drawn(number, mode), kind)


def pictures(names: list[str], contents: list[bytes], zipped: bool = False) -> Case:
    def write(folder: Path) -> list[str]:
        if zipped:
            with zipfile.ZipFile(folder / "pets.zip", "w") as archive:
                for name, data in zip(names, contents, strict=True):
                    archive.writestr(name, data)
            return ["build", "folder", "--folder", str(folder / "pets.zip")]
        for name, data in zip(names, contents, strict=True):
            path = folder / "pets" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return ["build", "folder", "--folder", str(folder / "pets")]

    return write


def tars(members: Callable[[int], dict[str, bytes]]) -> Case:
    def write(folder: Path) -> list[str]:
        (folder / "tars").mkdir()
        with tarfile.open(folder / "tars" / "a b (1).tar", "w") as tar:
            for number in range(ROWS):
                for suffix, data in members(number).items():
                    member = tarfile.TarInfo(f"{number:04}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        return ["index", str(folder / "tars")]

    return write


def idx(zipped: bool) -> Case:
    def write(folder: Path) -> list[str]:
        for part in ("train", "t10k"):
            images = DRAW.integers(0, 256, (ROWS // 2, 8, 8), np.uint8)
            files = {
                f"{part}-images-idx3-ubyte": struct.pack(">iiii", 2051, *images.shape)
                + images.tobytes(),
                f"{part}-labels-idx1-ubyte": struct.pack(">ii", 2049, ROWS // 2)
                + bytes(NUMBER[: ROWS // 2]),
            }
            for name, data in files.items():
                if zipped:
                    (folder / f"{name}.gz").write_bytes(gzip.compress(data))
                else:
                    (folder / name).write_bytes(data)
        return ["build", "idx", "--folder", str(folder)]

    return write


def captions(in_csv: bool) -> Case:
    def write(folder: Path) -> list[str]:
        (birds := folder / "birds").mkdir()
        for number in range(ROWS):
            (birds / f"{number:02}.jpg").write_bytes(picture(number))
            if not in_csv:
                (birds / f"{number:02}.txt").write_text(f"a {KIND[number]} bird, {number}")
        if not in_csv:
            return ["build", "captions", "--folder", str(birds)]
        rows = [f'{number:02}.jpg,"a bird, {number}"' for number in range(ROWS)]
        (folder / "c.csv").write_text(joined("image,caption", rows))
        return ["build", "captions", "--folder", str(birds), "--csv", str(folder / "c.csv")]

    return write


def arff(binary: bool, sparse: bool) -> Case:
    def write(folder: Path) -> list[str]:
        head = ["@relation r"] + [f"@attribute x{n} numeric" for n in range(3)]
        head += ["@attribute flag {0,1}"] * binary
        head += ["@attribute L1 {0,1}", "@attribute L2 {0,1}", "@data"]
        rows = []
        for number in range(ROWS):
            cells = [*X[number, :3], *[number % 2] * binary, int(number % 3 == 0), int(number > 9)]
            dense = ",".join(map(str, cells))
            pairs = ",".join(f"{at} {cell}" for at, cell in enumerate(cells) if cell)
            rows.append(f"{{{pairs}}}" if sparse else dense)
        (folder / "r.arff").write_text("\n".join(head + rows) + "\n")
        names = '<label name="L1"/><label name="L2"/></labels>'
        names = f'<labels xmlns="http://mulan.sourceforge.net/labels">{names}'
        (folder / "r.xml").write_text(names)
        return ["build", "mulan", "--arff", str(folder / "r.arff"), "--xml", str(folder / "r.xml")]

    return write


def tu(folder: Path) -> list[str]:
    (graphs := folder / "G").mkdir()
    (graphs / "G_A.txt").write_text(
        "".join(f"{2 * n + 1}, {2 * n + 2}\n{2 * n + 2}, {2 * n + 1}\n" for n in range(ROWS))
    )
    (graphs / "G_graph_indicator.txt").write_text(
        "".join(f"{n // 2 + 1}\n" for n in range(2 * ROWS))
    )
    (graphs / "G_graph_labels.txt").write_text("".join(f"{n % 2 * 2 - 1}\n" for n in range(ROWS)))
    return ["build", "tu", "--folder", str(graphs)]


def several_tables(folder: Path) -> list[str]:
    for name, columns in (("audio", X[:, :2]), ("video", X[:, 2:])):
        rows = [",".join(map(str, row)) for row in columns]
        (folder / f"{name}.csv").write_text(joined("a,b", rows))
    (folder / "y.csv").write_text(joined("kind", KIND))
    files = [str(folder / f"{name}.csv") for name in ("audio", "video", "y")]
    return ["build", "table", "--csv", *files, "--label", "kind"]


HEAD, FOLDERS = "a,b,c,d,kind", [f"{KIND[n]}/{n:02}.jpg" for n in range(ROWS)]
JPEGS = [picture(n) for n in range(ROWS)]
MIXED = [picture(n, ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")[n % 6]) for n in range(ROWS)]
SUFFIX = ("jpg", "png", "webp", "gif", "tif", "bmp")
COLUMNS = {f"x{n}": X[:, n] for n in range(4)}
TEXTS = [f"the {KIND[n]} one, number {n}" for n in range(ROWS)]
# Each with its classes: names, a number of them, or none.
CASES: dict[str, tuple[Case, int]] = {
    "csv": (table(joined(HEAD, lines())), 3),
    "csv without a header": (table("\n".join(lines()) + "\n"), 3),
    "csv of R, with row names": (
        table(
            joined('"a","b","c","d","kind"', [f'"{n}",{line}' for n, line in enumerate(lines())])
        ),
        3,
    ),
    "csv of pandas, with an index": (
        table(joined(f",{HEAD}", [f"{n},{line}" for n, line in enumerate(lines())])),
        3,
    ),
    "csv of pandas, without names": (table(joined("0,1,2,3,4", lines())), 3),
    "csv with semicolons": (table(joined("a;b;c;d;kind", lines(";"))), 3),
    "csv with decimal commas": (table(joined("a;b;c;d;kind", lines(";", ","))), 3),
    "tsv": (table(joined(HEAD.replace(",", "\t"), lines("\t")), "t.tsv"), 3),
    "csv with spaces for commas": (table("\n".join(lines(" ")) + "\n", "t.data"), 3),
    "csv of Windows": (table(joined(HEAD, lines(), "\r\n")), 3),
    "csv of Excel, with a mark": (table(b"\xef\xbb\xbf" + joined(HEAD, lines()).encode()), 3),
    "csv of Excel, as Unicode text": (table(joined(HEAD, lines()).encode("utf-16")), 3),
    "csv in quotes, with newlines": (table(quoted_newlines()), 3),
    "csv without a last newline": (table(joined(HEAD, lines())[:-1]), 3),
    "csv with blank lines": (table(joined(HEAD, lines()) + "\n\n"), 3),
    "csv of class numbers": (
        table("\n".join(f"{line},{n}" for line, n in zip(lines(label=False), NUMBER, strict=True))),
        3,
    ),
    "several csv files": (several_tables, 3),
    "mat": (mat(X=X, Y=np.array(NUMBER)[:, None]), 3),
    "mat with y": (mat(fea=X, y=np.array(NUMBER)[None]), 3),
    "mat with gnd": (mat(X=X, gnd=np.array(NUMBER)[:, None] + 1), 3),
    "mat with a cell of views": (
        mat(X=cell([X[:, :2].T, X[:, 2:].T]), truth=np.array(NUMBER)[:, None]),
        3,
    ),
    "mat, sparse": (mat(X=scipy.sparse.csc_matrix(X), Y=np.array(NUMBER)[:, None]), 3),
    "mat with names in a cell": (
        mat(X=X, labels=np.array(NUMBER)[:, None] + 1, names=cell(["red", "green", "blue"])),
        3,
    ),
    "mat of 0 and 1": (mat(X=X, Y=np.eye(3)[NUMBER][:, :2]), 2),
    "npz": (npz(X=X, y=np.array(NUMBER)), 3),
    "npz of names": (npz(features=X, labels=np.array(KIND)), 3),
    "npz of pictures": (
        npz(images=DRAW.integers(0, 256, (ROWS, 8, 8, 3), np.uint8), labels=np.array(NUMBER)),
        3,
    ),
    "parquet of numbers": (parquet({**COLUMNS, "label": KIND}), 3),
    "parquet of vectors": (parquet({"embedding": X.tolist(), "label": NUMBER}), 3),
    "parquet of pictures": (parquet({"image": JPEGS, "label": NUMBER}), 3),
    "parquet of pictures of Hugging Face": (
        parquet({"image": [{"bytes": data, "path": None} for data in JPEGS], "label": KIND}),
        3,
    ),
    "parquet of pictures and captions": (parquet({"image": JPEGS, "caption": TEXTS}), 0),
    "folder": (pictures(FOLDERS, JPEGS), 3),
    "folder of mixed kinds": (
        pictures([f"{KIND[n]}/{n:02}.{SUFFIX[n % 6]}" for n in range(ROWS)], MIXED),
        3,
    ),
    "folder without classes": (pictures([f"{n:02}.jpg" for n in range(ROWS)], JPEGS), 0),
    "folder with splits": (
        pictures([f"{('train', 'test')[n % 2]}/{name}" for n, name in enumerate(FOLDERS)], JPEGS),
        3,
    ),
    "zip": (pictures([f"pets/{name}" for name in FOLDERS], JPEGS, zipped=True), 3),
    "captions beside pictures": (captions(in_csv=False), 0),
    "captions in a csv": (captions(in_csv=True), 0),
    "tars of jpg and cls": (
        tars(lambda n: {"jpg": JPEGS[n], "cls": str(NUMBER[n]).encode()}),
        3,
    ),
    "tars of jpg and txt": (tars(lambda n: {"jpg": JPEGS[n], "txt": TEXTS[n].encode()}), 0),
    "tars of png and json": (
        tars(lambda n: {"png": picture(n, "PNG"), "json": json.dumps({"label": KIND[n]}).encode()}),
        3,
    ),
    "idx": (idx(zipped=False), 10),
    "idx, gzipped": (idx(zipped=True), 10),
    "arff": (arff(binary=False, sparse=False), 2),
    "arff, sparse": (arff(binary=False, sparse=True), 2),
    "arff with a binary feature": (arff(binary=True, sparse=False), 2),
    "graphs": (tu, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_at_the_first_try(name: str, tmp_path: Path) -> None:
    case, classes = CASES[name]
    words = case(tmp_path)
    data = tmp_path / "tars" if words[0] == "index" else tmp_path / "data"
    out = [] if words[0] == "index" else ["--out", str(data)]
    assert main(["shards", *words, *out, "--quiet"]) == 0
    manifest = load_manifest(data)
    assert sum(manifest.rows(split) for split in manifest.splits) == ROWS
    assert len(manifest.labels.names) == classes, manifest.labels.names
    numeric = [view for view in manifest.views if view.kind == "vector"]
    stored = sum(view.shape[0] for view in numeric)
    assert stored in ((0, 4) if "arff" not in name else (3, 4)), manifest.views
    if "arff" in name:
        found = Reader(data).read("view1", np.arange(ROWS))[:, :3]
        np.testing.assert_array_equal(found, X[:, :3].astype(np.float32))
    elif stored == 4 and name not in ("csv of R, with row names",):
        reader = Reader(data)
        found = np.concatenate([reader.read(view.name, np.arange(ROWS)) for view in numeric], 1)
        np.testing.assert_allclose(found, X, rtol=1e-6)


def latin(folder: Path) -> list[str]:
    text = joined(HEAD, lines()).replace("blue", "blé")
    return table(text.encode("latin-1"))(folder)


def unclear_header(folder: Path) -> list[str]:
    rows = [f"{n % 5},{n % 7},{n % 2},{n % 11},{n % 3}" for n in range(ROWS)]
    return table(joined("0,1,2,3,4", rows))(folder)


def one_bad_picture(folder: Path) -> list[str]:
    return pictures(FOLDERS, [*JPEGS[:-1], b"<html>"])(folder)


def leaking_label(folder: Path) -> list[str]:
    columns = {"a": X.tolist(), "kind": NUMBER, "copy": [float(n) for n in NUMBER]}
    words = parquet(columns)(folder)
    return [*words, "--vector", "v=copy", "--label", "kind"]


def missing_cells(folder: Path) -> list[str]:
    rows = [line if n % 7 else f"?,{line.partition(',')[2]}" for n, line in enumerate(lines())]
    return table(joined(HEAD, rows))(folder)


# What is refused, the remedy that its message names, and the rows there are then.
REFUSED: dict[str, tuple[Case, str, int]] = {
    "latin-1": (latin, r"--encoding \S+", ROWS),
    "a first line of numbers": (unclear_header, "--header yes", ROWS),
    "a broken picture": (one_bad_picture, "--on-error skip", ROWS - 1),
    "a column that is the label": (leaking_label, r"--keep [\w:]+", ROWS),
    "cells that are missing": (missing_cells, "--missing mean", ROWS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_line_that_works(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, remedy, rows = REFUSED[name]
    words = ["shards", *case(tmp_path), "--out", str(tmp_path / "data"), "--quiet"]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert len(told.strip().splitlines()) == 1, told
    found = re.search(remedy, told)
    assert found is not None, told
    assert main([*words, *shlex.split(found.group().strip("`'.,;"))]) == 0
    manifest = load_manifest(tmp_path / "data")
    assert sum(manifest.rows(split) for split in manifest.splits) == rows
