"""`heron completion`: shell completion of verbs, options and shipped names."""

from collections.abc import Iterator
from pathlib import Path

from heron.cli.arguments import Group, parser_of
from heron.cli.study import TABLE_NAMES
from heron.config.shipped import ACCELERATE, CONFIGS, STUDIES, names_in

SHELLS = Path(__file__).parent / "shells"  # the scripts, with %s for the words that may follow
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"  # runs that of bash
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
    file = SHELLS / ("heron.fish" if shell == "fish" else "heron.bash")
    return (ZSH if shell == "zsh" else "") + file.read_text().rstrip() % cases
