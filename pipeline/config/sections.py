"""YAML as typed sections: reading, overrides, and what a fault says."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from heron.pipeline.config.errors import ConfigError

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Natural = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the configuration; unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Named(BaseModel):
    """Sections by a name that is no field."""

    @classmethod
    def section(cls, name: str) -> type[Section]:
        """Returns the section of a name."""
        raise NotImplementedError


Some = TypeVar("Some", bound=Section)


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"key '{key}' is given twice{node.start_mark}; keep one of them")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.[\d_]+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_tree(path: str | Path, what: str = "configuration", key: str = "data") -> dict[str, Any]:
    """The plain values of a YAML file.

    Args:
        path: of the file.
        what: it is, and a key that it has, for the errors.
        key: see `what`.

    Raises:
        ConfigError: the file is missing, or holds no YAML mapping.
    """
    path = Path(path)
    if not path.is_file():
        shipped = sorted(str(p) for p in path.parent.glob("*.yaml")) or ["none"]
        raise ConfigError(f"{what} {path} is not there; found {', '.join(shipped)}")
    tree = parse_yaml(path.read_text(), str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {type(tree).__name__}; expected keys such as '{key}:'")
    return tree


def parse_yaml(text: str, where: str) -> Any:
    """The plain values of some YAML.

    Raises:
        ConfigError: it is none, or has a key twice; says where.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from None


def parse_override(given: str) -> tuple[str, Any]:
    """The dotted key and the value of `key.key=value`.

    Raises:
        ConfigError: it has no '=', or the value is no YAML.
    """
    key, equals, value = given.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{given}' has no '='; expected key=value: optim.lr=0.1")
    return key, parse_yaml(value, f"override '{given}'")


def override(tree: dict[str, Any], given: str) -> None:
    """Set one dotted key in a tree.

    Args:
        tree: plain values, changed in place.
        given: `key.key=value`; see `pipeline.config.experiment.load_config`.

    Raises:
        ConfigError: it has no '=', or leads through a value or past the end of a list.
    """
    key, value = parse_override(given)
    *parents, last = key.split(".")
    place: Any = tree
    for parent in parents:
        if isinstance(place, dict) and place.get(parent) is None:
            place[parent] = {}
        place = place[_at(place, parent, given)]
        if not isinstance(place, dict | list):
            raise ConfigError(
                f"override '{given}': '{parent}' holds the value {place!r}, not a section"
            )
    place[_at(place, last, given)] = value


def _at(place: dict[str, Any] | list[Any], part: str, given: str) -> Any:
    """A key of a section, or the place in a list that a number names."""
    if isinstance(place, dict):
        return part
    if not part.isdigit() or int(part) >= len(place):
        raise ConfigError(
            f"override '{given}': '{part}' is no place in a list of {len(place)}; expected 0 to "
            f"{len(place) - 1}"
        )
    return int(part)


def check(model: type[Some], tree: dict[str, Any], what: str) -> Some:
    """A tree of plain values as a typed section.

    Raises:
        ConfigError: a key or a value does not fit; lists every fault with the nearest right key.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        faults = [_explain(fault, model) for fault in error.errors()]
        raise ConfigError("\n".join([f"{what} does not fit:", *faults])) from None


def _explain(fault: Any, root: type[BaseModel]) -> str:
    """One validation fault as 'key: found, expected'."""
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        section = _section(path[:-1], root)
        near = difflib.get_close_matches(path[-1], section, 1, 0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(section)}"
        return f"  {key}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"  {key}: missing; expected a value"
    message = fault["msg"].removeprefix("Value error, ")
    found = "" if isinstance(fault["input"], dict | Section) else f"found {fault['input']!r}; "
    return f"  {key or 'configuration'}: {found}{message[0].lower()}{message[1:]}"


def _section(path: Sequence[str], root: type[BaseModel]) -> list[str]:
    """The keys that are known at a place in the tree."""
    model: type[BaseModel] = root
    current: Any = root
    for part in path:
        if issubclass(model, Named):
            model = model.section(part)
            continue
        field = model.model_fields.get(part)
        if field is None:  # the index of a list or the tag of a choice: look at its models
            models = _models(current)
            model = next((m for m in models if m.__name__.lower() == part), models[0])
            continue
        current = field.annotation
        models = _models(current)
        if models:
            model = models[0]
    return list(model.model_fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The section types inside an annotation such as ``list[View]`` or ``Mlp | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    parts = getattr(annotation, "__args__", ())
    return [model for part in parts for model in _models(part)]
