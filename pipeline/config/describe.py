"""Every key of an experiment: its type, default and meaning, as the sections' docstrings say it."""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from heron.pipeline.config.augmentations import Augmentation
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import Config
from heron.pipeline.config.sections import as_typed, models_in
from heron.pipeline.config.terms import Term, Terms, named_terms
from heron.shards.dotted import suggest

BLOCK = re.compile(r"^(?:Attributes|Args):\n((?:(?: +.*)?\n?)*)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
NAMES = {"integer": "whole number", "string": "text", "boolean": "true or false"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
WIDEST = 2**53  # a bound beyond is one of the machine


class Key(NamedTuple):
    """A key of an experiment; N in `name` is a place in a list, VIEW the name of a view.

    Attributes:
        name: dotted, as an override takes it.
        of: the kind of encoder that has it, or "".
        type: what is expected, with bounds.
        default: as YAML, or `required`.
        meaning: one sentence or more.
    """

    name: str
    of: str
    type: str
    default: str
    meaning: str

    @property
    def shown(self) -> str:
        """Its name, and what has it."""
        return f"{self.name} ({self.of})" if self.of else self.name


def describe_keys() -> list[Key]:
    """Returns every key of an experiment, in the order of its sections."""
    return list(_keys(Config, "", ""))


def keys_at(name: str) -> list[Key]:
    """Returns a key, and those inside it.

    Raises:
        ConfigError: there is no such key; names the nearest.
    """
    every, wanted = describe_keys(), re.sub(r"\.\d+(?=\.|$)", ".N", name)
    wanted = re.sub(r"^model\.encoders\.[^.]+", "model.encoder", wanted)  # each is one
    if found := [key for key in every if f"{key.name}.".startswith(f"{wanted}.")]:
        return found
    raise ConfigError(f"unknown key {name!r}; {suggest(wanted, [key.name for key in every])}")


def _keys(section: type[BaseModel], prefix: str, of: str) -> Iterator[Key]:
    meanings = documented(section)
    for name, field in section.model_fields.items():
        if section is Augmentation and name == "own":
            continue  # which a dotted path names
        default = "required" if field.is_required() else _yaml(field.get_default())
        inside = list(_inside(f"{prefix}{name}", field))
        kind = "section" if inside else _type(_schema(field))
        if inside and _container(field.annotation) is list:
            kind = "list of sections"
        own = models_in(field.annotation)  # a section that says itself what it is
        meaning = meanings.get(name) or (_first_line(own[0]) if own else "")
        yield Key(f"{prefix}{name}", of, kind, default, meaning)
        yield from inside


def _inside(name: str, field: FieldInfo) -> Iterator[Key]:
    """Yields the keys inside a field that holds sections."""
    annotation = field.annotation
    if annotation is Terms:
        for term, options in named_terms().items():
            yield Key(f"{name}.{term}", "", "section", "null", _first_line(options))
            yield from _keys(options, f"{name}.{term}.", "")
        return
    sections = models_in(annotation)
    several = {list: "N.", dict: "VIEW."}.get(_container(annotation), "")
    for section in sections:
        of = section.__name__.lower() if len(sections) > 1 else ""
        yield from _keys(section, f"{name}.{several}", of)


def _container(annotation: Any) -> Any:
    """Returns `list` or `dict` where sections lie in one, as in `list[View] | None`."""
    if (origin := get_origin(annotation)) in (list, dict):
        return origin
    return next(filter(None, map(_container, get_args(annotation))), None)


def documented(section: type[BaseModel]) -> dict[str, str]:
    """Returns the meanings of a section's keys: by its `Attributes`, or those of what it extends.

    A term's are also those of the arguments of its loss, the function of its name.
    """
    found: dict[str, str] = {}
    texts = [base.__dict__.get("__doc__") or "" for base in section.__mro__]
    for text in [*texts, *_of_loss(section)]:
        for block in BLOCK.findall(inspect.cleandoc(text)):
            for name, meaning in ENTRY.findall(block):
                found.setdefault(name, " ".join(meaning.split()))
    return found


def _of_loss(section: type[BaseModel]) -> list[str]:
    """Returns the docstring of the loss that a term stands for: the function of its name."""
    if not issubclass(section, Term):
        return []
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", section.__name__).lower()
    loss = vars(sys.modules[section.__module__]).get(name)
    return [loss.__doc__] if loss and loss.__doc__ else []


def _first_line(section: type[BaseModel]) -> str:
    first = inspect.cleandoc(section.__doc__ or "").partition("\n")[0]
    return _of_loss(section)[0].partition("\n")[0] if first.startswith("See ") else first


def _yaml(value: Any) -> str:
    plain = TypeAdapter(Any).dump_python(value, mode="json")
    if isinstance(plain, dict) and plain:
        return "its keys'"
    return as_typed(plain)


def _schema(field: FieldInfo) -> dict[str, Any]:
    hint: Any = Annotated[field.annotation, *field.metadata, None]
    return TypeAdapter(hint).json_schema()


def _type(schema: dict[str, Any]) -> str:
    """Returns what a JSON schema expects, in words."""
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return " or ".join(map(str, choices))
    kind = schema.get("type", "any")
    if kind == "array":
        least, most = schema.get("minItems"), schema.get("maxItems")
        count = f"{least} of" if least is not None and least == most else "list of"
        return f"{count}: {_type(schema.get('items', {}))}"
    bounds = [
        f"{sign} {schema[name]:g}"
        for name, sign in BOUNDS.items()
        if name in schema and abs(schema[name]) < WIDEST
    ]
    return " ".join([NAMES.get(kind, kind), ", ".join(bounds)]).strip()
