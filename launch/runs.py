"""`heron runs`: the runs of some folders, by their files: listed, filtered, compared."""

import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typing_extensions import TypedDict

from heron.launch.arguments import UsageError
from heron.pipeline.config.errors import ConfigError, StudyError, TrainingError
from heron.pipeline.config.renamed import move_renamed
from heron.pipeline.config.sections import leaves, read_tree
from heron.pipeline.training.run_lock import LOCK, holder
from heron.pipeline.training.tracking import FACTS, START, Metrics, read_result
from heron.shards.artefact import in_words, parse_json
from heron.shards.dotted import suggest
from heron.shards.errors import shown
from heron.shards.terminal import say_table

TAIL = 2**18  # bytes of metrics.jsonl that are read, from its end
MOST = 20_000  # runs that are listed
DEEPEST = 8  # folders within folders
FILES = START, "metrics.jsonl", "result.json", LOCK  # of a run: one of them beside a config.yaml
SCORED = b"test/", b"validation/"  # begins the names of scores in metrics.jsonl
INSIDE = "checkpoints", "tensorboard", "wandb", "mlflow", "dvclive"  # of a run; no run lies there
SHOWN = "name", "state", "step", "steps", "loss"
LATER = "started", "seconds", "host", "version", "fingerprint"
COLUMNS = *SHOWN, *LATER, "fault"
NO_SCORES = {*FACTS, "auc_labels", "folder", "config", *COLUMNS}
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

Run = dict[str, Any]


class Start(TypedDict, total=False):
    """What run.json may say, of which more is read past."""

    steps: float | None
    started: str | None
    host: str | None
    version: str | None
    fingerprint: str | None


class Condition(NamedTuple):
    """A comparison of a column, or of a key of the configuration, with a value."""

    key: str
    sign: str
    value: Any

    def holds(self, run: Run) -> bool:
        """Whether it holds; text and numbers are never equal, and neither is less."""
        found = _values(run).get(self.key)
        if self.sign in ("==", "!="):
            return SIGNS[self.sign](found, self.value)
        alike = all(isinstance(one, str) for one in (found, self.value)) or all(
            type(one) in (int, float) for one in (found, self.value)
        )
        return alike and SIGNS[self.sign](found, self.value)


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
    places = list(folders) or [Path("runs")]
    conditions = parse_conditions(where) if where else []
    found = [read_run(path) for path in dict.fromkeys(find_runs(places))]
    own = {key for run in found for key in run} | {*COLUMNS}
    asked = {sort, best or sort, *(one.key for one in conditions)}
    for run in found:  # reading them takes the longest
        of_config = compare or not asked <= own
        run["config"] = read_config(Path(run["folder"])) if of_config else {}
    known = own | {key for run in found for key in run["config"]}
    if found and (unknown := sorted(asked - known)):
        names = sorted(filter(str.isprintable, known))
        raise StudyError(f"no run has {unknown[0]!r}; {suggest(unknown[0], names)}")
    found = [run for run in found if all(one.holds(run) for one in conditions)]
    if living:
        found = [run for run in found if run["state"] == "living"]
    if best:
        found = _best(found, best)
    if compare and len(found) < 2:
        raise UsageError(f"--compare found {len(found)} runs; expected two or more")
    found.sort(key=lambda run: _order(_values(run).get(sort)))
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
        faults = ["fault"] if any(run["fault"] for run in found) else []
        more = [sort] if sort not in LATER else []
        heads = list(dict.fromkeys([*SHOWN, best or SCORE, *more, *LATER, *faults]))
        say_table(heads, [[_cell(_values(run), key) for key in heads] for run in found])
    else:
        print(f"no runs in {', '.join(map(str, places))}")
    return 0


def parse_conditions(text: str) -> list[Condition]:
    """Reads `optim.lr > 0.01 and state == 'ended'`; a StudyError has the place of a fault."""
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


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Returns the folders of runs at or below some folders, each in the order of names.

    Links are not followed. Raises a StudyError where a folder is not there, or too many runs are.
    """
    for folder in folders:
        if not folder.is_dir():
            raise StudyError(f"{folder} is no folder; expected one that runs lie in: see run.dir")
    below = (run for folder in folders for run in _below(folder, DEEPEST))
    found = list(islice(below, MOST + 1))
    if len(found) > MOST:
        raise StudyError(
            f"more than {MOST:,} runs are in {', '.join(map(str, folders))}; expected no more: "
            "name the folders further down"
        )
    return found


def _below(folder: Path, levels: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            files = {e.name: e.is_dir(follow_symlinks=False) for e in entries}
    except OSError:
        files = {}
    is_run = "config.yaml" in files and any(name in files for name in FILES)
    if is_run:
        yield folder
    for name in sorted(name for name, is_folder in files.items() if is_folder and levels):
        if not name.startswith((".", *INSIDE) if is_run else "."):
            yield from _below(folder / name, levels - 1)


def read_run(folder: Path) -> Run:
    """Returns what a run's folder tells: `COLUMNS`, and its scores by their names.

    `state` is `living` (a process has its lock), `ended` (there is a result), `stopped` (all steps
    that it made are saved), `dead` (some are not, or none was made) or `damaged`, with the `fault`.
    """
    run: Run = dict.fromkeys(COLUMNS) | {"name": str(folder), "folder": str(folder)}
    metrics, result = folder / "metrics.jsonl", folder / "result.json"
    try:
        for path in (folder / file for file in ("config.yaml", *FILES)):
            if path.exists() and not path.is_file():  # one that waits for a writer would hang
                raise ValueError(f"{path} is no file; expected one, as a run wrote it")
        owner = holder(folder)
        if (folder / START).exists():  # runs of the edition before it have none
            told = read_result(folder / START, ["steps"], Start)
            run |= {key: told.get(key) for key in Start.__annotations__}
        run |= _last_rows(metrics)
        if run["started"] is not None:
            began = datetime.fromisoformat(run["started"]).astimezone(UTC).timestamp()
            if metrics.exists():
                run["seconds"] = max(0.0, metrics.stat().st_mtime - began)
        if owner is not None:
            run["state"] = "living"
            if " on " in owner:
                run["host"] = owner.rpartition(" on ")[2]
        elif result.exists():
            told = read_result(result, ["steps", "train_seconds"])
            run |= {key: value for key, value in told.items() if _is_score(key, value)}
            run |= {"state": "ended", "steps": told["steps"], "seconds": told["train_seconds"]}
            run |= {key: told.get(key) for key in ("version", "fingerprint")}
        else:
            saved = _saved(folder / "checkpoints")
            run["state"] = "stopped" if run["step"] and run["step"] == saved else "dead"
    except (TrainingError, OSError, ValueError, OverflowError) as fault:
        run |= {"state": "damaged", "fault": " ".join(str(fault).split())}
    return run


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of a run by dotted keys; none where it cannot be read."""
    if not (folder / "config.yaml").is_file():
        return {}
    try:
        tree = read_tree(folder / "config.yaml")
        move_renamed(tree)
    except ConfigError:
        return {}
    return dict(leaves(tree))


def _last_rows(path: Path) -> Run:
    """Returns how many steps metrics.jsonl tells of, `step`, and its last loss and scores."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            lines = stream.read(TAIL).split(b"\n")
    except FileNotFoundError:
        return {"step": 0}
    if size > TAIL:
        del lines[0]  # its beginning is not there
    step, loss, scores = 0, None, Run()
    for line in reversed(lines[:-1]):  # what follows the last end of a line was cut short
        scored = any(b'"' + of in line for of in SCORED)
        if not line.strip() or (step and (scores or not scored)):
            continue  # a line that is not read cannot take long
        try:
            row = Metrics.model_validate(parse_json(line)).model_dump()
        except ValueError as fault:
            reason = in_words(fault).splitlines()[0]
            raise ValueError(f"{path} has a damaged line near its end: {reason}") from None
        if "loss" in row and not step:
            loss, step = row["loss"], row["step"] + 1
        if not scores:
            named = {k.removeprefix("test/"): v for k, v in row.items() if k.startswith("test/")}
            named |= {
                k.replace("/", "_", 1): v for k, v in row.items() if k.startswith("validation/")
            }
            scores = {key: value for key, value in named.items() if _is_score(key, value)}
    return {"step": step, "loss": loss} | scores


def _saved(checkpoints: Path) -> int | None:
    """Returns the step of the newest complete checkpoint."""
    names = (path.parent.name for path in checkpoints.glob("step-*/COMPLETE"))
    steps = (name.removeprefix("step-") for name in names)
    return max((int(step) for step in steps if step.isdecimal()), default=None)


def _is_score(key: str, value: Any) -> bool:
    return key not in NO_SCORES and (value is None or type(value) in (int, float))


def _values(run: Run) -> Run:
    """Returns what a run is sorted and filtered by: its configuration, and its own columns."""
    values: Run = run["config"] | run
    return values


def _best(found: list[Run], score: str) -> list[Run]:
    """Returns the ended run with the best value of a score, if any."""
    from heron.launch.studies.results import less_is_better

    ended = [r for r in found if r["state"] == "ended" and isinstance(r.get(score), int | float)]
    choose = min if less_is_better(score) else max
    return [choose(ended, key=lambda run: float(run[score]))] if ended else []


def _differing(found: Sequence[Run]) -> dict[str, Run]:
    """Returns, by run, the keys of the configuration that are not the same in all, and results."""
    configs = [run["config"] for run in found]
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.dir")
    differ = [k for k in keys if any(c.get(k, ...) != configs[0].get(k, ...) for c in configs)]
    left = {"name", "folder", "config", "host", "started", "version", "fingerprint", "fault"}
    results = dict.fromkeys(k for run in found for k in (*COLUMNS, *run) if k not in left)
    return {
        run["name"]: {k: run["config"].get(k) for k in differ} | {k: run.get(k) for k in results}
        for run in found
    }


def _cell(run: Run, key: str) -> str:
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
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))
