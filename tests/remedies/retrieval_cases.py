"""What errors of training, of embeddings, of indexes and of the page propose."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.remedies.makers import Case
from tests.shards.others import jpeg

WIDTH = 400  # of the run's hidden layer: two views
TOKEN = "a-token_of-20-letter"
SERVE = ("serve", "INDEX", "--port", "0")
PRETRAIN = ("pretrain", "OUT/run/config.yaml", "optim.warmup_epochs=0")
HELD: list[socket.socket] = []


def taken_port(folder: Path) -> Sequence[Any]:
    HELD[:] = [socket.create_server(("127.0.0.1", 0))]
    return ["serve", "INDEX", "--port", HELD[0].getsockname()[1]]


def twice(folder: Path) -> Sequence[Any]:
    for name in ("a", "b"):
        (folder / f"{name}.jpg").write_bytes(jpeg(1, 32, 32))
    return ["query", "INDEX", "--file", "left=OUT/a.jpg", "--file", "left=OUT/b.jpg"]


def misnamed(folder: Path) -> Sequence[Any]:
    twice(folder)
    return ["query", "INDEX", "--file", "lft=OUT/a.jpg"]


def two_rows(folder: Path) -> Sequence[Any]:
    np.save(folder / "v.npy", np.ones((2, WIDTH), np.float32))
    return ["query", "INDEX", "--vector", "OUT/v.npy", "--row", "5"]


def unplanned(folder: Path) -> Sequence[Any]:
    (folder / "e").mkdir()
    (folder / "e" / "plan.json").write_text("{")
    return ["embed", "RUN", "--out", "OUT/e"]


def views(size: int) -> str:
    return f"[{{stored: left, size: {size}}}, {{stored: right, size: {size}}}]"


ON_INDEXES = [
    Case(
        "work with one index only; pass one",
        lambda folder: [*SERVE, "PLACE/./index", "--run", "RUN"],
        [],
        ["PLACE/./index"],
    ),
    Case(
        "a token must have 16 to 200 ",
        lambda folder: [*SERVE, "--token", "short"],
        ["--token", TOKEN],
        ["--token", "short"],
    ),
    Case(
        "or none for a random one",
        lambda folder: [*SERVE, "--host", "0.0.0.0", "--token", "short"],
        [],
        ["--token", "short"],
    ),
    Case(
        "cannot listen on ",
        lambda folder: [*SERVE, "--host", "192.0.2.1"],
        ["--host", "127.0.0.1"],
        ["--host", "192.0.2.1"],
    ),
    Case(
        "use --port 0 for a free one",
        taken_port,
        ["--port", "0"],
    ),
    Case(
        ": no view named '",
        misnamed,
        ["--file", "left=OUT/a.jpg"],
        ["--file", "lft=OUT/a.jpg"],
    ),
    Case(
        " already has a file; pass one file for each view",
        twice,
        ["--file", "left=OUT/a.jpg", "--file", "right=OUT/b.jpg"],
        ["--file", "left=OUT/a.jpg", "left=OUT/b.jpg"],
    ),
    Case(
        " rows, counted from 0, so --row cannot be ",
        two_rows,
        ["--row", "1"],
        ["--row", "5"],
    ),
    Case(
        "search on GPUs was requested, but FAISS ",
        lambda folder: ["index", "EMBEDDINGS", "--gpu", "--out", "OUT/index"],
        [],
        ["--gpu"],
    ),
    Case(
        "; use another --role or --split",
        lambda folder: (
            ["embed", "RUN", "--out", "OUT/e", "--role", "validation"]
            + ["data.protocol.validation=0", "evaluate.threshold=0.5"]
        ),
        ["--role", "labelled"],
        ["--role", "validation"],
        before=["shards", "show", "PLACE/faces"],
    ),
    Case(
        " has embeddings with other settings: ",
        lambda folder: ["embed", "RUN", "--out", "OUT/e", "--dtype", "float16"],
        ["--overwrite"],
        given=["embed", "RUN", "--out", "OUT/e"],
    ),
    Case(
        " has embeddings with other settings: ",
        lambda folder: ["embed", "RUN", "--out", "OUT/e", "--dtype", "float16"],
        ["--out", "OUT/other"],
        ["--out", "OUT/e"],
        given=["embed", "RUN", "--out", "OUT/e"],
    ),
    Case(
        " is not the plan of an unfinished embedding: ",
        unplanned,
        ["--overwrite"],
    ),
    Case(
        " is not the plan of an unfinished embedding: ",
        unplanned,
        ["--out", "OUT/other"],
        ["--out", "OUT/e"],
    ),
    Case(
        "lower optim.lr or raise tau, and check the data",
        lambda folder: [*PRETRAIN, "optim.lr=1e30", "train.steps=3"],
        ["optim.lr=1e-3"],
        ["optim.lr=1e30"],
        before=["shards", "verify", "PLACE/faces"],
    ),
    Case(
        " rows are not finite, the first is row ",
        lambda folder: [*PRETRAIN, "optim.lr=1e30"],
        ["optim.lr=1e-3"],
        ["optim.lr=1e30"],
        before=["shards", "verify", "PLACE/faces"],
    ),
    Case(
        "or set data.views",
        lambda folder: ["embed", "RUN", "--out", "OUT/e", f"data.views={views(16)}"],
        [f"data.views={views(32)}"],
        [f"data.views={views(16)}"],
    ),
]
