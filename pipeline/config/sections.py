"""YAML as typed sections: reading, overrides, and what a fault says."""

import difflib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from heron.pipeline.config.errors import ConfigError
from heron.shards.artefact import LARGEST
from heron.shards.errors import CONTROL, shown

BYTES, VALUES, DEPTH = 2**18, 2**16, 40  # of a YAML file, at most; an alias counts as its values
FAULTS = 8  # that one message lists


def _no_control(text: str) -> str:
    if CONTROL.search(text):
        raise ValueError("a character that cannot be printed; expected a path without; rename it")
    return text


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Natural = Annotated[int, Field(ge=1, le=LARGEST)]
PathText = Annotated[str, AfterValidator(_no_control)]


class Section(BaseModel):
    """A part of the configuration; unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Some = TypeVar("Some", bound=Section)


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        values = super().construct_mapping(node, deep)
        if len(values) < len(keys):
            ((twice, _),) = Counter(keys).most_common(1)
            line = node.start_mark.line + 1
            raise ConfigError(
                f"key {shown(twice)} is given twice, from line {line} on; keep one of them"
            )
        return values

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ConfigError, yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # of a number too long, a month that is none: PyYAML lets it by
            raise ConfigError(
                f"line {node.start_mark.line + 1}: found {shown(node.value)}, which cannot be read "
                f"({error}); expected a value within the bounds of its type, or text in quotes"
            ) from None


class _Dumper(yaml.SafeDumper):
    """Safe YAML that quotes a text which `_Loader` would read as a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.[\d_]+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def dump_yaml(tree: Any, **options: Any) -> str:
    """Returns plain values as YAML, in their order, which `read_tree` reads as they were."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, **options))


def read_tree(path: str | Path, what: str = "configuration", key: str = "data") -> dict[str, Any]:
    """Returns the plain values of a YAML file; `what` it is and a `key` of it are for the errors.

    Raises:
        ConfigError: the file is missing or cannot be read, or holds no YAML mapping.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(BYTES + 1)
        if len(raw) > BYTES:
            raise ConfigError(f"{path} has more than {BYTES} bytes; expected no more: shorten it")
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 ({error}); expected text; save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:  # the second of a NUL in the path
        if not isinstance(error, FileNotFoundError):
            raise ConfigError(f"{what} {path} cannot be read ({error}); expected a file") from None
        found = sorted(str(p) for p in path.parent.glob("*.yaml")) or ["none"]
        raise ConfigError(f"{what} {path} is not there; found {', '.join(found)}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {type(tree).__name__}; expected keys such as '{key}:'")
    return tree


def parse_yaml(text: str, where: str) -> Any:
    """Returns the plain values of some YAML; ConfigError, with `where`, if it is none."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except RecursionError:
        raise ConfigError(
            f"{where} is nested too deeply; expected {DEPTH} levels at most"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from None
    if fault := _fault(value, (), itertools.count()):
        raise ConfigError(f"{where}: {fault}")
    return value


def _fault(value: Any, path: tuple[str, ...], seen: Iterator[int]) -> str:
    """Says where values are too many, too deep, too large or of no plain type, or returns ""."""
    fault, inside = "", {}
    if next(seen) > VALUES or len(path) > DEPTH:
        fault = f"leads to more than {VALUES} values or {DEPTH} levels, aliases written out"
    elif isinstance(value, dict):
        if others := [name for name in value if not isinstance(name, str)]:
            fault = f"has the key {shown(others[0])}; expected text: put it in quotes"
        inside = value
    elif isinstance(value, list):
        inside = {str(place): one for place, one in enumerate(value)}
    elif isinstance(value, float) and not math.isfinite(value):
        fault = f"found {value}; expected a finite number"
    elif isinstance(value, int) and abs(value) > LARGEST:
        fault = f"found a number of {value.bit_length()} bits; expected {LARGEST} at most"
    elif not isinstance(value, str | int | float | None):
        fault = f"found {shown(value)}; expected text, a number or a truth: put it in quotes"
    if fault:
        return f"{'.'.join(path) or 'the whole'}: {fault}"
    return next(
        filter(None, (_fault(one, (*path, name), seen) for name, one in inside.items())), ""
    )


def _plain(value: Any) -> Any:
    if fault := _fault(value, (), itertools.count()):
        raise ValueError(fault)
    return value


Plain = Annotated[dict[str, Any], AfterValidator(_plain)]  # any values of a file, in bounds


def leaves(tree: Any, name: str = "", into_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields the values of a tree by their dotted keys, in which a number is a place in a list."""
    inside = dict(enumerate(tree)) if isinstance(tree, list) and into_lists else tree
    if isinstance(inside, dict) and inside:
        for key, value in inside.items():
            yield from leaves(value, f"{name}.{key}".strip("."), into_lists)
    else:
        yield name, tree


def as_typed(value: Any) -> str:
    """Returns a value as YAML on one line, as it is typed in an override."""
    text = dump_yaml(value, default_flow_style=True, width=10**9)
    return text.removesuffix("...\n").strip()


def parse_override(given: str) -> tuple[str, Any]:
    """Returns the dotted key and the value of `key.key=value`; ConfigError if it is no such."""
    key, equals, value = given.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {shown(given)} has no '='; expected key=value: optim.lr=0.1")
    return key, parse_yaml(value, f"override {shown(given)}")


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
                f"override {shown(given)}: '{parent}' holds the value {shown(section)}, not a "
                "section"
            )
    section[_key_in(section, last, given)] = value


def _names(tree: dict[str, Any], key: str) -> list[str]:
    """Returns the parts of a dotted key; a key of the tree that has dots itself is one part."""
    names, section = list[str](), dict[str, Any](tree)
    while key:
        dotted = [k for k in section if "." in str(k) and f"{key}.".startswith(f"{k}.")]
        name = max(dotted, key=len) if dotted else key.partition(".")[0]
        names.append(name)
        key = key[len(name) + 1 :]
        found = section.get(name)
        if isinstance(found, list):
            found = {str(place): one for place, one in enumerate(found)}
        section = found if isinstance(found, dict) else {}
    return names


def _key_in(section: dict[str, Any] | list[Any], part: str, given: str) -> Any:
    """Returns a key of a section, or the index in a list that a number names."""
    if isinstance(section, dict):
        return part
    if not (part.isascii() and part.isdigit() and len(part) < 9 and int(part) < len(section)):
        raise ConfigError(
            f"override {shown(given)}: {shown(part)} is no place in a list of {len(section)}; "
            f"expected 0 to {len(section) - 1}"
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
        faults = [_explain(fault, model) for fault in error.errors()[:FAULTS]]
        if len(faults) > 1:
            faults = [f"({number}) {fault}" for number, fault in enumerate(faults, 1)]
        more = error.error_count() - FAULTS
        faults += [f"and {more} more"] if more > 0 else []
        raise ConfigError(f"{what} does not fit: {'; '.join(faults)}") from None


def _explain(fault: Any, root: type[BaseModel]) -> str:
    """Returns a validation fault as 'key: found, expected'."""
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        section = _section(path[:-1], root)
        near = difflib.get_close_matches(path[-1], section, 1, 0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(section)}"
        return f"{key}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"{key}: missing; expected a value"
    message = fault["msg"].removeprefix("Value error, ")
    found = "" if isinstance(fault["input"], dict | Section) else f"found {shown(fault['input'])}; "
    return f"{key or 'configuration'}: {found}{message[:1].lower()}{message[1:]}"


def _section(path: Sequence[str], root: type[BaseModel]) -> list[str]:
    """Returns the keys that are known at a place in the tree."""
    model, models = root, [root]
    for part in path:
        if hasattr(model, "section"):  # of sections by a name that is no field, as `Terms`
            model = model.section(part)
            continue
        if part in model.model_fields:
            models = models_in(model.model_fields[part].annotation)
        # Another part is an index of a list, or the tag of a union: one of its models.
        model = next((one for one in models if one.__name__.lower() == part), (*models, model)[0])
    return list(model.model_fields)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the sections inside an annotation such as `list[View]` or `Mlp | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]
