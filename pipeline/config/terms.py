"""A term of the objective as one object: its options, what it needs, its parts, memory and loss.

The YAML's key is the class's name in snake case (`nt_xent` is `NtXent`, in one of the files of
`pipeline/objectives/`), or the dotted path of a class of your own.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, RootModel, SerializeAsAny, model_validator

from heron.pipeline.config.model import ModelConfig
from heron.pipeline.config.sections import Section
from heron.shards.artefact import Count
from heron.shards.dotted import load_class, suggest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from heron.pipeline.models.heterogeneous import ModelSpec
    from heron.pipeline.objectives.batch import GlobalBatch
    from heron.pipeline.objectives.memory import Memory, RunSpec

Temperature = Annotated[float, Field(ge=0.003)]  # exp(2 / tau) has no float64 below
KNOWN = ("multi_label", "multi_class", "hierarchical")  # labels that say what a row is
ONE = ("multi_class", "hierarchical")  # one class a row
WRONG = ("complementary",)  # labels that say what a row is not


@dataclass(frozen=True)
class Needs:
    """What a term's loss reads, by name: features of the model, `inputs`, or `paths`.

    Attributes:
        gathered: of all rows of all processes, such as `projections`; differentiable, whatever the
            loss makes of them: in backward every row is sent what each process found for it.
        labelled: of the labelled rows of all processes, such as `hidden`; likewise.
        vectors: of all rows of all processes, of which the own rows alone have a gradient: for a
            loss that finds their whole gradient, as `objectives.mirroring` does; nothing goes back.
        labelled_vectors: of the labelled rows, likewise.
        own: of this process's rows alone, such as `logits`.
        labels: the kinds of labels that the term is defined for; none: it looks at no label.
        views: the fewest views that it is defined for.
    """

    gathered: tuple[str, ...] = ()
    labelled: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    views: int = 1
    vectors: tuple[str, ...] = ()
    labelled_vectors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses a name where names are expected, which Python would take letter by letter."""
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
        """Everything that is read of any row."""
        own = {*self.gathered, *self.labelled, *self.own}
        return {*own, *self.vectors, *self.labelled_vectors}


@dataclass(frozen=True)
class TermSetting:
    """What a term stands in, which it may refuse.

    Attributes:
        model: the model's configuration.
        terms: all terms of the objective by name.
        labelled: labelled rows of a global batch.
    """

    model: ModelConfig
    terms: Mapping[str, Term]
    labelled: int


class Term(Section):
    """A term of the objective: `weight * min(epoch / ramp_epochs, 1)` times its loss.

    Derive from it in a file of your own, and name the class by its dotted path:
    `objective: {my_lab.losses.Mine: {weight: 1}}`. Fields are the YAML's options.

    Attributes:
        weight: factor of the term in the objective; 0 takes it out.
        ramp_epochs: epochs over which the weight rises from 0; 0: it is whole from the start.
    """

    weight: Annotated[float, Field(ge=0)] = 1.0
    ramp_epochs: Count = 0

    needs: ClassVar[Needs] = Needs()
    # Features with as many numbers as a projection, whose first ones are compared alone under
    # `model.matryoshka`. (): the loss itself takes `batch.widths`, as one must that moves its
    # memory. None: the term has no meaning on a part of a projection.
    nested: ClassVar[tuple[str, ...] | None] = ("projections",)
    repels_all: ClassVar[bool] = False  # whether all other samples are negatives, at exp(cos / tau)
    rings: ClassVar[bool] = False  # whether its loss takes keys that come round: `objectives.ring`
    remembers_rows: ClassVar[bool] = False  # whether its memory is of rows by their numbers
    # Whether its loss is defined where rows lack views (`GlobalBatch.present`), and where single
    # labels of a row are unknown (NaN); the objective refuses it there otherwise.
    missing_views: ClassVar[bool] = False
    unknown_labels: ClassVar[bool] = False

    def requires(self) -> Needs:
        """Returns what the term needs under its options."""
        return self.needs

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """Returns how many numbers a row processes tell each other of what its anchors found.

        One a collective of a step: of a term that reads `needs.vectors` by all rows, of another by
        the labelled ones.

        Args:
            shapes: of one sample of each view.
            labels: how many there are.
            levels: of a label path.
        """
        return []

    def why_no_ring(self) -> str:
        """Returns why the keys of its loss cannot come round a ring; empty: they can."""
        needs = self.requires()
        if needs.gathered or {*needs.labelled} - {"paths"}:
            return "it finds gradients of other processes' rows, which would have to go back"
        if (needs.vectors or needs.labelled_vectors) and not self.rings:
            return "its loss reads the vectors of all rows at once"
        return ""

    def ring_widths(self, views: int, widths: Mapping[str, int]) -> list[int]:
        """Returns how many numbers a row go round in each round of a step.

        Args:
            views: how many there are.
            widths: numbers a row of each feature, those of all views together.
        """
        needs = self.requires()
        compared = sum(widths[name] for name in (*needs.vectors, *needs.labelled_vectors))
        return [compared] * 2 if compared else []

    def refuse(self, name: str, setting: TermSetting) -> None:
        """Raises ConfigError where the term, `name` in the YAML, does not fit what it stands in."""

    def parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns what builds the modules that the model gets for this term, by name.

        A module with a method `add_features(encoded) -> {name: [tensor a view]}` adds these to what
        the model makes of a batch (see `models.heterogeneous.Encoded`). What two terms ask for by
        one name is built once, by the first.
        """
        return {}

    def classifier(self, spec: ModelSpec) -> nn.Module | None:
        """Returns what takes the place of the linear classifier, if anything does."""
        return None

    def memory(self, run: RunSpec) -> Memory | None:
        """Returns what the term remembers between steps, if anything."""
        return None

    @abstractmethod
    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor | None:
        """Returns this process's share of the loss, a scalar; the shares' sum is the loss.

        A term that only adds parts or a memory returns None.

        Args:
            batch: the features of the whole batch, and which rows are this process's own.
            memory: what `memory` has made.

        Raises:
            ValueError: the batch cannot be compared; the message says why.
        """


@cache
def named_terms() -> dict[str, type[Term]]:
    """Returns the terms that come with Heron, by name: the classes of `pipeline/objectives/`."""
    package = importlib.import_module("heron.pipeline.objectives")
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for found in pkgutil.iter_modules(package.__path__)
    ]
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, Term)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    }


def find_term(name: str) -> type[Term]:
    """Returns the class of a term by its name or dotted path.

    Raises:
        ValueError: there is none; names the nearest.
    """
    if "." not in name:
        known = named_terms()
        if name not in known:
            hint = suggest(name, sorted(known))
            raise ValueError(f"unknown key; {hint}, or the dotted path of a class of your own")
        return known[name]
    found = load_class(name, Term)  # type: ignore[type-abstract]
    if inspect.isabstract(found):
        raise ValueError(f"{name} has no loss; expected a method loss(batch, memory)")
    if not isinstance(found.needs, Needs):
        raise ValueError(f"{name}.needs is {found.needs!r}; expected Needs(gathered=(...), ...)")
    return found


def _build(given: Any) -> Any:
    """Returns the term of a name and its options: see `Terms`."""
    if isinstance(given, Term):
        return given
    return find_term(given["term"]).model_validate(given["options"])


class Terms(RootModel[dict[str, Annotated[SerializeAsAny[Term], BeforeValidator(_build)]]]):
    """The weighted sum that training minimises; a term of weight 0 is not built."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _name(cls, given: Any) -> Any:
        """Puts a term's name beside its options, so that each is checked by its own class."""
        if not isinstance(given, dict):
            return given
        return {
            name: options if isinstance(options, Term) else {"term": str(name), "options": options}
            for name, options in given.items()
            if options is not None
        }

    @model_validator(mode="after")
    def _some_term(self) -> Terms:
        if not self.terms():
            raise ValueError("no term has a weight above 0; expected at least one")
        return self

    @classmethod
    def section(cls, name: str) -> type[Section]:
        """Returns the section that a name stands for, whose keys an error lists."""
        return find_term(name)

    def terms(self) -> dict[str, Term]:
        """Returns the terms that take part, by name."""
        return {name: term for name, term in self.root.items() if term.weight > 0}
