"""What to run after a verb: the one table of it, which the command line prints from."""

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from heron.launch import compare, reproduce, study
from heron.pipeline.config.errors import STOPPED
from heron.pipeline.config.sections import as_typed
from heron.pipeline.config.shipped import CONFIGS, find_config, names_in

Given = Mapping[str, Any]  # the arguments of a verb by name, with their defaults


def _pretrain(*words: str) -> str:
    return shlex.join(["heron", "pretrain", *words])


def _with_options(words: Sequence[str], given: Given, *names: str) -> str:
    """Returns the command of some words, with those of these options that were given."""
    options: list[str] = []
    for name in (name for name in names if given[name]):
        value = given[name]
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        options += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join([*words, *options])


def _after_pretrain(given: Given) -> list[str]:
    if given["status"] == STOPPED:
        again = [word for word in given["overrides"] if not word.startswith("run.resume=")]
        words = ["heron", "pretrain", given["config"], *again, "run.resume=auto"]
        return [_with_options(words, given, "method", "processes", "accelerate")]
    from heron.pipeline.config.experiment import load_config

    config = load_config(find_config(given["config"]), given["overrides"], given["method"])
    known = {"run": Path(config.run.dir)}
    return [_filled("heron embed {run} --out embeddings/{run.name}", known)]


def _after_tune(given: Given) -> list[str]:
    out = given["out"] or compare.folder_of(given["config"], "tune")
    paths = [str(out / f"{method}.yaml") for method in dict.fromkeys(given["methods"])]
    return [shlex.join(["heron", "pretrain", path]) for path in paths]


def _after_study(given: Given) -> list[str]:
    if given["dry_run"]:
        words = ["heron", "study", str(given["study"]), *given["overrides"]]
        return [_with_options(words, given, "out", "small", "address", "retry_failed")]
    out = given["out"] or study.folder_of(given["study"], given["small"])
    return [shlex.join(["heron", "report", str(out)])]


def _after_report(given: Given) -> list[str]:
    from heron.launch.studies.results import best, read_results

    results = read_results(given["study"])
    found = best(results, results.study.measure.score or results.study.measure.y[0])
    return [str(results.table.loc[found.trials[0], "command"])] if found else []


def _after_reproduce(given: Given) -> list[str]:
    if given["dry_run"]:
        words = ["heron", "reproduce", given["table"], *given["overrides"]]
        return [_with_options(words, given, "runs", "first", "only", "out")]
    return [shlex.join(["heron", "runs", str(given["out"] or reproduce.folder_of(given["table"]))])]


# Templates, which the verb's arguments fill, or functions of these: a template, or whole commands.
NEXT: Mapping[str, str | Callable[[Given], str | list[str]]] = {
    "shards build": lambda given: (
        [_pretrain(given["source"], f"data.path={as_typed(str(given['out']))}")]
        if given["source"] in names_in(CONFIGS)
        else "heron init {out}"
    ),
    "shards index": "heron init {folder}",
    "shards verify": "heron shards show {folder}",
    "shards show": "heron init {folder}",
    "shards protocol": lambda given: [
        _pretrain(
            given["config"], *given["overrides"], f"data.roles={as_typed(str(given['folder']))}"
        )
    ],
    "init": "heron pretrain {out}",
    "pretrain": _after_pretrain,
    "embed": "heron index {out} --out indexes/{out.name}",
    "index": "heron serve {out}",
    "query": lambda given: "heron serve {index}" if given["format"] == "table" else "",
    "negatives": lambda given: (
        "heron serve {index}"
        if given["index"]
        else "heron index {embeddings} --out indexes/{embeddings.name}"
    ),
    "save": lambda given: "heron export {out} --out {out.name}.pt2" if given["out"] else "",
    "tune": _after_tune,
    "compare": lambda given: [shlex.join(["heron", "tune", given["config"], *given["overrides"]])],
    "study": _after_study,
    "report": _after_report,
    "reproduce": _after_reproduce,
    "launchers": "sbatch {out}/slurm/pretrain.sbatch",
    # What ends a piece of work, or only shows something:
    **dict.fromkeys(("config", "completion", "runs", "predict", "export", "serve"), ""),
}


def _filled(text: str, given: Given) -> str:
    """Returns a template with the arguments filled in, each word quoted for a shell."""
    return shlex.join(word.format_map(given) for word in text.split())


def next_commands(verb: str, call: Callable[[], Any], status: int) -> list[str]:
    """Returns the commands that come after a verb, such as `shards build faces`, and its call.

    Of a verb that ended with another status than 0 only a run that was stopped has one.
    """
    if status and (verb, status) != ("pretrain", STOPPED):
        return []
    assert isinstance(call, partial)
    known = verb.rpartition(" ")[0] if verb.startswith("shards build") else verb
    bound = inspect.signature(call.func).bind(*call.args, **call.keywords)
    bound.apply_defaults()
    given = bound.arguments | {"status": status, "source": verb.rpartition(" ")[2]}
    after = NEXT[known]
    found = after if isinstance(after, str) else after(given)
    return found if isinstance(found, list) else [_filled(found, given)] if found else []
