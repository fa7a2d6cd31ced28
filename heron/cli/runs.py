"""`heron runs`: lists, filters and compares the runs in some folders, by their files."""

import operator
import re
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from heron.base.dotted import suggest
from heron.base.errors import StudyError, short_repr
from heron.base.terminal import print_table
from heron.cli.arguments import UsageError
from heron.studies.runs import (
    COLUMNS,
    FIRST_COLUMNS,
    LAST_COLUMNS,
    Run,
    find_runs,
    read_config,
    read_run,
)

DEFAULT_SCORE = "f1_weighted"
MAX_CONDITION = 2_000  # characters of a condition
CONDITION = re.compile(
    r"""\s*(?P<key>[\w./-]+?)\s*(?P<sign>==|!=|<=|>=|<|>)\s*"""
    r"""(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<word>[^\s'"<>=!]+))\s*(?P<rest>.*)""",
    re.DOTALL,
)
SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
WORDS = {"true": True, "false": False, "null": None}


class Condition(NamedTuple):
    """A comparison of a column, or of a key of the configuration, with a value."""

    key: str
    sign: str
    value: Any

    def holds(self, run: Run) -> bool:
        """Returns whether it holds; text and a number are never equal, and have no order."""
        value = _values(run).get(self.key)
        if self.sign in ("==", "!="):
            return SIGNS[self.sign](value, self.value)
        comparable = all(isinstance(v, str) for v in (value, self.value)) or all(
            type(v) in (int, float) for v in (value, self.value)
        )
        return comparable and SIGNS[self.sign](value, self.value)


def runs(
    *folders: Annotated[Path, "folders to search for runs, at any depth (default: runs)"],
    sort: Annotated[str, "column or configuration key to sort by, such as optim.lr"] = "started",
    where: Annotated[str | None, "only matching runs: optim.lr>0.01 and state=='ended'"] = None,
    best: Annotated[str | None, "only the ended run with the best value of this score"] = None,
    living: Annotated[bool, "only runs that a process is working on"] = False,
    compare: Annotated[bool, "show the configuration keys that differ, and the scores"] = False,
    json: Annotated[bool, "print a JSON list instead of a table"] = False,
) -> int:
    """Lists runs with their progress, their state and their scores.

    heron runs runs studies
    heron runs --where "optim.lr>0.01 and state=='ended'" --sort f1_macro
    heron runs --best f1_macro
    heron runs --compare runs/a runs/b
    """
    roots = list(folders) or [Path("runs")]
    conditions = parse_conditions(where) if where else []
    selected = [read_run(path) for path in dict.fromkeys(find_runs(roots))]
    columns = {key for run in selected for key in run} | {*COLUMNS}
    requested = {sort, best or sort, *(condition.key for condition in conditions)}
    needs_configs = compare or not requested <= columns  # reading them takes the longest
    for run in selected:
        run["config"] = read_config(Path(run["folder"])) if needs_configs else {}
    keys = columns | {key for run in selected for key in run["config"]}
    if selected and (unknown := sorted(requested - keys)):
        names = sorted(filter(str.isprintable, keys))
        raise StudyError(f"no run has {unknown[0]!r}; {suggest(unknown[0], names)}")
    selected = [run for run in selected if all(condition.holds(run) for condition in conditions)]
    if living:
        selected = [run for run in selected if run["state"] == "living"]
    if best:
        selected = _best_run(selected, best)
    if compare and len(selected) < 2:
        raise UsageError(f"--compare needs two or more runs, got {len(selected)}")
    selected.sort(key=lambda run: _sort_key(_values(run).get(sort)))
    if compare:
        by_run = _differing(selected)
        differing = list(next(iter(by_run.values()), {}))
        lines = [
            [key, *(_format_cell(values, key) for values in by_run.values())] for key in differing
        ]
        if json:
            print(dumps(by_run, indent=1))
        else:
            print_table(["", *by_run], lines)
    elif json:
        rows = [{key: run[key] for key in run if key != "config"} for run in selected]
        print(dumps(rows, indent=1))
    elif selected:
        names = [*FIRST_COLUMNS, best or DEFAULT_SCORE]
        names += [sort] if sort not in LAST_COLUMNS else []
        names += [*LAST_COLUMNS, "fault"] if any(run["fault"] for run in selected) else LAST_COLUMNS
        heads = list(dict.fromkeys(names))
        print_table(heads, [[_format_cell(_values(run), key) for key in heads] for run in selected])
    else:
        print(f"no runs in {', '.join(map(str, roots))}")
    return 0


def parse_conditions(text: str) -> list[Condition]:
    """Parses `optim.lr > 0.01 and state == 'ended'`; a StudyError quotes the faulty part."""
    if len(text) > MAX_CONDITION:
        raise StudyError(
            f"a condition must have at most {MAX_CONDITION:,} characters, got {len(text):,}"
        )
    conditions, rest = [], text
    while True:
        match = CONDITION.fullmatch(rest)
        if match is None:
            raise StudyError(
                f"--where: {short_repr(rest)} is not a comparison; write KEY SIGN VALUE, such as "
                "optim.lr>0.01 or state == 'ended', with 'and' between two of them"
            )
        quoted = match["single"] if match["single"] is not None else match["double"]
        value = quoted if quoted is not None else _value(match["word"])
        conditions.append(Condition(match["key"], match["sign"], value))
        rest = match["rest"]
        if not rest:
            return conditions
        word, _, rest = rest.partition(" ")
        if word != "and":
            raise StudyError(f"--where: only 'and' can follow a comparison, got {short_repr(word)}")


def _value(word: str) -> Any:
    if word in WORDS:
        return WORDS[word]
    try:
        return float(word)
    except ValueError:
        return word


def _values(run: Run) -> Run:
    """Returns the values that a run is sorted and filtered by: its configuration and columns."""
    values: Run = run["config"] | run
    return values


def _best_run(candidates: list[Run], score: str) -> list[Run]:
    """Returns the ended run with the best value of a score, in a list; empty if there is none."""
    from heron.studies.results import lower_is_better

    ended = [
        r for r in candidates if r["state"] == "ended" and isinstance(r.get(score), int | float)
    ]
    choose = min if lower_is_better(score) else max
    return [choose(ended, key=lambda run: float(run[score]))] if ended else []


def _differing(selected: Sequence[Run]) -> dict[str, Run]:
    """Returns, by run, its results and the configuration keys whose values differ between runs."""
    configs = [run["config"] for run in selected]
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.dir")
    differ = [k for k in keys if any(c.get(k, ...) != configs[0].get(k, ...) for c in configs)]
    not_compared = {"name", "folder", "config", "fault", *LAST_COLUMNS} - {"seconds"}
    results = dict.fromkeys(
        k for run in selected for k in (*COLUMNS, *run) if k not in not_compared
    )
    return {
        run["name"]: {k: run["config"].get(k) for k in differ} | {k: run.get(k) for k in results}
        for run in selected
    }


def _format_cell(run: Run, key: str) -> str:
    value = run.get(key)
    if value is None:
        return "–"
    if key == "fingerprint":
        return str(value).removeprefix("sha256:")[:10]
    if key == "seconds":
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _sort_key(value: Any) -> tuple[int, float, str]:
    """Returns a sort key: numbers first, then texts, missing values last."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))
