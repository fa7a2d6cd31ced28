"""The views a model sees: stored views, standardised or augmented as a batch on the device.

Every random number is a function of (seed, epoch, row, view): a sample is augmented alike
whichever process it falls to and whatever its neighbours are.
"""

import math

import kornia.enhance as enhance
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from pipeline.config import Data
from pipeline.data.batches import Batch
from pipeline.data.reader import Reader
from pipeline.draws import uniforms
from pipeline.errors import ConfigError

_CROP_AREA = (0.4, 1.0)
_STRENGTH = 0.4  # brightness, contrast and saturation; hue takes a quarter of it


class Views:
    """Makes the model's inputs of a batch of stored views."""

    def __init__(self, reader: Reader, config: Data, device: torch.device) -> None:
        """Look up what is stored.

        Raises:
            ConfigError: a stored view is not in the data set, or an augmentation of images is
                asked of vectors, or the other way round.
        """
        self.views = config.views
        self.noise_std = config.noise_std
        self.device = device
        self.statistics: dict[str, tuple[Tensor, Tensor]] = {}
        for view in config.views:
            stored = reader.view(view.stored)
            for name in view.augment:
                if (name == "noise") != (stored.kind == "vector"):
                    raise ConfigError(
                        f"data.views: augmentation '{name}' does not fit {stored.kind} view "
                        f"'{view.stored}'; vectors take 'noise', images 'crop', 'color', 'flip'"
                    )
            if config.standardise and stored.mean is not None and stored.std is not None:
                mean = torch.tensor(stored.mean, device=device)
                std = torch.tensor(stored.std, device=device)
                self.statistics[view.stored] = mean, torch.where(std > 0, std, 1.0)

    def __call__(self, batch: Batch, train: bool, first: int | None = None) -> list[Tensor]:
        """The model's inputs: one float32 tensor a view.

        Args:
            batch: stored views on the device.
            train: augment; evaluation sees the stored view as it is.
            first: how many of the views, from the first on; None makes all.

        Returns:
            [rows, width] for vectors, [rows, channels, height, width] in [0, 1] for images.
        """
        inputs = []
        for number, view in enumerate(self.views[:first]):
            x = self._as_float(view.stored, batch.stored[view.stored])
            for name in view.augment if train else ():
                if name == "noise":
                    x = x + self.noise_std * normals(batch.keys, 10 * number, x.shape[1])
                else:
                    augment, salt = AUGMENTATIONS[name]
                    x = augment(x, uniforms(batch.keys, 10 * number + salt, 5))
            image = x.dim() == 4  # convolutions run faster on channels-last memory
            inputs.append(x.contiguous(memory_format=torch.channels_last) if image else x)
        return inputs

    def _as_float(self, name: str, stored: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
        if stored.dtype == torch.uint8:
            return stored.permute(0, 3, 1, 2).float() / 255
        if name not in self.statistics:
            return stored
        mean, std = self.statistics[name]
        return (stored - mean) / std


def normals(keys: Int[Tensor, " batch"], salt: int, count: int) -> Float[Tensor, "batch count"]:
    """Standard normal numbers by Box and Muller."""
    u = uniforms(keys, salt, 2 * count)
    return torch.sqrt(-2 * torch.log1p(-u[:, :count])) * torch.cos(2 * math.pi * u[:, count:])


def crop(
    x: Float[Tensor, "batch channels height width"], draws: Float[Tensor, "batch draws"]
) -> Float[Tensor, "batch channels height width"]:
    """Random resized crop and horizontal flip, resampled to the size it came in.

    Args:
        x: images.
        draws: uniform numbers; columns 0 to 3 are area, two offsets and flip.
    """
    low, high = _CROP_AREA
    side = torch.sqrt(low + (high - low) * draws[:, 0])
    offset = (2 * draws[:, 1:3] - 1) * (1 - side)[:, None]
    flip = torch.where(draws[:, 3] < 0.5, 1.0, -1.0)
    theta = torch.zeros(len(x), 2, 3, device=x.device)
    theta[:, 0, 0], theta[:, 1, 1] = side * flip, side
    theta[:, :, 2] = offset
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def color(
    x: Float[Tensor, "batch 3 height width"], draws: Float[Tensor, "batch draws"]
) -> Float[Tensor, "batch 3 height width"]:
    """Colour distortion: brightness, contrast, saturation and hue, and grey one time in five.

    Args:
        x: images in [0, 1].
        draws: uniform numbers; columns 0 to 3 are the four factors, column 4 is grey.
    """
    factor = 1 + _STRENGTH * (2 * draws - 1)
    x = enhance.adjust_brightness_accumulative(x, factor[:, 0])
    x = enhance.adjust_contrast_with_mean_subtraction(x, factor[:, 1])
    x = enhance.adjust_saturation_with_gray_subtraction(x, factor[:, 2])
    x = enhance.adjust_hue(x, (2 * draws[:, 3] - 1) * (_STRENGTH / 4) * 2 * math.pi)
    grey = (draws[:, 4] < 0.2)[:, None, None, None]
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device)[:, None, None]
    return torch.where(grey, (x * weights).sum(1, keepdim=True), x)


def flip(
    x: Float[Tensor, "batch channels height width"], draws: Float[Tensor, "batch draws"]
) -> Float[Tensor, "batch channels height width"]:
    """Horizontal flip, one time in two.

    Args:
        x: images.
        draws: uniform numbers; column 0 decides.
    """
    return torch.where((draws[:, 0] < 0.5)[:, None, None, None], x.flip(3), x)


# An augmentation of images and the salt of its numbers.
AUGMENTATIONS = {"crop": (crop, 1), "color": (color, 2), "flip": (flip, 3)}
