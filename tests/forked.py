"""Commands in processes forked from one that has loaded their libraries: see `ranks`.

A new interpreter loads for some five seconds; `subprocess` is for what its start or its end is
asked about.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from heron.cli.main import main as heron
from heron.distributed.watchdog import leave
from tests.ranks import begin_server

Main = Callable[[Sequence[str]], int]


class Command:
    """A command under way, with what is used here of `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], folder: Path, main: Main, environment: Mapping[str, str]
    ) -> None:
        """Starts it, as the first process of a session."""
        self.words = words
        file, name = tempfile.mkstemp(prefix="heron-said-")
        os.close(file)
        self._said = Path(name)
        weakref.finalize(self, self._said.unlink)
        given = words, str(folder), dict(environment), str(self._said), main
        begin_server()
        self._process = multiprocessing.get_context("forkserver").Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The status, or minus the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it wrote on both outputs, once it has ended."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.words, timeout or 0)
        return self._said.read_text(), None


def start(
    words: Sequence[str],
    folder: Path,
    main: Main = heron,
    environment: Mapping[str, str] = os.environ,
) -> Command:
    """Start a command in a folder.

    Args:
        words: behind the command's name.
        folder: that it runs in.
        main: of the command, importable; without one it is `heron`.
        environment: all of its variables.
    """
    return Command(words, folder, main, environment)


def output(words: Sequence[str], folder: Path, main: Main = heron) -> str:
    """What a command wrote that ended well."""
    command = start(words, folder, main)
    said, _ = command.communicate(timeout=300)
    assert command.returncode == 0, said[-3000:]
    return said


def _run(
    words: Sequence[str], folder: str, environment: dict[str, str], said: str, main: Main
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in some shells
    torch.set_num_threads(1)
    os.environ.clear()  # the server has that of the moment when it began
    os.environ |= environment
    os.chdir(folder)
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.argv = ["heron", *words]
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        print(end.code if isinstance(end.code, str) else "", file=sys.stderr)
    leave(status)  # a thread of a library can abort the interpreter's end
