"""The command line: `heron VERB`, and its verbs by name."""

import os
import re
import select
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from heron.base.atomic import naming
from heron.base.errors import INTERRUPTED, STOPPED, HeronError, Stopped
from heron.base.shipped import ACCELERATE, CONFIGS, STUDIES, __version__, names_in
from heron.base.terminal import print_error
from heron.cli.arguments import Group, UsageError, Verb, choose, parse, parser_of
from heron.cli.check import check
from heron.cli.compare import compare, tune
from heron.cli.config import config
from heron.cli.init import init
from heron.cli.models import embed, export, predict, save
from heron.cli.next_step import next_commands
from heron.cli.pretrain import launchers, pretrain
from heron.cli.reports import audit, negatives
from heron.cli.retrieval import index, query, serve
from heron.cli.runs import runs
from heron.cli.shards import SHARDS
from heron.cli.study import TABLE_NAMES, report, run_table, study

STDOUT = 1  # its file descriptor
SHELLS = Path(__file__).parent / "shells"  # the scripts, with %s for the words that may follow
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"  # runs that of bash
SHIPPED = {  # names that ship with Heron, by the verb that takes them
    "pretrain": [*names_in(CONFIGS), *names_in(ACCELERATE)],
    "config": names_in(CONFIGS),
    "study": names_in(STUDIES),
    "reproduce": TABLE_NAMES,
    "completion": ["bash", "zsh", "fish"],
}
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
        "audit": Verb(audit),
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
    file = SHELLS / ("heron.fish" if shell == "fish" else "heron.bash")
    return (ZSH if shell == "zsh" else "") + file.read_text().rstrip() % cases


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
        with naming("what this command prints, or a temporary file"):
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
