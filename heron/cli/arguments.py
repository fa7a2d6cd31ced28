"""Parses the arguments of a verb, by the signature of the function that implements it.

Positional parameters become arguments, `*overrides` words that may stand anywhere, and keyword-only
parameters options. `Annotated[int, "what it means"]` gives the text of `--help`.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from heron.base.dotted import suggest
from heron.base.errors import CONTROL, SourceError, explain
from heron.base.sections import Natural, expand_home
from heron.base.terminal import print_error
from heron.base.workers import Executor, Processes


class UsageError(Exception):
    """Arguments that are valid alone but not together."""


class Verb(NamedTuple):
    """A verb of the command line."""

    function: Callable[..., int | None]  # does the work; returns the exit status, None for 0
    model: type[BaseModel] | None = None  # further options, passed to the function as keywords
    about: str = ""  # description and example lines; empty: the function's docstring


class Group(NamedTuple):
    """Verbs by name, with a common description."""

    about: str
    verbs: Mapping[str, "Verb | Group"]
    noun: str = "command"  # what a user calls one of them


def _key_and_value(text: str) -> str:
    if "=" not in text:
        raise ValueError(f"must be key=value, got {text!r}")
    return text


Override = Annotated[str, AfterValidator(_key_and_value)]
Location = Annotated[str, AfterValidator(expand_home)]  # a path, a name, or a URL
# As configs/methods.yaml has it, with overrides of its own: NAME+key=value.
MethodName = Annotated[
    str, AfterValidator(lambda text: re.sub(r"^[^+]*", lambda name: name[0].lower(), text))
]
Overwrite = Annotated[bool, "move what is in --out aside, and start over"]
Quiet = Annotated[bool, "no progress bar"]
Address = Annotated[
    str | None, "Ray cluster to run on: HOST:PORT or auto (default: run on this machine)"
]
AtOnce = Annotated[Natural | None, "runs at a time, by Ray (default: 1 here, all of a cluster)"]
OVERRIDE = re.compile(r"[a-z_]+(\.[\w-]+)*=")  # begins an override
UNRECOGNIZED = "unrecognized arguments: "  # begins a message of argparse
ONE_EACH = object()  # in `Annotated`: an option that takes one value and may be given again


@contextmanager
def executor(workers: int | None, address: str | None, gpu: bool = False) -> Iterator[Executor]:
    """Provides processes of this machine, or the tasks of the Ray cluster at an address.

    With `gpu` each task has a GPU, if the cluster has any.
    """
    if address is None:
        yield Processes(workers or 1)
        return
    from heron.distributed.cluster import Tasks, connected, has_gpus

    with connected(address, "--address"):
        yield Tasks(workers, int(gpu and has_gpus()))


class Parser(argparse.ArgumentParser):
    """A parser that prints its texts verbatim, and an error as one line."""

    def __init__(self, prog: str, about: str, examples: str) -> None:
        """Sets up a parser with `--help` only."""
        epilog = f"examples:\n{examples}" if examples else None
        verbatim = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, about, epilog, formatter_class=verbatim)

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2; for an unknown option, suggests a similar one."""
        if message.startswith(UNRECOGNIZED):
            option = message.removeprefix(UNRECOGNIZED).partition(" ")[0].partition("=")[0]
            if near := get_close_matches(option, self._option_string_actions, 1, 0.75):
                message += f"; did you mean {near[0]}?"
        print_error("error", f"{message} (see `{self.prog} --help`)")
        sys.exit(2)


def describe(verb: Verb | Group) -> tuple[str, str]:
    """Returns the description of a verb or group, and its examples."""
    if isinstance(verb, Group):
        return verb.about, "\n".join(filter(None, (describe(v)[1] for v in verb.verbs.values())))
    lines = inspect.cleandoc(verb.about or verb.function.__doc__ or "").splitlines()
    examples = [line for line in lines if line.strip().startswith("heron ")]
    about = "\n".join(line for line in lines if line not in examples)
    return about.strip(), "\n".join(f"  {line.strip()}" for line in examples)


def choose(prog: str, group: Group, words: Sequence[str]) -> Verb | Group:
    """Returns the verb or group that the first word names; ends the program if there is none."""
    about, examples = describe(group)
    summaries = {name: describe(verb)[0].partition("\n")[0] for name, verb in group.verbs.items()}
    listed = "\n".join(f"  {name:<12}{summary}" for name, summary in summaries.items())
    parser = Parser(prog, f"{about}\n\n{listed}", examples)
    parser.add_argument("name", metavar=group.noun.upper(), help="one of those above")
    if words and words[0].startswith("-") and parser.parse_known_args(["", words[0]])[1]:
        parser.error(f"unknown option {words[0]!r}; the {group.noun} comes first")
    name = parser.parse_args(words[:1]).name
    try:
        return group.verbs[name]
    except KeyError:
        parser.error(f"unknown {group.noun} {name!r}; {suggest(name, list(group.verbs))}")
    except SourceError as fault:
        parser.error(str(fault))


def parser_of(prog: str, verb: Verb) -> Parser:
    """Returns the parser of a verb's arguments and options."""
    parser = Parser(prog, *describe(verb))
    for parameter in inspect.signature(verb.function).parameters.values():
        default = PydanticUndefined if parameter.default is parameter.empty else parameter.default
        field = FieldInfo.from_annotated_attribute(parameter.annotation, default)
        if parameter.kind is parameter.VAR_KEYWORD:
            for name, option in verb.model.model_fields.items() if verb.model else ():
                _add_option(parser, name, option)
        elif parameter.kind is parameter.KEYWORD_ONLY and field.annotation is bool:
            flag = f"--{parameter.name.replace('_', '-')}"
            parser.add_argument(flag, action="store_true", help=_help(field))
        elif parameter.kind is parameter.KEYWORD_ONLY:
            _add_option(parser, parameter.name, field)
        else:
            count: dict[str, Any] = {"nargs": None if default is PydanticUndefined else "?"}
            if parameter.kind is parameter.VAR_POSITIONAL:
                count = {"nargs": "*", "default": []}  # without a default it would be required
            convert, metavar = _converter(parameter.annotation), parameter.name.upper()
            parser.add_argument(
                parameter.name, type=convert, metavar=metavar, help=_help(field), **count
            )
    return parser


def parse(prog: str, verb: Verb, words: Sequence[str]) -> Callable[[], int | None]:
    """Returns the call of the verb with parsed arguments; ends the program if they are invalid."""
    parser = parser_of(prog, verb)
    parameters = inspect.signature(verb.function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        words = _overrides_first(parser, words)
    values = vars(parser.parse_intermixed_args(words))
    positional = [values.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    variadic = [values.pop(p.name) for p in parameters if p.kind is p.VAR_POSITIONAL]
    return partial(verb.function, *positional, *chain(*variadic), **values)


def _overrides_first(parser: Parser, words: Sequence[str]) -> list[str]:
    """Puts each key=value that an option of several values would swallow in front of the option."""
    ordered = list[str]()
    start: int | None = None  # of the words of such an option
    for word in words:
        if start is not None and OVERRIDE.match(word):
            ordered.insert(start, word)
            start += 1
            continue
        if word.startswith("-"):
            action = parser._option_string_actions.get(word)
            start = len(ordered) if action and action.nargs == "+" else None
        ordered.append(word)
    return ordered


def _add_option(parser: Parser, name: str, field: FieldInfo) -> None:
    """Adds an option with a value; without it, the function's own default applies."""
    optional = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if optional else (field.annotation,)
    items = [get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)]
    literals = [kind for kind in (*kinds, *items) if get_origin(kind) is Literal]
    is_repeated = any(item is ONE_EACH for item in field.metadata)
    choices = [value for kind in literals for value in get_args(kind)]
    has_default = field.default not in (None, "", (), PydanticUndefined)
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        dest=name,
        action="append" if is_repeated else "extend" if items else "store",
        nargs="+" if items and not is_repeated else None,
        type=_converter(items[0] if items else Annotated[field.annotation, field]),
        choices=choices or None,
        required=field.is_required(),
        default=argparse.SUPPRESS,
        metavar=None if choices else name.upper(),
        help=_help(field) + (f" (default: {field.default})" if has_default else ""),
    )


def _help(field: FieldInfo) -> str:
    text = next((item for item in field.metadata if isinstance(item, str)), field.description or "")
    return text.replace("%", "%%")


def _converter(annotation: Any) -> Callable[[str], Any]:
    adapter = TypeAdapter(annotation)

    def convert(text: str) -> Any:
        try:
            value = adapter.validate_python(text)
            if isinstance(value, Path):
                value = Path(expand_home(str(value)))
            if isinstance(value, Path) and CONTROL.search(text):
                raise argparse.ArgumentTypeError(
                    f"the path {text!r} has a character that cannot be printed; rename it"
                )
            return value
        except ValidationError as error:
            fault = error.errors()[0]
        if fault["type"] == "value_error":  # Heron's own messages name it themselves
            raise argparse.ArgumentTypeError(fault["msg"].removeprefix("Value error, "))
        raise argparse.ArgumentTypeError(explain(fault, "it").removeprefix("it").lstrip(": "))

    return convert
