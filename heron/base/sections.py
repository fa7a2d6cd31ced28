"""Reads YAML into typed sections, applies overrides, and explains faults."""

import difflib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from heron.base.artefact import INT64_MAX
from heron.base.errors import CONTROL, ConfigError, explain, short_repr

# Limits of a YAML file; an alias counts as the values that it stands for.
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 2**18, 2**16, 40
MAX_FAULTS = 8  # listed in one message


def _path(text: str) -> str:
    """Returns a path whose `~` is the home directory, as a shell would have it."""
    if CONTROL.search(text):
        raise ValueError("the path has a character that cannot be printed; rename it")
    return expand_home(text)


def expand_home(text: str) -> str:
    """Returns a path with a leading `~` or `~user` expanded; ValueError for an unknown user."""
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        name = text.partition("/")[0]
        raise ValueError(
            f"'{name}' has no home directory; for a folder of that name, write ./{text}"
        ) from None


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Natural = Annotated[int, Field(ge=1, le=INT64_MAX)]
PathText = Annotated[str, AfterValidator(_path)]


class Section(BaseModel):
    """A part of the configuration; unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


SectionType = TypeVar("SectionType", bound=Section)


class _Loader(yaml.SafeLoader):
    """Loads safe YAML with merge keys, reads 1e-3 as a number, and refuses duplicate keys."""

    merged = 0  # values that merge keys have copied

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # before merging, which adds keys
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if duplicates := [key for key, count in keys.items() if count > 1]:
            raise ConfigError(
                f"key {short_repr(duplicates[0])} is given twice, the second time from line "
                f"{node.start_mark.line + 1} on; keep one of them"
            )
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merges the mappings of `<<` into a node, whose own values take precedence."""
        merges = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        for value in merges:
            for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(mapping, yaml.MappingNode):
                    self.flatten_mapping(mapping)
                    self.merged += len(mapping.value)
                if self.merged > MAX_VALUES:
                    raise ConfigError(
                        f"line {node.start_mark.line + 1} merges more than {MAX_VALUES} values; "
                        "write some of them out"
                    )
        super().flatten_mapping(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ConfigError, yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # PyYAML does not wrap those of long numbers or impossible dates
            raise ConfigError(
                f"line {node.start_mark.line + 1}: {short_repr(node.value)} cannot be read "
                f"({error}); use a value within the bounds of its type, or put the text in quotes"
            ) from None


class _Dumper(yaml.SafeDumper):
    """Dumps safe YAML, and quotes text that `_Loader` would read as a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.[\d_]+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def dump_yaml(tree: Any, **options: Any) -> str:
    """Returns plain values as YAML, in their order; `read_tree` restores them."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, **options))


def read_tree(path: str | Path, what: str = "configuration", key: str = "data") -> dict[str, Any]:
    """Returns the plain values of a YAML file; `what` and an example `key` serve in the errors.

    Raises ConfigError if the file is missing, cannot be read, or is no YAML mapping.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES} bytes, the limit; shorten it")
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if not isinstance(error, FileNotFoundError):
            raise ConfigError(f"cannot read {what} {path} ({error}); is it a file?") from None
        others = sorted(str(p) for p in path.parent.glob("*.yaml")) or ["none"]
        raise ConfigError(f"{what} {path} does not exist; found {', '.join(others)}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must have keys such as '{key}:', got {type(tree).__name__}")
    return tree


def parse_yaml(text: str, where: str) -> Any:
    """Returns the plain values of YAML text; ConfigError, naming `where`, if it is invalid."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except RecursionError:
        raise ConfigError(
            f"{where} is nested too deeply; the limit is {MAX_DEPTH} levels"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    if fault := _plain_fault(value, (), itertools.count()):
        raise ConfigError(f"{where}: {fault}")
    return json.loads(json.dumps(value))  # no aliases: an override changes one place alone


def _plain_fault(value: Any, path: tuple[str, ...], counter: Iterator[int]) -> str:
    """Describes the first value beyond the limits or of no plain type, or returns ""."""
    fault, children = "", {}
    if next(counter) > MAX_VALUES or len(path) > MAX_DEPTH:
        fault = f"expands to more than {MAX_VALUES} values or {MAX_DEPTH} levels, counting aliases"
    elif isinstance(value, dict):
        if non_text := [name for name in value if not isinstance(name, str)]:
            fault = f"has the key {short_repr(non_text[0])}, which is not text; put it in quotes"
        children = value
    elif isinstance(value, list):
        children = {str(index): item for index, item in enumerate(value)}
    elif isinstance(value, float) and not math.isfinite(value):
        fault = f"must be a finite number, got {value}"
    elif isinstance(value, int) and abs(value) > INT64_MAX:
        fault = f"must be {INT64_MAX} at most, got a number of {value.bit_length()} bits"
    elif not isinstance(value, str | int | float | None):
        fault = f"must be text, a number, true or false, got {short_repr(value)}; put it in quotes"
    if fault:
        return f"{'.'.join(path) or 'the top level'} {fault}"
    faults = (_plain_fault(item, (*path, name), counter) for name, item in children.items())
    return next(filter(None, faults), "")


def _checked_plain(value: Any) -> Any:
    if fault := _plain_fault(value, (), itertools.count()):
        raise ValueError(fault)
    return value


# Arbitrary plain values, within the limits.
Plain = Annotated[dict[str, Any], AfterValidator(_checked_plain)]


def leaves(tree: Any, name: str = "", into_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields the values of a tree with their dotted keys, where a number is a list index."""
    children = dict(enumerate(tree)) if isinstance(tree, list) and into_lists else tree
    if isinstance(children, dict) and children:
        for key, value in children.items():
            yield from leaves(value, f"{name}.{key}".strip("."), into_lists)
    else:
        yield name, tree


def check(model: type[SectionType], tree: dict[str, Any], what: str) -> SectionType:
    """Validates a tree of plain values; ConfigError lists the faults, with the nearest keys."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        faults = [_explain(fault, model) for fault in error.errors()[:MAX_FAULTS]]
        if len(faults) > 1:
            faults = [f"({number}) {fault}" for number, fault in enumerate(faults, 1)]
        omitted = error.error_count() - MAX_FAULTS
        faults += [f"and {omitted} more"] if omitted > 0 else []
        raise ConfigError(f"{what}: {'; '.join(faults)}") from None


def _explain(fault: Any, root: type[BaseModel]) -> str:
    """Describes a validation error: the key, what it must be, what it is."""
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        section = _keys_at(path[:-1], root)
        close = difflib.get_close_matches(path[-1], section, 1, 0.5)
        hint = f"did you mean '{close[0]}'?" if close else f"choose one of {', '.join(section)}"
        return f"{key}: unknown key; {hint}"
    return explain(fault, key or "configuration")


def _keys_at(path: Sequence[str], root: type[BaseModel]) -> list[str]:
    model, models = root, [root]
    for part in path:
        if hasattr(model, "section"):  # sections by names that are no fields, as in `Terms`
            model = model.section(part)
            continue
        if part in model.model_fields:
            models = models_in(model.model_fields[part].annotation)
        # Any other part is a list index, or the tag of a union, which selects one of its models.
        model = next(
            (section for section in models if section.__name__.lower() == part), (*models, model)[0]
        )
    return list(model.model_fields)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the section classes in an annotation such as `list[View]` or `Mlp | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]
