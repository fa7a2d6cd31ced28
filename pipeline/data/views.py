"""The views a model sees: stored views, standardised or augmented as a batch on the device.

Every random number is a function of (seed, epoch, row, view): a sample is augmented alike
whichever process it falls to and whatever its neighbours are.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

from heron.pipeline.config.augmentations import Augmentation, OwnAugmentation
from heron.pipeline.config.data import Data
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.augment import DRAWS, blur, color, crop, fit, flip
from heron.pipeline.data.batches import Batch
from heron.pipeline.data.graphs import drop_nodes, mask_nodes, perturb_edges, subgraph
from heron.pipeline.data.pictures import input_shape
from heron.pipeline.data.random_keys import normals, uniforms
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
        self._changes = [_salted(view.augment, place) for place, view in enumerate(config.views)]
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
            changes = self._changes[number] if train else []
            if image and all(name != "crop" for name, *_ in changes):
                x = fit(x, size)
            for name, options, salt in changes:
                if isinstance(options, OwnAugmentation):
                    x = _own(name, options, x, partial(uniforms, batch.rng_keys, salt))
                    continue
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


def _salted(augmentations: Sequence[Augmentation], view: int) -> list[tuple[str, Any, int]]:
    """Returns name, options and salt of the augmentations of a view of this number.

    Salts keep their random numbers apart: one that is there again draws others than before.
    """
    found: list[tuple[str, Any, int]] = []
    for name, options in ((one.name, one.options) for one in augmentations):
        own = isinstance(options, OwnAugmentation)
        salt = zlib.crc32(f"{view} {name}".encode()) if own else 10 * view + SALTS[name]
        again = [earlier for earlier, *_ in found].count(name)
        found.append((name, options, salt + REPEAT_SALT * again))
    return found


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
