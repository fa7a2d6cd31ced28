"""Pictures: decoded once, at the smallest size that the views need, and augmented in batches.

An augmentation takes a batch on its device, its options and uniform numbers [batch, DRAWS] that
belong to the samples, so a sample is augmented in the same way on any process and beside any other
samples.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from heron.base.errors import ConfigError, format_shape
from heron.data.augmentations import Blur, Color, Crop, Flip
from heron.data.options import ModelView
from heron.shards.manifest import View
from heron.shards.picture import JPEG, PNG, is_plain_jpeg, pixels, read_header

AUGMENTATIONS = {
    "vector": ("noise",),
    "image": ("crop", "color", "flip", "blur"),
    "graph": ("drop_nodes", "perturb_edges", "mask_nodes", "subgraph"),
    "text": ("none of these, but the dotted path of your own class",),
}
DRAFTS = (8, 4, 2)  # divisors of the size at which scaled decoding is faster than full decoding
DRAWS = 6  # uniform numbers that an augmentation of a picture may use
FINEST = 4  # most samples along each side of an output pixel, where a picture is shrunk
Images = Float[Tensor, "batch channels height width"]
Resized = Float[Tensor, "batch channels rows columns"]
Draws = Float[Tensor, "batch draws"]


@dataclass(frozen=True)
class PictureDecoder:
    """Decodes the pictures of a stored view to one size.

    Attributes:
        stored: height, width and channels in the manifest, -1 where they vary.
        shape: height, width and channels of the output.
        draft: whether JPEGs may be decoded at a fraction of their size.
    """

    stored: tuple[int, ...]
    shape: tuple[int, ...]
    varying: bool = False
    draft: bool = True
    dtype = "uint8"
    vocabulary = 0

    def decode(self, data: bytes, out: NDArray[np.uint8]) -> None:
        """Decodes the bytes of one picture into `out`, of `shape`.

        Raises ValueError for no picture, a damaged one, or a size other than the manifest's.
        """
        if not self.varying and is_plain_jpeg(data):
            min_size = self._least(())
            with suppress(ValueError):  # the fault is found below
                decoded = simplejpeg.decode_jpeg(
                    data, min_height=min_size[0], min_width=min_size[1], buffer=out
                )
                if decoded.shape == self.shape:
                    return
        whole = None if data.startswith((JPEG, PNG)) else pixels(data)
        size = read_header(data)[1:] if whole is None else whole.shape[:2]
        if not self.varying and size != self.stored[:2]:
            raise ValueError(
                f"is {_size_text(size)}, but the manifest says {_size_text(self.stored)}"
            )
        out[:] = self.fit(pixels(data, self._least(size)) if whole is None else whole)

    def _least(self, size: Sequence[int]) -> Sequence[int]:
        """Returns the least height and width at which a JPEG of `size` is decoded; 0: its own."""
        if not self.varying:
            return self.shape[:2] if self.shape != self.stored else (0, 0)
        drafts = DRAFTS if self.draft else ()
        divisor = next((d for d in drafts if min(size) >= d * self.shape[0]), 1)
        return [-(-n // divisor) if divisor > 1 else 0 for n in size]

    def fit(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Resamples a decoded picture to `shape`; if sizes vary, cuts its central square first.

        Raises ValueError if it has neither `shape` nor the stored shape.
        """
        stored = (*picture.shape[:2], self.stored[2]) if self.varying else self.stored
        if picture.shape not in (stored, self.shape) or picture.ndim != 3 or 0 in picture.shape:
            expected = "any × any" if self.varying else _size_text(self.stored)
            raise ValueError(
                f"must be {expected} × {self.stored[2]}, got {format_shape(picture.shape)}"
            )
        if self.varying:
            height, width = picture.shape[:2]
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            picture = picture[top : top + side, left : left + side]
        height, width = self.shape[:2]
        if picture.shape[:2] == (height, width):
            return picture
        resized = Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(resized)


def input_shape(stored: View, view: ModelView, vocabulary: int = 0) -> tuple[int, ...]:
    """Returns the shape of a sample as the model sees it; ConfigError if the options do not fit.

    It is (width,) of vectors, (height, width, channels) of pictures, (tokens, vocabulary) of texts,
    or (nodes, edges, 2, labels) of graphs.
    """
    image = stored.kind == "image"
    for augmentation in view.augment:
        name = augmentation.name
        if augmentation.own:
            continue
        if name not in (supported := AUGMENTATIONS[stored.kind]):
            raise ConfigError(
                f"data.views: augmentation '{name}' does not work on {stored.kind} view "
                f"'{view.stored}'; {stored.kind}s take {', '.join(supported)}"
            )
        if name == "color" and stored.shape[2] != 3:
            raise ConfigError(
                f"data.views: augmentation 'color' needs three channels, but '{view.stored}' has "
                f"{stored.shape[2]}; remove it"
            )
    if not image:
        if view.size is not None:
            raise ConfigError(
                f"data.views: size is {view.size}, but '{view.stored}' has {stored.kind}s; remove "
                "it"
            )
        if stored.kind == "graph":
            nodes, edges, labels = stored.shape
            return nodes, edges, 2, labels
        return (view.tokens, vocabulary) if stored.kind == "text" else stored.shape
    if view.size is None and -1 in stored.shape:
        raise ConfigError(
            f"data.views: the pictures of '{view.stored}' have several sizes; set the size of the "
            "model's input, such as size: 224"
        )
    height, width = view.size or stored.shape[:2]
    return height, width, stored.shape[2]


def picture_decoder(
    stored: View, views: Sequence[ModelView], draft: bool, decode_size: int | None
) -> PictureDecoder:
    """Returns the decoder of stored pictures from which the model's `views` are made.

    A draft is decoded at 1/2, 1/4 or 1/8 of its size: the smallest at which no view is enlarged,
    neither its smallest crop nor, without crops, the full picture. Raises ConfigError if
    `data.decode_size` is less than a view's size.
    """
    if -1 in stored.shape:
        needed = max(max(view.size) for view in views if view.size is not None)
        side = decode_size or math.ceil(needed * 8 / 7)  # 256 for 224, as is usual
        if side < needed:
            raise ConfigError(
                f"data.decode_size must be at least the views' size {needed}, got {side}"
            )
        return PictureDecoder(stored.shape, (side, side, stored.shape[2]), True, draft)
    scale = max((_scale(view, stored.shape) for view in views), default=1.0)
    divisor = next((d for d in DRAFTS if d * scale <= 1), 1) if draft else 1
    height, width = (-(-n // divisor) for n in stored.shape[:2])
    return PictureDecoder(stored.shape, (height, width, stored.shape[2]))


def _scale(view: ModelView, stored: Sequence[int]) -> float:
    """Returns the smallest factor of a picture's sides at which the view is not enlarged."""
    height, width = stored[:2]
    rows, columns = view.size or (height, width)
    crops = [augmentation.crop for augmentation in view.augment if augmentation.crop is not None]
    if not crops:
        return max(rows / height, columns / width)
    area = min(crop.area[0] for crop in crops) * height * width
    shapes = [ratio * columns / rows for crop in crops for ratio in crop.ratio]
    return max(
        max(
            rows / min(height, math.sqrt(area / shape)),
            columns / min(width, math.sqrt(area * shape)),
        )
        for shape in shapes
    )


def _size_text(size: Sequence[int]) -> str:
    return " × ".join(map(str, size[:2]))


def crop(x: Images, options: Crop, draws: Draws, size: Sequence[int]) -> Resized:
    """Returns a random rectangle of each picture, perhaps mirrored, resampled to `size` pixels.

    Where output pixels are larger than input pixels, each is the mean of several samples. A
    rectangle that would be higher or wider than the picture is shrunk with its ratio kept. Columns
    0 to 3 of the draws are area, two offsets and flip; column 4 is the ratio.
    """
    if not len(x):  # a process may have no rows, which affine_grid refuses
        return x.new_empty(0, x.shape[1], *size)
    height, width = x.shape[2:]
    (low, high), (narrow, wide) = options.area, options.ratio
    area = low + (high - low) * draws[:, 0]
    ratio = math.log(narrow) + (math.log(wide) - math.log(narrow)) * draws[:, 4]
    # In units of the picture's sides, so that ratio 1 is the shape of the output.
    aspect = (ratio + math.log(size[1] * height / (size[0] * width))).exp()
    sides = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], 1)
    sides = sides / sides.amax(1, keepdim=True).clamp(min=1)
    offset = (2 * draws[:, 1:3] - 1) * (1 - sides)
    flip = torch.where(draws[:, 3] < 1 - options.flip, 1.0, -1.0)
    theta = torch.zeros(len(x), 2, 3, device=x.device)
    theta[:, 0, 0], theta[:, 1, 1] = sides[:, 0] * flip, sides[:, 1]
    theta[:, :, 2] = offset
    fine = min(FINEST, max(1, math.ceil(max(height / size[0], width / size[1]) * high**0.5 - 0.25)))
    grid = F.affine_grid(
        theta, [len(x), x.shape[1], fine * size[0], fine * size[1]], align_corners=False
    )
    out = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    return F.avg_pool2d(out, fine) if fine > 1 else out


def fit(x: Images, size: Sequence[int]) -> Resized:
    """Returns the largest central rectangle with the aspect of `size`, resampled to `size`."""
    height, width = x.shape[2:]
    scale = min(height / size[0], width / size[1])
    rows, columns = (max(1, round(side * scale)) for side in size)
    top, left = (height - rows) // 2, (width - columns) // 2
    centre = x[:, :, top : top + rows, left : left + columns]
    if list(centre.shape[2:]) == list(size):
        return centre
    return F.interpolate(centre, list(size), mode="bilinear", antialias=True)


def color(x: Images, options: Color, draws: Draws) -> Images:
    """Distorts brightness, contrast, saturation and hue of RGB images in [0, 1]; perhaps to grey.

    Columns 0 to 3 of the draws are the four factors, 4 decides on grey, 5 on the distortion.
    """
    brightness, contrast, saturation = (
        (1 + options.strength * (2 * draws[:, n] - 1))[:, None, None, None] for n in range(3)
    )
    y = (x * brightness).clamp_(0, 1)
    y = torch.lerp(_grey(y).mean((2, 3), keepdim=True), y, contrast).clamp_(0, 1)
    y = torch.lerp(_grey(y), y, saturation).clamp_(0, 1)
    y = _turn_hue(y, (2 * draws[:, 3] - 1) * options.hue)
    if options.probability < 1:
        y = _select(draws[:, 5] < options.probability, y, x)
    return _select(draws[:, 4] < options.grey, _grey(y), y)


def _grey(x: Images) -> Float[Tensor, "batch 1 height width"]:
    """Returns the luma of RGB images (ITU-R BT.601)."""
    red, green, blue = torch.split(x, 1, 1)
    return (red * 0.299).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def _turn_hue(x: Images, turn: Float[Tensor, " batch"]) -> Images:
    """Rotates the hue of RGB images by a share of the circle, as through HSV and back.

    In sixths of the circle, the hue is that of the largest channel (0, 2 or 4) and what the other
    two differ by, over the chroma c = max - min. A channel is max - c clip(min(k, 4 - k), 0, 1),
    where k is the hue plus 5, 3 or 1, modulo 6.
    """
    red, green, blue = torch.split(x, 1, 1)
    low, top = torch.aminmax(x, dim=1, keepdim=True)
    chroma = top - low
    hue = torch.where(
        red == top,
        green - blue,
        torch.where(
            green == top,
            torch.add(blue - red, chroma, alpha=2),
            torch.add(red - green, chroma, alpha=4),
        ),
    )
    hue = hue / chroma.clamp(min=torch.finfo(x.dtype).tiny) + 6 * turn[:, None, None, None]
    offset = torch.arange(5, 0, -2, device=x.device, dtype=x.dtype)[:, None, None]
    k = (hue + offset).remainder_(6)
    return torch.addcmul(top, chroma, torch.minimum(k, 4 - k).clamp_(0, 1), value=-1)


def flip(x: Images, options: Flip, draws: Draws) -> Images:
    """Mirrors the pictures where column 0 is below the probability."""
    return _select(draws[:, 0] < options.probability, x.flip(3), x)


def blur(x: Images, options: Blur, draws: Draws) -> Images:
    """Blurs by a Gaussian with sigma from column 0 where column 1 is below the probability."""
    low, high = options.sigma
    sigma = low + (high - low) * draws[:, :1]
    kernel = max(3, min(x.shape[2:]) // 10 | 1)
    place = torch.arange(kernel, device=x.device, dtype=x.dtype) - kernel // 2
    weights = torch.softmax(-(place**2) / (2 * sigma.to(x.dtype) ** 2), 1)
    of_plane = weights.repeat_interleave(x.shape[1], 0, output_size=len(x) * x.shape[1])
    planes = F.pad(x, [kernel // 2] * 4, mode="reflect").flatten(0, 1)[None]
    for shape in ((1, kernel), (kernel, 1)):
        planes = F.conv2d(planes, of_plane.view(-1, 1, *shape), groups=planes.shape[1])
    return _select(draws[:, 1] < options.probability, planes.view(x.shape), x)


def _select(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(mask[:, None, None, None], x, y)
