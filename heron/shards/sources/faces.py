"""Synthetic faces with CelebA's forty attributes: drawn from a table of shapes, photographed."""

from collections.abc import Mapping
from io import BytesIO
from typing import ClassVar, NamedTuple

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFilter
from pydantic import Field

from heron.shards.manifest import Labels, View
from heron.shards.sources.base import Rows, SyntheticSource

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

# A shape in each line, from back to front: the attributes that the face has, and with ! has not;
# PIL's shape, in the plural with its mirror image; its colour, of `_palette` or PIL (+ the mean of
# two, * a factor); and its numbers, which are for
#   polygon  the corners
#   line     the width, then both ends of every stroke
#   ellipse  the radii, then the centres
#   chord    the radii, two angles in degrees, then the centres; it is filled
#   arc      the radii, two angles, the width, then the centres
# Lengths are in units: 0 0 lies between the eyes, y points down, a head is some 60 by 80.
SHAPES = """
!Bald                  ellipse  hair         34 37  0 -8
!Bald&!Male            polygons hair*.82     0 -8  34 -8  33 44  0 44
Wavy_Hair              ellipses hair*.9      10 9  5 -41  16 -38  26 -31  33 -23  36 -14  35 -4
Wavy_Hair&!Male        ellipses hair*.82     10 9  36 6  36 15  36 24  36 34  34 44
Straight_Hair&!Male    polygons hair*.82     0 -12  34 -12  41 60  0 60
Face                   ellipse  shirt        42 40  0 92
Male                   ellipse  shirt        54 40  0 92
Face                   polygons skin*.8      0 20  13 20  14 58  0 64
Male                   polygons skin*.8      0 20  20 20  21 58  0 64
Male                   polygons white        20 51  25 58  6 70  0 60
Wearing_Necktie        polygons tie          0 56  6 56  4 64  9 110  0 110
Wearing_Necklace       ellipses gold         2.6 2.6  19 52  17 58  12 62.5  6 65.5  0 66.5
Face                   ellipses skin*.8      5 8  29 4
Double_Chin            ellipse  skin*.9      24 14  0 38
!Oval_Face             ellipse  skin         29.5 38  0 2
!Oval_Face             ellipses skin         14 19  14.5 15
Oval_Face              ellipse  skin         26 42  0 5
Chubby                 ellipse  skin         35 27  0 11
Male                   polygons skin         0 8  27 8  24 32  13 40  0 40
Double_Chin            arc      skin*.65     18 9  25 155  1.8  0 31
!Attractive            ellipse  skin*.68     1.7 1.7  -19 -8  8 -12  20 -6  -22 12  9 31  17 20
!Young                 arc      skin*.65     15 6  215 325  1.3  0 -15  0 -10.5  0 -6
!Young                 lines    skin*.65     1.5  9 13  15 20  15 20  16 27  22 0  27 -3
High_Cheekbones        polygons skin+white   25 5  11 12  24 10
High_Cheekbones        polygons skin*.7      26 12  14 16  17 23
Rosy_Cheeks            ellipses skin+crimson 7.5 6  18 14
Bags_Under_Eyes        ellipses skin+indigo  7.2 4  13 5.5
Full_Beard             polygons hair*.85     0 18  16 18  29 6  25 34  13 46  0 46
5_o_Clock_Shadow       polygons skin+#3c4654 0 17  16 17  28 8  24 32  13 40  0 40
Goatee                 polygons hair*.85     0 30  9 30  8 40  0 48
Sideburns              polygons hair*.85     30 -12  22 -10  22 20  28 17
Mustache               polygons hair*.85     0 15.5  8 16.5  15 24  7 22  0 21.5
Face                   ellipses white        7.4 5.2  13 0
Face                   ellipses iris         4.4 5.2  13 0
Face                   ellipses black        2.1 2.1  13 0
Narrow_Eyes            chords   skin*.9      8 6  200 340  13 0
Narrow_Eyes            chords   skin*.9      8 6  20 160  13 0
Face                   arcs     black        7.4 5.2  195 345  1.2  13 0
Heavy_Makeup           arcs     makeup       9.8 8.4  190 350  4.4  13 0
!Arched_Eyebrows       lines    hair*.7      2  5.5 -9  21 -9.2
Arched_Eyebrows        lines    hair*.7      2  6 -7  15 -13.5  15 -13.5  21.5 -7.5
Bushy_Eyebrows         lines    hair*.7      5.4  6 -10  15 -12  15 -12  21 -10
Pointy_Nose            polygons skin*.7      0 -3  5 14  0 18
Big_Nose               ellipses skin*.76     4.4 4.2  6.2 12  2 12  1 7
Big_Nose               ellipses black        1.5 1  4.2 14
!Pointy_Nose&!Big_Nose ellipse  skin*.76     3.8 3  0 11.5
Smiling                arc      lips         12.5 10  12 168  3  0 19
Smiling&Big_Lips       arc      lips         14 12.5  12 168  7  0 19
!Smiling               ellipse  lips         8 2.4  0 25
!Smiling&Big_Lips      ellipse  lips         9.5 5  0 25
Smiling                arc      lips*.5      11.5 8.5  15 165  1.2  0 19
!Smiling               line     lips*.5      1.2  -8 25.3  8 25.3
Smiling&Mouth_Slightly_Open chord #4a1018 11.5 8.5  10 170  0 19
Smiling&Mouth_Slightly_Open polygons white 0 20.5  10 20.5  8 23.5  0 23.5
!Smiling&Mouth_Slightly_Open ellipse lips 7 6.5  0 26.5
!Smiling&Mouth_Slightly_Open ellipse #4a1018 5 4  0 27
Bald                   ellipse  skin+white   7 3.4  -8 -27
!Bald&Male             polygons hair         0 -36  24 -34  30 -4  25 -15  17 -23  0 -24
!Bald&!Male            polygons hair         0 -36  24 -34  31 12  26 -8  14 -23  0 -27
Receding_Hairline      ellipses skin         9 9  13 -27
Wavy_Hair              arcs     shine        6 5  180 340  1.4  30 -17  24 -28  15 -35  5 -39
Straight_Hair          lines    shine        1  12 -41  30 -20  9 -42  22 -27  4 -43  12 -29
Bangs                  polygons hair         0 -36  20 -36  30 -18  24 -8  18 -14  12 -8  6 -14 0 -8
Wearing_Hat            chord    hat          36 34  180 360  0 -14
Wearing_Hat            ellipse  hat*.7       44 4  0 -15
Eyeglasses             arcs     black        11 9  0 360  2  13 .5
Eyeglasses             lines    black        1.8  24 -2  31 -4  2.5 -1  0 -1
Wearing_Earrings       ellipses gold         4 5  31.5 18
"""


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
    for line in SHAPES.strip().splitlines():
        condition, shape, colour, *numbers = line.split()
        if all(
            (word.lstrip("!") in features) != word.startswith("!") for word in condition.split("&")
        ):
            kind = shape.removesuffix("s")
            for side in (1,) if kind == shape else (1, -1):
                values = [float(number) for number in numbers]
                _draw(pen, kind, side, _mix(colour, palette), values, width / CANVAS)
    return image


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
