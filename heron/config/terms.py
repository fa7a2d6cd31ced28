"""The terms of the objective in an experiment: their names, their options, and what they read.

The YAML key is the name of a class of `heron.losses` in snake case (`nt_xent` is `NtXent`), or the
dotted path of a class of your own.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, get_type_hints

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    RootModel,
    SerializeAsAny,
    create_model,
    model_validator,
)

from heron.config.sections import Section
from heron.shards.artefact import Count
from heron.shards.dotted import load_class, suggest
from heron.shards.errors import HeronError

Temperature = Annotated[float, Field(ge=0.003)]  # below, exp(2 / tau) overflows float64
CLASS_LABELS = ("multi_label", "multi_class", "hierarchical")  # labels that say what a row is
SINGLE_CLASS_LABELS = ("multi_class", "hierarchical")  # labels with one class per row
COMPLEMENTARY_LABELS = ("complementary",)  # labels that say what a row is not


@dataclass(frozen=True)
class Needs:
    """What a loss reads, by name: features of the model, `inputs`, or `paths`.

    Attributes:
        gathered: features of all rows of all processes, such as `projections`. They are
            differentiable for any loss: backward sends every row the gradients that each process
            has computed for it.
        labelled: the same for the labelled rows of all processes, such as `hidden`.
        vectors: features of all rows of all processes, of which only this process's rows have a
            gradient: for a loss that computes the whole gradient of its own rows, as
            `losses.mirroring` does. Backward exchanges nothing.
        labelled_vectors: the same for the labelled rows.
        own: features of this process's rows alone, such as `logits`.
        labels: the kinds of labels that the loss is defined for; (): it uses no labels.
        views: the smallest number of views that the loss is defined for.
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
                    f"Needs.{name} must be a tuple of names, got {getattr(self, name)!r}"
                )
        if "paths" in self.gathered:
            raise TypeError(
                "Needs.gathered has 'paths', which only labelled rows have: use Needs.labelled"
            )

    @property
    def features(self) -> set[str]:
        """The names of all features that the loss reads."""
        names = {*self.gathered, *self.labelled, *self.own}
        return {*names, *self.vectors, *self.labelled_vectors}


class TermSection(Section):
    """The options of a term of the objective: its weight, and those of its loss (`section_of`).

    Attributes:
        weight: factor of the term in the objective; 0 removes the term.
        ramp_epochs: epochs over which the weight rises from 0; 0: full weight from the start.
    """

    weight: Annotated[float, Field(ge=0)] = 1.0
    ramp_epochs: Count = 0

    model_config = ConfigDict(arbitrary_types_allowed=True)  # of a loss that only loops build

    loss: ClassVar[Any] = None  # the class of the loss, a `heron.losses.Loss`

    def build_loss(self) -> Any:
        """Returns a new loss with these options; errors are those of its class."""
        return self.loss(**self.model_dump(exclude={*TermSection.model_fields}))

    def __reduce__(self) -> Any:
        """Sections of losses are made at run time: a copy is made from the loss and the options."""
        if self.loss is None:
            return super().__reduce__()
        return _rebuilt, (self.loss, self.model_dump())

    def weight_at(self, epoch: float) -> float:
        """Returns the weight at an epoch, which may be fractional."""
        return self.weight * (min(epoch / self.ramp_epochs, 1.0) if self.ramp_epochs else 1.0)


def _rebuilt(loss: Any, options: dict[str, Any]) -> TermSection:
    return section_of(loss).model_validate(options)


@cache
def section_of(loss: Any) -> type[TermSection]:
    """Returns the section of a class of losses: its options are the arguments after the `*`.

    Types and bounds are those of the annotations, meanings those of the docstrings. `gather` is no
    option: a run compares the rows of all processes.
    """
    hints = get_type_hints(loss.__init__, include_extras=True)
    fields: dict[str, Any] = {
        name: (
            hints.get(name, Any),
            ... if argument.default is argument.empty else argument.default,
        )
        for name, argument in inspect.signature(loss.__init__).parameters.items()
        if argument.kind is argument.KEYWORD_ONLY and name != "gather"
    }
    docs = (inspect.cleandoc(text or "") for text in (loss.__doc__, loss.__init__.__doc__))
    section = create_model(
        loss.__name__, __base__=TermSection, __module__=loss.__module__,
        __doc__="\n\n".join(docs), **fields,
    )  # fmt: skip
    section.loss = loss
    return section


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
