"""The terms of the objective as the YAML gives them: their options and defaults."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Natural = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the configuration; unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Term(Section):
    """A term of the objective: `weight * min(epoch / ramp_epochs, 1)` times its loss."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    ramp_epochs: Count = 0


class WeightedUnsupervised(Term):
    """HeroCon's L_u, Eq. 5."""

    tau: Positive = 1.0
    anchors: Literal["first", "all"] = "all"
    negatives: Literal["all_views", "cross_view"] = "all_views"


class WeightedSupervised(Term):
    """HeroCon's L_s, Eq. 7."""

    tau: Positive = 1.0
    distance: Literal["hamming", "indicator"] = "hamming"
    self_pairs: bool = False


class Objective(Section):
    """The weighted sum that training minimises; a term of weight 0 is not built."""

    bce: Term | None = None
    cross_entropy: Term | None = None
    weighted_unsupervised: WeightedUnsupervised | None = None
    weighted_supervised: WeightedSupervised | None = None

    def terms(self) -> dict[str, Term]:
        """The terms that take part, by name."""
        named = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: term for name, term in named if term is not None and term.weight > 0}

    @model_validator(mode="after")
    def _some_term(self) -> "Objective":
        if not self.terms():
            raise ValueError("no term has a weight above 0; expected at least one")
        return self
