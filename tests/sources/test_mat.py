"""The source `mat`: views in a cell or by name, either way round, of v5 and of v7.3."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scipy.io import savemat
from scipy.sparse import csc_array, issparse

from heron.base.errors import SourceError
from heron.base.workers import Processes
from heron.shards.build import build
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.sources import make_source
from heron.sources.mat import read_value
from heron.sources.matlab import MatlabFile
from tests.shards.tiny import whole

DRAW = np.random.default_rng(0)
ONE, TWO = DRAW.normal(size=(9, 4)), DRAW.integers(0, 9, (9, 3)).astype("f8")
CLASSES = np.array([3.0, 1, 2] * 3)
VERSIONS = ["v5", "v5-compressed", "v7.3"]


def cell(*values: Any) -> Any:
    made = np.empty((1, len(values)), object)
    made[0] = [*values]
    return made


def write(path: Path, version: str, variables: Mapping[str, Any]) -> None:
    if version != "v7.3":
        savemat(path, dict(variables), do_compression=version != "v5")
        return
    with h5py.File(path, "w") as file:
        for name, value in variables.items():
            _write_item(file, name, value)


def _write_item(file: Any, name: str, value: Any) -> Any:
    """As MATLAB writes them: axes in reverse, a cell of references."""
    if issparse(value):
        item = file.create_group(name)
        item.attrs["MATLAB_sparse"] = value.shape[0]
        item["data"], item["ir"], item["jc"] = value.data, value.indices, value.indptr
        kind = "double"
    elif isinstance(value, dict):
        item, kind = file.create_group(name), "struct"
    elif isinstance(value, str):
        item, kind = (
            file.create_dataset(name, data=np.array([[ord(c)] for c in value], "u2")),
            "char",
        )
    elif value.dtype == object:
        inner = [_write_item(file, f"#refs#/{name}-{n}", v) for n, v in enumerate(value.ravel("F"))]
        refs = np.array([one.ref for one in inner], h5py.ref_dtype).reshape(value.T.shape)
        item, kind = file.create_dataset(name, data=refs), "cell"
    else:
        kind = {"float64": "double", "float32": "single"}.get(str(value.dtype), str(value.dtype))
        item = file.create_dataset(name, data=value.T)
    item.attrs["MATLAB_class"] = np.bytes_(kind)
    return item


def mat(folder: Path, version: str, variables: Mapping[str, Any], **options: object) -> Source:
    write(folder / "views.mat", version, variables)
    return make_source("mat", {"mat": folder / "views.mat", **options})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("turned", [False, True])
def test_views_in_a_cell_or_by_name(tmp_path: Path, version: str, turned: bool) -> None:
    one, two = (ONE.T, csc_array(TWO.T)) if turned else (ONE, csc_array(TWO))
    labels = CLASSES[None] if turned else CLASSES[:, None]
    for views in ({"X": cell(one, two)}, {"X1": one, "X2": two}):
        source = mat(tmp_path, version, views | {"gt": labels}, labels_name="gt")
        assert [(v.name, v.shape) for v in source.views] == [("X1", (4,)), ("X2", (3,))]
        assert source.splits == {"all": 9} and source.labels.names == ["1", "2", "3"]
        rows = whole(source, "all")
        np.testing.assert_array_equal(rows.views["X1"], ONE.astype("f4"))
        np.testing.assert_array_equal(rows.views["X2"], TWO)
        assert rows.labels.tolist() == [2, 0, 1] * 3
    build(source, tmp_path / "out", executor=Processes(2), progress=False)
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("variables", "ignore", "array"),
    [
        ({"X": cell(ONE, TWO), "X1": TWO}, [], "X1"),
        ({"X1": TWO, "X": cell(ONE, TWO)}, [], "X1"),
        ({"X": cell(*[ONE] * 11), "X1": cell(TWO)}, [], "X11"),
        ({"X": cell(ONE, TWO), "X1": TWO}, ["X1"], "X1"),  # ignore which of the two?
    ],
)
def test_two_arrays_of_one_name_are_refused(
    tmp_path: Path, version: str, variables: Any, ignore: list[str], array: str
) -> None:
    source = mat(tmp_path, version, variables | {"Y": CLASSES}, ignore=ignore)
    message = f"variables '(X' and 'X1|X1' and 'X)' both have an array '{array}'"
    with pytest.raises(SourceError, match=message):
        _ = source.views


@pytest.mark.parametrize("version", VERSIONS)
def test_of_a_cell_and_a_variable_like_its_matrix_one_may_be_ignored(
    tmp_path: Path, version: str
) -> None:
    variables = {"X": cell(ONE, TWO), "X1": TWO, "Y": CLASSES}
    source = mat(tmp_path, version, variables, ignore=["X"])
    assert [view.name for view in source.views] == ["X1"]
    np.testing.assert_array_equal(whole(source, "all").views["X1"], TWO)
    cells = {"X": cell(ONE, ONE), "X1": cell(TWO), "Y": CLASSES}
    assert [v.name for v in mat(tmp_path, version, cells).views] == ["X1", "X2", "X11"]


@pytest.mark.parametrize("version", VERSIONS)
def test_labels_of_each_kind(tmp_path: Path, version: str) -> None:
    def labels(value: Any, **options: object) -> tuple[list[str], list[Any]]:
        source = mat(tmp_path, version, {"X": ONE, "Y": value}, **options)
        return source.labels.names, whole(source, "all").labels.tolist()

    sets = (ONE[:, :2] > 0).astype("f8")
    assert labels(sets) == (["0", "1"], sets.tolist())
    assert labels(sets.T) == (["0", "1"], sets.tolist())
    assert labels(2 * sets - 1, minus_one="no") == (["0", "1"], sets.tolist())
    names = cell(*(["cat", "dog", "cow"] * 3))
    assert labels(names) == (["cat", "cow", "dog"], [0, 2, 1] * 3)
    assert labels(CLASSES, label_kind="none") == ([], [-1] * 9)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("first", [0, 1])
def test_class_names_in_a_cell(tmp_path: Path, version: str, first: int) -> None:
    names = {"classes": cell("cat", "dog", "wild cow")}
    source = mat(tmp_path, version, {"X": ONE, "gnd": CLASSES[:, None] - 1 + first} | names)
    assert [view.name for view in source.views] == ["X"]
    assert source.labels.names == ["cat", "dog", "wild cow"]
    assert whole(source, "all").labels.tolist() == [2, 0, 1] * 3
    several = np.eye(3)[(CLASSES - 1).astype(int)]
    source = mat(tmp_path, version, {"X": ONE, "Y": several} | names)
    assert (
        source.labels.kind == "multi_label" and source.labels.names == names["classes"][0].tolist()
    )
    several[:, 2] = 0  # a cell of as many texts as classes, and one that is not
    source = mat(tmp_path, version, {"X": ONE, "Y": several, "words": cell("a", "b")})
    with pytest.raises(SourceError, match="'words' is .*, and neither a view nor labels nor split"):
        _ = source.views


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["Y", "y", "Gnd", "GND", "labels", "Truth", "truth"])
def test_labels_by_any_usual_name_come_before_views(
    tmp_path: Path, version: str, name: str
) -> None:
    source = mat(tmp_path, version, {"X": ONE.T, name: CLASSES.astype("u1")[:, None]})
    assert [view.name for view in source.views] == ["X"] and source.splits == {"all": 9}
    assert whole(source, "all").labels.tolist() == [2, 0, 1] * 3


@pytest.mark.parametrize("version", VERSIONS)
def test_pictures_have_their_samples_last(tmp_path: Path, version: str) -> None:
    pictures = DRAW.integers(0, 256, (6, 5, 3, 9)).astype("u1")
    source = mat(tmp_path, version, {"X": pictures, "y": CLASSES}, labels_name="y")
    assert source.views[0].shape == (6, 5, 3)
    np.testing.assert_array_equal(whole(source, "all").views["X"], np.moveaxis(pictures, 3, 0))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        (
            {"X": ONE, "n": np.array([[3.0]]), "Y": CLASSES},
            {},
            "'n' is float64 (1, 1), and neither",
        ),
        ({"X": ONE, "S": {"a": 1}, "Y": CLASSES}, {}, " a struct or another object"),
        ({"X": ONE * 1j, "Y": CLASSES}, {}, "complex"),
        (
            {"X": cell(cell(ONE)), "Y": CLASSES},
            {},
            "X is a cell of cells; a cell must have matrices or",
        ),
        (
            {"X": ONE, "Y": CLASSES},
            {"ignore": ["z"]},
            "no variable 'z' to ignore; choose one of X, Y",
        ),
        ({"X": ONE, "Y": CLASSES + 0.5}, {}, "Y, row 0 is 3.5; labels must be integers"),
        ({"X": ONE, "Y": CLASSES * np.nan}, {}, "Y, row 0 is nan; labels must be integers"),
        ({"X": ONE[:8], "Y": CLASSES}, {}, "'X' is float64 (8, 4), and neither a view nor labels"),
        ({"X": ONE, "Z": TWO[:7]}, {}, "no number of samples that fit all of X 9 × 4, Z 7 × 3"),
        ({"X": ONE, "Z": ONE}, {}, "two numbers of samples that fit all of X 9 × 4, Z 9 × 4"),
        (
            {"X": ONE[:4], "Y": CLASSES[:4]},
            {},
            "X is 4 × 4, and samples may be its rows or columns",
        ),
        ({"X": ONE}, {"labels_name": "gt"}, "no array 'gt', only X; choose one of X"),
        ({"X": ONE, "Y": CLASSES}, {"view_names": ["x"]}, "no array 'x', only X, Y; did you mea"),
        ({"X": TWO, "Z": csc_array((1 << 20, 1 << 20))}, {}, "Z is 1048576 × 1048576, 8,796,093,"),
    ],
)
def test_errors(
    tmp_path: Path,
    version: str,
    variables: Mapping[str, Any],
    options: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(SourceError) as fault:
        build(mat(tmp_path, version, variables, **options), tmp_path / "out", progress=False)
    assert message in str(fault.value) and str(fault.value).startswith("views.mat")


@pytest.mark.parametrize("name", ["gnd", "gt", "y", "Truth", "labels"])
def test_labels_by_a_usual_name(tmp_path: Path, name: str) -> None:
    """Before any view is: three errors proposed a view for the labels."""
    source = mat(tmp_path, VERSIONS[0], {"X": ONE, name: CLASSES})
    assert [view.name for view in source.views] == ["X"]
    np.testing.assert_array_equal(whole(source, "all").labels, CLASSES.ravel() - CLASSES.min())


@pytest.mark.parametrize("version", VERSIONS)
def test_samples_by_option(tmp_path: Path, version: str) -> None:
    square = {"X": ONE[:4], "Y": CLASSES[:4]}
    for samples, expected in (("rows", ONE[:4]), ("columns", ONE[:4].T)):
        source = mat(tmp_path, version, square, samples=samples)
        np.testing.assert_array_equal(whole(source, "all").views["X"], expected.astype("f4"))
    both = mat(tmp_path, version, {"X": ONE, "Z": ONE}, samples="columns", label_kind="none")
    assert both.splits == {"all": 4}
    one = mat(tmp_path, version, {"X": ONE, "Z": ONE[:, :3].T}, label_kind="none")
    assert one.splits == {"all": 9}  # the only number that both have


def test_a_sparse_matrix_whose_indices_lead_out_of_it(tmp_path: Path) -> None:
    write(tmp_path / "views.mat", "v7.3", {"X": csc_array(TWO), "Y": CLASSES})
    with h5py.File(tmp_path / "views.mat", "r+") as file:
        file["X"]["ir"][0] = 1 << 30
    source = make_source("mat", {"mat": tmp_path / "views.mat"})
    with pytest.raises(SourceError, match="views.mat: X is damaged .*ind.*; download it again"):
        _ = source.splits


def test_an_element_that_unpacks_to_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "views.mat", "v5-compressed", {"X": cell(np.zeros((999, 99))), "Y": CLASSES})
    monkeypatch.setattr("heron.sources.matlab.MAX_UNPACKED_BYTES", 10**5)
    with pytest.raises(
        SourceError, match="X has more than 100,000 bytes unpacked, which is the limit"
    ):
        _ = make_source("mat", {"mat": tmp_path / "views.mat"}).splits


def test_empty_variables_and_classes_as_texts_of_hdf5(tmp_path: Path) -> None:
    path = tmp_path / "views.mat"
    with h5py.File(path, "w") as file:
        for name, kind in (("none", "double"), ("words", "char"), ("cells", "cell")):
            file[name] = np.zeros(2, "u8")  # MATLAB's way: the shape, in place of the numbers
            file[name].attrs.update({"MATLAB_class": np.bytes_(kind), "MATLAB_empty": 1})
        file["X"], file["cube"] = ONE.T, np.ones((2, 3, 4))
        for name in ("X", "cube"):
            file[name].attrs["MATLAB_class"] = "double"  # a text, as h5py writes it
    opened = MatlabFile(path)
    values = {name: read_value(opened, name) for name in opened.variables}
    assert values["cells"] == [] and np.asarray(values["words"]).tolist() == ""
    shapes = {name: np.shape(values[name]) for name in ("none", "X", "cube")}
    assert shapes == {"none": (0, 0), "X": (9, 4), "cube": (4, 3, 2)}
