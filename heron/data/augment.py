"""Augmentations of picture batches on their device, as functions of the samples.

Each takes a batch, its options and uniform numbers [batch, DRAWS] that belong to the samples, so a
sample is augmented in the same way on any process and beside any other samples.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from heron.config.augmentations import Blur, Color, Crop, Flip

DRAWS = 6  # uniform numbers that an augmentation of a picture may use
FINEST = 4  # most samples along each side of an output pixel, where a picture is shrunk
Images = Float[Tensor, "batch channels height width"]
Resized = Float[Tensor, "batch channels rows columns"]
Draws = Float[Tensor, "batch draws"]


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
    factor = 1 + options.strength * (2 * draws - 1)
    from kornia import enhance  # here: importing it takes a third as long as torch

    y = enhance.adjust_brightness_accumulative(x, factor[:, 0])
    y = enhance.adjust_contrast_with_mean_subtraction(y, factor[:, 1])
    y = enhance.adjust_saturation_with_gray_subtraction(y, factor[:, 2])
    y = enhance.adjust_hue(y, (2 * draws[:, 3] - 1) * options.hue * 2 * math.pi)
    if options.probability < 1:
        y = _select(draws[:, 5] < options.probability, y, x)
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device)[:, None, None]
    return _select(draws[:, 4] < options.grey, (y * weights).sum(1, keepdim=True), y)


def flip(x: Images, options: Flip, draws: Draws) -> Images:
    """Mirrors the pictures where column 0 is below the probability."""
    return _select(draws[:, 0] < options.probability, x.flip(3), x)


def blur(x: Images, options: Blur, draws: Draws) -> Images:
    """Blurs by a Gaussian with sigma from column 0 where column 1 is below the probability."""
    low, high = options.sigma
    sigma = low + (high - low) * draws[:, :1]
    kernel = max(3, min(x.shape[2:]) // 10 | 1)
    from kornia import filters

    y = filters.gaussian_blur2d(x, (kernel, kernel), sigma.expand(-1, 2))
    return _select(draws[:, 1] < options.probability, y, x)


def _select(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(mask[:, None, None, None], x, y)
