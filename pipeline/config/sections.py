"""YAML as typed sections: reading, overrides, and what a fault says."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from heron.pipeline.config.errors import ConfigError

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
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
    """Returns the plain values of a YAML file; `what` it is and a `key` of it are for the errors.

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
    """Returns the plain values of some YAML; ConfigError, with `where`, if it is none."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from None


def parse_override(given: str) -> tuple[str, Any]:
    """Returns the dotted key and the value of `key.key=value`; ConfigError if it is no such."""
    key, equals, value = given.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{given}' has no '='; expected key=value: optim.lr=0.1")
    return key, parse_yaml(value, f"override '{given}'")


def override(tree: dict[str, Any], given: str) -> None:
    """Sets one dotted key, `key.key=value`, in a tree of plain values.

    Raises:
        ConfigError: it has no '=', or leads through a value or past the end of a list.
    """
    key, value = parse_override(given)
    section: Any = tree
    *parents, last = _names(tree, key)
    for parent in parents:
        if isinstance(section, dict) and section.get(parent) is None:
            section[parent] = {}
        section = section[_key_in(section, parent, given)]
        if not isinstance(section, dict | list):
            raise ConfigError(
                f"override '{given}': '{parent}' holds the value {section!r}, not a section"
            )
    section[_key_in(section, last, given)] = value


def _names(tree: dict[str, Any], key: str) -> list[str]:
    """Returns the parts of a dotted key; a key of the tree that has dots itself is one part."""
    names, section = [], tree
    while key:
        dotted = [k for k in section if "." in str(k) and f"{key}.".startswith(f"{k}.")]
        name = max(dotted, key=len) if dotted else key.partition(".")[0]
        names.append(name)
        key = key[len(name) + 1 :]
        found = section.get(name)
        section = found if isinstance(found, dict) else {}
    return names


def _key_in(section: dict[str, Any] | list[Any], part: str, given: str) -> Any:
    """Returns a key of a section, or the index in a list that a number names."""
    if isinstance(section, dict):
        return part
    if not part.isdigit() or int(part) >= len(section):
        raise ConfigError(
            f"override '{given}': '{part}' is no place in a list of {len(section)}; expected 0 to "
            f"{len(section) - 1}"
        )
    return int(part)


def check(model: type[Some], tree: dict[str, Any], what: str) -> Some:
    """Returns a tree of plain values as a typed section.

    Raises:
        ConfigError: a key or a value does not fit; lists every fault with the nearest right key.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        faults = [_explain(fault, model) for fault in error.errors()]
        raise ConfigError("\n".join([f"{what} does not fit:", *faults])) from None


def _explain(fault: Any, root: type[BaseModel]) -> str:
    """Returns a validation fault as 'key: found, expected'."""
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
    """Returns the keys that are known at a place in the tree."""
    model, models = root, [root]
    for part in path:
        if issubclass(model, Named):
            model = model.section(part)
            continue
        if part in model.model_fields:
            models = _models(model.model_fields[part].annotation)
        # Another part is an index of a list, or the tag of a union: one of its models.
        model = next((one for one in models if one.__name__.lower() == part), (*models, model)[0])
    return list(model.model_fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Returns the sections inside an annotation such as `list[View]` or `Mlp | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]
