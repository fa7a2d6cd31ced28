"""The arguments of a verb: those of the function that does it, read from its signature.

Positional parameters are arguments, `*overrides` are words that may stand anywhere, keyword
parameters are options. `Annotated[int, "what it means"]` gives the text of `--help`.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from heron.shards.dotted import suggest
from heron.shards.errors import CONTROL, SourceError
from heron.shards.terminal import say_fault


class UsageError(Exception):
    """Arguments that are right alone and do not fit each other."""


class Verb(NamedTuple):
    """A verb of the command line."""

    function: Callable[..., int | None]  # does the work; returns the exit status, None for 0
    model: type[BaseModel] | None = None  # of further options, which the function gets as keywords
    about: str = ""  # what it does, and examples, a line each; empty: the function's docstring


class Group(NamedTuple):
    """Verbs by their names, and what they have in common."""

    about: str
    verbs: Mapping[str, "Verb | Group"]
    noun: str = "verb"


def _key_and_value(text: str) -> str:
    if "=" not in text:
        raise ValueError(f"found {text!r}; expected key=value")
    return text


Override = Annotated[str, AfterValidator(_key_and_value)]
UNKNOWN = "unrecognized arguments: "  # begins what argparse says of them
ONE_EACH = object()  # in `Annotated`: an option that takes one value and may be given again


class Parser(argparse.ArgumentParser):
    """A parser that shows its texts as they are written, and a fault as one line."""

    def __init__(self, prog: str, about: str, examples: str) -> None:
        """Begins with no argument but `--help`."""
        epilog = f"examples:\n{examples}" if examples else None
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, about, epilog, formatter_class=as_written)

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2; an option that is not known is told its nearest."""
        if message.startswith(UNKNOWN):
            option = message.removeprefix(UNKNOWN).partition(" ")[0].partition("=")[0]
            if near := get_close_matches(option, self._option_string_actions, 1, 0.75):
                message += f"; did you mean {near[0]}?"
        say_fault("error", f"{message} (see `{self.prog} --help`)")
        sys.exit(2)


def describe(verb: Verb | Group) -> tuple[str, str]:
    """Returns what a verb or a group of verbs does, and its examples."""
    if isinstance(verb, Group):
        return verb.about, "\n".join(filter(None, (describe(v)[1] for v in verb.verbs.values())))
    lines = inspect.cleandoc(verb.about or verb.function.__doc__ or "").splitlines()
    examples = [line for line in lines if line.strip().startswith("heron ")]
    about = "\n".join(line for line in lines if line not in examples)
    return about.strip(), "\n".join(f"  {line.strip()}" for line in examples)


def choose(prog: str, group: Group, words: Sequence[str]) -> Verb | Group:
    """Returns what the first word names; ends the program where there is no such verb."""
    about, examples = describe(group)
    summaries = {name: describe(one)[0].partition("\n")[0] for name, one in group.verbs.items()}
    listed = "\n".join(f"  {name:<12}{summary}" for name, summary in summaries.items())
    parser = Parser(prog, f"{about}\n\n{listed}", examples)
    parser.add_argument("name", metavar=group.noun.upper(), help="one of those above")
    if words and words[0].startswith("-") and parser.parse_known_args(["", words[0]])[1]:
        parser.error(f"unknown option {words[0]!r}; a {group.noun} comes first")
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
    for one in inspect.signature(verb.function).parameters.values():
        default = PydanticUndefined if one.default is one.empty else one.default
        field = FieldInfo.from_annotated_attribute(one.annotation, default)
        if one.kind is one.VAR_KEYWORD:
            for name, option in verb.model.model_fields.items() if verb.model else ():
                _add_option(parser, name, option)
        elif one.kind is one.KEYWORD_ONLY and field.annotation is bool:
            flag = f"--{one.name.replace('_', '-')}"
            parser.add_argument(flag, action="store_true", help=_help(field))
        elif one.kind is one.KEYWORD_ONLY:
            _add_option(parser, one.name, field)
        else:
            nargs = "*" if one.kind is one.VAR_POSITIONAL else None
            convert, metavar = _converter(one.annotation), one.name.upper()
            parser.add_argument(
                one.name, nargs=nargs, type=convert, metavar=metavar, help=_help(field)
            )
    return parser


def parse(prog: str, verb: Verb, words: Sequence[str]) -> Callable[[], int | None]:
    """Returns the call that the words ask for; ends the program where they do not fit."""
    given = vars(parser_of(prog, verb).parse_intermixed_args(words))
    parameters = inspect.signature(verb.function).parameters.values()
    arguments = [given.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    several = [given.pop(p.name) for p in parameters if p.kind is p.VAR_POSITIONAL]
    return partial(verb.function, *arguments, *chain(*several), **given)


def _add_option(parser: Parser, name: str, field: FieldInfo) -> None:
    """Adds an option with a value; where it is not given, the function has its own default."""
    optional = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if optional else (field.annotation,)
    items = [get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)]
    literals = [kind for kind in (*kinds, *items) if get_origin(kind) is Literal]
    each = any(one is ONE_EACH for one in field.metadata)
    choices = [value for kind in literals for value in get_args(kind)]
    has_default = field.default not in (None, "", (), PydanticUndefined)
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        dest=name,
        action="append" if each else "extend" if items else "store",
        nargs="+" if items and not each else None,
        type=_converter(items[0] if items else Annotated[field.annotation, field]),
        choices=choices or None,
        required=field.is_required(),
        default=argparse.SUPPRESS,
        metavar=None if choices else name.upper(),
        help=_help(field) + (f" (default: {field.default})" if has_default else ""),
    )


def _help(field: FieldInfo) -> str:
    text = next((one for one in field.metadata if isinstance(one, str)), field.description or "")
    return text.replace("%", "%%")


def _converter(annotation: Any) -> Callable[[str], Any]:
    """Returns what makes a text of the command line a value of a type, within its bounds."""
    adapter = TypeAdapter(annotation)

    def convert(text: str) -> Any:
        try:
            value = adapter.validate_python(text)
            if isinstance(value, Path) and CONTROL.search(text):
                raise argparse.ArgumentTypeError(f"found {text!r}; expected a path one can print")
            return value
        except ValidationError as error:
            fault = error.errors()[0]
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] != "value_error":  # ours names what was found
            message = f"found {text!r}; {message[:1].lower()}{message[1:]}"
        raise argparse.ArgumentTypeError(message)

    return convert
