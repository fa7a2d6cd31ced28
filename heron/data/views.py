"""Makes the views a model sees: stored views, standardised or augmented in batches on the device.

Every random number is a function of (seed, epoch, row, view), so a sample is augmented in the same
way on any process and beside any other samples.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Shaped
from numpy.typing import NDArray
from torch import Tensor

from heron.base.errors import ConfigError
from heron.data.augmentations import Augmentation, OwnAugmentation
from heron.data.batches import Batch
from heron.data.graphs import drop_nodes, mask_nodes, perturb_edges, subgraph
from heron.data.options import Data
from heron.data.pictures import DRAWS, blur, color, crop, fit, flip, input_shape
from heron.data.random_keys import normals, uniforms
from heron.data.rows import Rows, positions_by_number
from heron.shards.manifest import View

REPEAT_SALT = 1_000_003
CHOICE_SALT = 900_001  # of the draw among kept features
PART_ROWS, MOST_PARTS = 256, 1024
MOST_MAPPED = 128  # files of features that a process keeps open, of one table
HEAD_BYTES = 128  # of an npy file
GRAPHS = {f.__name__: f for f in (drop_nodes, perturb_edges, mask_nodes, subgraph)}
PICTURES: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (crop, color, flip, blur)}
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
        """Looks up the views; ConfigError if one is missing, or unfit for size or augmentations."""
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
        token ids, int32 [rows, tokens], for texts; rows of `data.graphs` for graphs; features, if
        the batch has them: see `Embedded`. Without `train` they are not augmented, only brought
        to their size.
        """
        inputs = []
        views = [*enumerate(self.views[:first])]
        made = {n: batch.stored[name] for n, _ in views if (name := features_of(n)) in batch.stored}
        names = dict.fromkeys(view.stored for number, view in views if number not in made)
        decoded = {name: self._to_float(name, batch.stored[name]) for name in names}
        for number, view in views:
            if number in made:
                inputs.append(made[number])
                continue
            x = decoded[view.stored]  # shared by views: nothing below writes into it
            image = x.dim() == 4
            size = self.shapes[number][:2] if image else (0, 0)
            augmentations = self._augmentations[number] if train else []
            if image and all(name != "crop" for name, *_ in augmentations):
                x = fit(x, size)
            for name, options, salt in augmentations:
                draw = partial(uniforms, batch.rng_keys, salt)
                if isinstance(options, OwnAugmentation):
                    x = _apply_own(name, options, x, draw)
                elif name == "noise":
                    x = x + options.std * normals(batch.rng_keys, salt, x.shape[1])
                elif name in GRAPHS:
                    x = GRAPHS[name](x, self.shapes[number][0], options.share, draw)
                else:
                    sizes = [size] if name == "crop" else []
                    x = self._pictures[name](x, options, draw(DRAWS), *sizes)
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


def features_of(view: int) -> str:
    """Returns the name, among the arrays of a batch, of a view's features."""
    return f"features of {view}"


@dataclass(frozen=True)
class Embedded:
    """What a frozen encoder makes of some rows, on disk: some variants of each row.

    Part p of the rows has a file for each variant: [rows of the part, width].

    Attributes:
        folder: of the files.
        rows: numbers of the rows, ascending.
        variants: how many differently augmented features a row has.
        width: of the features.
        dtype: of the features.
        place: views of the model at other places draw other variants, as far as there are some.
    """

    folder: Path
    rows: Rows
    variants: int
    width: int
    dtype: str = "float32"
    place: int = 0
    _mapped: dict[Path, NDArray[Any]] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle: the other process maps the files itself."""
        return vars(self) | {"_mapped": {}}

    @property
    def part_rows(self) -> int:
        """Rows of a part; there are at most `MOST_PARTS` parts."""
        return PART_ROWS * max(1, -(-len(self.rows) // (PART_ROWS * MOST_PARTS)))

    @property
    def parts(self) -> list[Rows]:
        """The rows of each part."""
        size = self.part_rows
        return [self.rows[start : start + size] for start in range(0, len(self.rows), size)]

    @property
    def bytes(self) -> int:
        """Size of the features."""
        return len(self.rows) * self.variants * self.width * np.dtype(self.dtype).itemsize

    def file(self, part: int, variant: int) -> Path:
        """Returns the path of the features of a part."""
        return self.folder / f"{part:06d}-{variant}.npy"

    def missing(self, part: int) -> list[int]:
        """Returns the variants of a part that are not there; files appear whole or not at all."""
        size = HEAD_BYTES + len(self.parts[part]) * self.width * np.dtype(self.dtype).itemsize
        files = [self.file(part, variant) for variant in range(self.variants)]
        return [n for n, x in enumerate(files) if not x.exists() or x.stat().st_size != size]

    def read(self, rows: Rows, keys: NDArray[np.int64] | None = None) -> NDArray[Any]:
        """Returns features of rows, [rows, width]: of variants drawn by keys, or of the first."""
        at, variants = np.searchsorted(self.rows, rows), np.zeros(len(rows), np.int64)
        if keys is not None:
            draws = uniforms(torch.from_numpy(keys), CHOICE_SALT, self.variants)
            variants = draws.argsort(1)[:, self.place % self.variants].numpy()
        out = np.empty((len(rows), self.width), self.dtype)
        parts, at = np.divmod(at, self.part_rows)
        for number, positions in positions_by_number(parts * self.variants + variants):
            path = self.file(*divmod(number, self.variants))
            if path not in self._mapped:
                if len(self._mapped) >= MOST_MAPPED:  # each holds a descriptor: 1,024 are usual
                    self._mapped.pop(next(iter(self._mapped)))
                self._mapped[path] = np.load(path, mmap_mode="r", allow_pickle=False)
            out[positions] = self._mapped[path][at[positions]]
        return out


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
