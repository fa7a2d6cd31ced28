"""The commands to run after a verb, which the command line suggests."""

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

Arguments = Mapping[str, Any]  # of a verb by name, with their defaults


def _pretrain(*words: str) -> str:
    return shlex.join(["heron", "pretrain", *words])


def _with_options(words: Sequence[str], arguments: Arguments, *names: str) -> str:
    """Returns the command of some words, with those of the named options that have a value."""
    options: list[str] = []
    for name in (name for name in names if arguments[name]):
        value = arguments[name]
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        options += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join([*words, *options])


def _after_pretrain(arguments: Arguments) -> list[str]:
    if arguments["status"] == STOPPED:
        again = [word for word in arguments["overrides"] if not word.startswith("run.resume=")]
        words = ["heron", "pretrain", arguments["config"], *again, "run.resume=auto"]
        return [_with_options(words, arguments, "method", "processes", "accelerate")]
    from heron.pipeline.config.experiment import load_config

    config = load_config(
        find_config(arguments["config"]), arguments["overrides"], arguments["method"]
    )
    run = {"run": Path(config.run.dir)}
    return [_fill("heron embed {run} --out embeddings/{run.name}", run)]


def _after_tune(arguments: Arguments) -> list[str]:
    out = arguments["out"] or compare.folder_of(arguments["config"], "tune")
    paths = [str(out / f"{method}.yaml") for method in dict.fromkeys(arguments["methods"])]
    return [shlex.join(["heron", "pretrain", path]) for path in paths]


def _after_study(arguments: Arguments) -> list[str]:
    if arguments["dry_run"]:
        words = ["heron", "study", str(arguments["study"]), *arguments["overrides"]]
        return [_with_options(words, arguments, "out", "small", "address", "retry_failed")]
    out = arguments["out"] or study.folder_of(arguments["study"], arguments["small"])
    return [shlex.join(["heron", "report", str(out)])]


def _after_report(arguments: Arguments) -> list[str]:
    from heron.launch.studies.results import best, read_results

    results = read_results(arguments["study"])
    best_setting = best(results, results.study.measure.score or results.study.measure.y[0])
    return [str(results.table.loc[best_setting.trials[0], "command"])] if best_setting else []


def _after_reproduce(arguments: Arguments) -> list[str]:
    if arguments["dry_run"]:
        words = ["heron", "reproduce", arguments["table"], *arguments["overrides"]]
        return [_with_options(words, arguments, "runs", "first", "only", "out")]
    return [
        shlex.join(
            ["heron", "runs", str(arguments["out"] or reproduce.folder_of(arguments["table"]))]
        )
    ]


# A template that the verb's arguments fill, or a function of them that returns one, or commands.
NEXT: Mapping[str, str | Callable[[Arguments], str | list[str]]] = {
    "shards build": lambda arguments: (
        [_pretrain(arguments["source"], f"data.path={as_typed(str(arguments['out']))}")]
        if arguments["source"] in names_in(CONFIGS)
        else "heron init {out}"
    ),
    "shards index": "heron init {folder}",
    "shards verify": "heron shards show {folder}",
    "shards show": "heron init {folder}",
    "shards protocol": lambda arguments: [
        _pretrain(
            arguments["config"],
            *arguments["overrides"],
            f"data.roles={as_typed(str(arguments['folder']))}",
        )
    ],
    "init": "heron pretrain {out}",
    "pretrain": _after_pretrain,
    "embed": "heron index {out} --out indexes/{out.name}",
    "index": "heron serve {out}",
    "query": lambda arguments: "heron serve {index}" if arguments["format"] == "table" else "",
    "negatives": lambda arguments: (
        "heron serve {index}"
        if arguments["index"]
        else "heron index {embeddings} --out indexes/{embeddings.name}"
    ),
    "save": lambda arguments: "heron export {out} --out {out.name}.pt2" if arguments["out"] else "",
    "tune": _after_tune,
    "compare": lambda arguments: [
        shlex.join(["heron", "tune", arguments["config"], *arguments["overrides"]])
    ],
    "study": _after_study,
    "report": _after_report,
    "reproduce": _after_reproduce,
    "launchers": "sbatch {out}/slurm/pretrain.sbatch",
    # Verbs that end a piece of work, or only show something:
    **dict.fromkeys(("config", "completion", "runs", "predict", "export", "serve"), ""),
}


def _fill(text: str, arguments: Arguments) -> str:
    """Returns a template with the arguments filled in, each word quoted for a shell."""
    return shlex.join(word.format_map(arguments) for word in text.split())


def next_commands(verb: str, call: Callable[[], Any], status: int) -> list[str]:
    """Returns the commands to suggest after a verb, such as `shards build faces`, and its call.

    With a status other than 0, only a run that was stopped has one.
    """
    if status and (verb, status) != ("pretrain", STOPPED):
        return []
    assert isinstance(call, partial)
    verb_key = verb.rpartition(" ")[0] if verb.startswith("shards build") else verb
    bound = inspect.signature(call.func).bind(*call.args, **call.keywords)
    bound.apply_defaults()
    arguments = bound.arguments | {"status": status, "source": verb.rpartition(" ")[2]}
    template = NEXT[verb_key]
    suggestion = template if isinstance(template, str) else template(arguments)
    if not suggestion:
        return []
    return suggestion if isinstance(suggestion, list) else [_fill(suggestion, arguments)]
