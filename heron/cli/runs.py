"""`heron runs`: lists, filters and compares the runs in some folders, by their files."""

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

from heron.cli.arguments import UsageError
from heron.config.errors import ConfigError, StudyError, TrainingError
from heron.config.sections import leaves, read_tree
from heron.shards.artefact import describe_errors, parse_json
from heron.shards.dotted import suggest
from heron.shards.errors import short_repr
from heron.shards.terminal import print_table
from heron.training.run_lock import LOCK, holder
from heron.training.tracking import FACTS, START, Metrics, read_result

TAIL = 2**18  # bytes of metrics.jsonl that are read, from its end
MAX_RUNS = 20_000  # runs that are listed
RUN_FILES = START, "metrics.jsonl", "result.json", LOCK  # a run has config.yaml and one of them
SCORE_PREFIXES = b"test/", b"validation/"  # of the names of scores in metrics.jsonl
RUN_SUBFOLDERS = "checkpoints", "tensorboard", "wandb", "mlflow", "dvclive"  # hold no runs
FIRST_COLUMNS = "name", "state", "step", "steps", "loss"
LAST_COLUMNS = "started", "seconds", "host", "version", "fingerprint"
COLUMNS = *FIRST_COLUMNS, *LAST_COLUMNS, "fault"
NOT_SCORES = {*FACTS, "auc_labels", "folder", "config", *COLUMNS}
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

Run = dict[str, Any]


class Start(TypedDict, total=False):
    """The fields of run.json that are read; others are ignored."""

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
        """Returns whether it holds; text and a number are never equal, and have no order."""
        value = _values(run).get(self.key)
        if self.sign in ("==", "!="):
            return SIGNS[self.sign](value, self.value)
        comparable = all(isinstance(v, str) for v in (value, self.value)) or all(
            type(v) in (int, float) for v in (value, self.value)
        )
        return comparable and SIGNS[self.sign](value, self.value)


def runs(
    *folders: Annotated[Path, "folders that runs lie in, at any depth (default: runs)"],
    sort: Annotated[str, "column or key of the configuration to sort by, as optim.lr"] = "started",
    where: Annotated[str | None, "only those runs: optim.lr>0.01 and state=='ended'"] = None,
    best: Annotated[str | None, "only the ended run that is best by this score"] = None,
    living: Annotated[bool, "only runs that a process is working on"] = False,
    compare: Annotated[bool, "keys of the configuration in which they differ, and scores"] = False,
    json: Annotated[bool, "a JSON list instead of a table"] = False,
) -> int:
    """Lists runs: how far each has come, whether it is alive, its scores.

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
        raise UsageError(f"--compare found {len(selected)} runs; expected two or more")
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
            f"a condition of {len(text):,} characters; expected {MAX_CONDITION:,} at most"
        )
    conditions, rest = [], text
    while True:
        match = CONDITION.fullmatch(rest)
        if match is None:
            raise StudyError(
                f"--where: {short_repr(rest)} is no comparison; expected KEY SIGN VALUE, such as "
                "optim.lr>0.01 or state == 'ended', and 'and' between two of them"
            )
        quoted = match["single"] if match["single"] is not None else match["double"]
        value = quoted if quoted is not None else _value(match["word"])
        conditions.append(Condition(match["key"], match["sign"], value))
        rest = match["rest"]
        if not rest:
            return conditions
        word, _, rest = rest.partition(" ")
        if word != "and":
            raise StudyError(
                f"--where: found {short_repr(word)} after a comparison; expected 'and'"
            )


def _value(word: str) -> Any:
    if word in WORDS:
        return WORDS[word]
    try:
        return float(word)
    except ValueError:
        return word


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Returns the folders of runs at or below each of some folders, in the order of names.

    Links are not followed. Raises a StudyError if a folder does not exist, or for too many runs.
    """
    for folder in folders:
        if not folder.is_dir():
            raise StudyError(f"{folder} is no folder; expected one that runs lie in: see run.dir")
    all_runs = (run for folder in folders for run in _runs_below(folder))
    run_folders = list(islice(all_runs, MAX_RUNS + 1))
    if len(run_folders) > MAX_RUNS:
        raise StudyError(
            f"more than {MAX_RUNS:,} runs are in {', '.join(map(str, folders))}; expected no more: "
            "name the folders further down"
        )
    return run_folders


def _runs_below(folder: Path) -> Iterator[Path]:
    to_visit = [folder]
    while to_visit:
        folder = to_visit.pop()
        try:
            with os.scandir(folder) as entries:
                is_folder = {e.name: e.is_dir(follow_symlinks=False) for e in entries}
        except OSError:
            continue
        is_run = "config.yaml" in is_folder and any(name in is_folder for name in RUN_FILES)
        if is_run:
            yield folder
        skipped = (".", *RUN_SUBFOLDERS) if is_run else "."
        names = (name for name in is_folder if is_folder[name] and not name.startswith(skipped))
        to_visit += [folder / name for name in sorted(names, reverse=True)]


def read_run(folder: Path) -> Run:
    """Reads a run's folder: returns the values of `COLUMNS`, and its scores by name.

    `state` is `living` (a process holds its lock), `ended` (it has a result), `stopped` (all of its
    steps are saved), `dead` (some are not, or it made none) or `damaged`, with the `fault`.
    """
    run: Run = dict.fromkeys(COLUMNS) | {"name": str(folder), "folder": str(folder)}
    metrics, result = folder / "metrics.jsonl", folder / "result.json"
    try:
        for path in (folder / file for file in ("config.yaml", *RUN_FILES)):
            if path.exists() and not path.is_file():  # a pipe would hang
                raise ValueError(f"{path} is no file; expected one, as a run wrote it")
        owner = holder(folder)
        if (folder / START).exists():  # it may have ended before it wrote one
            start = read_result(folder / START, ["steps"], Start)
            run |= {key: start.get(key) for key in Start.__annotations__}
        run |= _last_rows(metrics)
        if run["started"] is not None:
            started = datetime.fromisoformat(run["started"]).astimezone(UTC).timestamp()
            if metrics.exists():
                run["seconds"] = max(0.0, metrics.stat().st_mtime - started)
        if owner is not None:
            run["state"] = "living"
            if " on " in owner:
                run["host"] = owner.rpartition(" on ")[2]
        elif result.exists():
            values = read_result(result, ["steps", "train_seconds"])
            run |= {key: value for key, value in values.items() if _is_score(key, value)}
            run |= {"state": "ended", "steps": values["steps"], "seconds": values["train_seconds"]}
            run |= {key: values.get(key) for key in ("version", "fingerprint")}
        else:
            saved_step = _newest_checkpoint_step(folder / "checkpoints")
            run["state"] = "stopped" if run["step"] and run["step"] == saved_step else "dead"
    except (TrainingError, OSError, ValueError, OverflowError) as fault:
        run |= {"state": "damaged", "fault": " ".join(str(fault).split())}
    return run


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of a run by dotted keys; empty if it cannot be read."""
    if not (folder / "config.yaml").is_file():
        return {}
    try:
        tree = read_tree(folder / "config.yaml")
    except ConfigError:
        return {}
    return dict(leaves(tree))


def _last_rows(path: Path) -> Run:
    """Returns the number of steps in metrics.jsonl, `step`, and its last loss and scores."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            lines = stream.read(TAIL).split(b"\n")
    except FileNotFoundError:
        return {"step": 0}
    if size > TAIL:
        del lines[0]  # cut off by the seek
    step, loss, scores = 0, None, Run()
    for line in reversed(lines[:-1]):  # what follows the last newline is incomplete
        has_scores = any(b'"' + prefix in line for prefix in SCORE_PREFIXES)
        if not line.strip() or (step and (scores or not has_scores)):
            continue  # parsing only what is needed keeps a long tail quick
        try:
            row = Metrics.model_validate(parse_json(line)).model_dump()
        except ValueError as fault:
            reason = describe_errors(fault).splitlines()[0]
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


def _newest_checkpoint_step(checkpoints: Path) -> int | None:
    names = (path.parent.name for path in checkpoints.glob("step-*/COMPLETE"))
    steps = (name.removeprefix("step-") for name in names)
    return max((int(step) for step in steps if step.isdecimal()), default=None)


def _is_score(key: str, value: Any) -> bool:
    return key not in NOT_SCORES and (value is None or type(value) in (int, float))


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
    not_compared = {
        "name",
        "folder",
        "config",
        "host",
        "started",
        "version",
        "fingerprint",
        "fault",
    }
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
