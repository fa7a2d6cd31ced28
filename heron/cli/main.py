"""The command line: `heron VERB`, and its verbs by name.

`NEXT` has the commands to run after a verb, which the command line suggests; scripts complete verbs
in a shell.
"""

import inspect
import os
import re
import select
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from heron.cli.arguments import Group, UsageError, Verb, choose, parse, parser_of
from heron.cli.compare import compare, split, tune
from heron.cli.compare import folder_of as folder_of_search
from heron.cli.config import check, config
from heron.cli.init import init
from heron.cli.models import embed, export, predict, save
from heron.cli.pretrain import launchers, pretrain
from heron.cli.retrieval import index, negatives, query, serve
from heron.cli.runs import runs
from heron.cli.shards import SHARDS
from heron.cli.study import TABLE_NAMES, folder_of_table, report, run_table, study
from heron.cli.study import folder_of as folder_of_study
from heron.config.errors import INTERRUPTED, STOPPED, Stopped
from heron.config.overrides import as_typed
from heron.config.shipped import ACCELERATE, CONFIGS, STUDIES, __version__, find_config, names_in
from heron.shards.errors import HeronError
from heron.shards.terminal import print_error
from heron.training.tracking import read_result

Arguments = Mapping[str, Any]  # of a verb by name, with their defaults


def _pretrain(*words: str) -> str:
    return shlex.join(["heron", "pretrain", *words])


def _with_options(words: Sequence[str], args: Arguments, *names: str) -> str:
    """Returns the command of some words, with those of the named options that have a value."""
    options: list[str] = []
    for name in (name for name in names if args[name]):
        value = args[name]
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        options += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join([*words, *options])


def _after_pretrain(args: Arguments) -> list[str]:
    if args["status"] == STOPPED:
        again = [word for word in args["overrides"] if not word.startswith("run.resume=")]
        words = ["heron", "pretrain", args["config"], *again, "run.resume=auto"]
        return [_with_options(words, args, "method", "processes", "accelerate")]
    from heron.config.experiment import load_config

    config = load_config(find_config(args["config"]), args["overrides"], args["method"])
    run = {"run": Path(config.run.dir)}
    return [_fill("heron embed {run} --out embeddings/{run.name}", run)]


def _after_tune(args: Arguments) -> list[str]:
    out = args["out"] or folder_of_search(args["config"], "tune")
    paths = [str(out / f"{method}.yaml") for method in dict.fromkeys(args["methods"])]
    return [shlex.join(["heron", "pretrain", path]) for path in paths]


def _after_compare(args: Arguments) -> list[str]:
    """Returns the command for the row that the verdict takes; a scikit-learn model has none."""
    config, overrides = split(args["config"], args["overrides"])
    out = args["out"] or folder_of_search(config, "quick" if args["quick"] else "compare")
    take = read_result(out / "compare.json")["take"]
    if take.endswith("raw features"):
        return []
    words = ["heron", "tune", config, *overrides, "--methods", take.rpartition(" on ")[2]]
    return [shlex.join(words)]


def _after_study(args: Arguments) -> list[str]:
    if args["dry_run"]:
        words = ["heron", "study", str(args["study"]), *args["overrides"]]
        return [_with_options(words, args, "out", "small", "address", "retry_failed")]
    out = args["out"] or folder_of_study(args["study"], args["small"])
    return [shlex.join(["heron", "report", str(out)])]


def _after_report(args: Arguments) -> list[str]:
    from heron.studies.results import best, read_results

    results = read_results(args["study"])
    best_setting = best(results, results.study.measure.score or results.study.measure.y[0])
    return [str(results.table.loc[best_setting.trials[0], "command"])] if best_setting else []


def _after_reproduce(args: Arguments) -> list[str]:
    if args["dry_run"]:
        words = ["heron", "reproduce", args["table"], *args["overrides"]]
        return [_with_options(words, args, "runs", "first", "only", "out")]
    return [shlex.join(["heron", "runs", str(args["out"] or folder_of_table(args["table"]))])]


# A template that the verb's arguments fill, or a function of them that returns one, or commands.
NEXT: Mapping[str, str | Callable[[Arguments], str | list[str]]] = {
    "shards build": lambda args: (
        [_pretrain(args["source"], f"data.path={as_typed(str(args['out']))}")]
        if args["source"] in names_in(CONFIGS)
        else "heron init {out}"
    ),
    "shards index": "heron init {folder}",
    "shards verify": "heron shards show {folder}",
    "shards show": "heron init {folder}",
    "shards protocol": lambda args: [
        _pretrain(args["config"], *args["overrides"], f"data.roles={as_typed(str(args['folder']))}")
    ],
    "init": "heron pretrain {out}",
    "pretrain": _after_pretrain,
    "embed": "heron index {out} --out indexes/{out_name}",
    "index": "heron serve {out}",
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
    "study": _after_study,
    "report": _after_report,
    "reproduce": _after_reproduce,
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
    args = bound.arguments | {"status": status, "source": verb.rpartition(" ")[2]}
    args |= {f"{n}_name": Path(str(args[n])).name for n in ("out", "embeddings") if n in args}
    template = NEXT[verb_key]
    suggestion = template if isinstance(template, str) else template(args)
    if not suggestion:
        return []
    return suggestion if isinstance(suggestion, list) else [_fill(suggestion, args)]


BASH = """\
_heron_words() {
  case "$1" in
%s
  esac
}
_heron() {
  local path="" next i
  for ((i = 1; i < COMP_CWORD; i++)); do
    next="${path:+$path }${COMP_WORDS[i]}"
    [ -n "$(_heron_words "$next")" ] && path="$next"
  done
  COMPREPLY=($(compgen -W "$(_heron_words "$path")" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _heron heron"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
FISH = """\
function __heron_words
  switch "$argv"
%s
  end
end
function __heron
  set -l path
  for word in (commandline -opc)[2..]
    set -l longer $path $word
    test -n "$(__heron_words "$longer")"; and set path $longer
  end
  __heron_words "$path" | string split " "
end
complete -c heron -a "(__heron)\""""
SHIPPED = {  # names that ship with Heron, by the verb that takes them
    "pretrain": [*names_in(CONFIGS), *names_in(ACCELERATE)],
    "config": names_in(CONFIGS),
    "study": names_in(STUDIES),
    "reproduce": TABLE_NAMES,
    "completion": ["bash", "zsh", "fish"],
}


def words_by_path(group: Group, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yields each path of verbs, with the words that may follow it."""
    yield path, [*group.verbs, *([] if path else ["--version"])]
    for name, verb in group.verbs.items():
        verb_path = f"{path} {name}".strip()
        if isinstance(verb, Group):
            yield from words_by_path(verb, verb_path)
            continue
        actions = parser_of(f"heron {verb_path}", verb)._actions
        options = [option for action in actions for option in action.option_strings]
        long = [option for option in options if option.startswith("--")]
        yield verb_path, [*long, *SHIPPED.get(verb_path, [])]


def script(shell: str, verbs: Group) -> str:
    """Returns the script for a shell; where no words follow, it completes file names."""
    case = "    case '{}'\n      echo {}" if shell == "fish" else "    '{}') echo '{}' ;;"
    cases = "\n".join(case.format(path, " ".join(words)) for path, words in words_by_path(verbs))
    if shell == "fish":
        return FISH % cases
    return (ZSH if shell == "zsh" else "") + BASH % cases


STDOUT = 1  # its file descriptor
SURROGATE = re.compile("[\ud800-\udfff]")  # what Python makes of bytes that are not UTF-8


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], "bash, zsh or fish"]) -> None:
    """Prints the completion script of a shell; source it, or add it to the shell's startup file.

    heron completion bash > ~/.local/share/bash-completion/completions/heron
    heron completion zsh >> ~/.zshrc
    heron completion fish > ~/.config/fish/completions/heron.fish
    """
    print(script(shell, VERBS))


VERBS = Group(
    "Contrastive pretraining for data with several views and several labels.\n\n"
    "--version prints the version.",
    {
        "pretrain": Verb(pretrain),
        "init": Verb(init),
        "config": Verb(config),
        "shards": SHARDS,
        "embed": Verb(embed),
        "predict": Verb(predict),
        "index": Verb(index),
        "query": Verb(query),
        "negatives": Verb(negatives),
        "serve": Verb(serve),
        "check": Verb(check),
        "save": Verb(save),
        "export": Verb(export),
        "reproduce": Verb(run_table),
        "tune": Verb(tune),
        "compare": Verb(compare),
        "study": Verb(study),
        "report": Verb(report),
        "launchers": Verb(launchers),
        "completion": Verb(completion),
        "runs": Verb(runs),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its status; an expected error prints one line, with status 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    for word in words:
        if SURROGATE.search(word):
            print_error(
                "error", f"argument {ascii(word)} is not UTF-8; pass text or a path in UTF-8"
            )
            return 2
    if words == ["--version"]:
        print(f"heron {__version__}")
        return 0
    if words[:1] == ["config"] and len(words) > 2:  # `heron config --help KEY` explains the key
        words = [word for word in words if word not in ("-h", "--help")]
    prog = "heron"
    verb: Verb | Group = VERBS
    while isinstance(verb, Group):
        verb = choose(prog, verb, words)
        prog, words = f"{prog} {words[0]}", words[1:]
    call = parse(prog, verb, words)
    try:
        status = call() or 0
        sys.stdout.flush()
        for command in next_commands(prog.removeprefix("heron "), call, status):
            print(f"next: {command}", file=sys.stderr)  # never wrapped: it is for copying
    except UsageError as fault:
        print_error("error", f"{fault} (see `{prog} --help`)")
        return 2
    except (HeronError, OSError) as fault:
        if isinstance(fault, BrokenPipeError) and _stdout_is_closed():
            return 141  # what a shell gives for SIGPIPE
        print_error("error", str(fault))
        return 1
    except Stopped as stopped:
        print_error("stopped", f"{stopped}; run the same command again to continue")
        return STOPPED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _stdout_is_closed() -> bool:
    """Returns whether the reader of the output has gone, as in `heron ... | head`."""
    output = select.poll()
    output.register(STDOUT, 0)  # poll reports POLLERR without being asked
    if closed := any(event & select.POLLERR for _, event in output.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # or Python fails again as it exits
    return closed
