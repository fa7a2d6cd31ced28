"""Sections of an experiment for the augmentations of a view in training."""

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

from heron.base.dotted import load_class
from heron.base.sections import BelowOne, Positive, Section, Share

if TYPE_CHECKING:
    from torch import Tensor


def _ascending(values: list[float]) -> list[float]:
    if values[0] > values[1]:
        raise ValueError("the smaller value must come first")
    return values


PAIR = Field(min_length=2, max_length=2)
Range = Annotated[list[Positive], PAIR, AfterValidator(_ascending)]
Areas = Annotated[list[Annotated[float, Field(gt=0, le=1)]], PAIR, AfterValidator(_ascending)]


class Crop(Section):
    """A random rectangle of the picture, resampled to the view's size (Szegedy et al. 2015).

    Attributes:
        area: smallest and largest area of the rectangle, as a share of the picture.
        ratio: smallest and largest width over height, relative to that of the view's size.
        flip: probability of a mirror image.
    """

    area: Areas = [0.4, 1.0]
    ratio: Range = [1.0, 1.0]
    flip: Share = 0.5


class Color(Section):
    """Colour distortion (SimCLR, Appendix A): brightness, contrast, saturation and hue.

    Attributes:
        strength: brightness, contrast and saturation change by a factor of 1 ± strength at most.
        hue: largest rotation of the hue, as a share of the circle.
        probability: probability of any distortion.
        grey: probability of turning the picture grey.
    """

    strength: Share = 0.4
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    probability: Share = 1.0
    grey: Share = 0.2


class Flip(Section):
    """A mirror image.

    Attributes:
        probability: probability of the mirror image.
    """

    probability: Share = 0.5


class Blur(Section):
    """Gaussian blur with a kernel of a tenth of the picture's side (SimCLR, Appendix A).

    Attributes:
        sigma: smallest and largest standard deviation, in pixels.
        probability: probability of blurring.
    """

    sigma: Range = [0.1, 2.0]
    probability: Share = 0.5


class Noise(Section):
    """Gaussian noise on a vector.

    Attributes:
        std: standard deviation of the noise, in the vector's units, or in its standard deviations
            if it is standardised.
    """

    std: Positive = 0.1


class DropNodes(Section):
    """A graph without some of its nodes (GraphCL, Section 3.1).

    Attributes:
        share: share of the nodes that are removed.
    """

    share: BelowOne = 0.2


class PerturbEdges(Section):
    """A graph with some edges replaced by others (GraphCL, Section 3.1).

    Attributes:
        share: share of the edges that are removed, and added again between random nodes.
    """

    share: Share = 0.2


class MaskNodes(Section):
    """A graph with the labels of some nodes hidden (GraphCL, Section 3.1).

    Attributes:
        share: share of the nodes whose labels are hidden.
    """

    share: Share = 0.2


class Subgraph(Section):
    """A connected part of a graph (GraphCL, Section 3.1).

    Attributes:
        share: share of the nodes that are kept.
    """

    share: Annotated[float, Field(gt=0, le=1)] = 0.8


class OwnAugmentation(Section):
    """Your own augmentation: a section of its options that is also the function.

    It is named by the dotted path of its class: `augment: [{my_lab.views.Mask: {part: 0.2}}]`.
    """

    @abstractmethod
    def __call__(self, x: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
        """Returns the augmented batch, of the same shape and dtype; must not write into `x`.

        Args:
            x: [rows, width] for vectors; [rows, channels, height, width] in [0, 1] for pictures;
                for graphs see `data.graphs`.
            draw: `draw(count)` returns uniform numbers in [0, 1), [rows, count]: the same ones on
                every call, a function of row and epoch, not of the process.
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
    def _load_own(cls, value: Any) -> Any:
        if not (isinstance(value, dict) and len(value) == 1 and "." in str(next(iter(value)))):
            return value
        ((path, options),) = value.items()
        augmentation = load_class(path, OwnAugmentation)  # type: ignore[type-abstract]
        if inspect.isabstract(augmentation):
            raise ValueError(f"{path} cannot be called; give it a method __call__(x, draw)")
        return {"own": (path, augmentation.model_validate({} if options is None else options))}

    @model_validator(mode="after")
    def _exactly_one(self) -> Augmentation:
        if len(chosen := [name for name, section in self if section is not None]) != 1:
            names = [name for name in type(self).model_fields if name != "own"]
            raise ValueError(
                f"an augmentation must be one of {', '.join(names)} or the dotted path of your "
                f"own class, got {' and '.join(chosen) or 'none'}; write one per item"
            )
        return self

    @model_serializer
    def _plain(self) -> dict[str, Any]:
        return {self.name: self.options.model_dump(mode="json")}

    @property
    def name(self) -> str:
        """The name: `crop`, `color`, ..., or a dotted path."""
        chosen = next(field for field, section in self if section is not None)
        return self.own[0] if self.own else chosen

    @property
    def options(self) -> Section:
        """The section of the chosen augmentation."""
        section: Section = self.own[1] if self.own else getattr(self, self.name)
        return section


# SimCLR's set at its colour strength of 1 (Chen et al. 2020, Appendix A).
SIMCLR: list[Any] = [
    {"crop": {"area": [0.08, 1.0], "ratio": [3 / 4, 4 / 3]}},
    {"color": {"strength": 0.8, "hue": 0.2, "probability": 0.8}},
    {"blur": {}},
]


def _expand_names(value: Any) -> Any:
    """Expands bare names: an augmentation with its defaults, or the three of `simclr`."""
    if not isinstance(value, list):
        return value
    names = [*(name for name in Augmentation.model_fields if name != "own"), "simclr"]
    items = []
    for item in value:
        if isinstance(item, str) and item not in names and "." not in item:
            raise ValueError(f"no augmentation named {item!r}; choose one of {', '.join(names)}")
        written_out = [{item: {}}] if isinstance(item, str) else [item]
        items += SIMCLR if item == "simclr" else written_out
    return items


Augmentations = Annotated[list[Augmentation], BeforeValidator(_expand_names)]
