"""Sections of an experiment that say what is done to a view in training."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializeAsAny,
    model_serializer,
    model_validator,
)

from heron.pipeline.config.sections import BelowOne, Positive, Section, Share
from heron.shards.dotted import load_class

if TYPE_CHECKING:
    from torch import Tensor


def _ordered(values: list[float]) -> list[float]:
    if values[0] > values[1]:
        raise ValueError(f"from {values[0]} to {values[1]}; expected the lesser first")
    return values


TWO = Field(min_length=2, max_length=2)
Range = Annotated[list[Positive], TWO, AfterValidator(_ordered)]
Areas = Annotated[list[Annotated[float, Field(gt=0, le=1)]], TWO, AfterValidator(_ordered)]


class Crop(Section):
    """A part of the picture, resampled to the view's size (Szegedy et al. 2015).

    Attributes:
        area: least and greatest share of the picture that the part has.
        ratio: least and greatest width over height, beside that of the view's size.
        flip: probability of a mirror image.
    """

    area: Areas = [0.4, 1.0]
    ratio: Range = [1.0, 1.0]
    flip: Share = 0.5


class Color(Section):
    """Colour distortion (SimCLR, Appendix A): brightness, contrast, saturation and hue.

    Attributes:
        strength: brightness, contrast and saturation change by a factor within this of 1.
        hue: greatest turn of the hue, as a share of the circle.
        probability: of any of it.
        grey: probability of losing all colour.
    """

    strength: Share = 0.4
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    probability: Share = 1.0
    grey: Share = 0.2


class Flip(Section):
    """A mirror image.

    Attributes:
        probability: of the mirror image.
    """

    probability: Share = 0.5


class Blur(Section):
    """Gaussian blur of a kernel a tenth of the picture's side (SimCLR, Appendix A).

    Attributes:
        sigma: least and greatest standard deviation, in pixels.
        probability: of any blur.
    """

    sigma: Range = [0.1, 2.0]
    probability: Share = 0.5


class Noise(Section):
    """Gaussian noise on a vector.

    Attributes:
        std: of the noise, in the vector's units, or in standard deviations if it is standardised.
    """

    std: Positive = 0.1


class DropNodes(Section):
    """A graph without some of its nodes (GraphCL, Section 3.1).

    Attributes:
        share: of the nodes that are taken out.
    """

    share: BelowOne = 0.2


class PerturbEdges(Section):
    """A graph of which some edges are others (GraphCL, Section 3.1).

    Attributes:
        share: of the edges that are taken out, and drawn anew between any two nodes.
    """

    share: Share = 0.2


class MaskNodes(Section):
    """A graph of which some nodes hide their label (GraphCL, Section 3.1).

    Attributes:
        share: of the nodes that do.
    """

    share: Share = 0.2


class Subgraph(Section):
    """A connected part of a graph (GraphCL, Section 3.1).

    Attributes:
        share: of the nodes that are kept.
    """

    share: Annotated[float, Field(gt=0, le=1)] = 0.8


class OwnAugmentation(Section):
    """An augmentation of your own: its options and what it does, in one file anywhere.

    It is named by the dotted path of its class: `augment: [{my_lab.views.Mask: {part: 0.2}}]`.
    """

    @abstractmethod
    def __call__(self, x: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
        """Returns a batch of the same shape, augmented; it does not write into `x`.

        Args:
            x: [rows, width] of vectors; [rows, channels, height, width] in [0, 1] of pictures; of
                graphs see `data.graphs`.
            draw: gives so many uniform numbers in [0, 1) a row, [rows, count]: always the same
                ones, which follow the row and the epoch, not the process.
        """


class Augmentation(Section):
    """One augmentation: `crop`, or `{crop: {area: [0.08, 1]}}`, or one of your own."""

    crop: Crop | None = None
    color: Color | None = None
    flip: Flip | None = None
    blur: Blur | None = None
    noise: Noise | None = None
    drop_nodes: DropNodes | None = None
    perturb_edges: PerturbEdges | None = None
    mask_nodes: MaskNodes | None = None
    subgraph: Subgraph | None = None
    own: tuple[str, SerializeAsAny[OwnAugmentation]] | None = None  # its dotted path, and itself

    @model_validator(mode="before")
    @classmethod
    def _load(cls, given: Any) -> Any:
        """Takes a key that is a dotted path for the augmentation of your own that it names."""
        if not (isinstance(given, dict) and len(given) == 1 and "." in str(next(iter(given)))):
            return given
        ((path, options),) = given.items()
        found = load_class(path, OwnAugmentation)  # type: ignore[type-abstract]
        if inspect.isabstract(found):
            raise ValueError(f"{path} does nothing; expected a method __call__(x, draw)")
        return {"own": (path, found.model_validate({} if options is None else options))}

    @model_validator(mode="after")
    def _one(self) -> Augmentation:
        if len(chosen := [name for name, value in self if value is not None]) != 1:
            known = [name for name in type(self).model_fields if name != "own"]
            raise ValueError(
                f"an augmentation is one of {', '.join(known)} or the dotted path of your own, not "
                f"{' and '.join(chosen) or 'none'}; give each an item of its own"
            )
        return self

    @model_serializer
    def _plain(self) -> dict[str, Any]:
        return {self.name: self.options.model_dump(mode="json")}

    @property
    def name(self) -> str:
        """Its name: `crop`, `color`, ..., or a dotted path."""
        return self.own[0] if self.own else next(n for n, value in self if value is not None)

    @property
    def options(self) -> Section:
        """Its section."""
        section: Section = self.own[1] if self.own else getattr(self, self.name)
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
    known = [*(name for name in Augmentation.model_fields if name != "own"), "simclr"]
    items = []
    for item in value:
        if isinstance(item, str) and item not in known and "." not in item:
            raise ValueError(f"no augmentation {item!r}; expected one of {', '.join(known)}")
        bare = [{item: {}}] if isinstance(item, str) else [item]
        items += SIMCLR if item == "simclr" else bare
    return items


Augmentations = Annotated[list[Augmentation], BeforeValidator(_written_out)]
