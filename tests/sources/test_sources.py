"""Sources: what they read and draw, and how they say what is wrong with a file."""

import re
from pathlib import Path

import numpy as np
import pytest

from heron.base.errors import ShardError, SourceError
from heron.shards.build import build
from heron.sources import make_source
from tests.shards.tiny import ARFF, XML, arrays_source, mulan_options, whole

SCENE = Path(__file__).parents[3] / "shared" / "data" / "scene"


def test_mulan_reads_dense_and_sparse_rows(tmp_path: Path) -> None:
    source = make_source("mulan", mulan_options(tmp_path))
    rows = whole(source, "all")
    assert source.labels.names == ["calm", "keen"] and source.dataset == "tiny"
    np.testing.assert_array_equal(rows.views["view1"], [[1.5, 2], [-1, 0.25], [4, 0]])
    np.testing.assert_array_equal(rows.labels, [[0, 1], [1, 1], [1, 0]])


def test_mulan_rows_may_begin_with_blanks(tmp_path: Path) -> None:
    plain = whole(make_source("mulan", mulan_options(tmp_path)), "all")
    blanks = ARFF.replace("1.5,2", " 1.5,2").replace("{0 4", " \t{0 4").replace("1,1\n", "1,1  \n")
    rows = whole(make_source("mulan", mulan_options(tmp_path, blanks)), "all")
    np.testing.assert_array_equal(rows.views["view1"], plain.views["view1"])
    np.testing.assert_array_equal(rows.labels, plain.labels)


@pytest.mark.parametrize("kind", [{}, {"view_kind": "columns"}, {"view_kind": "scene"}])
def test_mulan_noise_is_on_even_rows_of_one_view_and_odd_rows_of_the_other(
    tmp_path: Path, kind: dict[str, str]
) -> None:
    options = mulan_options(tmp_path)
    plain = whole(make_source("mulan", options), "all").views["view1"]
    options |= {"seed": 5, "noise": 0.01, **kind}
    noisy = whole(make_source("mulan", options), "all").views
    same1, same2 = ((np.asarray(noisy[v]) == plain).all(1).tolist() for v in ("view1", "view2"))
    assert same1 == [False, True, False] and same2 == [True, False, True]
    assert np.abs(np.asarray(noisy["view1"]) - plain).max() < 0.2
    again = make_source("mulan", options).read("all", 0, 3).views["view1"]
    np.testing.assert_array_equal(again, noisy["view1"])


def test_mulan_adds_no_noise_unasked(tmp_path: Path) -> None:
    """It once added that of Scene to any set."""
    rows = whole(make_source("mulan", mulan_options(tmp_path)), "all")
    np.testing.assert_array_equal(rows.views["view1"], [[1.5, 2], [-1, 0.25], [4, 0]])
    assert list(rows.views) == ["view1"]


def test_mulan_noise_follows_the_spread_of_each_column(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = (draw.normal(size=(4000, 4)) * [1e-3, 1, 1e5, 0] + [5, 0, -1e6, 0.1]).astype(np.float32)
    lines = [f"{','.join(map(repr, row))},0,1" for row in x.astype(float).tolist()]
    head = "".join(f"@attribute x{n} numeric\n" for n in range(4))
    text = f"@relation r\n{head}@attribute calm {{0,1}}\n@attribute keen {{0,1}}\n@data\n"
    source = make_source("mulan", mulan_options(tmp_path, text + "\n".join(lines)) | {"noise": 0.1})
    views = whole(source, "all").views
    one = (np.asarray(views["view1"], float) - x)[::2]
    two = (np.asarray(views["view2"], float) - x)[1::2]
    spread = np.array([x[:, column].astype(float).std() for column in range(3)])
    for noise in (one, two):
        np.testing.assert_allclose(noise[:, :3].std(0) / spread, 0.1, rtol=0.05)
        assert np.abs(noise[:, :3].mean(0) / spread).max() < 0.01
        assert (noise[:, 3] == 0).all()
    np.testing.assert_array_equal(np.asarray(views["view1"])[1::2], x[1::2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"view_kind": "columns"}, "view_kind is columns, and noise 0; use a noise, such as 0.01"),
        ({"view_kind": "scene"}, "view_kind is scene, and noise 0; use a noise, such as 0.01"),
        ({"view_kind": "single", "noise": 0.1}, "and noise 0.1; use a noise, .* none with single"),
        ({"noise": -1}, "noise must be greater than or equal to 0"),
    ],
)
def test_mulan_noise_that_says_two_things(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(SourceError, match=said):
        make_source("mulan", mulan_options(tmp_path) | options)


def test_mulan_names_the_attribute_that_gives_a_label_away(tmp_path: Path) -> None:
    """It asked for `features:0`, a view that there is not, and then for `view1:0`."""
    rows = "".join(f"{n % 2},{n}.5,{n % 2},{n // 3 % 2}\n" for n in range(30))
    options = mulan_options(tmp_path, ARFF[: ARFF.index("1.5,2")] + rows)
    for noise in (0.0, 0.1):
        with pytest.raises(SourceError, match="--keep view1:height"):
            _ = make_source("mulan", options | {"noise": noise}).splits
        kept = options | {"keep": ["view1:height"], "noise": noise}
        assert make_source("mulan", kept).splits == {"all": 30}


ONE_LABEL = '<labels xmlns="http://mulan.sourceforge.net/labels"><label name="y"/></labels>'
NOMINAL = """@relation kinds
@attribute warm {0,1}
@attribute 'the colour' {red, 'dark, green', "it's"}
@attribute size {3,1,2}
@attribute calm {0,1}
@attribute keen {1,0}
@data
1, red, 2, 0, 1
0,'dark, green',3,1,1
{0 1, 1 "it's", 3 1, 4 0}
{4 1}
"""


@pytest.mark.parametrize("merged", [True, False])
def test_mulan_reads_nominal_attributes_and_splits(tmp_path: Path, merged: bool) -> None:
    options = mulan_options(tmp_path, NOMINAL, name="train")
    other = mulan_options(tmp_path, NOMINAL.split("0,'dark")[0], name="test")
    both = [*options["arff"], *other["arff"]]  # type: ignore[misc]
    split = {} if merged else {"split_names": ["train", "test"]}
    words = {"arff": both, "binary_features": True}
    source = make_source("mulan", options | words | split)
    assert source.splits == ({"all": 5} if merged else {"train": 4, "test": 1})
    rows = whole(source, "all" if merged else "train")
    warm, red, green, its, three, one, two = np.asarray(rows.views["view1"])[:4].T.tolist()
    assert warm == [1, 0, 1, 0]
    assert (red, green, its) == ([1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0])
    assert (three, one, two) == ([0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0])
    assert rows.labels[:4].tolist() == [[0, 1], [1, 1], [1, 0], [0, 1]]
    build(source, tmp_path / "out", progress=False)
    with pytest.raises(SourceError, match="3 split_names for 2 files"):
        make_source("mulan", options | words | {"split_names": ["a", "b", "c"]})


@pytest.mark.parametrize(
    ("arff", "xml", "message"),
    [
        (
            ARFF,
            XML.replace("utf-8", "utf-9"),
            "tiny.xml is not Mulan's XML (unknown encoding: utf-9)",
        ),
        (ARFF, XML.replace("keen", "kind"), "tiny.arff: no attribute 'kind', which tiny.xml names"),
        (
            ARFF.replace("1.5,2,", "1.5,"),
            XML,
            "tiny.arff, line 9: 3 columns for 4 @attribute lines",
        ),
        (ARFF.replace("1.5", "?"), XML, "line 9, column 'height' must be a finite number, got '?'"),
        (
            ARFF.replace("0.25", "nan"),
            XML,
            "10, column 'arm span' must be a finite float32, got nan",
        ),
        (ARFF.replace("1.5", "1e39"), XML, "column 'height' must be a finite float32, got 1e+39"),
        (ARFF.replace("{0 4", "{0 inf"), XML, "line 12, column 'height' must be"),
        (
            ARFF.replace("1,1\n", "2,1\n"),
            XML,
            "line 10, column 'calm' must be a label of 0 or 1, got 2",
        ),
        (
            ARFF.replace("{0 4", "{9 4"),
            XML,
            " must be COLUMN VALUE, each column once, from 0 to 3; fix",
        ),
        (
            ARFF.replace("{0 4", "{x 4"),
            XML,
            " must be COLUMN VALUE, each column once, from 0 to 3; fix",
        ),
        (
            ARFF.replace("real", "{red,'dark, green'}"),
            XML,
            "line 9, column 'arm span' must be one of red, dark, green, got '2'; fill or drop "
            "missing",
        ),
        (
            ARFF.replace("calm {0,1}", "calm {0,1,2}"),
            XML,
            ": attribute 'calm', a label, must be {0,1}",
        ),
        (
            ARFF.replace("real", "{a,b,a}"),
            XML,
            "line 4: attribute 'arm span' is '{a,b,a}'",
        ),
        (ARFF.replace("real", "string"), XML, "line 4: attribute 'arm span' must be numeric"),
        (ARFF.split("1.5")[0], XML, "tiny.arff has no rows after @data"),
        ("% hello", XML, "tiny.arff has no @attribute lines, so it is not an ARFF file"),
        (
            "<html>",
            XML,
            "tiny.arff, line 1: '<html>' is not @relation, @attribute, @data or a comment",
        ),
        (ARFF.replace("@attribute calm", "@attribut calm"), XML, "line 5: '@attribut calm"),
        (ARFF.replace("keen", "calm"), XML, "line 6: a second attribute 'calm'; rename one"),
        (
            ARFF.replace(", 2 1}", ", 2 1"),
            XML,
            "a sparse row must end with '}', got '{0 4, 2 1'; download it again, or fix the line",
        ),
        (
            ARFF.replace(", 2 1}", ", 2 1}}"),
            XML,
            "12, column 'calm' must be a finite number, got '1}'",
        ),
        (
            ARFF.replace("{0 4", "{{0 4"),
            XML,
            " must be COLUMN VALUE, each column once, from 0 to 3; fix",
        ),
        (
            ARFF.replace("{0 4", "{0 4, "),
            XML,
            "line 12: cell '' must be COLUMN VALUE, each column once",
        ),
        (
            ARFF.replace(", 2 1}", ", 2}"),
            XML,
            "line 12, column 'calm' must be a finite number, got ''",
        ),
        (
            ARFF.replace(", 2 1}", ", 2 1, 0 5}"),
            XML,
            "line 12: cell '0 5' must be COLUMN VALUE, each column once",
        ),
        (
            ARFF.replace("keen {0,1}", "keen {1, 0}"),
            XML,
            "line 12: column 'keen' of type '{1,0}' is omitted, which means its first value, and "
            "that is not 0; write it out in every sparse row",
        ),
        (ARFF.replace("1.5,2", "1_000,2"), XML, "line 9, column 'height' must be"),
        (ARFF.replace("1.5,2", "١,2"), XML, "9, column 'height' must be a finite number, got '١'"),
        (
            ARFF.replace("{0 4", "{٠ 4"),
            XML,
            " must be COLUMN VALUE, each column once, from 0 to 3; fix",
        ),
        (
            ARFF.replace("{0 4", "{" + "0" * 5000 + " 4"),
            XML,
            "must be COLUMN VALUE, each column once",
        ),
        (
            ARFF.replace("0,1\n-1", "0,1\u2028-1"),
            XML,
            "line 9: found '\\u2028' in '1.5,2,0,1\\u2028-1,0.25,1,1'; save it again as UTF-8 text",
        ),
        (ARFF.replace("1.5,2", "1.5\u2028,2"), XML, r"line 9: found '\u2028' in '1.5\u2028,2,0,1'"),
        (
            ARFF.replace("1.5,2", "1.5\xa0,2"),
            XML,
            "'height' must be a finite number, got '1.5\\xa0'",
        ),
        (ARFF.replace("@attribute calm", "\ufeff@attribute calm"), XML, r"line 5: found '\ufeff'"),
        (
            ARFF.replace("height", "he\udce9ght"),
            XML,
            r"line 3: found '\udce9' in '@attribute he\ud",
        ),
        (ARFF, "hello", "tiny.xml is not"),
        (ARFF, "<labels/>", "tiny.xml names no label; it needs <label name=...>"),
    ],
)
def test_mulan_errors(tmp_path: Path, arff: str, xml: str, message: str) -> None:
    source = make_source("mulan", mulan_options(tmp_path, arff, xml))
    with pytest.raises(SourceError) as fault:
        build(source, tmp_path / "out", progress=False)
    assert message in str(fault.value)


def test_mulan_begins_with_a_byte_order_mark_and_ends_lines_as_windows_does(tmp_path: Path) -> None:
    plain = whole(make_source("mulan", mulan_options(tmp_path)), "all")
    marked = "\ufeff" + ARFF.replace("@relation", "@attribute depth numeric\n@relation")
    text = marked.replace("\n1.5", "\n7,1.5").replace("\n-1", "\n7,-1")
    text = text.replace("{0 4, 2 1}", "{0 7, 1 4, 3 1}").replace("\n", "\r\n")
    rows = whole(make_source("mulan", mulan_options(tmp_path, text)), "all")
    np.testing.assert_array_equal(rows.views["view1"], [[7, 1.5, 2], [7, -1, 0.25], [7, 4, 0]])
    np.testing.assert_array_equal(rows.labels, plain.labels)


def test_mulan_holds_no_more_values_than_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heron.sources.arff.MAX_VALUES", 99)
    source = make_source("mulan", mulan_options(tmp_path, ARFF + "{}\n" * 100))
    with pytest.raises(
        SourceError, match="line 34: 4 columns of more than 24 rows, and the limit is 99 v"
    ):
        _ = source.splits


@pytest.mark.parametrize("mark", ["\ufeff", "\u2028", "\n", "\0", "\udce9"])
def test_no_control_character_in_a_label(tmp_path: Path, mark: str) -> None:
    source = arrays_source(tmp_path, label_names=["a", "b", f"c{mark}d", "e"])
    with pytest.raises(SourceError) as fault:
        _ = source.splits
    assert str(fault.value) == (
        f"tiny.npz: a label has the name {f'c{mark}d'!r}, with a control character or byte order "
        "mark; rename it"
    )


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("arrays", "npz", "a\0b\nc"),
        ("arrays", "npy", ["x=a\0b\nc"]),
        ("idx", "folder", "a\0b\nc"),
        ("celeba", "images", "a\0b\nc"),
        ("mulan", "arff", ["a\0b\nc"]),
    ],
)
def test_a_path_with_a_zero_byte(name: str, option: str, value: object) -> None:
    with pytest.raises(SourceError) as fault:
        make_source(name, {option: value})
    assert "\n" not in str(fault.value) and "\0" not in str(fault.value)
    assert rf"{name}: " in str(fault.value) and r"a\x00b\nc" in str(fault.value)


def test_mulan_files_of_different_sets(tmp_path: Path) -> None:
    options = mulan_options(tmp_path)
    other = mulan_options(tmp_path, ARFF.replace("height", "depth"), name="other")
    both = [*options["arff"], *other["arff"]]  # type: ignore[misc]
    with pytest.raises(SourceError, match="other.arff: attribute 'depth' where tiny.arff has 'hei"):
        _ = make_source("mulan", options | {"arff": both}).splits


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("{red,blue}", "{blue,red}", "b.arff: attribute 'c' {blue,red} where a.arff has 'c' {red"),
        ("{red,blue}", "{red,blue,green}", "b.arff: attribute 'c' {red,blue,green} where a.arff"),
        ("numeric", "{red,blue}", "b.arff: attribute 'c' {red,blue} where a.arff has 'c'"),
        ("numeric", "{1,0}", None),
        ("{red,blue}", "{red,blue}", None),
    ],
)
def test_mulan_files_whose_attributes_have_other_values(
    tmp_path: Path, one: str, other: str, message: str | None
) -> None:
    for name, kind in (("a", one), ("b", other)):
        row = "red,1" if "red" in kind else "1,1"
        text = f"@relation x\n@attribute c {kind}\n@attribute y {{0,1}}\n@data\n{row}\n"
        (tmp_path / f"{name}.arff").write_text(text)
    (tmp_path / "x.xml").write_text(ONE_LABEL)
    files = {"arff": [tmp_path / "a.arff", tmp_path / "b.arff"], "xml": tmp_path / "x.xml"}
    source = make_source("mulan", {**files, "binary_features": True})
    if message is None:
        assert source.splits == {"all": 2}
        return
    with pytest.raises(SourceError, match=re.escape(message)):
        _ = source.splits


def test_a_binary_attribute_that_is_no_label_is_a_feature(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = mulan_options(tmp_path, ARFF, XML.replace('<label name="keen"></label>', ""))
    source = make_source("mulan", options)
    assert source.labels.names == ["calm"] and source.splits["all"] > 0
    (view,) = source.views
    assert view.shape == (3,)
    assert "keen: {0,1} and not in tiny.xml, and so features, not labels" in caplog.text


def test_mulan_without_a_feature(tmp_path: Path) -> None:
    (tmp_path / "a.arff").write_text("@relation x\n@attribute y {0,1}\n@data\n1\n0\n")
    (tmp_path / "x.xml").write_text(ONE_LABEL)
    source = make_source("mulan", {"arff": [tmp_path / "a.arff"], "xml": tmp_path / "x.xml"})
    with pytest.raises(SourceError, match="a\\.arff: every attribute is a label"):
        _ = source.splits


@pytest.mark.skipif(not SCENE.exists(), reason=f"no Scene files under {SCENE.name}/ of the data")
def test_mulan_scene(tmp_path: Path) -> None:
    arff = [SCENE / "scene-train.arff", SCENE / "scene-test.arff"]
    options = {"arff": arff, "xml": SCENE / "scene.xml", "view_kind": "scene", "noise": 0.01}
    source = make_source("mulan", options)
    assert source.splits == {"all": 2407}
    assert [(view.name, view.shape) for view in source.views] == [
        ("view1", (294,)),
        ("view2", (294,)),
    ]
    names = ["Beach", "Sunset", "FallFoliage", "Field", "Mountain", "Urban"]
    assert source.labels.names == names
    rows = whole(source, "all")
    assert rows.labels.sum(0).tolist() == [427, 364, 397, 433, 533, 431]
    assert rows.views["view2"][0][0] == np.float32(0.646467)
    clean = whole(make_source("mulan", {"arff": arff, "xml": SCENE / "scene.xml"}), "all")
    draw = np.random.default_rng(0)
    for first, view in enumerate(("view1", "view2")):  # as before there was another noise
        expected = np.array(clean.views["view1"])
        x = expected[first::2]
        expected[first::2] += 0.01 * draw.normal(x.mean(), x.std(), x.shape).astype("f4")
        np.testing.assert_array_equal(rows.views[view], expected)
    built = build(source, tmp_path / "scene", progress=False)
    recorded = built.built_from.options
    assert recorded["view_kind"] == "noise" and recorded["noise"] == 0.01  # as in earlier folders
    earlier = make_source("mulan", options | {"view_kind": "noise"})
    assert build(earlier, tmp_path / "scene", progress=False) == built
    with pytest.raises(ShardError, match="its view_kind is 'noise', not 'single'"):
        build(make_source("mulan", {"arff": arff, "xml": SCENE / "scene.xml"}), tmp_path / "scene")


def test_arrays_infer_and_obey(tmp_path: Path) -> None:
    source = arrays_source(tmp_path)
    assert source.labels.kind == "multi_class" and source.labels.names == ["0", "1", "2", "3"]
    assert [view.name for view in source.views] == ["view1", "view2"]
    one = arrays_source(
        tmp_path, view_names=["view2"], ignore=["view1"], label_names=list("abcdef")
    )
    assert [view.name for view in one.views] == ["view2"] and one.labels.names == list("abcdef")
    path = tmp_path / "m.npz"
    np.savez(path, x=np.zeros((3, 2)), labels=np.array([[0, 1], [1, 1], [0, 0]], bool))
    assert make_source("arrays", {"npz": path}).labels.kind == "multi_label"
    np.savez(path, x=np.zeros((3, 2)), labels=np.array([[0, 1], [1, 2], [0, 0]]))
    tree = make_source("arrays", {"npz": path, "label_kind": "hierarchical"}).labels
    assert tree.levels == [["0", "1"], ["0", "1", "2"]] and tree.names == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"b": np.zeros((3, 2))},
            {},
            "'b' has 3 rows but 'labels' has 4; every array must have the",
        ),
        ({"a": np.array([[0.0], [1], [np.nan], [2]])}, {}, "view 'a', row 2, column 0 is nan"),
        (
            {"a": np.full((4, 1), 1e39)},
            {},
            "'a', row 0, column 0 is 1e+39, which is not a finite float32",
        ),
        (
            {"labels": np.array([0, 1, -2, 0])},
            {},
            "or -1 in all of a row that has no label, got -2",
        ),
        ({"labels": np.full((4, 2), 2)}, {}, "label of row 0 must be 0 or 1"),
        (
            {"labels": np.array([0, 1, 5, 0])},
            {"label_names": ["x", "y"]},
            "label of row 2 must be a class number from 0 to 1",
        ),
        ({"labels": np.zeros(4)}, {}, "'labels' must be integers or names [rows], or 0/1 [rows"),
        ({"labels": np.array([{}] * 4)}, {}, "arrays of Python objects are pickles, never decoded"),
        ({}, {"view_names": ["c"]}, "no array 'c', only a, labels"),
        (
            {},
            {"view_names": ["labels"], "ignore": ["a"]},
            "view 'labels' must be numbers [rows, width], or uint8 [rows",
        ),
        ({"split": np.arange(4)}, {}, ": 'split' must be strings [rows], got int64 (4,)"),
        ({"split": np.array(["train"])}, {}, "'split' has 1 rows but 'labels' has 4"),
    ],
)
def test_arrays_errors(
    tmp_path: Path, change: dict[str, object], options: dict[str, object], message: str
) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **({"a": np.zeros((4, 2)), "labels": np.zeros(4, int)} | change))  # type: ignore[arg-type]
    with pytest.raises(SourceError) as fault:
        build(make_source("arrays", {"npz": path, **options}), tmp_path / "out", progress=False)
    assert message in str(fault.value) and "bad.npz" in str(fault.value)


def test_arrays_that_are_no_npz(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, view=np.zeros((50, 3)))
    packed = path.read_bytes()
    for data in (b"<html>", packed[:40] + b"\xff" * 20 + packed[60:]):
        path.write_bytes(data)
        with pytest.raises(
            SourceError, match="cannot read bad\\.npz: it is not what numpy\\.savez"
        ):
            _ = make_source("arrays", {"npz": path}).views


def test_an_npz_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, view=np.zeros((50_000, 3)))
    monkeypatch.setattr("heron.sources.arrays.MAX_UNPACKED_BYTES", 10**5)
    with pytest.raises(SourceError, match="\\(1,200,128 bytes unpacked"):
        _ = make_source("arrays", {"npz": path}).views


def test_make_names_the_nearest_right_name(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="unknown source 'face'; did you mean 'faces'?"):
        make_source("face", {})
    with pytest.raises(SourceError, match="unknown source 'xyz'; choose one of mulan, arrays"):
        make_source("xyz", {})
    with pytest.raises(SourceError, match="faces has no option 'trian'; did you mean 'train'?"):
        make_source("faces", {"trian": 3})
    with pytest.raises(SourceError, match=r"faces: train must be greater than 0, got 0; see"):
        make_source("faces", {"train": 0})
    with pytest.raises(SourceError, match="mulan: arff is missing"):
        make_source("mulan", {})
    with pytest.raises(SourceError, match="npz: path does not point to a file.*none.npz"):
        make_source("arrays", {"npz": tmp_path / "none.npz"})
