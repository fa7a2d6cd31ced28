"""The terms of the objective in an experiment: their names, their options, and what they read.

The YAML key is the class's name in snake case (`nt_xent` is `NtXent`, in one of the files of
`heron/objectives/`), or the dotted path of a class of your own.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, RootModel, SerializeAsAny, model_validator

from heron.config.sections import Section
from heron.shards.artefact import Count
from heron.shards.dotted import load_class, suggest

Temperature = Annotated[float, Field(ge=0.003)]  # below, exp(2 / tau) overflows float64
CLASS_LABELS = ("multi_label", "multi_class", "hierarchical")  # labels that say what a row is
SINGLE_CLASS_LABELS = ("multi_class", "hierarchical")  # labels with one class per row
COMPLEMENTARY_LABELS = ("complementary",)  # labels that say what a row is not


@dataclass(frozen=True)
class Needs:
    """What a term's loss reads, by name: features of the model, `inputs`, or `paths`.

    Attributes:
        gathered: features of all rows of all processes, such as `projections`. They are
            differentiable for any loss: backward sends every row the gradients that each process
            has computed for it.
        labelled: the same for the labelled rows of all processes, such as `hidden`.
        vectors: features of all rows of all processes, of which only this process's rows have a
            gradient: for a loss that computes the whole gradient of its own rows, as
            `objectives.mirroring` does. Backward exchanges nothing.
        labelled_vectors: the same for the labelled rows.
        own: features of this process's rows alone, such as `logits`.
        labels: the kinds of labels that the term is defined for; (): it uses no labels.
        views: the smallest number of views that the term is defined for.
    """

    gathered: tuple[str, ...] = ()
    labelled: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    views: int = 1
    vectors: tuple[str, ...] = ()
    labelled_vectors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses a plain string in place of a tuple, which would be read letter by letter."""
        for name in ("gathered", "labelled", "own", "labels", "vectors", "labelled_vectors"):
            if not isinstance(getattr(self, name), tuple):
                raise TypeError(
                    f"Needs.{name} is {getattr(self, name)!r}; expected a tuple of names"
                )
        if "paths" in self.gathered:
            raise TypeError(
                "Needs.gathered holds 'paths', which labelled rows have: Needs.labelled"
            )

    @property
    def features(self) -> set[str]:
        """The names of all features that the loss reads."""
        names = {*self.gathered, *self.labelled, *self.own}
        return {*names, *self.vectors, *self.labelled_vectors}


class TermSection(Section):
    """The options that every term has; `heron.objectives.term.Term` is what a term derives from.

    Attributes:
        weight: factor of the term in the objective; 0 removes the term.
        ramp_epochs: epochs over which the weight rises from 0; 0: full weight from the start.
    """

    weight: Annotated[float, Field(ge=0)] = 1.0
    ramp_epochs: Count = 0

    needs: ClassVar[Needs] = Needs()
    remembers_rows: ClassVar[bool] = False  # whether its memory is indexed by row numbers
    # Whether its loss is defined where rows lack views (`GlobalBatch.present`), and where single
    # labels of a row are unknown (NaN); otherwise the objective refuses such data.
    missing_views: ClassVar[bool] = False
    unknown_labels: ClassVar[bool] = False


@cache
def named_terms() -> dict[str, type[TermSection]]:
    """Returns Heron's own terms by name: the classes of `heron/objectives/`."""
    package = importlib.import_module("heron.objectives")
    modules = [
        importlib.import_module(f"{package.__name__}.{info.name}")
        for info in pkgutil.iter_modules(package.__path__)
    ]
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, TermSection)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    }


def find_term(name: str) -> type[TermSection]:
    """Returns the class of a term by its name or dotted path.

    Raises:
        ValueError: there is no such term; names the nearest.
    """
    if "." not in name:
        terms = named_terms()
        if name not in terms:
            hint = suggest(name, sorted(terms))
            raise ValueError(f"unknown key; {hint}, or the dotted path of a class of your own")
        return terms[name]
    term = load_class(name, TermSection)
    if inspect.isabstract(term):
        raise ValueError(f"{name} has no loss; expected a method loss(batch, memory)")
    if not isinstance(term.needs, Needs):
        raise ValueError(f"{name}.needs is {term.needs!r}; expected Needs(gathered=(...), ...)")
    return term


def _build_term(value: Any) -> Any:
    """Returns the term for {"term": name, "options": options}: see `Terms`."""
    if isinstance(value, TermSection):
        return value
    return find_term(value["term"]).model_validate(value["options"])


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
            raise ValueError("no term has a weight above 0; expected at least one")
        return self

    @classmethod
    def section(cls, name: str) -> type[Section]:
        """Returns the class of a term, whose keys an error message lists."""
        return find_term(name)

    def terms(self) -> dict[str, TermSection]:
        """Returns the terms of weight above 0, by name."""
        return {name: term for name, term in self.root.items() if term.weight > 0}
