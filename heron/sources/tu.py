"""Sets of graphs in the TU text format (Morris et al. 2020), such as MUTAG and IMDB-BINARY."""

from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import DirectoryPath, Field

from heron.base.errors import DOWNLOAD_AGAIN, SourceError
from heron.shards.graph import normalize_edges, pack_graph
from heron.shards.manifest import GRAPH_LIMITS, Labels
from heron.sources.base import SINGLE_SPLIT, Column, FileSource, Loaded, read_each

Part = Literal[
    "node_labels", "edge_labels", "node_attributes", "edge_attributes", "graph_attributes"
]
Integers = NDArray[np.int64]
REQUIRED = ("A", "graph_indicator", "graph_labels")
MAX_FILE_BYTES = 2**30  # of a file


class Tu(FileSource):
    """Sets of graphs in the TU text format: a folder with NAME_A.txt and the files beside it.

    The only view is `graph`; nodes have the labels of NAME_node_labels.txt, numbers from 0, or
    their degrees where there is no such file.
    """

    name: ClassVar[str] = "tu"
    block_rows: ClassVar[int | None] = None
    examples: ClassVar[str] = "heron shards build tu --folder MUTAG --out data/mutag"

    folder: DirectoryPath = Field(description="the folder of NAME_A.txt, NAME_graph_labels.txt, …")
    ignore: list[Part] = Field([], description="files of the folder that are left out on purpose")

    @property
    def dataset(self) -> str:
        """The prefix of the file names."""
        names = sorted(path.name for path in self.folder.glob("*_A.txt"))
        if len(names) != 1:
            raise SourceError(
                f"{self.folder}: a folder must have one set in the TU format: NAME_A.txt, "
                "NAME_graph_indicator.txt, NAME_graph_labels.txt; got "
                f"{', '.join(names) or 'no *_A.txt'}"
            )
        return names[0].removesuffix("_A.txt")

    def _file(self, suffix: str) -> Path:
        return self.folder / f"{self.dataset}_{suffix}.txt"

    @property
    def files(self) -> list[Path]:
        """The files that are read."""
        optional = [] if "node_labels" in self.ignore else ["node_labels"]
        return [
            path
            for suffix in (*REQUIRED, *optional)
            if (path := self._file(suffix)).exists() or suffix in REQUIRED
        ]

    def load(self) -> Loaded:
        """Reads the files, and splits nodes and edges by graph."""
        self._check_files()
        graph_of = self._column("graph_indicator")
        classes = self._column("graph_labels")
        node_starts = self._starts(graph_of, len(classes))
        edges = self._edges(graph_of - 1)
        labels = self._node_labels(len(graph_of), edges)
        edge_starts = np.searchsorted(graph_of[edges[:, 0]] - 1, np.arange(len(classes) + 1))
        shape = (
            len(classes),
            int(np.diff(node_starts).max()),
            int(np.diff(edge_starts).max()),
            int(labels.max()) + 1,
        )
        names, targets = np.unique(classes, return_inverse=True)

        def graph(row: int) -> bytes:
            nodes = labels[slice(*node_starts[row : row + 2])]
            pairs = edges[slice(*edge_starts[row : row + 2])] - node_starts[row]
            return pack_graph(nodes.astype(np.int32), pairs.astype(np.int32))

        return Loaded(
            views={"graph": Column(shape, read_each(graph), kind="graph")},
            targets=targets.reshape(-1).astype(np.int64),
            labels=Labels(kind="multi_class", names=[str(name) for name in names]),
            splits={SINGLE_SPLIT: range(len(classes))},
            keys=[f"graph{number:07d}" for number in range(1, len(classes) + 1)],
        )

    def _check_files(self) -> None:
        """Refuses folders that lack a required file, or have one that this source cannot read."""
        for suffix in REQUIRED:
            if not self._file(suffix).exists():
                raise SourceError(f"{self._file(suffix)} is missing; {DOWNLOAD_AGAIN}")
        for suffix in get_args(Part)[1:]:
            if self._file(suffix).exists() and suffix not in self.ignore:
                raise SourceError(
                    f"{self._file(suffix).name} exists, which this source cannot read: it reads "
                    f"labels of nodes and classes of graphs; leave it out with --ignore {suffix}"
                )

    def _column(self, suffix: str) -> Integers:
        return _integers(self._file(suffix), 1)[:, 0]

    def _starts(self, graph_of: Integers, graphs: int) -> Integers:
        """Returns the first node of each graph, and the end of the last graph."""
        steps = np.diff(graph_of, prepend=0, append=graphs + 1)
        if graph_of[0] != 1 or not np.isin(steps, (0, 1)).all() or not steps[-1]:
            raise SourceError(
                f"{self._file('graph_indicator').name} must number the graph of each node from 1 "
                f"to {graphs}, the lines of {self._file('graph_labels').name}, the nodes of each "
                f"together; {DOWNLOAD_AGAIN}"
            )
        return np.searchsorted(graph_of, np.arange(1, graphs + 2))

    def _edges(self, graph: Integers) -> Integers:
        """Returns each undirected edge once, [edges, 2], nodes from 0, in the graphs' order."""
        path = self._file("A")
        pairs = _integers(path, 2) - 1 if path.stat().st_size else np.empty((0, 2), np.int64)
        bad = np.flatnonzero(((pairs < 0) | (pairs >= len(graph))).any(1))
        if not len(bad):
            bad = np.flatnonzero(graph[pairs[:, 0]] != graph[pairs[:, 1]])
        if len(bad):
            raise SourceError(
                f"{path.name}, line {bad[0] + 1}: an edge from {pairs[bad[0], 0] + 1} to "
                f"{pairs[bad[0], 1] + 1}, which are not two nodes of one graph, of 1 to "
                f"{len(graph)}; {DOWNLOAD_AGAIN}"
            )
        try:
            edges = normalize_edges(pairs).astype(np.int64)
        except ValueError as fault:
            raise SourceError(f"{path.name}: {fault} (from 0); an edge has two nodes") from None
        if 2 * len(edges) != len(pairs):
            raise SourceError(
                f"{path.name} has {len(pairs)} lines for {len(edges)} pairs of nodes; graphs must "
                "be undirected, with each edge once in each direction"
            )
        return edges

    def _node_labels(self, nodes: int, edges: Integers) -> Integers:
        """Returns the label of each node: that of the file, or its degree."""
        path = self._file("node_labels")
        if path not in self.files:
            labels, where = np.bincount(edges.ravel(), minlength=nodes), "degrees"
        else:
            labels, where = self._column("node_labels"), path.name
        if len(labels) != nodes:
            raise SourceError(f"{where} has {len(labels)} lines for {nodes} nodes")
        if len(bad := np.flatnonzero((labels < 0) | (labels >= GRAPH_LIMITS[2][-1]))):
            raise SourceError(
                f"{where}, line {bad[0] + 1}: labels must be 0 to {GRAPH_LIMITS[2][-1] - 1}, got "
                f"{labels[bad[0]]}; renumber them, or leave them out with --ignore node_labels"
            )
        return labels


def _integers(path: Path, columns: int) -> Integers:
    """Reads lines of whole numbers separated by commas, [lines, columns]."""
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise SourceError(f"{path.name} has {size:,} bytes, and the limit is {MAX_FILE_BYTES:,}")
    if not size:
        raise SourceError(f"{path.name} is empty, without a number on each line; {DOWNLOAD_AGAIN}")
    try:
        table = np.loadtxt(path, np.int64, comments=None, delimiter=",", ndmin=2)
        if table.shape[1] != columns:
            raise ValueError(f"{table.shape[1]} numbers on a line")
    except ValueError as fault:
        raise SourceError(
            f"{path.name} must have lines of {columns} whole numbers, separated by commas: "
            f"{fault}; {DOWNLOAD_AGAIN}"
        ) from None
    return table
