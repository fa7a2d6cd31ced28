"""A group of processes that wait for requests and answer them together."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.isolation import CONTEXT, LEAVE_S

GONE = "its process ended"


class Crew:
    """Processes of one function, whose first argument is the connection that it answers by."""

    def __init__(self, function: Callable[..., None], args: Iterable[Sequence[Any]]) -> None:
        """Starts a process for each of `args`, which are the function's other arguments."""
        self.members = []
        for arguments in args:
            connection, remote = CONTEXT.Pipe()
            process = CONTEXT.Process(target=function, args=(remote, *arguments))
            process.start()
            remote.close()
            self.members.append((connection, process))

    def ask(self, question: Any) -> list[Any]:
        """Sends all processes the same request, and returns their answers."""
        for connection, _ in self.members:
            connection.send(question)
        return self.answers()

    def answers(self) -> list[Any]:
        """Returns the next answer of each process; only `GONE` if one has ended without."""
        try:
            return [connection.recv() for connection, _ in self.members]
        except (EOFError, ConnectionError):
            return [GONE]

    def close(self) -> None:
        """Closes the connections and ends the processes."""
        for connection, _ in self.members:
            connection.close()
        for _, process in self.members:
            process.join(LEAVE_S)
            process.kill()
