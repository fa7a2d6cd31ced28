"""The table of `benchmarks.objectives`, in Markdown and in numbers."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.isolation import OUT_OF_MEMORY, Outcome
from benchmarks.rates import Rates
from benchmarks.workloads import TERMS


@dataclass(frozen=True)
class Case:
    """One measurement; `rows` samples are anchors, or all if it is None."""

    term: str
    method: str
    size: int
    dim: int
    precision: str
    device: str
    threads: int
    rows: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return TERMS[self.term].shape(self.size, self.rows)


Line = tuple[Case, Sequence[str]]  # ours, and the methods beside it


class Table:
    """A Markdown table, line by line, with notes on missing numbers; and each line's numbers."""

    def __init__(self, lines: Sequence[Line]) -> None:
        requested = {method for _, methods in lines for method in methods}
        self.cuda = lines[0][0].device == "cuda"
        order = ("ours", "dense", "compiled", "inf-cl", "siglip-kernel")
        self.methods = [m for m in order if m in requested | {"ours"}]
        self.unit, self.scale = ("ms", 1e3) if self.cuda else ("s", 1.0)
        self.notes: list[str] = []
        self.numbers: list[dict[str, Any]] = []

    def head(self) -> str:
        of_gpu = ["floor"] if self.cuda else []
        names = ["term", "N", "d", "in", "anchors x keys"]
        names += [f"{method} {self.unit}" for method in (*self.methods, "products", *of_gpu)]
        names += ["dense / ours", f"ours / {(*of_gpu, 'products')[0]}", "ours MB", "dense MB"]
        names += ["loss error", "gradient error"] if self.cuda else []
        return f"{self.row(names)}\n{'|---' * len(names)}|"

    def line(self, case: Case, outcomes: dict[str, Outcome], rated: Rates) -> str:
        term, (anchors, keys) = TERMS[case.term], case.shape
        products = rated.products[anchors, keys] * term.products
        bound = rated.floor(case.shape, case.dim, term.products, term.exponentials)
        ours, dense = outcomes["ours"], outcomes.get("dense", Outcome())
        cells = [case.term, f"{case.size:,}", str(case.dim), case.precision]
        cells.append(f"{anchors:,} x {keys:,}")
        cells += [self.seconds(outcomes.get(method, Outcome())) for method in self.methods]
        cells.append(f"{self.time(products)} ({term.products})")
        cells += [self.time(bound)] if self.cuda else []
        cells.append(number(dense.seconds / ours.seconds, ".1f"))
        cells.append(number(ours.seconds / (bound if self.cuda else products), ".1f"))
        cells += [number(outcome.bytes / 1e6, ",.0f") for outcome in (ours, dense)]
        if self.cuda:
            cells += [number(e, ".0e") for e in (ours.loss_error, ours.gradient_error)]
        numbers = {**asdict(case), "anchors": anchors, "keys": keys, "products_s": products}
        numbers |= {"floor_s": bound} | {m: finite(asdict(o)) for m, o in outcomes.items()}
        del numbers["method"]
        self.numbers.append(finite(numbers))
        return self.row(cells)

    def seconds(self, outcome: Outcome) -> str:
        if not outcome.missing:
            return self.time(outcome.seconds)
        if outcome.missing == OUT_OF_MEMORY and not math.isnan(outcome.bytes):
            return f"– ({outcome.bytes / 1e9:,.0f} GB)"
        if outcome.missing not in self.notes:
            self.notes.append(outcome.missing)
        return f"– [{self.notes.index(outcome.missing) + 1}]"

    def time(self, seconds: float) -> str:
        scaled = seconds * self.scale
        return number(scaled, ".3f" if scaled < 100 else ",.0f")

    @staticmethod
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"


def number(x: float, spec: str) -> str:
    return "–" if math.isnan(x) else format(x, spec)


def finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """Drops values that JSON cannot express, and empty reasons."""
    nan = {name for name, x in numbers.items() if isinstance(x, float) and not math.isfinite(x)}
    return {name: x for name, x in numbers.items() if name not in nan and x != ""}
