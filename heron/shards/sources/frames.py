"""Synthetic frames of speech: a latent trajectory for each class, as sound and articulation."""

from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from heron.shards.manifest import Labels, View
from heron.shards.sources.base import Rows, SyntheticSource

WINDOW = 7  # frames stacked in a row, as in XRMB
WIDTHS = {"view1": 39, "view2": 16}  # acoustic, articulatory; of one frame: 273 and 112 in all
NOISE = (1.5, 0.9)  # of each view, so that either view alone leaves doubt
LATENT = 6  # dimensions of the trajectory that both views see
HIDDEN = 24  # of the map from a latent state to a view's frame
SPREAD = 0.65  # of speakers, in units of the trajectories' own


class Frames(SyntheticSource):
    """Synthetic frames in the shape of XRMB: views of 273 and 112, seven frames of each.

    A class is a trajectory in a latent space; a row is a section of it, at its speaker's speed and
    offset. Each view is a fixed random map of that section, with noise of its own.
    """

    name: ClassVar[str] = "frames"
    examples: ClassVar[str] = "heron shards build frames --out data/frames --train 20000"

    train: int = Field(20_000, gt=0, description="rows to train on")
    test: int = Field(5_000, ge=0, description="rows to test on")
    classes: int = Field(20, ge=2, le=40, description="classes, of 40 there are")

    @property
    def views(self) -> list[View]:
        """`view1`, acoustic, and `view2`, articulatory."""
        return [
            View(name=name, kind="vector", shape=(WINDOW * width,), dtype="float32")
            for name, width in WIDTHS.items()
        ]

    @property
    def labels(self) -> Labels:
        """Numbered classes, which stand in for phones."""
        return Labels(kind="multi_class", names=[f"phone{n:02d}" for n in range(self.classes)])

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns rows of a split, drawn block by block."""
        size = self.block_rows or 1
        first = start // size
        blocks = [self._draw_block(split, block) for block in range(first, -(-stop // size))]
        keep = slice(start - first * size, stop - first * size)
        *views, labels = (np.concatenate(arrays)[keep] for arrays in zip(*blocks, strict=True))
        return Rows(dict(zip(WIDTHS, views, strict=True)), labels)

    @cached_property
    def _shared(self) -> tuple[Any, ...]:
        """What all rows share: the trajectories, and each view's map of latent states."""
        random = np.random.default_rng([self.seed, 0])
        waves = random.normal(size=(40, 3, 2, LATENT)) / np.array([1.0, 1.5, 2.5])[:, None, None]
        inputs = [random.normal(size=(LATENT, HIDDEN)) for _ in WIDTHS]
        outputs = [random.normal(size=(HIDDEN, w)) / np.sqrt(HIDDEN) for w in WIDTHS.values()]
        return waves, inputs, outputs

    def _draw_block(self, split: str, block: int) -> tuple[NDArray[Any], ...]:
        rows = self.block_rows or 1
        waves, inputs, outputs = self._shared
        random = np.random.default_rng([self.seed, 1 + (split == "test"), block])
        labels = random.integers(0, self.classes, rows)
        middle = random.uniform(0.3, 0.7, (rows, 1))  # of the phone, where the row is centred
        speed = random.uniform(0.05, 0.1, (rows, 1))  # of a phone, per frame
        time = middle + speed * (np.arange(WINDOW) - WINDOW // 2)
        angle = np.pi * time[..., None] * np.arange(1, 4)  # [rows, frames, harmonics]
        circle = np.stack([np.sin(angle), np.cos(angle)], -1)
        latent = np.einsum("rfhs,rhsl->rfl", circle, waves[labels])
        latent += SPREAD * random.normal(size=(rows, 1, LATENT))
        views = []
        for into, out, noise in zip(inputs, outputs, NOISE, strict=True):
            frames = np.tanh(latent @ into * 0.5) @ out
            frames += noise * random.normal(size=frames.shape)
            views.append(frames.reshape(rows, -1).astype(np.float32))
        return *views, labels.astype(np.int64)
