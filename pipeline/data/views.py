"""The views a model sees: stored views, standardised or augmented as a batch on the device.

Every random number is a function of (seed, epoch, row, view): a sample is augmented alike
whichever process it falls to and whatever its neighbours are. An augmentation of pictures takes a
batch, its options and uniform numbers [batch, DRAWS] of the samples' own.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from heron.pipeline.config.augmentations import Blur, Color, Crop, Flip, OwnAugmentation
from heron.pipeline.config.data import Data
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.batches import Batch
from heron.pipeline.data.graphs import drop_nodes, mask_nodes, perturb_edges, subgraph
from heron.pipeline.data.pictures import input_shape
from heron.pipeline.data.random_keys import normals, uniforms
from heron.shards.manifest import View

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
    rows, columns = round(size[0] * scale), round(size[1] * scale)
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


REPEAT_SALT = 1_000_003
GRAPHS = {
    "drop_nodes": drop_nodes,
    "perturb_edges": perturb_edges,
    "mask_nodes": mask_nodes,
    "subgraph": subgraph,
}
PICTURES: dict[str, Callable[..., Tensor]] = {
    "crop": crop,
    "color": color,
    "flip": flip,
    "blur": blur,
}
SALTS = {"crop": 1, "color": 2, "flip": 3, "blur": 4, "noise": 0}  # keep their numbers apart
SALTS |= {name: 5 + place for place, name in enumerate(GRAPHS)}


@runtime_checkable  # tests check types while they run
class StoredViews(Protocol):
    """A reader of shards, or what else knows what is stored."""

    def view(self, name: str) -> View:
        """Returns shape and statistics of a stored view."""
        ...

    def vocabulary(self, name: str) -> int:
        """Returns how many token ids the texts of a stored view have."""
        ...


class Views:
    """Makes the model's inputs of a batch of stored views."""

    def __init__(self, known: StoredViews, config: Data, device: torch.device) -> None:
        """Looks up what is stored.

        Raises:
            ConfigError: a stored view is not in the data set, or a size or an augmentation of
                images is asked of vectors, or the other way round.
        """
        self.views, self.names = config.views, config.view_names
        self.device = device
        self.shapes = [
            input_shape(known.view(view.stored), view, known.vocabulary(view.stored))
            for view in config.views
        ]
        self._pictures = PICTURES
        self.statistics: dict[str, tuple[Tensor, Tensor]] = {}
        for view in config.views:
            stored = known.view(view.stored)
            if config.standardise and stored.mean is not None and stored.std is not None:
                mean = torch.tensor(stored.mean, device=device)
                std = torch.tensor(stored.std, device=device)
                self.statistics[view.stored] = mean, torch.where(std > 0, std, 1.0)

    def compile(self, backend: str) -> None:
        """Compiles the augmentations of pictures; their random numbers are drawn as ever."""
        self._pictures = {
            name: torch.compile(change, backend=backend, dynamic=False)
            for name, change in PICTURES.items()
        }

    def __call__(self, batch: Batch, train: bool, first: int | None = None) -> list[Tensor]:
        """Returns the model's inputs: a tensor for each of the `first` views; None: of all.

        Without `train` no view is augmented: it is the stored view, brought to its size.

        Returns:
            [rows, width] for vectors, [rows, channels, height, width] in [0, 1] for images; token
            ids, int32 [rows, tokens], for texts; graphs as `data.graphs` has them.
        """
        inputs = []
        names = dict.fromkeys(view.stored for view in self.views[:first])
        decoded = {name: self._decoded(name, batch.stored[name]) for name in names}
        for number, view in enumerate(self.views[:first]):
            x = decoded[view.stored]  # nothing below writes into it
            image = x.dim() == 4
            size = self.shapes[number][:2] if image else (0, 0)
            augmentations = view.augment if train else []
            if image and all(augmentation.crop is None for augmentation in augmentations):
                x = fit(x, size)
            for place, augmentation in enumerate(augmentations):
                name, options = augmentation.name, cast(Any, augmentation.options)
                # One that is there again draws other numbers than before.
                again = REPEAT_SALT * [one.name for one in augmentations[:place]].count(name)
                if isinstance(options, OwnAugmentation):
                    salt = zlib.crc32(f"{number} {name}".encode()) + again
                    x = _own(name, options, x, partial(uniforms, batch.rng_keys, salt))
                    continue
                salt = 10 * number + SALTS[name] + again
                if name == "noise":
                    x = x + options.std * normals(batch.rng_keys, salt, x.shape[1])
                    continue
                if name in GRAPHS:
                    draw = partial(uniforms, batch.rng_keys, salt)
                    x = GRAPHS[name](x, self.shapes[number][0], options.share, draw)
                    continue
                draws = uniforms(batch.rng_keys, salt, DRAWS)
                change = self._pictures[name]
                x = change(x, options, draws, *([size] if name == "crop" else []))
            if image:  # convolutions run faster on channels-last memory
                x = x.contiguous(memory_format=torch.channels_last)
            inputs.append(x)
        return inputs

    def _decoded(self, name: str, stored: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Returns a stored view as floats; token ids and graphs stay whole numbers."""
        if stored.dtype == torch.uint8:
            return stored.permute(0, 3, 1, 2).float().div_(255)
        if name not in self.statistics:
            return stored
        mean, std = self.statistics[name]
        return (stored - mean) / std


def _own(name: str, options: OwnAugmentation, x: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
    """Returns what a user's augmentation makes of a batch.

    Raises:
        ConfigError: it is of another shape or type.
    """
    before = x._version
    y: object = options(x, draw)
    if x._version != before:
        raise ConfigError(
            f"data.views: augmentation {name} writes into what it is given, which other views see "
            "too; expected a new tensor"
        )
    got = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        raise ConfigError(
            f"data.views: augmentation {name} gave {got}; expected {x.dtype} {tuple(x.shape)}, "
            "as it was given"
        )
    return y
