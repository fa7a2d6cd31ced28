"""The commands to run after a verb, which the command line suggests."""

import inspect
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from heron.base.errors import STOPPED
from heron.base.shipped import CONFIGS, find_config, names_in
from heron.cli import compare, study
from heron.experiment.overrides import as_typed
from heron.studies.quick import as_file
from heron.training.tracking import read_result

Arguments = Mapping[str, Any]  # of a verb by name, with their defaults


def _heron(*words: object) -> str:
    return shlex.join(["heron", *map(str, words)])


def _after_stop(args: Arguments) -> list[str]:
    """Returns the command that continues a run that was stopped."""
    words = [word for word in args["overrides"] if not word.startswith("run.resume=")]
    options = [f"--{n}={args[n]}" for n in ("method", "processes", "accelerate") if args[n]]
    return [_heron("pretrain", args["config"], *words, "run.resume=auto", *options)]


def _after_pretrain(args: Arguments) -> list[str]:
    from heron.experiment.config import load_config

    config = load_config(find_config(args["config"]), args["overrides"], args["method"])
    run = {"run": Path(config.run.dir)}
    encoders = config.model.encoder, *config.model.encoders.values()
    augmentations = (part.name for view in config.data.views for part in view.augment)
    parts = *config.objective.root, *(encoder.kind for encoder in encoders), *augmentations
    own = " --trust-code" * any("." in part for part in parts)  # a class by its dotted path
    return [_fill("heron embed {run} --out embeddings/{run.name}" + own, run)]


def _after_tune(args: Arguments) -> list[str]:
    out = args["out"] or compare.folder_of(args["config"], "tune")
    names = dict.fromkeys(map(as_file, args["methods"]))
    return [_heron("pretrain", out / f"{name}.yaml") for name in names]


def _after_compare(args: Arguments) -> list[str]:
    """Returns the command for the row that the verdict takes; a scikit-learn model has none."""
    config, overrides = compare.split(args["config"], args["overrides"])
    out = args["out"] or compare.folder_of(config, "quick" if args["quick"] else "compare")
    take = read_result(out / "compare.json")["take"]
    if take.endswith("raw features"):
        return []
    return [_heron("tune", config, *overrides, "--methods", take.rpartition(" on ")[2])]


def _after_report(args: Arguments) -> list[str]:
    from heron.studies.results import best, read_results

    results = read_results(args["study"])
    best_setting = best(results, results.study.measure.score or results.study.measure.y[0])
    return [str(results.table.loc[best_setting.trials[0], "command"])] if best_setting else []


# A template that the verb's arguments fill, or a function of them that returns one, or commands.
NEXT: Mapping[str, str | Callable[[Arguments], str | list[str]]] = {
    "shards build": lambda args: (
        [_heron("pretrain", args["source"], f"data.path={as_typed(str(args['out']))}")]
        if args["source"] in names_in(CONFIGS)
        else "heron init {out}"
    ),
    "shards index": "heron init {folder}",
    "shards verify": "heron shards show {folder}",
    "shards show": "heron init {folder}",
    "shards protocol": lambda args: [
        _heron(
            "pretrain",
            args["config"],
            *args["overrides"],
            f"data.roles={as_typed(str(args['folder']))}",
        )
    ],
    "shards amend": "heron shards show {out}",
    "init": "heron pretrain {out}",
    "pretrain": _after_pretrain,
    "embed": "heron index {out} --out indexes/{out_name}",
    "index": "heron serve {out}",
    "audit": "heron serve {out}",
    "query": lambda args: "heron serve {index}" if args["format"] == "table" else "",
    "negatives": lambda args: (
        "heron serve {index}"
        if args["index"]
        else "heron index {embeddings} --out indexes/{embeddings_name}"
        if args["embeddings"]
        else "heron index {out}-embeddings --out indexes/{out_name}"
    ),
    "save": lambda args: "heron export {out} --out {out_name}.pt2" if args["out"] else "",
    "tune": _after_tune,
    "compare": _after_compare,
    "study": lambda args: (
        []
        if args["dry_run"]
        else [_heron("report", args["out"] or study.folder_of(args["study"], args["small"]))]
    ),
    "report": _after_report,
    "reproduce": lambda args: (
        []
        if args["dry_run"]
        else [_heron("runs", args["out"] or study.folder_of_table(args["table"]))]
    ),
    "launchers": "sbatch {out}/slurm/pretrain.sbatch",
    # Verbs that end a piece of work, or only show something:
    **dict.fromkeys(("check", "config", "completion", "runs", "predict", "export", "serve"), ""),
}


def _fill(text: str, args: Arguments) -> str:
    """Returns a template with the arguments filled in, each word quoted for a shell."""
    return shlex.join(word.format_map(args) for word in text.split())


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
    args = bound.arguments | {"source": verb.rpartition(" ")[2]}
    args |= {f"{n}_name": Path(str(args[n])).name for n in ("out", "embeddings") if n in args}
    template = _after_stop if status else NEXT[verb_key]
    suggestion = template if isinstance(template, str) else template(args)
    if isinstance(suggestion, list):
        return suggestion
    return [_fill(suggestion, args)] if suggestion else []
