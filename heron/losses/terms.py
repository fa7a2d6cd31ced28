"""The terms of the objective in an experiment: their options, and what they read."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, get_type_hints

from pydantic import ConfigDict, Field, create_model

from heron.base.artefact import Count
from heron.base.sections import Section

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

    @cached_property  # a step asks for it several times
    def features(self) -> frozenset[str]:
        """The names of all features that the loss reads."""
        names = {*self.gathered, *self.labelled, *self.own}
        return frozenset({*names, *self.vectors, *self.labelled_vectors})


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
