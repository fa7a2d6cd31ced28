"""Synthetic faces with CelebA's forty attributes: drawn from a table of shapes, photographed."""

from collections.abc import Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFilter
from pydantic import Field

from heron.shards.manifest import Labels, View
from heron.shards.source import Rows
from heron.sources.base import SyntheticSource

Colour = tuple[int, ...]

FINE = 2  # pixels of the drawing along each side of a pixel of the picture
FRAME, CANVAS = 128, 192  # units along a side of the picture, and of the drawing around it
BELOW = 5  # units from between the eyes to the middle of the picture
HAIR = {
    "Black_Hair": "#1e1a1e",
    "Blond_Hair": "#f0d068",
    "Brown_Hair": "#6a4226",
    "Gray_Hair": "#b0b2b8",
}
SKINS = ("#f1c8aa", "#e2b28e", "#cd9670", "#ac7652", "#80543a")
CHOICES = {
    "iris": ("#466eaa", "#4a7846", "#603e22", "#3c2c24"),
    "hat": ("#b42832", "#285aa0", "#3c8c50", "#463c5a"),
    "tie": ("#c8242c", "#f0b428", "#78288c"),
    "makeup": ("#7e3caa", "#28788c"),
}
SHIRTS = {True: ("#34548c", "#2c685c", "#585c68"), False: ("#c44864", "#9654a8", "#dc8054")}
BEARDS = ("5_o_Clock_Shadow", "Goatee", "Mustache", "Sideburns")

SHAPES = Path(__file__).with_name("shapes.txt")  # says itself how it is read


class Camera(NamedTuple):
    """The range in which each property of a camera's pictures varies."""

    shift: float  # along either axis, in widths of the picture
    scale: float  # of 1, up or down
    tilt: float  # in degrees
    light: tuple[float, float]  # its least and its most, of 1
    slope: float  # of the light, from the middle to the lighter side
    cast: float  # of each colour, of 1
    noise: float  # at most, of 255
    background: tuple[int, int]  # the least and the most of each colour, of 255


def draw_face(has: Mapping[str, bool], random: np.random.Generator, size: int) -> Image.Image:
    """Returns a face on a transparent RGBA canvas, for pictures of `size` pixels a side.

    `random` chooses what no attribute says: the colours of skin, irises and clothes.
    """
    width = FINE * size * CANVAS // FRAME
    image = Image.new("RGBA", (width, width))
    pen = ImageDraw.Draw(image)
    palette = _palette(has, random)
    features = {"Face", *(name for name in has if has[name])}
    if features.isdisjoint((*BEARDS, "No_Beard")):
        features.add("Full_Beard")
    for line in _shapes():
        condition, shape, colour, *numbers = line.split()
        if all(
            (word.lstrip("!") in features) != word.startswith("!") for word in condition.split("&")
        ):
            kind = shape.removesuffix("s")
            for side in (1,) if kind == shape else (1, -1):
                values = [float(number) for number in numbers]
                _draw(pen, kind, side, _mix(colour, palette), values, width / CANVAS)
    return image


@cache
def _shapes() -> list[str]:
    lines = SHAPES.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _draw(
    pen: ImageDraw.ImageDraw, kind: str, side: int, ink: Colour, numbers: list[float], unit: float
) -> None:
    """Draws a shape, or for side -1 its mirror image (angles are not mirrored)."""
    count = {"polygon": 0, "line": 1, "ellipse": 2, "chord": 4, "arc": 5}[kind]
    options = numbers[:count]
    points = (np.reshape(numbers[count:], (-1, 2)) * (side, 1) + CANVAS / 2) * unit
    if kind == "polygon":
        points = points.reshape(1, -1)
    elif kind == "line":
        points = points.reshape(-1, 4)
    else:
        radii = np.array(options[:2]) * unit
        points = np.hstack([points - radii, points + radii])
    width = [max(1, round(options[-1] * unit))] if kind in ("line", "arc") else []
    for point in points.tolist():
        getattr(pen, kind)(point, *options[2:4], ink, *width)


def _palette(has: Mapping[str, bool], random: np.random.Generator) -> dict[str, Colour]:
    """Returns the colours of a face by their names in the table."""
    choices = CHOICES | {"skin": SKINS, "shirt": SHIRTS[has["Male"]]}
    names = {name: colours[random.integers(len(colours))] for name, colours in choices.items()}
    if has["Pale_Skin"]:
        names["skin"] = "#f8e6de"
    names["lips"] = "#d61034" if has["Wearing_Lipstick"] else "skin+#8c3c3c*.9"
    names["hair"] = next((HAIR[name] for name in HAIR if has[name]), "#b2481c")
    if has["Bald"]:  # of brows and beard
        names["hair"] = HAIR["Brown_Hair" if has["Young"] else "Gray_Hair"]
    names["shine"] = "hair+white*.75"
    palette: dict[str, Colour] = {}
    for name, colour in names.items():
        palette[name] = _mix(colour, palette)
    return palette


def _mix(colour: str, palette: Mapping[str, Colour]) -> Colour:
    """Returns the colour of an expression in the table."""
    names, _, factor = colour.partition("*")
    colours = [palette.get(name) or ImageColor.getrgb(name) for name in names.split("+")]
    mean = np.mean(colours, 0) * float(factor or 1)
    return tuple(int(channel) for channel in mean.clip(0, 255))


def photograph(
    face: Image.Image, blurred: bool, camera: Camera, random: np.random.Generator
) -> Image.Image:
    """Returns an RGB picture of a face from `draw_face`, in the size it was drawn for."""
    side = face.width * FRAME // CANVAS
    x, y = side * (0.5 + camera.shift * random.uniform(-1, 1, 2))
    zoom = 1 + camera.scale * random.uniform(-1, 1)
    angle = np.radians(camera.tilt * random.uniform(-1, 1))
    cos, sin = np.cos(angle) / zoom, np.sin(angle) / zoom
    middle, low = face.width * 0.5, face.width * (0.5 + BELOW / CANVAS)
    # From positions in the picture to positions in the drawing.
    affine = (cos, sin, middle - cos * x - sin * y, -sin, cos, low + sin * x - cos * y)
    placed = face.transform(
        (side, side), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR
    ).reduce(FINE)
    background = tuple(random.integers(*camera.background, 3).tolist())
    picture = Image.new("RGB", placed.size, background)
    picture.paste(placed, mask=placed)
    if blurred:
        picture = picture.filter(ImageFilter.GaussianBlur(picture.width / 48))
    angle, slope = random.uniform(0, (2 * np.pi, camera.slope))
    ramp = np.linspace(-slope, slope, picture.width)
    light = 1 + np.cos(angle) * ramp + np.sin(angle) * ramp[:, None]
    cast = random.uniform(*camera.light) * random.uniform(1 - camera.cast, 1 + camera.cast, 3)
    pixels = np.asarray(picture) * light[..., None] * cast
    pixels += random.uniform(0, camera.noise) * random.standard_normal(pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


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
