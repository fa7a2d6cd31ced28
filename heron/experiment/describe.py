"""Describes the keys of an experiment: type, default, and meaning from the sections' docstrings."""

import inspect
import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from heron.base.dotted import suggest
from heron.base.errors import ConfigError
from heron.base.sections import models_in
from heron.data.augmentations import Augmentation
from heron.experiment.config import Config
from heron.experiment.overrides import as_typed
from heron.losses.named_terms import Terms, named_terms

BLOCK = re.compile(r"^(?:Attributes|Args):\n((?:(?: +.*)?\n?)*)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
NAMES = {"integer": "whole number", "string": "text", "boolean": "true or false"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
WIDEST = 2**53  # larger bounds are limits of the machine and not shown


class Key(NamedTuple):
    """A key of an experiment; N in `name` stands for a list index, VIEW for the name of a view.

    Attributes:
        name: dotted key, as in an override.
        encoder_kind: the kind of encoder that has the key, or "".
        type: expected type, with bounds.
        default: as YAML, or `required`.
        meaning: one or more sentences.
    """

    name: str
    encoder_kind: str
    type: str
    default: str
    meaning: str

    @property
    def shown(self) -> str:
        """The name, with the kind of encoder, if any, in parentheses."""
        return f"{self.name} ({self.encoder_kind})" if self.encoder_kind else self.name


def describe_keys() -> list[Key]:
    """Returns every key of an experiment, in the order of its sections."""
    return list(_keys(Config, "", ""))


def keys_at(name: str) -> list[Key]:
    """Returns a key and the keys inside it; ConfigError with the nearest if there is none."""
    all_keys, normalized = describe_keys(), re.sub(r"\.\d+(?=\.|$)", ".N", name)
    # All encoders have the keys of `encoder`.
    normalized = re.sub(r"^model\.encoders\.[^.]+", "model.encoder", normalized)
    if matches := [key for key in all_keys if f"{key.name}.".startswith(f"{normalized}.")]:
        return matches
    raise ConfigError(
        f"unknown key {name!r}; {suggest(normalized, [key.name for key in all_keys])}"
    )


def _keys(section: type[BaseModel], prefix: str, encoder_kind: str) -> Iterator[Key]:
    meanings = documented(section)
    for name, field in section.model_fields.items():
        if section is Augmentation and name == "own":
            continue  # a dotted path takes its place
        default = "required" if field.is_required() else _yaml_default(field.get_default())
        nested = list(_nested_keys(f"{prefix}{name}", field))
        kind = "section" if nested else _type_text(_schema(field))
        if nested and _container(field.annotation) is list:
            kind = "list of sections"
        sections = models_in(field.annotation)  # whose own docstring is the fallback
        meaning = meanings.get(name) or (_first_line(sections[0]) if sections else "")
        yield Key(f"{prefix}{name}", encoder_kind, kind, default, meaning)
        yield from nested


def _nested_keys(name: str, field: FieldInfo) -> Iterator[Key]:
    annotation = field.annotation
    if annotation is Terms:
        for term, options in named_terms().items():
            yield Key(f"{name}.{term}", "", "section", "null", _first_line(options))
            yield from _keys(options, f"{name}.{term}.", "")
        return
    sections = models_in(annotation)
    index = {list: "N.", dict: "VIEW."}.get(_container(annotation), "")
    for section in sections:
        of = section.__name__.lower() if len(sections) > 1 else ""
        yield from _keys(section, f"{name}.{index}", of)


def _container(annotation: Any) -> Any:
    """Returns `list` or `dict` if an annotation has one, as in `list[View] | None`, or None."""
    if (origin := get_origin(annotation)) in (list, dict):
        return origin
    return next(filter(None, map(_container, get_args(annotation))), None)


def documented(section: type[BaseModel]) -> dict[str, str]:
    """Returns the meanings of a section's keys, from its `Attributes` or `Args` and its bases'."""
    meanings: dict[str, str] = {}
    for text in (base.__dict__.get("__doc__") or "" for base in section.__mro__):
        for block in BLOCK.findall(inspect.cleandoc(text)):
            for name, meaning in ENTRY.findall(block):
                meanings.setdefault(name, " ".join(meaning.split()))
    return meanings


def _first_line(section: type[BaseModel]) -> str:
    return inspect.cleandoc(section.__doc__ or "").partition("\n")[0]


def _yaml_default(value: Any) -> str:
    plain = TypeAdapter(Any).dump_python(value, mode="json")
    if isinstance(plain, dict) and plain:
        return "its keys'"
    return as_typed(plain)


def _schema(field: FieldInfo) -> dict[str, Any]:
    hint: Any = Annotated[field.annotation, *field.metadata, None]
    return TypeAdapter(hint).json_schema()


def _type_text(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_type_text, schema["anyOf"]))
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return " or ".join(map(str, choices))
    kind = schema.get("type", "any")
    if kind == "array":
        min_items, max_items = schema.get("minItems"), schema.get("maxItems")
        count = f"{min_items} of" if min_items is not None and min_items == max_items else "list of"
        return f"{count}: {_type_text(schema.get('items', {}))}"
    bounds = [
        f"{sign} {schema[name]:g}"
        for name, sign in BOUNDS.items()
        if name in schema and abs(schema[name]) < WIDEST
    ]
    return " ".join([NAMES.get(kind, kind), ", ".join(bounds)]).strip()
