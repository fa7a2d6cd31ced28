"""What errors of labels propose, and of the files of graphs, of MATLAB and of CIFAR."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.graphs import write_tu
from tests.remedies.makers import CATS, CLASSES, FIELD, Case, X, arrays, pictures, tar
from tests.shards.others import cats, jpeg, npy
from tests.sources import test_cifar, test_mat
from tests.sources.pickles import dumps2

SIGNS = [{"__key__": str(n), "jpg": jpeg(n), "npy": npy([n % 2 * 2 - 1, 1])} for n in range(6)]
MANY = {
    "__key__": "1",
    "jpg": jpeg(1),
    "json": {"t": ["a"], "many": [str(n) for n in range(100_001)]},
}


def labelled_nodes(folder: Path) -> Sequence[Any]:
    path = write_tu(folder / "rings") / "rings_node_labels.txt"
    path.write_text("-1\n" + path.read_text()[2:])
    return ["shards", "build", "tu", "--folder", path.parent]


def struct(folder: Path) -> Sequence[Any]:
    test_mat.write(folder / "m.mat", "v7.3", {"X": X, "S": {"a": 1}, "Y": CLASSES[:, None] + 1.0})
    return ["shards", "build", "mat", "--mat", folder / "m.mat"]


def cifar(files: dict[str, bytes], *words: Any) -> Callable[[Path], Sequence[Any]]:
    def make(folder: Path) -> Sequence[Any]:
        path = test_cifar.pack(folder / "cifar.tar.gz", files)
        return ["shards", "build", "cifar", "--path", path, *words]

    return make


def of_one_class() -> dict[str, bytes]:
    """CIFAR-100 whose rows are all of one class, so that nothing tells where the others belong."""
    rows = test_cifar.batch(test_cifar.PIXELS[:1], fine_labels=[7], coarse_labels=[7])
    one = dumps2(rows)
    return {"meta": test_cifar.hundred()["meta"], "train": one, "test": one}


def with_unicorns() -> dict[str, bytes]:
    names = {b"label_names": [*test_cifar.TEN[:9], b"unicorn"]}
    return test_cifar.ten() | {"batches.meta": dumps2(names)}


def of_others(folder: Path) -> Sequence[Any]:
    test_cifar.pack(folder / "cifar.tar.gz", test_cifar.ten())
    path = test_cifar.pack(folder / "others.tar.gz", {"notes.txt": b""})
    return ["shards", "build", "cifar", "--path", path]


def some_unknown() -> Any:
    labels = np.eye(3)[CLASSES]
    labels[5, 1] = np.nan
    return labels


LABELLED = [
    Case(
        "if single labels of a row are unknown: --unknown allow",
        arrays(x=X, labels=some_unknown()),
        ["--unknown", "allow"],
    ),
    Case(
        " (see --split-names)",
        pictures("train/a/1.jpg", "train/b/2.jpg", "test/a/old/3.jpg"),
        ["--split-names", "train"],
    ),
    Case(
        "no file of CIFAR; pass another --path: ",
        of_others,
        ["--path", "OUT/cifar.tar.gz"],
        ["--path", "OUT/others.tar.gz"],
    ),
    Case(
        "or a vector of 0 and 1, or of -1 and 1 with --minus-one no",
        tar(SIGNS, "--image", "jpg", "--label", "npy"),
        ["--minus-one", "no"],
    ),
    Case(
        "must be -1 or 1, because of --minus-one no, got",
        tar(cats(0, 6), *CATS, "--minus-one", "no"),
        [],
        ["--minus-one", "no"],
    ),
    Case(
        "these are not classes: use another --label",
        tar([MANY], "--image", "jpg", "--label", "json:many"),
        FIELD,
        ["--label", "json:many"],
    ),
    Case(
        " labels must be 0/1, got ",
        arrays("--label-kind", "multi_label", x=X, labels=np.array(["a", "b", "c", "d"] * 10)),
        ["--label-kind", "multi_class"],
        ["--label-kind", "multi_label"],
    ),
    Case(
        "or leave them out with --ignore node_labels",
        labelled_nodes,
        ["--ignore", "node_labels"],
    ),
    Case(
        "has a struct or another object; drop it with",
        struct,
        ["--ignore", "S"],
    ),
    Case(
        "is neither animal nor vehicle",
        cifar(with_unicorns(), "--label-kind", "hierarchical"),
        ["--label-kind", "multi_class"],
        ["--label-kind", "hierarchical"],
    ),
    Case(
        " coarse classes, not in one",
        cifar(of_one_class()),
        ["--label-kind", "multi_class"],
    ),
]
