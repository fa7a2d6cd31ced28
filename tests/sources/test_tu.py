"""Graphs of the TU format: built, verified, shown; what is wrong with a file is named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from heron.base.errors import ShardError, SourceError
from heron.data.reader import Reader
from heron.shards.build import build
from heron.shards.graph import pack_graph, unpack_graph
from heron.shards.manifest import View
from heron.shards.show import show
from heron.shards.verify import verify
from heron.sources import make_source
from tests.graphs import drawn, row, write_tu

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "graphs"


def test_a_folder_is_built_as_its_files_say(tmp_path: Path) -> None:
    source = make_source("tu", {"folder": write_tu(tmp_path / "rings")})
    manifest = build(source, tmp_path / "s", progress=False)
    assert manifest.dataset == "rings" and manifest.views[0].shape == (8, 8, 3)
    reader = Reader(tmp_path / "s")
    rows = reader.split_rows("all")
    graphs, classes = drawn()
    np.testing.assert_array_equal(
        reader.read("graph", rows), np.stack([row(graph, 8, 8) for graph in graphs])
    )
    assert reader.manifest.labels.names == ["1", "2"]
    assert (reader.labels(rows) + 1).tolist() == classes
    assert verify(tmp_path / "s").ok
    assert "8 nodes and 8 edges at most, 3 labels of nodes" in show(tmp_path / "s")


def test_without_labels_a_node_has_its_degree(tmp_path: Path) -> None:
    for options in ({}, {"ignore": ["node_labels"]}):
        folder = write_tu(tmp_path / f"r{len(options)}", labelled=bool(options))
        build(make_source("tu", {"folder": folder, **options}), tmp_path / folder.name / "s")
        reader = Reader(tmp_path / folder.name / "s")
        ring, star = reader.read("graph", np.array([0, 1]))[:, :8].tolist()
        assert set(ring) <= {2, -1} and sorted(set(star))[-1] == len(drawn()[0][1][0]) - 1


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("A", lambda t: t.replace("1, 2\n", "", 1), "each edge once in each direction"),
        ("A", lambda t: t.replace("1, 2\n", "1, 1\n", 1), "joins node 0 with itself"),
        ("A", lambda t: t.replace("1, 2\n", "1, 40\n", 1), r"line 1: an edge from 1 to 40"),
        (
            "A",
            lambda t: t.replace("1, 2\n", "1; 2\n", 1),
            "must have lines of 2 whole numbers, .*: could not convert string '1; 2'",
        ),
        ("A", lambda t: t.replace("1, 2\n", "0, 2\n", 1), r"line 1: an edge from 0 to 2"),
        (
            "graph_indicator",
            lambda t: t.replace("2\n", "3\n", 1),
            "must number the graph of each node from 1 to 40",
        ),
        (
            "graph_indicator",
            lambda t: t + "41\n",
            "must number the graph of each node from 1 to 40",
        ),
        (
            "graph_labels",
            lambda t: t.replace("1", "1.5", 1),
            "must have lines of 1 whole numbers, .*: could not convert string '1.5'",
        ),
        ("graph_labels", lambda t: "", "rings_graph_labels\\.txt is empty"),
        ("node_labels", lambda t: t + "1\n", "lines for .* nodes"),
        ("node_labels", lambda t: "-1\n" + t[2:], "line 1: labels must be 0 to 65535, got -1"),
        ("edge_labels", lambda t: "1\n", "leave it out with --ignore edge_labels"),
        ("graph_attributes", lambda t: "1\n", "leave it out with --ignore graph_attributes"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, part: str, change: Callable[[str], str], told: str
) -> None:
    folder = write_tu(tmp_path / "rings")
    path = folder / f"rings_{part}.txt"
    path.write_text(change(path.read_text() if path.exists() else ""))
    with pytest.raises(SourceError, match=told):
        build(make_source("tu", {"folder": folder}), tmp_path / "s", progress=False)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "rings").mkdir()
    with pytest.raises(SourceError, match=r"must have one set in the TU format: NAME_A\.txt"):
        build(make_source("tu", {"folder": tmp_path / "rings"}), tmp_path / "s")
    (write_tu(tmp_path / "rings") / "rings_graph_labels.txt").unlink()
    with pytest.raises(SourceError, match="rings_graph_labels.txt is missing"):
        build(make_source("tu", {"folder": tmp_path / "rings"}), tmp_path / "s")


def member(numbers: list[int], dtype: str = "i4") -> bytes:
    from heron.shards.write_shard import npy

    return npy(np.array(numbers, dtype))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"no graph", "not an npy array"),
        (member([1, 0], "i8"), r"must be a graph, int32 with one axis"),
        (member([3, 0, 0]), "says 3 nodes in 2 numbers"),
        (member([-1, 0, 0]), "says -1 nodes"),
        (member([2, 0, 0, 0]), "says 2 nodes in 3 numbers"),
        (member([5, 0, 0, 0, 0, 0]), "edges, got 5 nodes and 0 edges"),
        (member([2, 0, 7]), "has a node of label 7; labels go from 0 to 2"),
        (member([2, 0, 1, 0, 2]), "has an edge to node 2; nodes go from 0 to 1"),
        (member([2, 0, 1, 1, 0]), "edges out of order"),
        (member([2, 0, 1, 0, 1, 0, 1]), "edges out of order"),
    ],
)
def test_bytes_that_are_no_graph(data: bytes, told: str) -> None:
    with pytest.raises((ValueError, ShardError), match=told):
        unpack_graph(data, (4, 4, 3))


def test_what_is_packed_is_unpacked() -> None:
    labels, edges = np.array([2, 0, 1], np.int32), np.array([[0, 1], [1, 2]], np.int32)
    found = unpack_graph(pack_graph(labels, edges), (4, 4, 3))
    np.testing.assert_array_equal(found[0], labels)
    np.testing.assert_array_equal(found[1], edges)


def test_a_view_of_graphs_has_nodes() -> None:
    for shape in ((0, 1, 1), (1, 1, 0), (2**31, 0, 1), (1, -1, 1)):
        with pytest.raises(ValueError, match="nodes, edges and labels are beyond the limits 1 to"):
            View(name="g", kind="graph", shape=shape, dtype="uint8")


@pytest.mark.skipif(not SHARED.exists(), reason="the graphs of ../shared are not there")
@pytest.mark.parametrize(
    ("name", "rows", "shape"), [("MUTAG", 188, (28, 33, 7)), ("PTC", 344, (109, 108, 22))]
)
def test_published_sets(name: str, rows: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    source = make_source("tu", {"folder": SHARED / name})
    assert source.splits == {"all": rows} and source.views[0].shape == shape
