"""Draws the library's imports as text: rooms by floor, what each imports, circles.

    python -m tests.house                  the rooms of this checkout
    python -m tests.house --room data      the files of one room
    python -m tests.house --check          status 1 where a circle is left, or a limit is passed

A room is a folder of `heron/`, or a file there that stands alone. Every import counts: at the top
of a file, under TYPE_CHECKING, in a function, and in a file that imports by name (`import_module`)
each text that is the name of a module; a name that is put together is a fault. A name that a
package hands on is followed to the file that defines it, so that an `__init__.py` hides nothing.
"""

import argparse
import ast
import sys
from collections.abc import Hashable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeGuard, TypeVar

LIBRARY = "heron"
BY_NAME = "import_module", "__import__"
GROUND = f"{LIBRARY}.base"  # the room that every other may import: its arrows say nothing
# What --check allows, and the test of this house holds: a change may lower these, and one that
# must raise one says which lines went for those that came.
MAX_ROOMS, MAX_ARROWS, MAX_LINES, MAX_FILES = 21, 81, 56_479, 283

Node = TypeVar("Node", bound=Hashable)
Graph = Mapping[Node, set[Node]]


class House:
    """The files of a library, and which of them each imports."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.files: dict[str, Path] = {}  # by dotted name
        self._read(self.root / LIBRARY, LIBRARY)
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.files.items()}
        self.lines = {name: len(path.read_text().splitlines()) for name, path in self.files.items()}

    def _read(self, folder: Path, package: str) -> None:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".py":
                stem = "" if path.stem == "__init__" else f".{path.stem}"
                self.files[package + stem] = path
            elif path.is_dir() and any(path.rglob("*.py")):
                self._read(path, f"{package}.{path.name}")

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules that each module imports."""
        return {name: set(self._imported(name)) - {name} for name in self.files}

    def _imported(self, name: str) -> Iterator[str]:
        package = name if self.files[name].name == "__init__.py" else name.rpartition(".")[0]
        if any(_imports_by_name(node) for node in ast.walk(self.trees[name])):
            texts = {
                node.value for node in ast.walk(self.trees[name]) if isinstance(node, ast.Constant)
            }
            # Loggers are named after the library itself.
            yield from self.files.keys() & {x for x in texts if isinstance(x, str)} - {LIBRARY}
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.files)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                for alias in node.names:
                    if (defined := self._defined(base, alias.name)) is not None:
                        yield defined

    def _defined(self, module: str, name: str) -> str | None:
        """Returns the module that a name of a module comes from; None if it is none of ours."""
        if f"{module}.{name}" in self.files:
            return f"{module}.{name}"
        if module not in self.files:
            return None
        if self.files[module].name == "__init__.py":
            for node in self.trees[module].body:
                if (
                    isinstance(node, ast.ImportFrom)
                    and node.module in self.files
                    and any(name == (alias.asname or alias.name) for alias in node.names)
                ):
                    return self._defined(node.module, name)
        return module

    @cached_property
    def put_together(self) -> list[str]:
        """The places where a module of the library is imported by a name that is put together."""
        return [
            f"{name}:{node.lineno}"
            for name, tree in self.trees.items()
            for node in ast.walk(tree)
            if _imports_by_name(node) and node.args and _is_put_together(node.args[0])
        ]

    def room(self, module: str) -> str:
        """Returns the room of a module: `heron.data`, or the file itself if it stands alone."""
        return ".".join(module.split(".")[:2])

    def rooms(self) -> dict[str, set[str]]:
        """Returns the rooms, and which of them each imports."""
        graph: dict[str, set[str]] = {self.room(name): set() for name in self.files}
        for name, imported in self.imports.items():
            graph[self.room(name)] |= {self.room(other) for other in imported}
        return {room: others - {room} for room, others in graph.items()}

    def of_room(self, room: str) -> dict[str, set[str]]:
        """Returns the modules of a room, and which of its own each imports."""
        inside = {name for name in self.files if self.room(name).split(".")[-1] == room}
        return {name: self.imports[name] & inside for name in inside}


def _imports_by_name(node: ast.AST) -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", 0)
    return called in BY_NAME


def _is_put_together(name: ast.expr) -> bool:
    """Whether a name is made of parts, one of which is of this library."""
    return isinstance(name, ast.JoinedStr | ast.BinOp | ast.Call) and any(
        (isinstance(part, ast.Constant) and str(part.value).split(".")[0] == LIBRARY)
        or (isinstance(part, ast.Name) and part.id in ("__name__", "__package__"))
        for part in ast.walk(name)
    )


def circles(graph: Graph[Node]) -> list[set[Node]]:
    """Returns the sets of nodes that reach each other (Tarjan's algorithm, SICOMP 1972)."""
    index: dict[Node, int] = {}
    lowest: dict[Node, int] = {}
    path: list[Node] = []
    found: list[set[Node]] = []

    def visit(node: Node) -> None:
        index[node] = lowest[node] = len(index)
        path.append(node)
        for other in sorted(graph.get(node, ()), key=str):
            if other not in index:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in path:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            at = path.index(node)
            circle = set(path[at:])
            del path[at:]
            if len(circle) > 1:
                found.append(circle)

    for node in sorted(graph, key=str):
        if node not in index:
            visit(node)
    return found


def floors(graph: Graph[Node]) -> dict[Node, int]:
    """Returns each node's floor, one above the highest that it imports; a circle is on one."""
    group = {node: {node} for node in graph}
    for circle in circles(graph):
        group |= dict.fromkeys(circle, circle)
    height: dict[Node, int] = {}

    def of(node: Node) -> int:
        if node not in height:
            below = {other for member in group[node] for other in graph[member]} - group[node]
            height.update(dict.fromkeys(group[node], 1 + max(map(of, below), default=0)))
        return height[node]

    return {node: of(node) for node in graph}


def drawing(graph: Graph[str], lines: Mapping[str, int]) -> Iterator[str]:
    """Yields a line for each node, the highest floor first."""
    floor = floors(graph)
    for node in sorted(graph, key=lambda node: (-floor[node], node)):
        below = " ".join(sorted(other.rpartition(".")[2] for other in graph[node]))
        yield f"{floor[node]:3}  {node:44} {lines[node]:6,}  {below}".rstrip()


def count_arrows(rooms: Graph[str]) -> int:
    """Returns how many arrows there are between rooms, without those to the ground."""
    return sum(len(others - {GROUND}) for others in rooms.values())


def faults(house: House) -> Iterator[str]:
    """Yields what is against the rules of the house."""
    rooms = house.rooms()
    for name, graph in (("rooms", rooms), ("files", house.imports)):
        for circle in circles(graph):
            yield f"circle of {name}: {' '.join(sorted(circle))}"
    for place in house.put_together:
        yield f"{place} imports a module of {LIBRARY} by a name that is put together; write it out"
    found = {
        "rooms": (len(rooms), MAX_ROOMS),
        "arrows between rooms": (count_arrows(rooms), MAX_ARROWS),
        "lines": (sum(house.lines.values()), MAX_LINES),
        "files": (len(house.files), MAX_FILES),
    }
    for name, (count, most) in found.items():
        if count > most:
            yield f"{count:,} {name}; expected {most:,} at most"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--room", help="draws the files of this room")
    parser.add_argument("--check", action="store_true", help="status 1 where there is a fault")
    options = parser.parse_args(words)
    house = House(options.root)
    if options.room:
        print(*drawing(house.of_room(options.room), house.lines), sep="\n")
        return 0
    rooms = house.rooms()
    lines = dict.fromkeys(rooms, 0)
    for name, count in house.lines.items():
        lines[house.room(name)] += count
    print(*drawing(rooms, lines), sep="\n")
    print(
        f"{len(rooms)} rooms, {count_arrows(rooms)} arrows, "
        f"{len(circles(rooms))} circles of rooms, {len(circles(house.imports))} of files, "
        f"{sum(lines.values()):,} lines in {len(house.files)} files"
    )
    wrong = list(faults(house))
    print(*wrong, sep="\n")
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
