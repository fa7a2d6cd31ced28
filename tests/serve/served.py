"""Small indexes with all that `heron serve` shows: pictures, labels, and a model for uploads."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from uvicorn import Server

from heron.data.batches import Batch
from heron.data.dataset import open_reader
from heron.data.views import Views
from heron.models.heterogeneous import Features, Heterogeneous
from heron.retrieval.build import build_index
from heron.retrieval.embedding_model import EmbeddingModel
from heron.retrieval.file_encoder import FileEncoder
from heron.retrieval.query import Retriever
from heron.serve.admission import BINARY, Limits
from heron.serve.server import address, listen, make_server
from heron.shards.build import build
from heron.sources import make_source
from tests.experiments import frames
from tests.retrieval import made

MARKUP = "<img src=x onerror=document.title='broken'>"  # a label that no page may run
LIMITS = Limits(upload_bytes=200_000, body_s=0.5)


class Halves:
    """A model that sees one view: pictures as 8 x 8 means, vectors as they are."""

    classified = 1

    def __call__(self, views: list[Tensor], *_: object, **__: object) -> Features:
        x = views[0]
        x = torch.nn.functional.adaptive_avg_pool2d(x, 8).flatten(1) if x.dim() == 4 else x
        return {"hidden": [x - x.mean(1, keepdim=True)]}


def retriever(folder: Path, source: str, rows: int = 48) -> Retriever:
    """An index of every row of a source, `faces` or `frames`, by `Halves`."""
    options: dict[str, Any] = {"train": rows, "test": 0}
    options |= {"size": 32} if source == "faces" else {"classes": 4}
    build(make_source(source, options), folder / source, progress=False)
    view = "image" if source == "faces" else "view1"
    config = frames(folder, data={"path": str(folder / source), "views": [{"stored": view}]}).data
    reader = open_reader(config)
    views = Views(reader, config, torch.device("cpu"))
    model = EmbeddingModel(cast(Heterogeneous, Halves()), views, reader)
    numbers = np.arange(rows)
    names = reader.manifest.labels.names
    if source == "frames":
        names = [MARKUP, "a b's", *names[2:]]
    vectors = np.stack([_vector(model, reader.read(view, numbers[i : i + 1])) for i in numbers])
    embeddings = made.embeddings(
        folder / "embeddings",
        {"hidden": vectors},
        reader.targets(numbers),
        names,
        reader.manifest.labels.kind,
        reader.sample_keys(numbers),
        data=str(folder / source),
    )
    build_index(embeddings, folder / "index", kind="flat", progress=False)
    found = Retriever.open(folder / "index")
    found.__dict__["_encoder"] = FileEncoder(model, "hidden")  # in place of a trained one
    found.__dict__["inputs"] = {view: reader.view(view).kind}
    return found


def _vector(model: EmbeddingModel, rows: NDArray[Any]) -> NDArray[np.float32]:
    one, none = torch.zeros(1, dtype=torch.int64), torch.empty(0, 0)
    batch = Batch({model.stored[0]: torch.from_numpy(rows)}, none, one, one, [1])
    return np.asarray(model.forward(batch, ["hidden"])["hidden"][0].numpy())


@contextmanager
def running(
    found: Retriever | Mapping[str, Retriever],
    limits: Limits | None = None,
    token: str | None = None,
) -> Iterator[str]:
    """A real server in a thread; its address."""
    listening = listen("127.0.0.1", 0)
    with in_thread(make_server(found, listening, limits, token), listening):
        yield address(listening, token)


@contextmanager
def in_thread(server: Server, listening: socket.socket) -> Iterator[None]:
    """Runs a server until the end of the context."""
    thread = Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
        assert not thread.is_alive()


class Site(NamedTuple):
    """A running server and what it serves."""

    url: str
    found: Retriever

    def ask(
        self, path: str, method: str = "GET", body: Any = None, **headers: str
    ) -> tuple[HTTPResponse, bytes]:
        """One request; `_` in a header's name stands for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=10)
        try:
            connection.request(method, path, body, named)
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()

    def json(self, path: str, status: int = 200, **rest: Any) -> Any:
        """The answer of one request, with the status that it must have."""
        response, data = self.ask(path, **rest)
        assert response.status == status, data
        return json.loads(data)

    def error(self, path: str, status: int = 400, **rest: Any) -> str:
        """The error of one request; it is a text and nothing else."""
        found = self.json(path, status, **rest)
        assert list(found) == ["error"] and "Traceback" not in found["error"]
        return str(found["error"])

    def upload(self, data: Any, status: int = 200, query: str = "") -> Any:
        """The answer to an upload."""
        return self.json(
            f"/api/upload{query}", status, method="POST", body=data, Content_Type=BINARY
        )


def begun(site: Site, *lines: str) -> socket.socket:
    """A connection that has sent some lines."""
    found = socket.create_connection((urlsplit(site.url).hostname, urlsplit(site.url).port), 5)
    found.sendall("".join(f"{line}\r\n" for line in lines).encode())
    return found


def answered(line: socket.socket) -> bytes:
    """An answer, up to its end or that of the connection."""
    found = b""
    while not found.endswith(b"}") and (more := line.recv(4_000)):
        found += more
    return found


POST = "POST /api/upload HTTP/1.1", "Host: localhost", f"Content-Type: {BINARY}"


def picture(site: Site, number: int, kind: str = "PNG") -> bytes:
    """A stored picture as a file."""
    found = site.found.picture(number)
    assert found is not None
    found.save(out := BytesIO(), kind)
    return out.getvalue()
