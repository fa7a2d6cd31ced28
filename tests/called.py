"""A command `heron` for other programs' children: its work is done in a forked process.

A notebook calls it some times, and a new interpreter loads for some five seconds each time.
"""

import json
import socketserver
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from tests import forked

OWN = Path(sys.executable).parent / "heron"
SCRIPT = f"""#!{sys.executable} -IS
import json, os, socket, sys
if sys.argv[1] == "serve":  # is read from while it runs, and is told to end
    os.execv({str(OWN)!r}, ["heron", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.path.join(os.path.dirname(__file__), "asked"))
    with server.makefile("rw") as file:
        print(json.dumps([sys.argv[1:], os.getcwd()]), file=file, flush=True)
        status, said = json.loads(file.readline())
print(said, end="")
sys.exit(status)
"""


class Answer(socketserver.StreamRequestHandler):
    """Runs what is asked for, and answers with its status and what it wrote."""

    def handle(self) -> None:
        words, folder = json.loads(self.rfile.readline())
        command = forked.start(words, Path(folder))
        try:
            said, _ = command.communicate(timeout=300)
        finally:
            command.kill()
        self.wfile.write(f"{json.dumps([command.returncode, said])}\n".encode())


@contextmanager
def heron() -> Iterator[Path]:
    """A folder in which `heron` is such a command, while it lasts."""
    with tempfile.TemporaryDirectory(prefix="heron-") as name:  # short, as a socket's path must be
        folder = Path(name)
        (folder / "heron").write_text(SCRIPT)
        (folder / "heron").chmod(0o755)
        with socketserver.UnixStreamServer(str(folder / "asked"), Answer) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield folder
            finally:
                server.shutdown()
