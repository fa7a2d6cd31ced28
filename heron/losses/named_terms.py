"""The terms of an objective by their names in an experiment: Heron's own losses, and yours.

The YAML key is the name of a class of `heron.losses` in snake case (`nt_xent` is `NtXent`), or the
dotted path of a class of your own.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, RootModel, SerializeAsAny, model_validator

from heron.base.dotted import load_class, suggest
from heron.base.errors import HeronError
from heron.base.sections import Section
from heron.losses.terms import Needs, TermSection, section_of


@cache
def named_terms() -> dict[str, type[TermSection]]:
    """Returns the sections of Heron's own losses by their names in an experiment."""
    losses = importlib.import_module("heron.losses")
    classes: set[Any] = {vars(losses)[name] for name in losses.__all__}  # aliases count once
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", loss.__name__).lower(): section_of(loss)
        for loss in sorted(classes, key=lambda loss: str(loss.__name__))
        if issubclass(loss, losses.Loss) and not _why_no_term(loss)
    }


def _why_no_term(loss: Any) -> str:
    """Says why an experiment cannot build a class of losses, or returns ""."""
    if inspect.isabstract(loss):
        return "has no method share(batch); add one"
    if not isinstance(loss.needs, Needs):
        return f"must have needs = Needs(gathered=(...), ...), got {loss.needs!r}"
    for name, argument in inspect.signature(loss).parameters.items():
        if argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD:
            return f"cannot be built without {name!r}; give it a default, or put it after *"
        if name in TermSection.model_fields:
            return f"has an option {name!r}, which every term already has; rename it"
    return ""


def find_term(name: str) -> type[TermSection]:
    """Returns the section of a loss by its name or dotted path; ValueError if there is none."""
    if "." not in name:
        terms = named_terms()
        if name not in terms:
            raise ValueError(
                f"unknown key; {suggest(name, sorted(terms))}, or use a class of your own by "
                "'objective={my_lab.losses.Mine: {weight: 1.0}}'"  # an override splits keys at dots
            )
        return terms[name]
    loss: Any = load_class(name, importlib.import_module("heron.losses").Loss)
    if fault := _why_no_term(loss):
        raise ValueError(f"{name} {fault}")
    return section_of(loss)


def _build_term(value: Any) -> Any:
    """Returns the section for {"term": name, "options": options}: see `Terms`."""
    if isinstance(value, TermSection):
        return value
    section = find_term(value["term"]).model_validate(value["options"])
    try:
        section.build_loss()  # refuses options that do not fit each other
    except HeronError as fault:
        raise ValueError(str(fault)) from None
    return section


class Terms(
    RootModel[dict[str, Annotated[SerializeAsAny[TermSection], BeforeValidator(_build_term)]]]
):
    """The weighted sum of terms that training minimises; terms of weight 0 are not built."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _with_names(cls, value: Any) -> Any:
        """Puts each term's name beside its options, which the term's class then validates."""
        if not isinstance(value, dict):
            return value
        return {
            name: options
            if isinstance(options, TermSection)
            else {"term": str(name), "options": options}
            for name, options in value.items()
            if options is not None
        }

    @model_validator(mode="after")
    def _some_term(self) -> Terms:
        if not self.terms():
            raise ValueError("no term has a weight above 0; set one")
        return self

    @classmethod
    def section(cls, name: str) -> type[Section]:
        """Returns the class of a term, whose keys an error message lists."""
        return find_term(name)

    def terms(self) -> dict[str, TermSection]:
        """Returns the terms of weight above 0, by name."""
        return {name: term for name, term in self.root.items() if term.weight > 0}
