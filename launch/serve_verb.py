"""`heron serve`: a web page over an index."""

import argparse
from pathlib import Path

from heron.launch.verb import Verb
from heron.pipeline.config.errors import ConfigError


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", type=Path, metavar="INDEX", help="folder of an index")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; another than loopback lets others search, and upload",
    )
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument(
        "--embeddings", type=Path, help="folder of embeddings (default: the index's)"
    )
    parser.add_argument(
        "--run", dest="model", metavar="RUN", help="run that encodes uploads (default: the index's)"
    )
    parser.add_argument("--data", help="shards that pictures are in (default: the index's)")


def _run(arguments: argparse.Namespace) -> int:
    from heron.pipeline.retrieval.query import (
        Retriever,  # here, so that `heron --help` need not load it
    )

    try:
        from heron.pipeline.serve.server import address, listen, make_server
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"the web page needs the package {missing.name}, which is not installed; install it "
            "with: pip install 'heron-pretrain[serve]'"
        ) from None
    listening = listen(arguments.host, arguments.port)  # a taken port is found before the index
    retriever = Retriever.open(
        arguments.index, arguments.embeddings, arguments.model, arguments.data
    )
    server = make_server(retriever, listening)
    print(f"{arguments.index}: {len(retriever.samples):,} samples at {address(listening)}")
    print("Ctrl-C ends it", flush=True)
    server.run(sockets=[listening])
    return 0


SERVE = Verb("show an index as a web page", _add, _run)
