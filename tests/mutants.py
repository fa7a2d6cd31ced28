"""Small faults planted in the code one at a time, and whether the tests nearest to them fail.

    python -m tests.mutants [--sample 100] [--seed 0] [--jobs 2] [--only heron/data]

draws a sample of all faults that `faults` can plant, the same one for a seed and a tree; plants
each in a copy of the tree, runs the tests that `stages` names until one fails, and prints those
that survived and the share that died. A fault is a changed comparison, operator, constant or
condition, a statement left out, or two arguments swapped. Messages, annotations, declarations and
constants that decide speed alone are left as they are. Its status is 1 where less than `--least` of
the sample died.

No tool that is kept does this here: mutmut puts a trampoline for each function, which neither a
Triton kernel nor a checked annotation survives, and cosmic-ray knows neither a sample nor the
tests nearest to a file.
"""

import argparse
import ast
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = "plan", "rows", "batches", "streams", "random_keys", "protocol"
PLACES = ["heron/losses", "heron/distributed", "heron/training/checkpoint.py"]
PLACES += [f"heron/data/{name}.py" for name in DATA]
SPEED = {  # module constants that decide how fast, in how much memory or how patiently, no value
    "AHEAD", "BLOCKS", "EXACT", "INTERPRETED", "IN_USE", "JOIN_S", "LEAVING_S", "LOOKS",
    "MATCH_PART", "MIN_STRIP_ROWS", "PROGRAMS", "PROGRAMS_INTERPRETED", "SHARED_KIB", "STRIP",
    "STRIP_ELEMENTS", "WIDEST_SIDE",
}  # fmt: skip
SLACK_S = 30.0  # a stage may take three times what it takes without a fault, and this

# The tests near a folder, in stages: the next is run where none of the last has failed.
UNITS = [f"tests/objectives/test_{n}.py" for n in ("terms", "family", "golden")]
UNITS += [f"tests/objectives/test_{n}.py" for n in ("custom", "objective", "contrast")]
RANKS, MATRIX = (f"tests/distributed/test_{name}.py" for name in ("distribution", "strategies"))
RUNS, METHODS = "tests/test_pretrain.py", "tests/experiment/test_methods.py"
LAUNCHED, KILLED = "tests/launch/test_configurations.py", "tests/training/test_kills.py"
REFERENCES, QUEUES = "tests/test_references.py", "tests/objectives/test_complementary.py"
SLOW = RANKS, MATRIX, RUNS, METHODS, LAUNCHED, KILLED, REFERENCES, QUEUES
FUSED = [f"tests/objectives/test_fused{n}.py" for n in ("", "_precision", "_terms", "_compile")]
NEAR: dict[str, list[list[str]]] = {
    "heron/losses/fused": [FUSED],
    **dict.fromkeys(
        [f"heron/losses/{name}" for name in ("engine", "contrast", "objective", "batch")],
        [[*UNITS, FUSED[1]], [METHODS], [RANKS], [REFERENCES]],
    ),
    **dict.fromkeys(
        [f"heron/losses/{name}" for name in ("memory", "momentum", "mulco", "pico")],
        [UNITS[-2:], [QUEUES], [METHODS], [RANKS], [REFERENCES]],
    ),
    "heron/losses": [UNITS[-2:], [METHODS], [RANKS], [REFERENCES]],
    "heron/data": [["tests/data"], [RUNS, QUEUES]],
    "heron/distributed/agreement": [["tests/distributed/test_agreement.py"], [RUNS]],
    "heron/distributed/launch": [["tests/distributed/test_launch.py", LAUNCHED, MATRIX], [RUNS]],
    "heron/distributed/watchdog": [["tests/distributed/test_watchdog.py"], [KILLED]],
    "heron/distributed/zero": [[MATRIX], [RUNS]],
    "heron/distributed": [[RANKS], [MATRIX], [RUNS]],
    "heron/training": [["tests/training/test_checkpoint.py"], [RUNS], [MATRIX], [KILLED]],
}


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted: the bytes of a file from `start` to `stop` become `new`."""

    file: str
    line: int
    start: int
    stop: int
    old: str
    new: str

    def __str__(self) -> str:
        """Says where it is, and what it puts in whose stead."""
        old, new = (re.sub(r"\s+", " ", text)[:60] for text in (self.old, self.new))
        return f"{self.file}:{self.line}: {old} -> {new}"


COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
COMPUTED: dict[type[ast.operator], tuple[str, str]] = {  # an operator, and what takes its place
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitXor: ("^", "|"),
}  # fmt: skip
LEFT_OUT = ast.Expr | ast.Assign | ast.AugAssign | ast.Raise | ast.Continue | ast.Break


class Finder(ast.NodeVisitor):
    """Lists the faults that can be planted in a file."""

    def __init__(self, file: str, source: bytes) -> None:
        """Takes the source as bytes, in which positions of `ast` count."""
        self.file, self.source = file, source
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self.starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        self.found: list[Fault] = []
        self.visit(ast.parse(source))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Returns where a node begins and ends."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Returns a node's source."""
        begin, end = self.span(node)
        return self.source[begin:end].decode()

    def add(self, node: ast.expr | ast.stmt, new: str, span: tuple[int, int] | None = None) -> None:
        """Lists a fault in the stead of a node, or of a part of it."""
        begin, end = span or self.span(node)
        old = self.source[begin:end].decode()
        if new != old:
            self.found.append(Fault(self.file, node.lineno, begin, end, old, new))

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Lists another operator between two operands."""
        begin, end = self.span(left)[1], self.span(right)[0]
        match = re.search(rf"(?<!\w){re.escape(old)}", self.source[begin:end].decode())
        if match:
            self.add(left, new, (begin + match.start(), begin + match.end()))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Looks at defaults and the body: annotations and decorators decide nothing."""
        for inner in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(inner)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Looks at the body."""
        for inner in node.body:
            self.visit(inner)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Looks at the value."""
        if node.value is not None and not _is_speed(node.target):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Looks at the value."""
        if not _is_speed(node.targets[0]):
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leaves messages alone."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leaves what is said to readers and type checkers alone."""

    def visit_Compare(self, node: ast.Compare) -> None:
        """Puts `<=` for `<`, and so on."""
        operands = [node.left, *node.comparators]
        for left, kind, right in zip(operands, node.ops, operands[1:], strict=False):
            old = re.sub(r"\s+", " ", ast.unparse(ast.Compare(left, [kind], [right])))
            old = old.removeprefix(ast.unparse(left)).removesuffix(ast.unparse(right)).strip()
            self.between(left, right, old, COMPARED[type(kind)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Puts `-` for `+`, and so on; strings are joined by `+`."""
        strings = any(
            isinstance(side, ast.JoinedStr)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        if not strings and type(node.op) in COMPUTED:
            self.between(node.left, node.right, *COMPUTED[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Puts `or` for `and`."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self.between(node.values[0], node.values[1], old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drops `not` and `-`."""
        if isinstance(node.op, ast.Not | ast.USub):
            self.add(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Puts another number, or the other truth value."""
        value = node.value
        if isinstance(value, bool):
            self.add(node, str(not value))
        elif isinstance(value, int):
            self.add(node, str(value + 1))
        elif isinstance(value, float):
            self.add(node, str(value * 2 or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        """Swaps the first two arguments; those of `max` have no order."""
        symmetric = isinstance(node.func, ast.Name) and node.func.id in ("max", "min")
        plain = not symmetric and not any(
            isinstance(argument, ast.Starred) for argument in node.args[:2]
        )
        if len(node.args) > 1 and plain:
            one, two = node.args[:2]
            gap = self.source[self.span(one)[1] : self.span(two)[0]].decode()
            swapped = self.text(two) + gap + self.text(one)
            self.add(node, swapped, (self.span(one)[0], self.span(two)[1]))
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """Leaves a statement out, or turns a condition round."""
        if isinstance(node, LEFT_OUT) and not _is_declared(node):
            self.add(node, "pass")
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            self.add(node.test, f"not ({self.text(node.test)})", self.span(node.test))
        super().generic_visit(node)


def _is_speed(target: ast.expr) -> bool:
    """Whether a constant of `SPEED` is assigned."""
    return isinstance(target, ast.Name) and target.id in SPEED


def _is_declared(node: ast.stmt) -> bool:
    """Whether leaving a statement out only makes a name undefined, or takes out a docstring."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    names = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple)
    return names


def faults(places: Sequence[str] = PLACES) -> list[Fault]:
    """Returns every fault that can be planted in some files and folders, in order."""
    found = []
    for place in places:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found += Finder(str(file.relative_to(ROOT)), file.read_bytes()).found
    return found


def stages(file: str) -> list[list[str]]:
    """Returns the tests of a file: first those that import it, then those near its folder."""
    dotted = re.escape(f"heron.{file.removesuffix('.py').replace('/', '.')}")
    package, _, name = dotted.rpartition(r"\.")
    pattern = re.compile(rf"{dotted}\b|from {package} import [^\n]*\b{name}\b")
    (near,) = [near for start, near in NEAR.items() if file.startswith(start)][:1]
    direct = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if pattern.search(path.read_text())
    ]
    far = (*SLOW, "tests/launch/", "tests/studies/", "tests/evaluation/", "tests/test_")
    quick = [test for test in direct if not test.startswith(far) and test not in near[0]]
    if set(near[0]).isdisjoint(SLOW):
        return [quick + near[0], *near[1:]]
    return [stage for stage in (quick, *near) if stage]


class Bench:
    """A copy of the tree in which faults are planted, and how long stages take without one."""

    def __init__(self, folder: Path) -> None:
        """Copies what git knows of."""
        self.folder, self.written = folder, int(time.time())
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    def write(self, file: str, source: bytes) -> None:
        """Writes a file; byte code of the same second and size would be taken for that of it."""
        self.written += 2
        (self.folder / file).write_bytes(source)
        os.utime(self.folder / file, (self.written, self.written))

    def fails(self, tests: Sequence[str], limit: float | None) -> str:
        """Returns which test fails first, what else ends the stage, or ""."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        with (self.folder / "said.txt").open("w+") as said:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=said, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
            said.seek(0)
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text := said.read(), re.MULTILINE)
        if status is None:
            return f"longer than {limit:.0f} s"
        if status == 0:
            return ""
        return failed[1] if failed else f"status {status}: {text[-300:]!r}"

    def survives(self, fault: Fault, clean: "Clean", most: int) -> str:
        """Plants a fault; returns what found it in so many stages, or ""."""
        source = (self.folder / fault.file).read_bytes()
        self.write(fault.file, source[: fault.start] + fault.new.encode() + source[fault.stop :])
        try:
            for stage in stages(fault.file)[:most]:
                if found := self.fails(stage, 3 * clean.seconds(stage) + SLACK_S):
                    return found
            return ""
        finally:
            self.write(fault.file, source)


class Clean:
    """What stages take without a fault; a stage that fails there would find every fault."""

    def __init__(self, bench: Bench) -> None:
        """Measures a stage when it is first asked for."""
        self.bench, self.known, self.lock = bench, dict[str, float](), threading.Lock()

    def seconds(self, stage: Sequence[str]) -> float:
        """Returns the seconds of a stage."""
        with self.lock:
            if (key := " ".join(stage)) not in self.known:
                start = time.perf_counter()
                if failed := self.bench.fails(stage, None):
                    raise SystemExit(f"{failed} fails without a fault; mend it first")
                self.known[key] = time.perf_counter() - start
            return self.known[key]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    """Runs a sample, and prints what survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sample", type=int, default=100, help="faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (default: %(default)s)")
    parser.add_argument("--least", type=float, default=0.95, help="share that must die")
    parser.add_argument("--stages", type=int, default=9, help="run at most (default: all)")
    parser.add_argument("--only", nargs="+", default=PLACES, help="files and folders")
    parser.add_argument("--lines", nargs="+", default=[], help="FILE:LINE, instead of a sample")
    asked = parser.parse_args()
    found = faults(asked.only)
    chosen = [fault for fault in found if f"{fault.file}:{fault.line}" in asked.lines]
    if not asked.lines:
        chosen = random.Random(asked.seed).sample(found, min(asked.sample, len(found)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        benches: queue.Queue[Bench] = queue.Queue()
        for number in range(asked.jobs):
            benches.put(Bench(Path(folder) / str(number)))
        clean = Clean(Bench(Path(folder) / "clean"))

        def run(fault: Fault) -> str:
            bench = benches.get()
            try:
                return bench.survives(fault, clean, asked.stages)
            finally:
                benches.put(bench)

        survivors = list(_told(chosen, pool.map(run, chosen)))
    died = len(chosen) - len(survivors)
    print(f"{died} of {len(chosen)} faults were found, {len(survivors)} survived:")
    print(*(f"  {fault}" for fault in survivors), sep="\n")
    return int(died < asked.least * len(chosen))


def _told(chosen: Sequence[Fault], results: Iterator[str]) -> Iterator[Fault]:
    """Prints each result when it is there; yields the faults that survived."""
    for fault, result in zip(chosen, results, strict=True):
        print(f"{fault}: {result or 'SURVIVED'}", flush=True)
        if not result:
            yield fault


if __name__ == "__main__":
    sys.exit(main())
