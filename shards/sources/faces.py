"""Synthetic faces, drawn from CelebA's forty attributes so that each can be seen."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import ClassVar

import numpy as np
from pydantic import Field

from heron.shards.manifest import Labels, View
from heron.shards.sources.base import Drawn, Rows
from heron.shards.sources.portrait import portrait

QUALITY = 90
CAMERAS = ["left", "right"]
ATTRIBUTES = [  # CelebA's, in its order
    "5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald", "Bangs",
    "Big_Lips", "Big_Nose", "Black_Hair", "Blond_Hair", "Blurry", "Brown_Hair", "Bushy_Eyebrows",
    "Chubby", "Double_Chin", "Eyeglasses", "Goatee", "Gray_Hair", "Heavy_Makeup",
    "High_Cheekbones", "Male", "Mouth_Slightly_Open", "Mustache", "Narrow_Eyes", "No_Beard",
    "Oval_Face", "Pale_Skin", "Pointy_Nose", "Receding_Hairline", "Rosy_Cheeks", "Sideburns",
    "Smiling", "Straight_Hair", "Wavy_Hair", "Wearing_Earrings", "Wearing_Hat",
    "Wearing_Lipstick", "Wearing_Necklace", "Wearing_Necktie", "Young",
]  # fmt: skip


class Faces(Drawn):
    """Synthetic faces with CelebA's forty attributes, every one of them visible.

    Attributes are about as frequent as in CelebA (but none under 5 %) and go together as they do
    there; position, size, light, skin and background vary and are no attribute. With two cameras,
    each has a place, a tilt, a light, a background and a noise of its own: the two pictures share
    the face, and nothing of how it was taken.
    """

    name: ClassVar[str] = "faces"
    examples: ClassVar[str] = "heron shards build faces --out data/faces --train 4000 --test 1000"
    block_rows: ClassVar[int | None] = None

    train: int = Field(4_000, gt=0, description="pictures to train on")
    test: int = Field(1_000, ge=0, description="pictures to test on")
    size: int = Field(64, ge=32, le=256, description="height and width in pixels")
    cameras: int = Field(1, ge=1, le=2, description="1 stores `image`; 2 store `left` and `right`")

    @property
    def views(self) -> list[View]:
        """One picture, or the same face as two cameras see it."""
        names = ["image"] if self.cameras == 1 else CAMERAS
        shape = (self.size, self.size, 3)
        return [View(name=name, kind="image", shape=shape, dtype="uint8") for name in names]

    @property
    def labels(self) -> Labels:
        """CelebA's forty attributes."""
        return Labels(kind="multi_label", names=ATTRIBUTES)

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Faces of a split; keys count on from one split to the next, as CelebA's do."""
        first = 1 + (self.train if split == "test" else 0)
        keys, labels = [], []
        pictures: dict[str, list[bytes]] = {view.name: [] for view in self.views}
        for number in range(first + start, first + stop):
            for camera, stored in enumerate(pictures.values()):
                random = np.random.default_rng([self.seed, number])  # the same face each time
                has = draw_attributes(random)
                if self.cameras == 1:
                    picture = portrait(has, random, self.size)
                else:
                    own = np.random.default_rng([self.seed, number, camera])
                    picture = portrait(has, random, self.size, own)
                stream = BytesIO()
                picture.save(stream, "JPEG", quality=QUALITY, subsampling=0)
                stored.append(stream.getvalue())
            keys.append(f"{number:06d}")
            labels.append([has[name] for name in ATTRIBUTES])
        return Rows({**pictures}, np.array(labels, np.uint8), keys)


def draw_attributes(random: np.random.Generator) -> dict[str, bool]:
    """Draw the attributes of one face: exclusive ones exclude, related ones go together."""
    numbers = iter(random.random(64).tolist())

    def chance(probability: float) -> bool:
        return float(next(numbers)) < probability

    has = dict.fromkeys(ATTRIBUTES, False)
    has["Male"] = male = chance(0.45)
    has["Young"] = young = chance(0.72 if male else 0.84)
    has["Chubby"] = chubby = chance(0.16 if male else 0.06)
    has["Attractive"] = chance((0.2 if chubby else 0.68) - 0.2 * male - 0.25 * (not young))
    has["Smiling"] = smiling = chance(0.42 if male else 0.53)
    _draw_hair(has, chance)
    _draw_beard(has, chance)
    for name, probability in {
        "Arched_Eyebrows": 0.08 if male else 0.4,
        "Bags_Under_Eyes": (0.28 if male else 0.1) + 0.12 * (not young),
        "Big_Lips": 0.17 if male else 0.3,
        "Blurry": 0.07,
        "Bushy_Eyebrows": 0.26 if male else 0.07,
        "Double_Chin": 0.45 if chubby else 0.03,
        "Eyeglasses": (0.1 if male else 0.05) + 0.1 * (not young),
        "Heavy_Makeup": 0.02 if male else 0.66,
        "High_Cheekbones": (0.75 if smiling else 0.2) - 0.1 * male,
        "Mouth_Slightly_Open": 0.75 if smiling else 0.25,
        "Narrow_Eyes": 0.18 if smiling else 0.1,
        "Oval_Face": 0.05 if chubby else 0.33,
        "Pale_Skin": 0.05 if male else 0.09,
        "Wearing_Necktie": 0.17 if male else 0.0,
        "Wearing_Necklace": 0.02 if male else 0.24,
        "Wearing_Earrings": 0.04 if male else 0.34,
    }.items():
        has[name] = chance(probability)
    has["Big_Nose"] = chance(0.38 if male else 0.14)
    has["Pointy_Nose"] = not has["Big_Nose"] and chance(0.35)
    has["Rosy_Cheeks"] = chance(0.22 if has["Heavy_Makeup"] else 0.05)
    has["Wearing_Lipstick"] = chance(0.96 if has["Heavy_Makeup"] else 0.03 if male else 0.45)
    return has


def _draw_hair(has: dict[str, bool], chance: Callable[[float], bool]) -> None:
    """At most one of bald, or of the colours (none is red), and one of straight and wavy."""
    male, young = has["Male"], has["Young"]
    has["Bald"] = bald = male and chance(0.09 if young else 0.24)
    has["Wearing_Hat"] = not bald and chance(0.085)
    if bald:
        return
    if not young and chance(0.35):
        has["Gray_Hair"] = True
    elif chance(0.32):
        has["Black_Hair"] = True
    elif chance(0.1 if male else 0.36):
        has["Blond_Hair"] = True
    else:
        has["Brown_Hair"] = chance(0.6)
    if chance(0.26):
        has["Straight_Hair"] = True
    else:
        has["Wavy_Hair"] = chance(0.24 if male else 0.6)
    has["Receding_Hairline"] = not has["Wearing_Hat"] and chance(0.08 if young else 0.26)
    has["Bangs"] = not has["Receding_Hairline"] and chance(0.1 if male else 0.24)


def _draw_beard(has: dict[str, bool], chance: Callable[[float], bool]) -> None:
    """No_Beard is the absence of every kind of beard; none of four kinds is a full one."""
    has["No_Beard"] = not (has["Male"] and chance(0.42))
    if not has["No_Beard"]:
        has["5_o_Clock_Shadow"] = chance(0.5)
        for name in ("Goatee", "Mustache", "Sideburns"):
            has[name] = chance(0.4)
