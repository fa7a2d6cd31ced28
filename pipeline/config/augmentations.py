"""Sections of an experiment that say what is done to a view in training."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_serializer, model_validator

from heron.pipeline.config.sections import Positive, Section, Share


def _ordered(values: list[float]) -> list[float]:
    if values[0] > values[1]:
        raise ValueError(f"from {values[0]} to {values[1]}; expected the lesser first")
    return values


TWO = Field(min_length=2, max_length=2)
Range = Annotated[list[Positive], TWO, AfterValidator(_ordered)]
Areas = Annotated[list[Annotated[float, Field(gt=0, le=1)]], TWO, AfterValidator(_ordered)]


class Crop(Section):
    """A part of the picture, resampled to the view's size (Szegedy et al. 2015).

    `area` is the part's share of the picture; `ratio` its width over height, beside that of the
    view's size; `flip` the probability of a mirror image.
    """

    area: Areas = [0.4, 1.0]
    ratio: Range = [1.0, 1.0]
    flip: Share = 0.5


class Color(Section):
    """Colour distortion (SimCLR, Appendix A): brightness, contrast, saturation and hue.

    Each factor is within `strength` of 1, the hue within `hue` of a turn; all of it happens with
    `probability`, and `grey` is the probability of losing all colour.
    """

    strength: Share = 0.4
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    probability: Share = 1.0
    grey: Share = 0.2


class Flip(Section):
    """A mirror image, with `probability`."""

    probability: Share = 0.5


class Blur(Section):
    """Gaussian blur of a kernel a tenth of the picture's side (SimCLR, Appendix A)."""

    sigma: Range = [0.1, 2.0]
    probability: Share = 0.5


class Noise(Section):
    """Gaussian noise on a vector; `std` in its units, or in standard deviations if standardised."""

    std: Positive = 0.1


class Augmentation(Section):
    """One augmentation: `crop`, or `{crop: {area: [0.08, 1]}}`."""

    crop: Crop | None = None
    color: Color | None = None
    flip: Flip | None = None
    blur: Blur | None = None
    noise: Noise | None = None

    @model_validator(mode="after")
    def _one(self) -> "Augmentation":
        if len(chosen := [name for name, value in self if value is not None]) != 1:
            raise ValueError(
                f"an augmentation is one of {', '.join(type(self).model_fields)}, not "
                f"{' and '.join(chosen) or 'none'}; give each an item of its own"
            )
        return self

    @model_serializer
    def _plain(self) -> dict[str, Any]:
        return {self.name: self.options.model_dump(mode="json")}

    @property
    def name(self) -> str:
        """Its name: `crop`, `color`, ..."""
        return next(name for name, value in self if value is not None)

    @property
    def options(self) -> Section:
        """Its section."""
        section: Section = getattr(self, self.name)
        return section


# SimCLR's set at its colour strength of 1 (Chen et al. 2020, Appendix A).
SIMCLR: list[Any] = [
    {"crop": {"area": [0.08, 1.0], "ratio": [3 / 4, 4 / 3]}},
    {"color": {"strength": 0.8, "hue": 0.2, "probability": 0.8}},
    {"blur": {}},
]


def _written_out(value: Any) -> Any:
    """Returns options for bare names: the defaults of an augmentation, the three of `simclr`."""
    if not isinstance(value, list):
        return value
    known = [*Augmentation.model_fields, "simclr"]
    items = []
    for item in value:
        if isinstance(item, str) and item not in known:
            raise ValueError(f"no augmentation {item!r}; expected one of {', '.join(known)}")
        bare = [{item: {}}] if isinstance(item, str) else [item]
        items += SIMCLR if item == "simclr" else bare
    return items


Augmentations = Annotated[list[Augmentation], BeforeValidator(_written_out)]
