"""What to run after a verb: the one table of it, which the command line prints from."""

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any

from heron.pipeline.config.errors import STOPPED
from heron.pipeline.config.shipped import CONFIGS, find_config, names_in

Given = Mapping[str, Any]  # the arguments of a verb by name, with their defaults


def _after_pretrain(given: Given) -> Iterator[str]:
    if given["status"] == STOPPED:
        again = [word for word in given["overrides"] if not word.startswith("run.resume=")]
        words = ["heron", "pretrain", given["config"], *again, "run.resume=auto"]
        for option in ("method", "processes", "accelerate"):
            words += [f"--{option}", str(given[option])] if given[option] else []
        yield shlex.join(words)
        return
    from heron.pipeline.config.experiment import load_config

    config = load_config(find_config(given["config"]), given["overrides"], given["method"])
    run = Path(config.run.dir)
    yield _filled("heron embed {run} --out embeddings/{run.name}", {"run": run})


def _after_build(given: Given) -> Iterator[str]:
    name = given["source"] if given["source"] in names_in(CONFIGS) else ""
    text = "heron pretrain {source} data.path={out}" if name else "heron init {out}"
    yield _filled(text, given)


def _after_query(given: Given) -> Iterator[str]:
    if given["format"] == "table":
        yield _filled("heron serve {index}", given)


def _after_negatives(given: Given) -> Iterator[str]:
    made = "heron index {embeddings} --out indexes/{embeddings.name}"
    yield _filled("heron serve {index}" if given["index"] else made, given)


def _after_tune(given: Given) -> Iterator[str]:
    from heron.launch.compare import folder_of

    out = given["out"] or folder_of(given["config"], "tune")
    for method in given["methods"]:
        yield _filled("heron pretrain {path}", {"path": out / f"{method}.yaml"})


def _after_study(given: Given) -> Iterator[str]:
    from heron.launch.study import folder_of

    study = given["study"]
    if given["dry_run"]:
        small = " --small" if given["small"] else ""
        yield _filled("heron study {study}", given) + small
    else:
        out = given["out"] or folder_of(study, given["small"])
        yield _filled("heron report {out}", {"out": out})


def _after_report(given: Given) -> Iterator[str]:
    from heron.launch.studies.curves import best
    from heron.launch.studies.results import read_results

    results = read_results(given["study"])
    found = best(results, results.study.measure.score or results.study.measure.y[0])
    if found:
        yield str(results.table.loc[found.trials[0], "command"])


def _after_reproduce(given: Given) -> Iterator[str]:
    from heron.launch.reproduce import folder_of

    out = given["out"] or folder_of(given["table"])
    yield _filled(
        "heron reproduce {table}" if given["dry_run"] else "heron runs {out}", {**given, "out": out}
    )


def _after_save(given: Given) -> Iterator[str]:
    if given["out"]:
        yield _filled("heron export {out} --out {out.name}.pt2", given)


NEXT: Mapping[str, str | Callable[[Given], Iterator[str]]] = {
    "shards build": _after_build,
    "shards index": "heron init {folder}",
    "shards verify": "heron shards show {folder}",
    "shards show": "heron init {folder}",
    "shards protocol": "heron pretrain {config} data.roles={folder}",
    "init": "heron pretrain {out}",
    "pretrain": _after_pretrain,
    "embed": "heron index {out} --out indexes/{out.name}",
    "index": "heron serve {out}",
    "query": _after_query,
    "negatives": _after_negatives,
    "save": _after_save,
    "tune": _after_tune,
    "compare": "heron tune {config}",
    "study": _after_study,
    "report": _after_report,
    "reproduce": _after_reproduce,
    "launchers": "sbatch {out}/slurm/pretrain.sbatch",
    # What ends a piece of work, or only shows something:
    **dict.fromkeys(("config", "completion", "runs", "predict", "export", "serve"), ""),
}


class _Quoted(Formatter):
    """Fills in a command's words, quoted for a shell."""

    def format_field(self, value: Any, spec: str) -> str:
        return shlex.quote(str(value))


def _filled(text: str, given: Given) -> str:
    return _Quoted().vformat(text, (), given)


def next_commands(verb: str, call: Callable[[], Any], status: int) -> list[str]:
    """Returns the commands that come after a verb, none where there is none.

    Args:
        verb: its words, such as `shards build faces`.
        call: of the verb's function, with its arguments.
        status: that it ended with; but for 0 only a run that was stopped has a next command.
    """
    if status and (verb, status) != ("pretrain", STOPPED):
        return []
    assert isinstance(call, partial)
    known = verb.rpartition(" ")[0] if verb.startswith("shards build") else verb
    bound = inspect.signature(call.func).bind(*call.args, **call.keywords)
    bound.apply_defaults()
    given = bound.arguments | {"status": status, "source": verb.rpartition(" ")[2]}
    after = NEXT[known]
    if isinstance(after, str):
        return [_filled(after, given)] if after else []
    return list(after(given))
