"""Overrides of the command line, `key.key=value`: a word for a text is the word as it was typed."""

from collections.abc import Iterator
from contextlib import suppress
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from heron.base.errors import ConfigError, HeronError, short_repr
from heron.base.sections import dump_yaml, parse_yaml

NULLS = ("", "null", "~")  # remove a section, or leave a key to its default


def as_typed(value: Any) -> str:
    """Returns a value as one line of YAML, as typed in an override."""
    text = dump_yaml(value, default_flow_style=True, width=10**9)
    return text.removesuffix("...\n").strip()


def parse_override(
    text: str, root: type[BaseModel] | None = None, names: list[str] | None = None
) -> tuple[str, Any]:
    """Returns the dotted key and the value of `key.key=value`.

    A key that holds text in the section `root` takes the word as it was typed, and quotes only
    where they enclose the whole; any other value is read as YAML. `names` are those of the key, if
    some of them have dots. Raises ConfigError if it has no '=', or no value of YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {short_repr(text)} has no '='; write key=value: optim.lr=0.1")
    kinds = [] if root is None else list(_annotations(root, names or key.split(".")))
    if kinds and all(map(_is_text, kinds)):
        word = value.strip()
        if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
            with suppress(ConfigError):
                if isinstance(quoted := parse_yaml(word, "the word"), str):
                    return key, quoted
        return key, None if word in NULLS else word
    return key, _read_yaml(value, f"override {short_repr(text)}")


def _read_yaml(word: str, where: str) -> Any:
    """Returns a word as YAML, in which `#` begins no comment: nobody types one there."""
    value = parse_yaml(word, where)
    *_, last, _ = yaml.scan(word)
    if comment := word[last.end_mark.index :].strip():
        if isinstance(value, str) and word.lstrip()[0] not in "'\"":
            return word.strip()
        raise ConfigError(
            f"{where}: '{comment}' would be a comment; remove it, or put text with # in quotes"
        )
    return value


def _annotations(kind: Any, names: list[str]) -> Iterator[Any]:
    """Yields the types that a key may have: several, where a section has several kinds."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if not names:
        yield kind
    elif get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from _annotations(part, names)
    elif get_origin(kind) in (list, dict):
        yield from _annotations(get_args(kind)[-1], names[1:])
    elif hasattr(kind, "section"):  # sections by names that are no fields, as in `Terms`
        with suppress(HeronError, ValueError):  # an unknown one, which validation refuses
            yield from _annotations(kind.section(names[0]), names[1:])
    elif isinstance(kind, type) and issubclass(kind, BaseModel) and names[0] in kind.model_fields:
        yield from _annotations(kind.model_fields[names[0]].annotation, names[1:])


def _is_text(kind: Any) -> bool:
    """Returns whether all values of a type are texts, or null."""
    if get_origin(kind) is Annotated:
        return _is_text(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return all(part is type(None) or _is_text(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return all(isinstance(value, str) for value in get_args(kind))
    return kind is str


def override(tree: dict[str, Any], text: str, root: type[BaseModel] | None = None) -> None:
    """Sets one dotted key, `key.key=value`, in a tree of plain values of the section `root`.

    Raises ConfigError if it has no '=', or leads through a value or past the end of a list.
    """
    names = _split_key(tree, text.partition("=")[0])
    _, value = parse_override(text, root, names)
    section: Any = tree
    *parents, last = names
    for parent in parents:
        if isinstance(section, dict) and section.get(parent) is None:
            section[parent] = {}
        section = section[_index_in(section, parent, text)]
        if not isinstance(section, dict | list):
            raise ConfigError(
                f"override {short_repr(text)}: '{parent}' is the value {short_repr(section)}, not "
                "a section"
            )
    section[_index_in(section, last, text)] = value


def _split_key(tree: dict[str, Any], key: str) -> list[str]:
    """Splits a dotted key into names; a key of the tree that itself has dots is one name."""
    names, section = list[str](), dict[str, Any](tree)
    while key:
        dotted = [k for k in section if "." in str(k) and f"{key}.".startswith(f"{k}.")]
        name = max(dotted, key=len) if dotted else key.partition(".")[0]
        names.append(name)
        key = key[len(name) + 1 :]
        value = section.get(name)
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        section = value if isinstance(value, dict) else {}
    return names


def _index_in(section: dict[str, Any] | list[Any], name: str, text: str) -> Any:
    """Returns the key in a section, or the index in a list, that a name stands for."""
    if isinstance(section, dict):
        return name
    if not (name.isascii() and name.isdigit() and len(name) < 9 and int(name) < len(section)):
        raise ConfigError(
            f"override {short_repr(text)}: {short_repr(name)} is not an index of a list of "
            f"{len(section)} items; use 0 to {len(section) - 1}"
        )
    return int(name)
