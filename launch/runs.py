"""`heron runs`: the runs of some folders, listed, filtered, compared."""

import operator
import re
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from heron.launch.arguments import UsageError
from heron.pipeline.config.errors import StudyError
from heron.shards.dotted import suggest
from heron.shards.errors import shown
from heron.shards.terminal import say_table

SHOWN = "name", "state", "step", "steps", "loss"
LATER = "started", "seconds", "host", "version", "fingerprint"
SCORE = "f1_weighted"
LONGEST = 2_000  # characters of a condition
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

    def holds(self, run: dict[str, Any]) -> bool:
        """Whether it holds; text and numbers are never equal, and neither is less."""
        found = run.get(self.key)
        if self.sign in ("==", "!="):
            return SIGNS[self.sign](found, self.value)
        alike = all(isinstance(one, str) for one in (found, self.value)) or all(
            type(one) in (int, float) for one in (found, self.value)
        )
        return alike and SIGNS[self.sign](found, self.value)


def parse_conditions(text: str) -> list[Condition]:
    """Reads `optim.lr > 0.01 and state == 'ended'`.

    Raises:
        StudyError: it is none such, with the place of the fault.
    """
    if len(text) > LONGEST:
        raise StudyError(f"a condition of {len(text):,} characters; expected {LONGEST:,} at most")
    conditions, rest = [], text
    while True:
        found = CONDITION.fullmatch(rest)
        if found is None:
            raise StudyError(
                f"--where: {shown(rest)} is no comparison; expected KEY SIGN VALUE, such as "
                "optim.lr>0.01 or state == 'ended', and 'and' between two of them"
            )
        quoted = found["single"] if found["single"] is not None else found["double"]
        value = quoted if quoted is not None else _value(found["word"])
        conditions.append(Condition(found["key"], found["sign"], value))
        rest = found["rest"]
        if not rest:
            return conditions
        word, _, rest = rest.partition(" ")
        if word != "and":
            raise StudyError(f"--where: found {shown(word)} after a comparison; expected 'and'")


def _value(word: str) -> Any:
    if word in WORDS:
        return WORDS[word]
    try:
        return float(word)
    except ValueError:
        return word


def runs(
    *folders: Annotated[Path, "folders that runs lie in, at any depth (default: runs)"],
    sort: Annotated[str, "column or key of the configuration to sort by, as optim.lr"] = "started",
    where: Annotated[str | None, "only those runs: optim.lr>0.01 and state=='ended'"] = None,
    best: Annotated[str | None, "only the ended run that is best by this score"] = None,
    living: Annotated[bool, "only runs that a process has"] = False,
    compare: Annotated[bool, "in which keys of the configuration they differ, and scores"] = False,
    json: Annotated[bool, "a JSON list instead of a table"] = False,
) -> int:
    """Lists runs: how far each is, whether it lives, its scores.

    heron runs runs studies
    heron runs --where "optim.lr>0.01 and state=='ended'" --sort f1_macro
    heron runs --best f1_macro
    heron runs --compare runs/a runs/b
    """
    from heron.launch.run_folders import COLUMNS, find_runs, read_config, read_run

    places = list(folders) or [Path("runs")]
    conditions = parse_conditions(where) if where else []
    found = [read_run(path, str(path)) for path in dict.fromkeys(find_runs(places))]
    if compare and len(found) < 2:
        raise UsageError(f"--compare found {len(found)} runs; expected two or more")
    own = {key for run in found for key in run} | set(COLUMNS)
    asked = {sort, best or sort, *(one.key for one in conditions)}
    if compare or not asked <= own:  # reading them takes the longest
        for run in found:
            run["config"] = read_config(Path(run["folder"]))
    known = own | {key for run in found for key in run.get("config", {})}
    if found and (unknown := sorted(asked - known)):
        names = sorted(filter(str.isprintable, known))
        raise StudyError(f"no run has {unknown[0]!r}; {suggest(unknown[0], names)}")
    found = [
        run for run in found if all(one.holds(run.get("config", {}) | run) for one in conditions)
    ]
    if living:
        found = [run for run in found if run["state"] == "living"]
    if best:
        found = _best(found, best)
    found.sort(key=lambda run: _order((run.get("config", {}) | run).get(sort)))
    if compare:
        by_run = _differing(found)
        keys = list(next(iter(by_run.values()), {}))
        lines = [[key, *(_cell(values, key) for values in by_run.values())] for key in keys]
        if json:
            print(dumps(by_run, indent=1))
        else:
            say_table(["", *by_run], lines)
    elif json:
        told = [{key: run[key] for key in run if key != "config"} for run in found]
        print(dumps(told, indent=1))
    elif found:
        say_table(*_listed(found, best or SCORE, sort))
    else:
        print(f"no runs in {', '.join(map(str, places))}")
    return 0


def _best(found: list[dict[str, Any]], score: str) -> list[dict[str, Any]]:
    """Returns the ended run with the best value of a score, if any."""
    from heron.launch.studies.results import less_is_better

    ended = [run for run in found if run["state"] == "ended" and _is_number(run.get(score))]
    choose = min if less_is_better(score) else max
    return [choose(ended, key=lambda run: float(run[score]))] if ended else []


def _listed(
    found: Sequence[dict[str, Any]], score: str, sort: str
) -> tuple[list[str], list[list[str]]]:
    """Returns heads and lines of the table of all that were found."""
    more = [sort] if sort not in LATER else []
    heads = list(dict.fromkeys([*SHOWN, score, *more, *LATER]))
    lines = [[_cell(run.get("config", {}) | run, key) for key in heads] for run in found]
    if any(run["fault"] for run in found):
        heads.append("fault")
        lines = [[*line, _cell(run, "fault")] for line, run in zip(lines, found, strict=True)]
    return heads, lines


def _differing(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns, by run, the keys of the configuration that are not the same in all, and results."""
    from heron.launch.run_folders import COLUMNS

    configs = [run["config"] for run in found]
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.dir")
    differ = [k for k in keys if any(c.get(k, ...) != configs[0].get(k, ...) for c in configs)]
    left = {"name", "folder", "config", "host", "started", "version", "fingerprint", "fault"}
    results = dict.fromkeys(k for run in found for k in (*COLUMNS, *run) if k not in left)
    return {
        run["name"]: {k: config.get(k) for k in differ} | {k: run.get(k) for k in results}
        for run, config in zip(found, configs, strict=True)
    }


def _cell(run: dict[str, Any], key: str) -> str:
    value = run.get(key)
    if value is None:
        return "–"
    if key == "fingerprint":
        return str(value).removeprefix("sha256:")[:10]
    if key == "seconds":
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers first, then texts, what is not there last."""
    if _is_number(value):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
