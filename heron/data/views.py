"""Makes the views a model sees: stored views, standardised or augmented in batches on the device.

Every random number is a function of (seed, epoch, row, view), so a sample is augmented in the same
way on any process and beside any other samples.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

from heron.config.augmentations import Augmentation, OwnAugmentation
from heron.config.data import Data
from heron.config.errors import ConfigError
from heron.data.batches import Batch
from heron.data.graphs import drop_nodes, mask_nodes, perturb_edges, subgraph
from heron.data.pictures import DRAWS, blur, color, crop, fit, flip, input_shape
from heron.data.random_keys import normals, uniforms
from heron.shards.manifest import View

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
SALTS = {"crop": 1, "color": 2, "flip": 3, "blur": 4, "noise": 0}  # random numbers differ
SALTS |= {name: 5 + place for place, name in enumerate(GRAPHS)}


@runtime_checkable  # tests check types at run time
class StoredViews(Protocol):
    """A reader of shards, or another description of stored views."""

    def view(self, name: str) -> View:
        """Returns shape and statistics of a stored view."""

    def vocabulary(self, name: str) -> int:
        """Returns the number of token ids of a stored view of texts."""


class Views:
    """Makes the model's inputs from a batch of stored views."""

    def __init__(self, data_set: StoredViews, config: Data, device: torch.device) -> None:
        """Looks up the stored views.

        Raises ConfigError if one is missing, or its kind does not fit the view's size or
        augmentations.
        """
        self.views, self.names = config.views, config.view_names
        self.device = device
        self.shapes = [
            input_shape(data_set.view(view.stored), view, data_set.vocabulary(view.stored))
            for view in config.views
        ]
        self._pictures = PICTURES
        self._augmentations = [_with_salts(view.augment, n) for n, view in enumerate(config.views)]
        self.statistics: dict[str, tuple[Tensor, Tensor]] = {}
        for view in config.views:
            stored = data_set.view(view.stored)
            if config.standardise and stored.mean is not None and stored.std is not None:
                mean = torch.tensor(stored.mean, device=device)
                std = torch.tensor(stored.std, device=device)
                self.statistics[view.stored] = mean, torch.where(std > 0, std, 1.0)

    def compile(self, backend: str) -> None:
        """Compiles the augmentations of pictures, except for the drawing of random numbers."""
        self._pictures = {
            name: torch.compile(augment, backend=backend, dynamic=False)
            for name, augment in PICTURES.items()
        }

    def __call__(self, batch: Batch, train: bool, first: int | None = None) -> list[Tensor]:
        """Returns the model's inputs: a tensor for each of the first `first` views, or of all.

        They are [rows, width] for vectors; [rows, channels, height, width] in [0, 1] for images;
        token ids, int32 [rows, tokens], for texts; rows of `data.graphs` for graphs. Without
        `train` they are not augmented, only brought to their size.
        """
        inputs = []
        names = dict.fromkeys(view.stored for view in self.views[:first])
        decoded = {name: self._to_float(name, batch.stored[name]) for name in names}
        for number, view in enumerate(self.views[:first]):
            x = decoded[view.stored]  # shared by views: nothing below writes into it
            image = x.dim() == 4
            size = self.shapes[number][:2] if image else (0, 0)
            augmentations = self._augmentations[number] if train else []
            if image and all(name != "crop" for name, *_ in augmentations):
                x = fit(x, size)
            for name, options, salt in augmentations:
                if isinstance(options, OwnAugmentation):
                    x = _apply_own(name, options, x, partial(uniforms, batch.rng_keys, salt))
                    continue
                if name == "noise":
                    x = x + options.std * normals(batch.rng_keys, salt, x.shape[1])
                    continue
                if name in GRAPHS:
                    draw = partial(uniforms, batch.rng_keys, salt)
                    x = GRAPHS[name](x, self.shapes[number][0], options.share, draw)
                    continue
                draws = uniforms(batch.rng_keys, salt, DRAWS)
                augment = self._pictures[name]
                x = augment(x, options, draws, *([size] if name == "crop" else []))
            if image:  # convolutions run faster on channels-last memory
                x = x.contiguous(memory_format=torch.channels_last)
            inputs.append(x)
        return inputs

    def _to_float(self, name: str, stored: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Returns pictures and vectors as floats, standardised if asked; others unchanged."""
        if stored.dtype == torch.uint8:
            return stored.permute(0, 3, 1, 2).float().div_(255)
        if name not in self.statistics:
            return stored
        mean, std = self.statistics[name]
        return (stored - mean) / std


def _with_salts(augmentations: Sequence[Augmentation], view: int) -> list[tuple[str, Any, int]]:
    """Returns name, options and salt of each augmentation; salts tell repetitions apart."""
    salted: list[tuple[str, Any, int]] = []
    for name, options in ((x.name, x.options) for x in augmentations):
        own = isinstance(options, OwnAugmentation)
        salt = zlib.crc32(f"{view} {name}".encode()) if own else 10 * view + SALTS[name]
        repeats = [earlier for earlier, *_ in salted].count(name)
        salted.append((name, options, salt + REPEAT_SALT * repeats))
    return salted


def _apply_own(
    name: str, options: OwnAugmentation, x: Tensor, draw: Callable[[int], Tensor]
) -> Tensor:
    """Applies a user's augmentation; ConfigError if it alters its input, the shape or the dtype."""
    version = x._version
    y: object = options(x, draw)
    if x._version != version:
        raise ConfigError(
            f"data.views: augmentation {name} modifies its input, which other views use too; "
            "return a new tensor"
        )
    got = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        raise ConfigError(
            f"data.views: augmentation {name} must return {x.dtype} {tuple(x.shape)}, as it was "
            f"given, got {got}"
        )
    return y
