"""Draw a face from its attributes, at twice the size, then halve it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Colour = tuple[int, ...]  # red, green, blue, and opacity where it is not full

SKINS = ((241, 200, 170), (226, 178, 142), (205, 150, 112), (172, 118, 82), (128, 84, 58))
PALE = (248, 230, 222)
HAIR = {
    "Black_Hair": (30, 26, 30),
    "Blond_Hair": (240, 208, 104),
    "Brown_Hair": (106, 66, 38),
    "Gray_Hair": (176, 178, 184),
}
RED_HAIR = (178, 72, 28)
IRISES = ((70, 110, 170), (74, 120, 70), (96, 62, 34), (60, 44, 36))
SHIRTS_MALE = ((52, 84, 140), (44, 104, 92), (88, 92, 104), (60, 68, 84))
SHIRTS_FEMALE = ((196, 72, 100), (150, 84, 168), (220, 128, 84), (204, 96, 148))
BACKGROUNDS = (
    (150, 190, 214), (206, 196, 170), (164, 200, 160), (196, 176, 206), (222, 214, 204),
    (120, 140, 160), (236, 200, 160), (110, 150, 140),
)  # fmt: skip
# How far pictures of a camera of its own differ: place and scale (times those of one picture),
# tilt in degrees, strength of the light, of its slope and colour, noise of 255.
FAR, TILT, LIGHT, RAMP, CAST, NOISE = 1.0, 8.0, (0.4, 1.3), 0.5, 0.3, 12.0
WHITE, GOLD, INK = (250, 250, 248), (250, 200, 40), (40, 28, 26)


def portrait(
    has: Mapping[str, bool],
    random: np.random.Generator,
    size: int,
    camera: np.random.Generator | None = None,
) -> Image.Image:
    """Draw a face that has these attributes: RGB, size by size pixels.

    Args:
        has: the attributes.
        random: draws what else the face is; without a camera, also how the picture is taken.
        size: height and width in pixels.
        camera: draws how the picture is taken, which then varies more; see `Faces`.
    """
    face = _Face(has, random, size, camera)
    face.back_hair()
    face.body()
    face.head()
    face.skin()
    face.beard()
    face.eyes()
    face.nose()
    face.mouth()
    face.front_hair()
    face.worn()
    if camera is None:
        return _develop(face.image.reduce(2), has, random)
    tilted = face.image.rotate(
        camera.uniform(-TILT, TILT), Image.Resampling.BILINEAR, fillcolor=face.background
    )
    return _expose(tilted.reduce(2), has, camera)


def _expose(
    image: Image.Image, has: Mapping[str, bool], camera: np.random.Generator
) -> Image.Image:
    """Blur, coloured light from one side, and noise, all of one camera."""
    if has["Blurry"]:
        image = image.filter(ImageFilter.GaussianBlur(image.width / 48))
    angle, strength = camera.uniform(0, (2 * np.pi, RAMP))
    cast = camera.uniform(LIGHT[0], LIGHT[1]) * camera.uniform(1 - CAST, 1 + CAST, 3)
    ramp = np.linspace(-strength, strength, image.width)
    light = 1 + np.cos(angle) * ramp + np.sin(angle) * ramp[:, None]
    pixels = np.asarray(image, float) * light[..., None] * cast
    pixels += camera.uniform(0, NOISE) * camera.standard_normal(pixels.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _develop(
    image: Image.Image, has: Mapping[str, bool], random: np.random.Generator
) -> Image.Image:
    """Blur, light from one side, and the camera's noise."""
    size = image.width
    if has["Blurry"]:
        image = image.filter(ImageFilter.GaussianBlur(size / 48))
    angle, strength, gain, noise = random.random(4) * (6.283, 0.14, 0.14, 5)
    ramp = np.linspace(-strength, strength, size, dtype=np.float32)
    light = 0.9 + gain + np.cos(angle) * ramp + np.sin(angle) * ramp[:, None]
    pixels = np.asarray(image, np.float32) * light[..., None].astype(np.float32)
    if not has["Blurry"]:  # what is out of focus is smooth
        pixels += np.float32(noise) * random.standard_normal(pixels.shape, np.float32)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


@cache
def _circle(points: int) -> NDArray[np.float64]:
    """Points of the unit circle, clockwise from the right: [points, 2]."""
    angle = np.linspace(0, 2 * np.pi, points, endpoint=False)
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def _shade(colour: Colour, factor: float) -> Colour:
    return tuple(min(255, int(channel * factor)) for channel in colour[:3])


class _Face:
    """A canvas with its own axes: 0, 0 is between the eyes, the head about 60 wide and 80 high."""

    def __init__(
        self,
        has: Mapping[str, bool],
        random: np.random.Generator,
        size: int,
        camera: np.random.Generator | None,
    ) -> None:
        self.has, self.random = has, random
        draws = random.random(16).tolist()
        far = 1.0
        if camera is not None:
            draws[:5], far = camera.random(5).tolist(), FAR
        self.unit = 2 * size / 128 * (0.965 + 0.17 * far * (draws[0] - 0.5))
        self.x = size + size / 8 * far * (draws[1] - 0.5)
        self.y = size * 0.93 + size / 8 * far * (draws[2] - 0.5)
        background: Colour = BACKGROUNDS[int(draws[3] * len(BACKGROUNDS))]
        self.background = _shade(background, 0.8 + 0.3 * draws[4])
        if camera is not None:
            self.background = tuple(camera.integers(0, 256, 3).tolist())
        self.image = Image.new("RGB", (2 * size, 2 * size), self.background)
        self.pen = ImageDraw.Draw(self.image, "RGBA")
        tone: Colour = SKINS[int(draws[5] ** 1.5 * len(SKINS))]
        self.tone: Colour = PALE if has["Pale_Skin"] else _shade(tone, 0.94 + 0.12 * draws[6])
        self.dark = _shade(self.tone, 0.8)
        self.hair: Colour = next((HAIR[name] for name in HAIR if has[name]), RED_HAIR)
        self.hair = _shade(self.hair, 0.9 + 0.2 * draws[7])
        self.iris = IRISES[int(draws[8] * len(IRISES))]
        shirts = SHIRTS_MALE if has["Male"] else SHIRTS_FEMALE
        self.shirt = _shade(shirts[int(draws[9] * len(shirts))], 0.85 + 0.3 * draws[10])
        self.half = 29 + 6 * has["Chubby"] - 4 * has["Oval_Face"] + draws[11]  # half width
        self.chin = 40 + 5 * has["Oval_Face"] - 2 * has["Chubby"] + draws[12]  # below the eyes
        self.eye = 13.0  # from the middle to the centre of an eye
        self.hue = draws[13]  # of what is worn

    def at(self, points: NDArray[np.float64]) -> list[tuple[float, float]]:
        placed = points * self.unit + (self.x, self.y)
        return [(x, y) for x, y in placed.tolist()]

    def shape(self, points: list[tuple[float, float]], colour: Colour) -> None:
        self.pen.polygon(self.at(np.array(points, float)), colour)

    def line(self, points: list[tuple[float, float]], colour: Colour, width: float) -> None:
        thick = max(1, round(width * self.unit))
        self.pen.line(self.at(np.array(points, float)), colour, thick, "curve")

    def box(self, x: float, y: float, rx: float, ry: float) -> tuple[float, float, float, float]:
        x, y, k = self.x + x * self.unit, self.y + y * self.unit, self.unit
        return x - rx * k, y - ry * k, x + rx * k, y + ry * k

    def oval(self, x: float, y: float, rx: float, ry: float, colour: Colour) -> None:
        self.pen.ellipse(self.box(x, y, rx, ry), colour)

    def both(self, x: float, y: float, rx: float, ry: float, colour: Colour) -> None:
        for side in (-x, x):
            self.oval(side, y, rx, ry, colour)

    def arc(
        self,
        x: float,
        y: float,
        rx: float,
        ry: float,
        part: tuple[float, float],
        colour: Colour,
        width: float,
    ) -> None:
        """Part of an ellipse, from one angle to another in degrees, clockwise from the right."""
        thick = max(1, round(width * self.unit))
        self.pen.arc(self.box(x, y, rx, ry), *part, colour, thick)

    def outline(self, grow: float = 0.0) -> NDArray[np.float64]:
        """The edge of the face: a round top, and a jaw that is square for men."""
        x, y = _circle(48).T
        jaw = 0.62 if self.has["Male"] else 0.95
        if self.has["Chubby"]:
            jaw = min(jaw, 0.7)
        wide = np.where(y > 0, np.sign(x) * np.abs(x) ** jaw, x)
        high = np.where(y > 0, self.chin, 36.0)
        return np.stack([wide * (self.half + grow), y * (high + grow)], 1)

    def back_hair(self) -> None:
        """What hangs behind: long for women, close to the head for men, nothing on the bald."""
        has, edge = self.has, self.half + 5
        if has["Bald"]:
            return
        colour = _shade(self.hair, 0.82)
        low = 14.0 if has["Male"] else 52.0
        self.oval(0, -8, edge + 2, 36, colour)
        if has["Wavy_Hair"]:
            for y in np.arange(-26, low + 1, 9).tolist():
                self.both(edge - 2, y, 9, 8, colour)
            self.shape([(-edge, -8), (edge, -8), (edge, low), (-edge, low)], colour)
        elif has["Straight_Hair"]:
            low += 8
            self.shape([(-edge, -12), (edge, -12), (edge + 5, low), (-edge - 5, low)], colour)
            for x in np.arange(edge - 6, edge + 5, 3.5).tolist():
                for side in (-x, x):
                    self.line([(side * 0.97, -10), (side, low)], _shade(self.hair, 1.25), 0.9)
        elif not has["Male"]:
            self.shape([(-edge - 2, -8), (edge + 2, -8), (edge - 2, 34), (-edge + 2, 34)], colour)
            self.both(edge - 8, 33, 7.5, 9, colour)

    def body(self) -> None:
        """Shoulders, neck and what hangs on them."""
        has, male = self.has, self.has["Male"]
        wide, neck = (54, 20) if male else (42, 13)
        self.oval(0, 92, wide, 40, self.shirt)
        self.shape([(-neck, 20), (neck, 20), (neck + 1, 58), (-neck - 1, 58)], self.dark)
        self.oval(0, 56, neck + 1, 8, self.dark)
        if male or has["Wearing_Necktie"]:
            for side in (-1, 1):
                collar = [(side * neck, 51), (side * (neck + 5), 58), (side * 6, 70), (0, 60)]
                self.shape([(float(x), float(y)) for x, y in collar], WHITE)
        if has["Wearing_Necktie"]:
            tie = _shade(((200, 36, 44), (240, 180, 40), (120, 40, 140))[int(self.hue * 3)], 1)
            self.shape([(-6, 56), (6, 56), (4, 64), (-4, 64)], _shade(tie, 0.8))
            self.shape([(-4, 64), (4, 64), (9, 100), (-9, 100)], tie)
        if has["Wearing_Necklace"]:
            for angle in np.linspace(0.12, np.pi - 0.12, 11).tolist():
                x, y = (neck + 4) * np.cos(angle), 52 + 14 * np.sin(angle)
                self.oval(x, y, 2.6, 2.6, _shade(GOLD, 0.6))
                self.oval(x, y, 2.0, 2.0, (255, 244, 200))

    def head(self) -> None:
        has = self.has
        if has["Double_Chin"]:
            self.oval(0, self.chin - 3, self.half * 0.78, 13, _shade(self.tone, 0.9))
            self.arc(0, self.chin - 3, self.half * 0.78, 13, (20, 160), self.dark, 1.6)
        self.both(self.half, 4, 5, 8, self.dark)
        self.pen.polygon(self.at(self.outline()), self.tone)
        if has["Double_Chin"]:
            self.arc(0, self.chin - 9, self.half * 0.6, 9, (25, 155), self.dark, 1.8)

    def skin(self) -> None:
        """What age, make-up and shape leave on cheeks and forehead."""
        has, mark = self.has, (*_shade(self.tone, 0.6), 150)
        if not has["Attractive"]:  # blotchy, where the attractive are smooth
            spots = self.random.random((16, 3)) * (44, 40, 1.2) + (-22, -16, 0.8)
            for x, y, r in spots.tolist():
                self.oval(x, y, r, r, (*_shade(self.tone, 0.68), 110))
        if not has["Young"]:
            for y in (-21.0, -16.5, -12.0):
                self.arc(0, y + 6, 15, 6, (215, 325), mark, 1.3)
            for side in (-1, 1):
                self.line([(side * 9, 13), (side * 15, 20), (side * 16, 27)], mark, 1.5)
                for dy in (-3, 0, 3):
                    self.line([(side * 21, dy * 0.5), (side * 25.5, dy * 1.3)], mark, 1.0)
        if has["High_Cheekbones"]:
            for side in (-1, 1):
                self.shape([(side * 24, 6), (side * 12, 12), (side * 23, 10)], (255, 250, 240, 170))
                self.shape(
                    [(side * 26, 12), (side * 14, 16), (side * 17, 23)],
                    (*_shade(self.tone, 0.62), 130),
                )
        if has["Rosy_Cheeks"]:
            self.both(18, 14, 7.5, 6, (240, 70, 90, 150))
        if has["Bags_Under_Eyes"]:
            for side in (-1, 1):
                self.oval(side * self.eye, 6.2, 7.2, 3, (90, 60, 110, 105))
                self.arc(side * self.eye, 4.5, 7.5, 5, (20, 160), (70, 45, 80, 200), 1.3)

    def beard(self) -> None:
        has, hair = self.has, self.hair
        if has["Bald"]:
            hair = HAIR["Brown_Hair"] if has["Young"] else HAIR["Gray_Hair"]
        dark = _shade(hair, 0.85)
        edge = self.outline()
        jaw = [(x, y) for x, y in edge.tolist() if y > 8]
        if has["5_o_Clock_Shadow"]:
            inner = [(x * 0.62, 18 - abs(x) * 0.1) for x, _ in jaw[::-1]]
            self.shape([*jaw, *inner], (60, 70, 84, 125))
            self.oval(0, 18, 11, 3.5, (60, 70, 84, 125))
            dots = self.random.random((44, 2)) * (40, 20) + (-20, 18)
            for x, y in dots.tolist():
                if abs(x) > 9 or y > 31 or y < 20:
                    self.oval(x, y, 0.6, 0.6, (40, 44, 54, 110))
        kinds = ("5_o_Clock_Shadow", "Goatee", "Mustache", "Sideburns")
        if not has["No_Beard"] and not any(has[kind] for kind in kinds):
            inner = [(x * 0.6, 20 - abs(x) * 0.08) for x, _ in jaw[::-1]]
            self.shape([(x * 1.04, y * 1.07) for x, y in jaw] + inner, dark)
            self.oval(0, 18.5, 14, 4.5, dark)
            self.shape([(-14, 18), (-9, 18), (-9, 34), (-17, 34)], dark)
            self.shape([(14, 18), (9, 18), (9, 34), (17, 34)], dark)
        if has["Goatee"]:
            tip = [(8, self.chin), (0, self.chin + 8), (-8, self.chin)]
            self.shape([(-9, 30.5), (9, 30.5), *tip], dark)
        if has["Sideburns"]:
            for side in (-1, 1):
                x = side * (self.half + 0.5)
                inner = x - side * 7.5
                self.shape([(x, -12), (inner, -10), (inner, 20), (x - side * 1.5, 17)], dark)

    def eyes(self) -> None:
        has, wide = self.has, 7.4
        high = 2.1 if has["Narrow_Eyes"] else 5.2
        for side in (-1, 1):
            x = side * self.eye
            if has["Heavy_Makeup"]:
                shadow = (126, 60, 170) if self.hue < 0.5 else (40, 120, 160)
                self.oval(x, -2.5, wide + 2, high + 2.6, (*shadow, 200))
            self.oval(x, 0, wide, high, WHITE)
            self.oval(x, 0, min(4.4, high + 1), high, self.iris)
            self.oval(x, 0, min(2.1, high), min(2.1, high), INK)
            if has["Attractive"]:
                self.oval(x - 1.6, -1.6 if high > 3 else -0.7, 1.4, 1.4 if high > 3 else 0.9, WHITE)
            lash = 1.9 if has["Heavy_Makeup"] else 1.0
            self.arc(x, 0, wide, high, (180, 360), INK, lash)
            if not has["Male"]:
                self.line([(x + side * 6, -1.5), (x + side * 9.5, -4)], INK, lash)
            self._brow(side)

    def _brow(self, side: int) -> None:
        has = self.has
        thick = 4.6 if has["Bushy_Eyebrows"] else 1.9
        colour = _shade(INK if has["Bald"] else self.hair, 0.75)
        x = side * self.eye
        if has["Arched_Eyebrows"]:
            arch = [(x - side * 7, -7.0), (x + side * 2, -13.5), (x + side * 8.5, -7.5)]
            self.line(arch, colour, thick)
        else:
            self.line([(x - side * 7.5, -9), (x + side * 8, -9.2)], colour, thick)
        if has["Bushy_Eyebrows"]:
            for step in (-6, -2, 2, 6):
                y = -12.0 if has["Arched_Eyebrows"] and step == 2 else -10.0
                self.line([(x + step, y), (x + step + side * 2.2, y - 3.4)], colour, 1.5)

    def nose(self) -> None:
        has, shade = self.has, _shade(self.tone, 0.76)
        if has["Pointy_Nose"]:
            self.shape([(-0.5, -2), (-4.2, 13), (0, 16.5), (4.2, 13)], shade)
            self.shape([(0.2, -1), (-0.6, 14.5), (1.6, 13)], _shade(self.tone, 1.12))
        elif has["Big_Nose"]:
            self.shape([(-2.5, -1), (2.5, -1), (6, 12), (-6, 12)], (*shade, 150))
            self.both(6.4, 12, 4.2, 3.6, shade)
            self.oval(0, 11.2, 6.4, 5, _shade(self.tone, 0.9))
            self.both(4.2, 14, 1.5, 1.0, INK)
        else:
            self.oval(0, 11.5, 3.8, 3, shade)
            self.oval(0, 10.5, 3, 2.5, self.tone)

    def mouth(self) -> None:
        has, y = self.has, 24.5
        plain = (176, 92, 84) if sum(self.tone) > 420 else (132, 66, 58)
        lips = (214, 16, 52) if has["Wearing_Lipstick"] else plain
        full = 3.2 if has["Big_Lips"] else 1.5
        wide = 11.5 if has["Smiling"] else 8.0
        bend = 6.0 if has["Smiling"] else -0.8  # corners above the middle, or a little below
        across = np.linspace(-1, 1, 9)
        curve = y + bend * (1 - across**2) - bend / 2
        gap = (5.0 if has["Smiling"] else 6.0) * (1 - across**2) * has["Mouth_Slightly_Open"]
        bow = full * (1 - across**2) * (0.75 + 0.25 * np.cos(2 * np.pi * across + np.pi))
        top = np.stack([across * wide, curve - bow - 0.3 * full], 1)
        low = np.stack([across * wide, curve + gap + full * 1.3 * (1 - across**2) + 0.4], 1)
        if has["Mustache"]:
            self._mustache(y - 2.5 - full - max(0.0, bend / 2))
        self.pen.polygon(self.at(np.concatenate([top, low[::-1]])), lips)
        middle = np.stack([across * wide * 0.86, curve], 1)
        if has["Mouth_Slightly_Open"]:
            hole = np.stack([across * wide * 0.86, curve + gap], 1)
            self.pen.polygon(self.at(np.concatenate([middle, hole[::-1]])), (74, 16, 24))
            teeth = np.stack([across * wide * 0.7, curve + gap * 0.42], 1)
            edge = np.stack([across * wide * 0.7, curve], 1)
            self.pen.polygon(self.at(np.concatenate([edge, teeth[::-1]])), WHITE)
        else:
            self.pen.line(self.at(middle), _shade(lips, 0.5), max(1, round(1.2 * self.unit)))
        if has["Smiling"]:
            for side in (-1, 1):
                self.arc(side * (wide + 1.5), y - 2, 2.6, 5, (90, 270) if side < 0 else (270, 90),
                         self.dark, 1.1)  # fmt: skip

    def _mustache(self, y: float) -> None:
        hair = HAIR["Brown_Hair"] if self.has["Bald"] else self.hair
        for side in (-1, 1):
            half = ((0, -1.5), (8, -0.5), (15, 5), (7, 4), (0, 3))
            self.shape([(side * dx, y + dy) for dx, dy in half], _shade(hair, 0.8))

    def front_hair(self) -> None:
        """From the crown to the hairline, which bangs lower and years raise."""
        has, hair, edge = self.has, self.hair, self.half + 4
        if has["Bald"]:
            self.oval(-8, -27, 7, 3.4, (255, 255, 255, 110))
            return
        crown = [(x, y) for x, y in (_circle(40) * (edge, 38)).tolist() if y < -8]
        crown = sorted((x, y - 4) for x, y in crown)
        side = -2.0 if has["Male"] else 12.0
        if has["Receding_Hairline"]:
            side = -10.0
            line = [(24, -22), (13, -35), (5, -27), (-5, -27), (-13, -35), (-24, -22)]
        elif has["Male"]:
            line = [(26, -13), (17, -22), (-12, -23), (-25, -15)]
        else:
            line = [(27, -8), (14, -23), (0, -27), (-14, -23), (-27, -8)]
        light = _shade(hair, 1.3 if sum(hair) > 150 else 2.2)  # of curls and strands
        self.shape([*crown, (edge, side), *line, (-edge, side)], hair)
        if has["Wavy_Hair"]:
            for x in np.linspace(-edge + 3, edge - 3, 7).tolist():
                y = -10 - 32 * (1 - (x / edge) ** 2) ** 0.5
                self.oval(x, y + 2, 7, 6, hair)
                self.arc(x, y + 4, 5, 4, (180, 340), light, 1.2)
        elif has["Straight_Hair"]:
            for x in np.linspace(-edge + 6, edge - 6, 9).tolist():
                y = -11 - 29 * (1 - (x / edge) ** 2) ** 0.5
                self.line([(x * 0.45, -39), (x, min(-24, y + 12))], light, 1.0)
        if has["Bangs"]:
            top = [(-edge + 4, -20), (-20, -33), (20, -33), (edge - 4, -20)]
            self.shape([*top, (24, -13), (-24, -13)], hair)
            for x in range(-22, 23, 8):
                self.shape([(x - 4, -14), (x + 4, -14), (x + 1.0, -9)], hair)
                self.line([(x, -28), (x, -13)], _shade(hair, 0.72), 0.9)

    def worn(self) -> None:
        has = self.has
        if has["Wearing_Hat"]:
            hat = ((180, 40, 50), (40, 90, 160), (60, 140, 80), (70, 60, 90))[int(self.hue * 4)]
            edge = self.half + 6
            dome = [(x, y - 14) for x, y in (_circle(40) * (edge, 34)).tolist() if y <= 0.5]
            self.shape(sorted(dome), hat)
            self.shape([(-edge, -21), (edge, -21), (edge, -14), (-edge, -14)], _shade(hat, 0.7))
            self.oval(0, -14, edge + 7, 3.2, _shade(hat, 0.82))
        if has["Eyeglasses"]:
            for side in (-1, 1):
                self.oval(side * self.eye, 0.5, 10.5, 8.6, (220, 240, 255, 60))
                self.arc(side * self.eye, 0.5, 11, 9, (0, 360), INK, 2.0)
                self.line([(side * 24, -2), (side * (self.half + 2), -4)], INK, 1.8)
            self.line([(-2.5, -1), (2.5, -1)], INK, 1.8)
        if has["Wearing_Earrings"]:
            self.both(self.half + 2.5, 17.5, 4.0, 5.0, _shade(GOLD, 0.6))
            self.both(self.half + 2.5, 17.5, 3.2, 4.2, GOLD)
            self.both(self.half + 1.5, 16, 1.1, 1.3, WHITE)
