"""Synthetic faces with CelebA's forty attributes, every one of which is visible."""

from io import BytesIO
from typing import ClassVar

import numpy as np
from pydantic import Field

from heron.shards.manifest import Labels, View
from heron.shards.sources.base import Rows, SyntheticSource
from heron.shards.sources.portrait import Camera, draw_face, photograph

QUALITY = 90
STEADY = Camera(0.03, 0.09, 0, (0.9, 1.04), 0.14, 0, 5, (100, 240))
VARIED = Camera(0.06, 0.09, 8, (0.4, 1.3), 0.5, 0.3, 12, (0, 256))
CAMERAS = {1: {"image": STEADY}, 2: {"left": VARIED, "right": VARIED}}


class Faces(SyntheticSource):
    """Synthetic faces with CelebA's forty attributes, every one of them visible.

    Attributes are about as frequent as in CelebA (but none below 5 %) and as correlated as there;
    skin, irises, clothes and how the picture is taken vary and are not attributes. With two
    cameras, each has its own position, tilt, light, background and noise: the two pictures share
    the face, and nothing of how it was taken.
    """

    name: ClassVar[str] = "faces"
    version: ClassVar[int] = 2
    examples: ClassVar[str] = "heron shards build faces --out data/faces --train 4000 --test 1000"
    block_rows: ClassVar[int | None] = None

    train: int = Field(4_000, gt=0, description="pictures to train on")
    test: int = Field(1_000, ge=0, description="pictures to test on")
    size: int = Field(64, ge=32, le=256, description="height and width in pixels")
    cameras: int = Field(1, ge=1, le=2, description="1 stores `image`; 2 store `left` and `right`")

    @property
    def views(self) -> list[View]:
        """One picture, or one for each of two cameras."""
        shape = (self.size, self.size, 3)
        return [
            View(name=name, kind="image", shape=shape, dtype="uint8")
            for name in CAMERAS[self.cameras]
        ]

    @property
    def labels(self) -> Labels:
        """CelebA's forty attributes."""
        return Labels(kind="multi_label", names=ATTRIBUTES)

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns faces of a split; keys count on from train to test, as CelebA's do."""
        first = 1 + (self.train if split == "test" else 0)
        keys, labels = [], []
        pictures: dict[str, list[bytes]] = {name: [] for name in CAMERAS[self.cameras]}
        for number in range(first + start, first + stop):
            random = np.random.default_rng([self.seed, number])
            has = draw_attributes(random)
            face = draw_face(has, random, self.size)
            for name, camera in CAMERAS[self.cameras].items():
                stream = BytesIO()
                picture = photograph(face, has["Blurry"], camera, random)
                picture.save(stream, "JPEG", quality=QUALITY, subsampling=0)
                pictures[name].append(stream.getvalue())
            keys.append(f"{number:06d}")
            labels.append([has[name] for name in ATTRIBUTES])
        return Rows({**pictures}, np.array(labels, np.uint8), keys)


def draw_attributes(random: np.random.Generator) -> dict[str, bool]:
    """Draws the attributes of one face, with CelebA's exclusions and correlations."""
    has: dict[str, bool] = {}

    def draw(name: str, probability: float) -> bool:
        has[name] = random.random() < probability
        return has[name]

    male = draw("Male", 0.45)
    young = draw("Young", 0.72 if male else 0.84)
    chubby = draw("Chubby", 0.16 if male else 0.06)
    smiling = draw("Smiling", 0.42 if male else 0.53)
    makeup = draw("Heavy_Makeup", 0.02 if male else 0.66)
    draw("Attractive", (0.2 if chubby else 0.68) - 0.2 * male - 0.25 * (not young))
    draw("Bags_Under_Eyes", (0.28 if male else 0.1) + 0.12 * (not young))
    draw("Double_Chin", 0.45 if chubby else 0.03)
    draw("Eyeglasses", (0.1 if male else 0.05) + 0.1 * (not young))
    draw("High_Cheekbones", (0.75 if smiling else 0.2) - 0.1 * male)
    draw("Mouth_Slightly_Open", 0.75 if smiling else 0.25)
    draw("Narrow_Eyes", 0.18 if smiling else 0.1)
    draw("Oval_Face", 0.05 if chubby else 0.33)
    draw("Rosy_Cheeks", 0.22 if makeup else 0.05)
    draw("Wearing_Lipstick", 0.96 if makeup else 0.03 if male else 0.45)
    for name, men, women in (
        ("Arched_Eyebrows", 0.08, 0.4),
        ("Big_Lips", 0.17, 0.3),
        ("Big_Nose", 0.38, 0.14),
        ("Blurry", 0.07, 0.07),
        ("Bushy_Eyebrows", 0.26, 0.07),
        ("Pale_Skin", 0.05, 0.09),
        ("Wearing_Earrings", 0.04, 0.34),
        ("Wearing_Necklace", 0.02, 0.24),
        ("Wearing_Necktie", 0.17, 0.0),
    ):
        draw(name, men if male else women)
    draw("Pointy_Nose", 0.35 * (not has["Big_Nose"]))

    # Hair is of at most one colour (red is none), and straight, wavy or neither.
    bald = draw("Bald", male * (0.09 if young else 0.24))
    hat = draw("Wearing_Hat", 0.085 * (not bald))
    coloured = draw("Gray_Hair", 0.35 * (not bald and not young)) or bald
    coloured = draw("Black_Hair", 0.32 * (not coloured)) or coloured
    coloured = draw("Blond_Hair", (0.1 if male else 0.36) * (not coloured)) or coloured
    draw("Brown_Hair", 0.6 * (not coloured))
    straight = draw("Straight_Hair", 0.26 * (not bald))
    draw("Wavy_Hair", (0.24 if male else 0.6) * (not bald and not straight))
    receding = draw("Receding_Hairline", (0.08 if young else 0.26) * (not bald and not hat))
    draw("Bangs", (0.1 if male else 0.24) * (not bald and not receding))

    # A man who is not without a beard has any of four kinds of it; with none of them, a full one.
    bearded = not draw("No_Beard", 0.58 if male else 1)
    draw("5_o_Clock_Shadow", 0.5 * bearded)
    for name in ("Goatee", "Mustache", "Sideburns"):
        draw(name, 0.4 * bearded)
    return has


ATTRIBUTES = sorted(draw_attributes(np.random.default_rng()))  # CelebA's, in its order
