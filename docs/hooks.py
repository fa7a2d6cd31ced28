"""What the build of the documentation adds: the reference of the configuration, from the code."""

import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from heron.pipeline.config.augmentations import Augmentation
from heron.pipeline.config.experiment import Config
from heron.pipeline.config.terms import named_terms

MARK = "<!-- keys -->"  # in reference/configuration.md, where the tables come
WORDS = {
    int: "integer", float: "number", str: "text", bool: "`true` or `false`", type(None): "`null`"
}  # fmt: skip
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the tables of the configuration into the page that has the mark."""
    return markdown.replace(MARK, configuration()) if MARK in markdown else markdown


def configuration() -> str:
    """Returns the tables of all keys as Markdown."""
    parts = [*_sections("", Config)]
    parts += ["## Augmentations", "Each is an item of `data.views.*.augment`."]
    for name, field in Augmentation.model_fields.items():
        if name != "own":
            parts += _section(f"### `{name}`", "", next(_models(field.annotation)))
    parts += ["## Terms", "Each is a key of `objective`, with `weight` and `ramp_epochs` besides."]
    for name, term in sorted(named_terms().items()):
        parts += _section(f"### `{name}`", "", term, skip=("weight", "ramp_epochs"))
    return "\n\n".join(parts) + "\n"


def _sections(path: str, section: type[BaseModel]) -> Iterator[str]:
    """Gives the table of a section, then those of the sections in it."""
    yield from _section(f"## `{path}`" if path else "## The experiment", path, section)
    for name, field in section.model_fields.items():
        inside = f"{path}.{name}".lstrip(".") + (
            ".*" if get_origin(field.annotation) is list else ""
        )
        for model in _models(field.annotation):
            kind = model.model_fields.get("kind")
            if kind is not None and model.__name__ != "Optim":
                yield from _section(f"### `{inside}` of kind `{kind.default}`", inside, model)
            elif model is not Augmentation and name != "objective":
                yield from _sections(inside, model)


def _section(
    heading: str, path: str, section: type[BaseModel], skip: tuple[str, ...] = ()
) -> Iterator[str]:
    """Gives the heading, the docstring and the table of keys of one section."""
    yield heading
    yield inspect.cleandoc(section.__doc__ or "")
    rows = [
        f"| `{f'{path}.{name}'.lstrip('.')}` | {_type(field.annotation, field.metadata)} "
        f"| {_default(field)} |"
        for name, field in section.model_fields.items()
        if name not in skip
    ]
    if rows:
        yield "\n".join(["| key | type | default |", "|---|---|---|", *rows])


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Gives the sections that a type is made of."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Returns a type in words, with its bounds."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        text = _type(inside[0], inside[1:])
    elif origin in (Union, types.UnionType):
        text = ", or ".join(dict.fromkeys(_type(part) for part in inside))
    elif origin is Literal:
        text = ", ".join(f"`{value}`" for value in inside)
    elif origin is list:
        text = f"list of {_type(inside[0])}"
    elif origin is dict or (inspect.isclass(annotation) and issubclass(annotation, BaseModel)):
        text = "section"
    else:
        text = WORDS.get(annotation, "text")
    flat = [m for one in metadata for m in (one.metadata if isinstance(one, FieldInfo) else [one])]
    limits = {
        name: f"{BOUNDS[name]} {bound:g}"
        for m in flat
        for name in BOUNDS
        if isinstance(bound := getattr(m, name, None), int | float) and bound < 2**31
    }
    return " ".join([text, " and ".join(limits.values())]).strip()


def _default(field: FieldInfo) -> str:
    """Returns a default as YAML has it."""
    if field.is_required():
        return "–"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its own defaults"
    plain = yaml.safe_dump(value, default_flow_style=True, width=200).splitlines()[0]
    return f"`{plain}`"
