"""The verbs of `heron`, by name."""

from typing import Annotated, Literal

from heron.cli.arguments import Group, Verb
from heron.cli.check import check
from heron.cli.compare import compare, tune
from heron.cli.completion import script
from heron.cli.config import config
from heron.cli.init import init
from heron.cli.models import export, predict, save
from heron.cli.pretrain import launchers, pretrain
from heron.cli.reproduce import run_table
from heron.cli.retrieval import embed, index, negatives, query, serve
from heron.cli.runs import runs
from heron.cli.shards import SHARDS
from heron.cli.study import report, study


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], "bash, zsh or fish"]) -> None:
    """Prints the shell's completion: source it, or put the line into the shell's start-up file.

    heron completion bash > ~/.local/share/bash-completion/completions/heron
    heron completion zsh >> ~/.zshrc
    heron completion fish > ~/.config/fish/completions/heron.fish
    """
    print(script(shell, VERBS))


VERBS = Group(
    "Contrastive pretraining for data with several views and several labels.\n\n"
    "--version says which Heron this is.",
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
