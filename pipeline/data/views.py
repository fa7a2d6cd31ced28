"""The views a model sees: stored views, standardised or augmented as a batch on the device.

Every random number is a function of (seed, epoch, row, view): a sample is augmented alike
whichever process it falls to and whatever its neighbours are.
"""

import math

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from heron.pipeline.config.augmentations import Blur, Color, Crop, Flip, Noise
from heron.pipeline.config.experiment import Data
from heron.pipeline.data.augment import DRAWS, blur, color, crop, fit, flip
from heron.pipeline.data.batches import Batch
from heron.pipeline.data.pictures import input_shape
from heron.pipeline.data.random_keys import uniforms
from heron.pipeline.data.reader import Reader

SALTS = {"crop": 1, "color": 2, "flip": 3, "blur": 4, "noise": 0}  # keep their numbers apart


class Views:
    """Makes the model's inputs of a batch of stored views."""

    def __init__(self, reader: Reader, config: Data, device: torch.device) -> None:
        """Look up what is stored.

        Raises:
            ConfigError: a stored view is not in the data set, or a size or an augmentation of
                images is asked of vectors, or the other way round.
        """
        self.views = config.views
        self.device = device
        self.shapes = [input_shape(reader.view(view.stored), view) for view in config.views]
        self.statistics: dict[str, tuple[Tensor, Tensor]] = {}
        for view in config.views:
            stored = reader.view(view.stored)
            if config.standardise and stored.mean is not None and stored.std is not None:
                mean = torch.tensor(stored.mean, device=device)
                std = torch.tensor(stored.std, device=device)
                self.statistics[view.stored] = mean, torch.where(std > 0, std, 1.0)

    def __call__(self, batch: Batch, train: bool, first: int | None = None) -> list[Tensor]:
        """The model's inputs: one float32 tensor a view.

        Args:
            batch: stored views on the device.
            train: augment; evaluation sees the stored view, brought to its size.
            first: how many of the views, from the first on; None makes all.

        Returns:
            [rows, width] for vectors, [rows, channels, height, width] in [0, 1] for images.
        """
        inputs = []
        names = dict.fromkeys(view.stored for view in self.views[:first])
        floats = {name: self._as_float(name, batch.stored[name]) for name in names}
        for number, view in enumerate(self.views[:first]):
            x = floats[view.stored]  # nothing below writes into it
            image = x.dim() == 4
            size = self.shapes[number][:2] if image else (0, 0)
            chosen = view.augment if train else []
            if image and all(augmentation.crop is None for augmentation in chosen):
                x = fit(x, size)
            for augmentation in chosen:
                salt = 10 * number + SALTS[augmentation.name]
                options = augmentation.options
                if isinstance(options, Noise):
                    x = x + options.std * normals(batch.keys, salt, x.shape[1])
                    continue
                draws = uniforms(batch.keys, salt, DRAWS)
                match options:
                    case Crop():
                        x = crop(x, options, draws, size)
                    case Color():
                        x = color(x, options, draws)
                    case Flip():
                        x = flip(x, options, draws)
                    case Blur():
                        x = blur(x, options, draws)
            if image:  # convolutions run faster on channels-last memory
                x = x.contiguous(memory_format=torch.channels_last)
            inputs.append(x)
        return inputs

    def _as_float(self, name: str, stored: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
        if stored.dtype == torch.uint8:
            return stored.permute(0, 3, 1, 2).float().div_(255)
        if name not in self.statistics:
            return stored
        mean, std = self.statistics[name]
        return (stored - mean) / std


def normals(keys: Int[Tensor, " batch"], salt: int, count: int) -> Float[Tensor, "batch count"]:
    """Standard normal numbers by Box and Muller."""
    u = uniforms(keys, salt, 2 * count)
    return torch.sqrt(-2 * torch.log1p(-u[:, :count])) * torch.cos(2 * math.pi * u[:, count:])
