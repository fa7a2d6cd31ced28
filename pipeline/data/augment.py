"""Augmentations of a batch on its device, each number of them a function of the sample.

Each takes a batch, its options and uniform numbers [batch, DRAWS] of the samples' own; a sample is
augmented alike whichever process it falls to and whatever its neighbours are.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from heron.pipeline.config.augmentations import Blur, Color, Crop, Flip

DRAWS = 6  # uniform numbers that an augmentation of a picture may use
FINEST = 4  # samples along each side of a pixel, at most, where a picture is made smaller
Images = Float[Tensor, "batch channels height width"]
Resized = Float[Tensor, "batch channels rows columns"]
Draws = Float[Tensor, "batch draws"]


def crop(x: Images, options: Crop, draws: Draws, size: Sequence[int]) -> Resized:
    """Returns a random rectangle of each picture, perhaps mirrored, resampled to `size` pixels.

    Where pixels come out larger than they went in, each is the mean of several samples. A
    rectangle that would be higher or wider than the picture keeps its ratio and is made smaller.
    Columns 0 to 3 of the draws are area, two offsets and flip, 4 is the ratio.
    """
    if not len(x):  # a process may have no rows, which affine_grid refuses
        return x.new_empty(0, x.shape[1], *size)
    height, width = x.shape[2:]
    (low, high), (narrow, wide) = options.area, options.ratio
    area = low + (high - low) * draws[:, 0]
    ratio = math.log(narrow) + (math.log(wide) - math.log(narrow)) * draws[:, 4]
    # In units of the picture's sides, so that ratio 1 is the shape of what comes out.
    across = (ratio + math.log(size[1] * height / (size[0] * width))).exp()
    sides = torch.stack([(area * across).sqrt(), (area / across).sqrt()], 1)
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
    """Returns the largest rectangle about the centre with the shape of `size`, resampled to it."""
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

    Columns 0 to 3 of the draws are the four factors, 4 is grey, 5 whether to distort.
    """
    factor = 1 + options.strength * (2 * draws - 1)
    from kornia import enhance  # here: it takes a third of the time of torch to load

    y = enhance.adjust_brightness_accumulative(x, factor[:, 0])
    y = enhance.adjust_contrast_with_mean_subtraction(y, factor[:, 1])
    y = enhance.adjust_saturation_with_gray_subtraction(y, factor[:, 2])
    y = enhance.adjust_hue(y, (2 * draws[:, 3] - 1) * options.hue * 2 * math.pi)
    if options.probability < 1:
        y = _chosen(draws[:, 5] < options.probability, y, x)
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device)[:, None, None]
    return _chosen(draws[:, 4] < options.grey, (y * weights).sum(1, keepdim=True), y)


def flip(x: Images, options: Flip, draws: Draws) -> Images:
    """Returns a mirror image where column 0 is below the probability."""
    return _chosen(draws[:, 0] < options.probability, x.flip(3), x)


def blur(x: Images, options: Blur, draws: Draws) -> Images:
    """Blurs by a Gaussian of sigma from column 0, where column 1 is below the probability."""
    low, high = options.sigma
    sigma = low + (high - low) * draws[:, :1]
    kernel = max(3, min(x.shape[2:]) // 10 | 1)
    from kornia import filters

    y = filters.gaussian_blur2d(x, (kernel, kernel), sigma.expand(-1, 2))
    return _chosen(draws[:, 1] < options.probability, y, x)


def _chosen(where: Tensor, these: Tensor, others: Tensor) -> Tensor:
    return torch.where(where[:, None, None, None], these, others)
