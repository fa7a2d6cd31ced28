"""What errors of data propose, by command."""

from typing import Any

import numpy as np
import pyarrow as pa

from tests.remedies.makers import (
    BUILD_FRAMES,
    CATS,
    CLASSES,
    FIELD,
    NUMBERS,
    WITH_TEXTS,
    Case,
    X,
    also,
    arrays,
    attributed,
    cell_of,
    faces,
    frames_in,
    indexed,
    mat,
    other_table,
    parquet,
    pictures,
    rows,
    strays,
    table,
    tar,
)
from tests.shards.others import cats, jpeg

PARTS = {"x_train": X, "y_train": CLASSES, "x_test": X[:9], "y_test": CLASSES[:9]}
NOT_USED: list[tuple[Any, list[str], list[str]]] = [  # arrays that do not fit the others
    (arrays(x=X, labels=CLASSES, age=np.arange(40.0)), ["--ignore", "age"], []),
    (arrays(x=X, labels=CLASSES, age=np.arange(40.0), z=X[:9]), ["--ignore", "age", "z"], []),
    (arrays("--view-names", "x", x=X, z=X, labels=CLASSES), ["--ignore", "z"], []),
    (arrays("--label-kind", "none", x=X, kinds=CLASSES), ["--ignore", "kinds"], []),
    (arrays(x=X, labels=CLASSES, split=np.arange(40)), ["--ignore", "split"], []),
    (arrays(**PARTS, x_val=X[:5]), ["--ignore", "x_val"], []),
    (arrays(**PARTS, meta=np.arange(40.0)), ["--ignore", "meta"], []),
    (
        arrays("--labels-name", "y_train", **PARTS),
        ["--ignore", "y_test", "x_test"],
        [],
    ),
    (mat(X=X, Z=np.ones((40, 3, 4)), Y=CLASSES), ["--ignore", "Z"], []),
]

CASES = [
    Case(
        "may be a row, or names as pandas writes columns",
        table(rows("0,1,2", *(f"{n},{n + 3},{n % 2}" for n in range(1, 9))), "--label", "none"),
        ["--header", "yes"],
    ),
    Case(
        "as in a header, and",
        table(rows("age,1,kind", *NUMBERS)),
        ["--header", "yes"],
    ),
    Case(
        "what is no feature or, if it",
        table(rows("one,two,kind", *(f"{n % 3},{n}.5,{'abc'[n % 3]}" for n in range(40)))),
        ["--keep", "features:one"],
    ),
    Case(
        "in a row; several label columns must be 0 or 1",
        table(rows("x,a,b", *(f"{n}.5,{n % 3},{n % 6}" for n in range(40))), "--label", "a", "b"),
        ["--label-kind", "hierarchical"],
    ),
    Case(
        "its first line can be split ",
        table(rows("a;b,kind", *(f"{n}.5,{'abc'[n % 3]}" for n in range(40)))),
        ["--separator", "comma"],
    ),
    Case(
        "which may be the labels",
        arrays(x=X, kinds=CLASSES),
        ["--labels-name", "kinds"],
    ),
    Case(
        "may both be the labels",
        arrays(x=X, y=CLASSES, gnd=CLASSES),
        ["--labels-name", "y", "--ignore", "gnd"],
    ),
    *(
        Case("drop what is not used with --ignore", made, more, without)
        for made, more, without in NOT_USED
    ),
    Case(
        "add it to --view-names, or ",
        arrays("--view-names", "x", x=X, z=X, labels=CLASSES),
        ["--view-names", "x", "z"],
        ["--view-names", "x"],
    ),
    Case(
        "without 1 or 3 channels on either the second axis or the last",
        arrays(x=np.zeros((40, 3, 5, 3), np.uint8), labels=CLASSES),
        ["--channels", "last"],
    ),
    Case(
        "labels are only -1 and 1",
        arrays(x=X, labels=np.array([1, -1] * 20)),
        ["--minus-one", "no"],
    ),
    Case(
        "must be [rows, levels] for hierarchical labels and",
        arrays("--label-kind", "hierarchical", x=X, labels=CLASSES),
        ["--label-kind", "multi_class"],
        ["--label-kind", "hierarchical"],
    ),
    Case(
        " names; see --label-names",
        arrays("--label-names", "a", x=X, labels=np.eye(3, dtype=int)[CLASSES]),
        ["--label-names", "a", "b", "c"],
        ["--label-names", "a"],
    ),
    Case(
        "labels], because single labels may be unknown",
        arrays("--unknown", "allow", x=X, labels=CLASSES),
        [],
        ["--unknown", "allow"],
    ),
    Case(
        "of samples that fit all of",
        mat(X=X, Z=np.ones((7, 5)), W=np.ones((40, 6))),
        ["--ignore", "Z"],
    ),
    Case(
        "and samples may be its rows or columns",
        mat(X=X[:3], Y=CLASSES[:3]),
        ["--samples", "rows"],
    ),
    Case(
        ", not a matrix of real numbers, or texts",
        mat(X=X, S=1j * X, Y=CLASSES),
        ["--ignore", "S"],
    ),
    Case(
        "no view was chosen; it has the columns",
        parquet(a=["x", "y"] * 4),
        ["--text", "a"],
    ),
    Case(
        " may be the label; choose one with --label, as in",
        parquet(a=[[1.0, 2.0]] * 8, kind=["x", "y"] * 4, breed=["z", "y"] * 4),
        ["--vector", "a", "--label", "kind"],
    ),
    Case(
        "such rows as unlabelled with --missing-label unlabelled",
        parquet("--vector", "a", "--label", "kind", a=[[1.0, 2.0]] * 8, kind=["x", None] * 4),
        ["--missing-label", "unlabelled"],
    ),
    Case(
        "no row has a label; remove --label",
        parquet(
            *("--vector", "a", "--label", "kind", "--missing-label", "unlabelled"),
            a=[[1.0, 2.0]] * 8,
            kind=pa.array([None] * 8, pa.string()),
        ),
        [],
        ["--label", "kind", "--missing-label", "unlabelled"],
    ),
    Case(
        "is beside the split train, where only",
        pictures("train/a/1.jpg", "train/b/2.jpg", "wild/a/3.jpg"),
        ["--split-names", "train", "wild"],
    ),
    Case(
        " for a split, only ",
        pictures("train/a/1.jpg", "train/b/2.jpg", words=["--split-names", "tain"]),
        ["--split-names", "train"],
        ["--split-names", "tain"],
    ),
    Case(
        "a contact sheet must be one of ",
        faces("shards", "show", "FACES", "--sheet", "OUT/sheet.txt"),
        ["--sheet", "OUT/sheet.png"],
        ["--sheet", "OUT/sheet.txt"],
    ),
    Case(
        "would be empty; use --count 1 or more",
        faces("shards", "show", "FACES", "--sheet", "OUT/sheet.png", "--count", 0),
        ["--count", 1],
        ["--count", 0],
    ),
    Case(
        "already exists; name a new file with --out",
        faces("init", "FACES", "--out", "OUT/taken"),
        ["--out", "OUT/new.yaml"],
        ["--out", "OUT/taken"],
    ),
    Case(
        "`--prefix-keys true` tells tars apart",
        lambda folder: [*tar(cats(0, 3), *CATS)(folder), *also(folder, "two.tar")],
        ["--prefix-keys", "true"],
    ),
    Case(
        "treat it as unlabelled with `--missing-label unlabelled`",
        tar([*cats(0, 3), {"__key__": "9", "jpg": jpeg(9)}], *CATS),
        ["--missing-label", "unlabelled"],
    ),
    Case(
        "must be in one; name the split with --split NAME=PATTERN",
        lambda folder: [*tar(cats(0, 3), *CATS)(folder), *also(folder, "train.tar", 50)],
        ["--split", "train=*.tar"],
    ),
    Case(
        "label: every list is empty; remove --label",
        tar([{"__key__": "1", "jpg": jpeg(1), "json": {"t": []}}], "--image", "jpg", *FIELD),
        [],
        ["--label", "json:t"],
    ),
    Case(
        "this looks like text: index it with --text",
        tar(WITH_TEXTS, "--image", "jpg", "--label", "txt"),
        ["--text", "txt"],
        ["--label", "txt"],
    ),
    Case(
        " exists, which this source cannot read",
        lambda folder: ["shards", "build", "tu", "--folder", attributed(folder)],
        ["--ignore", "node_attributes"],
    ),
    Case(
        "use a name that one column has",
        table(rows("one,kind", *(f"{n}.5,{'abc'[n % 3]}" for n in range(40))), "--label", "kinds"),
        ["--label", "kind"],
        ["--label", "kinds"],
    ),
    Case(
        "there are several files",
        lambda folder: [*table(rows("1.5,2.5", "2.5,3.5"))(folder), other_table(folder)],
        ["--label", "none"],
    ),
    Case(
        "since the matrices of a cell are numbered from 1",
        mat(X1=X, X=cell_of(X, X + 1), Y=CLASSES),
        ["--ignore", "X"],
    ),
    Case(
        ", or -1 in all of a row that has no label, got ",
        arrays("--label-names", "a", "b", x=X, labels=CLASSES),
        ["--label-names", "a", "b", "c"],
        ["--label-names", "a", "b"],
    ),
    Case(
        "or use --minus-one no beside labels of 1",
        tar([{"__key__": str(n), "jpg": jpeg(n), "cls": n % 2 * 2 - 1} for n in range(6)], *CATS),
        ["--minus-one", "no"],
    ),
    Case(
        "was indexed with ",
        indexed("shards", "index", "TARS", *CATS, "--missing-label", "unlabelled"),
        ["--overwrite"],
    ),
    Case(
        "has tars that were indexed in place; choose another --out, a new folder or",
        indexed(*BUILD_FRAMES, "--overwrite", "--out", "TARS"),
        ["--out", "OUT/new"],
        ["--overwrite", "--out", "OUT/tars"],
    ),
    Case(
        "a build of Heron; choose another --out, or empty it",
        strays(*BUILD_FRAMES, "--out", "OUT/strays"),
        ["--out", "OUT/new"],
        ["--out", "OUT/strays"],
    ),
    Case(
        "; see `heron shards build ",
        lambda folder: ["shards", "build", "arrays", "--out", "OUT/new"],
        ["--help"],
    ),
    Case(
        "a contact sheet needs pictures: run without --sheet",
        lambda folder: ["shards", "show", frames_in(folder), "--sheet", "OUT/sheet.png"],
        [],
        ["--sheet", "OUT/sheet.png"],
    ),
]
