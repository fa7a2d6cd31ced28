"""The source `table`: headers, classes, missing cells, and what it says of a bad file."""

from pathlib import Path

import numpy as np
import pytest

from heron.base.errors import SourceError
from heron.base.workers import Processes
from heron.shards.build import build
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.sources import make_source
from tests.shards.tiny import whole

UCI = Path(__file__).parents[3] / "shared" / "data" / "uci"
HEADER = "height,arm span,kind\n"
BARE = "1.5,2,10\n-1,0.25,9\n\n4, 0 ,10\n"


def table(folder: Path, text: str, **options: object) -> Source:
    path = folder / "tiny.csv"
    path.write_text(text, encoding="utf-8")
    return make_source("table", {"csv": path, **options})


@pytest.mark.parametrize("text", [BARE, HEADER + BARE, "\ufeff" + HEADER + BARE])
def test_rows_with_a_header_and_without(tmp_path: Path, text: str) -> None:
    source = table(tmp_path, text)
    rows = whole(source, "all")
    assert source.splits == {"all": 3} and source.dataset == "tiny"
    assert [(view.name, view.shape) for view in source.views] == [("features", (2,))]
    np.testing.assert_array_equal(rows.views["features"], [[1.5, 2], [-1, 0.25], [4, 0]])
    assert source.labels.names == ["9", "10"]  # by number, not by text
    assert rows.labels.tolist() == [1, 0, 1]


def test_classes_that_are_texts_are_sorted_as_texts(tmp_path: Path) -> None:
    source = table(tmp_path, "1,rose\n2,10\n3,9\n4,rose\n")
    assert source.labels.names == ["10", "9", "rose"]
    assert whole(source, "all").labels.tolist() == [2, 0, 1, 2]


@pytest.mark.parametrize("label", ["kind", "0", 0, "-3"])
def test_the_class_by_name_and_by_number(tmp_path: Path, label: object) -> None:
    source = table(tmp_path, "kind,a,b\nx,1,2\ny,3,4\n", label=label)
    assert source.labels.names == ["x", "y"]
    np.testing.assert_array_equal(whole(source, "all").views["features"], [[1, 2], [3, 4]])


def test_a_name_of_digits_is_a_name_where_there_is_a_header(tmp_path: Path) -> None:
    source = table(tmp_path, "0,1,2\n7,8,9\n", header="yes", label="1")
    assert source.labels.names == ["8"]


def test_header_by_option_and_by_its_last_cell(tmp_path: Path) -> None:
    assert table(tmp_path, "1,2\n3,4\n", header="yes").splits == {"all": 1}
    assert table(tmp_path, "1,2\n3,4\n", header="no").splits == {"all": 2}
    assert table(tmp_path, "1,2\n3,4\n", header=False).splits == {"all": 2}  # YAML's bare no
    assert table(tmp_path, "0,1,class\n3,4,1\n5,6,2\n").splits == {"all": 2}
    assert table(tmp_path, "0,1,rose\n3,4,lily\n").splits == {"all": 2}
    assert table(tmp_path, "?,,1\n3,4,1\n", missing="mean").splits == {"all": 2}


def test_missing_cells_become_the_mean_of_their_column(tmp_path: Path) -> None:
    source = table(tmp_path, "1,?,0\n2,5,0\n NaN,,1\n6,8,1\n", missing="mean")
    np.testing.assert_array_equal(
        whole(source, "all").views["features"], [[1, 6.5], [2, 5], [3, 6.5], [6, 8]]
    )


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("1,?,0\n1,2,0\n", {}, "line 1, column 1: found '?'; the cell is missing; correct the"),
        (HEADER + "1,,0\n1,2,0\n", {}, "line 2, column 'arm span': found ''; the cell is missing"),
        ("1,NA,0\n1,2,0\n", {}, "correct the cells, or use --missing mean"),
        ("1,?,0\n2,?,1\n", {}, "column 1: every cell is missing, so there is no mean"),
        ("1,?,0\n2,?,1\n", {"missing": "mean"}, "column 1: every cell is missing, so there is no"),
        (HEADER + "1,tall,0\n", {}, "line 2, column 'arm span': found 'tall'; must be a finite"),
        ("1,2,0\n1,inf,0\n", {}, "line 2, column 1: found 'inf'; must be a finite float32"),
        ("1,2,0\n1,1e39,0\n", {}, "line 2, column 1: found '1e39'; must be a finite float32"),
        ("1,2,0\n1,1_0,0\n", {}, "line 2, column 1: found '1_0'; must be a finite float32"),
        ("1,2,0\n\n1,2\n", {}, "2 columns, but there must be 3, as in line 1"),
        ("1,2,0\n1,2,?\n", {}, "line 2: the class in column 2 is missing ('?')"),
        ("1,2,1\n1,2,1.0\n", {}, "classes '1' and '1.0' are the same number in two spellings"),
        ("1,tall,0\n", {}, "line 1 has 'tall', as in a header, and '1', as in a row"),
        ("1,tall,0\n", {}, "as in a row; choose with --header yes or --header no"),
        (
            BARE,
            {"label": "kind"},
            "no column is named 'kind'; names 1.5, 2, 10; use a name that one column has",
        ),
        (
            BARE,
            {"label": "kind", "header": "no"},
            "no column is named 'kind'; there are no names",
        ),
        (
            HEADER + BARE,
            {"label": "3"},
            "no column is named '3'; names height, arm span, kind; use a name that one",
        ),
        (
            BARE,
            {"label": "-4"},
            "no column is named '-4'; there are no names; use a name that one column has",
        ),
        (BARE, {"label": "-4"}, "or a number from -3 to 2; see --label and --header"),
        ("a,a,b\n1,2,3\n", {"label": "a"}, "2 columns are named 'a'; names a, a, b"),
        (
            "1_000,2_000,0\n1,2,1\n",
            {},
            "line 1 has '1_000', as in a header, and '1_000', as in a row",
        ),
        ("١,٢,0\n1,2,1\n", {}, "line 1 has '١', as in a header, and '١', as in a row"),
        (HEADER + "١,1,0\n", {}, "line 2, column 'height': found '١'; must be a finite float32"),
        (
            HEADER + "1,1\u2028,0\n",
            {},
            "column 'arm span': found '1\\u2028'; must be a finite float32",
        ),
        (BARE, {"label": "9" * 5000}, "no column is named '9999"),
        (
            HEADER + "1,2,\ufeffcat\n",
            {},
            r"a label has the name '\ufeffcat', with a control character or",
        ),
        (HEADER, {}, "has a header but no rows"),
        ("\n \n", {}, "has no rows; write one per line"),
        (
            "1:2:3\n",
            {},
            "line 1: 1 column, but there must be two at least, separated by commas, tabs",
        ),
        (
            "1,5;2,5\n",
            {},
            "its first line can be split by commas into 3 and by semicolons into 2 cells",
        ),
        (
            "a,b,c\n1,2,3\n",
            {"ignore": ["a", "b"]},
            "no column is left for a feature beside the labels",
        ),
        (
            "a,b,c\n1,0,3\n",
            {"label": ["b", "c"]},
            "label c is '3' in a row",
        ),
        (
            "a,b,c\nx,0,3\n",
            {"categories": ["d"]},
            "no column is named 'd'; names a, b, c; use a name that one",
        ),
        ('1,"2,3\n', {}, "cannot read tiny.csv (unexpected end of data); a table must be UTF-8"),
    ],
)
def test_errors(tmp_path: Path, text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(SourceError) as fault:
        build(table(tmp_path, text, **options), tmp_path / "out", progress=False)
    assert message in str(fault.value) and "tiny.csv" in str(fault.value)


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "tiny.csv").write_bytes(b"1,2\n\xe9,2\n")
    with pytest.raises(SourceError, match="a table must be UTF-8"):
        _ = make_source("table", {"csv": tmp_path / "tiny.csv"}).splits


def test_a_built_table_is_whole(tmp_path: Path) -> None:
    build(table(tmp_path, HEADER + BARE, label="kind"), tmp_path / "out", progress=False)
    assert verify(tmp_path / "out").ok


@pytest.mark.skipif(not UCI.exists(), reason="no UCI files in the data folder")
@pytest.mark.parametrize(
    ("file", "options", "rows", "width", "classes"),
    [
        ("yeast.csv", {}, 1484, 8, 10),
        ("dermatology.csv", {"label": "Classification", "missing": "mean"}, 366, 34, 6),
        ("texture.dat", {}, 5500, 40, 11),
    ],
)
def test_uci(file: str, options: dict[str, str], rows: int, width: int, classes: int) -> None:
    source = make_source("table", {"csv": UCI / file, **options})
    assert source.splits == {"all": rows} and source.views[0].shape == (width,)
    assert len(source.labels.names) == classes
    assert source.labels.names == sorted(source.labels.names, key=int)
    assert len(set(whole(source, "all").labels.tolist())) == classes


@pytest.mark.skipif(not UCI.exists(), reason="no UCI files in the data folder")
def test_uci_ages_that_are_missing() -> None:
    message = r"dermatology.csv, line 35, column 'Age': found '\?'; the cell is missing"
    with pytest.raises(SourceError, match=message):
        _ = make_source("table", {"csv": UCI / "dermatology.csv"}).splits


AUDIO = "id\tpitch\ttone\n" + "".join(f"r{n}\t{n}.5\t{'hi' if n % 2 else 'lo'}\n" for n in range(6))
KINDS = "id;kind;calm;keen\n" + "".join(f"r{n};k{n % 3};{n % 2};{n // 3}\n" for n in range(6))


def six(folder: Path, **texts: str) -> list[str]:
    """Six files, parted in four ways: five views, and one of labels alone."""
    made = {f"view{n}": "".join(f"{n * row},{row}\n" for row in range(6)) for n in range(3)}
    made |= {"wide": "".join(f" {row} {row + 1}  {row + 3} \n" for row in range(6))}
    made |= {"audio": AUDIO, "kinds": KINDS} | texts
    for name, text in made.items():
        (folder / f"{name}.csv").write_text(text)
    return [f"{'sound=' if name == 'audio' else ''}{folder / name}.csv" for name in made]


def test_six_files_side_by_side(tmp_path: Path) -> None:
    words: dict[str, object] = {
        "csv": six(tmp_path),
        "categories": "tone",
        "ignore": ["id", "kind"],
    }
    source = make_source("table", words | {"label": ["calm", "keen"]})
    assert [(view.name, view.shape) for view in source.views] == [
        *[("view0", (2,)), ("view1", (2,)), ("view2", (2,)), ("wide", (3,)), ("sound", (3,))]
    ]
    rows = whole(source, "all")
    np.testing.assert_array_equal(rows.views["wide"][4], [4, 5, 7])
    np.testing.assert_array_equal(rows.views["sound"][3:5], [[3.5, 1, 0], [4.5, 0, 1]])
    assert source.labels.kind == "multi_label" and source.labels.names == ["calm", "keen"]
    assert rows.labels.tolist() == [[n % 2, n // 3] for n in range(6)]
    build(source, tmp_path / "out", executor=Processes(2), progress=False)
    assert verify(tmp_path / "out").ok

    words |= {"ignore": ["calm", "keen"], "key": None}
    one = make_source("table", words | {"label": "kind", "ignore": ["calm", "keen", "id"]})
    assert one.labels.names == ["k0", "k1", "k2"]
    tree = {"label": ["calm", "kind"], "label_kind": "hierarchical", "ignore": ["id", "keen"]}
    assert make_source("table", words | tree).labels.levels == [["0", "1"], ["k0", "k1", "k2"]]
    none = make_source("table", {"csv": words["csv"][:3], "label": "none"})  # type: ignore[index]
    assert none.labels.kind == "none" and len(none.views) == 3


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (
            {},
            {},
            "there are several files, and none is named as having the labels; use --label COLUMN",
        ),
        ({"wide": "1 2\n"}, {"label": "kind"}, "wide.csv has 1 rows but view0.csv 6"),
        ({}, {"label": "mood"}, "no column is named 'mood'; names view0: ;"),
        ({}, {"label": "id"}, "2 columns are named 'id'; names view0: ;"),
        ({}, {"label": "kinds:mood"}, "no column is named 'kinds:mood'"),
        (
            {},
            {"label": "kind", "key": "id"},
            "view0.csv has no column 'id', the key that every file needs",
        ),
        (
            {},
            {"label": "kind", "ignore": "id"},
            "column 'tone': found 'lo'; must be a finite float32",
        ),
    ],
)
def test_faults_of_several_files(
    tmp_path: Path, texts: dict[str, str], options: dict[str, object], message: str
) -> None:
    with pytest.raises(SourceError) as fault:
        build(make_source("table", {"csv": six(tmp_path, **texts)} | options), tmp_path / "o")
    assert message in str(fault.value)


def test_rows_of_two_files_are_told_by_their_key(tmp_path: Path) -> None:
    swapped = KINDS.replace("r3", "r9")
    *_, audio, kinds = six(tmp_path, kinds=swapped)
    words = {"csv": [audio, kinds], "label": "kinds:kind", "key": "id", "categories": "all"}
    with pytest.raises(SourceError, match="kinds.csv, line 5: id is 'r9', but 'r3' in that row of"):
        _ = make_source("table", words).splits
    (tmp_path / "kinds.csv").write_text(KINDS)
    source = make_source("table", words)
    assert [(view.name, view.shape) for view in source.views] == [("sound", (3,)), ("kinds", (2,))]


def test_categories_that_are_missing_have_the_share_of_each(tmp_path: Path) -> None:
    source = table(tmp_path, "a,b\nx,0\ny,0\nx,1\n?,1\n", missing="mean", categories="a")
    found = np.asarray(whole(source, "all").views["features"])
    np.testing.assert_allclose(found, np.array([[1, 0], [0, 1], [1, 0], [2 / 3, 1 / 3]]))


def test_columns_are_named_in_any_case_where_that_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Width,Kind\n1.5,a\n2.5,b\n")
    (tmp_path / "b.csv").write_text("height,kind\n1.5,c\n2.5,d\n")
    one = make_source("table", {"csv": [str(tmp_path / "a.csv")], "label": ["kind"]})
    assert one.labels.names == ["a", "b"] and one.views[0].shape == (1,)
    both = {"csv": [str(tmp_path / f"{name}.csv") for name in "ab"], "ignore": ["kind"]}
    assert make_source("table", both | {"label": ["Kind"]}).labels.names == ["a", "b"]
