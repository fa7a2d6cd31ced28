"""A drawn data set whose rows have a picture, a caption and readings of sensors."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from heron.experiment.config import Config, parse_config
from heron.shards.manifest import Labels, View
from heron.sources import Rows
from heron.sources.base import SyntheticSource
from tests.experiments import merge

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 60, 230)}
SIZES = "small", "large"


class Mixed(SyntheticSource):
    """Squares of a colour and a size, what they are called, and five readings."""

    name: ClassVar[str] = "mixed"
    block_rows: ClassVar[int | None] = None
    train: int = 60
    test: int = 24
    missing: bool = False  # of three rows, each lacks another view

    @property
    def views(self) -> list[View]:
        may: dict[str, Any] = {"missing": "allow"} if self.missing else {}
        return [
            View(name="image", kind="image", shape=(16, 16, 3), dtype="uint8", **may),
            View(name="caption", kind="text", shape=(-1,), dtype="uint8", **may),
            View(name="sensors", kind="vector", shape=(5,), dtype="float32", **may),
        ]

    @property
    def labels(self) -> Labels:
        return Labels(kind="multi_class", names=list(COLOURS))

    def read(self, split: str, start: int, stop: int) -> Rows:
        rows = [_row(split, number) for number in range(start, stop)]
        pictures: list[Any]
        pictures, captions, sensors, labels = map(list, zip(*rows, strict=True))
        if self.missing:
            numbers = range(start, stop)
            pictures = [None if n % 6 == 1 else x for n, x in zip(numbers, pictures, strict=True)]
            captions = [None if n % 6 == 3 else x for n, x in zip(numbers, captions, strict=True)]
            nothing = np.full(5, np.nan, np.float32)
            sensors = [nothing if n % 6 == 5 else x for n, x in zip(numbers, sensors, strict=True)]
        return Rows(
            {"image": list(pictures), "caption": list(captions), "sensors": np.stack(sensors)},
            np.array(labels),
            [f"{split}{number:04d}" for number in range(start, stop)],
        )


def _row(split: str, number: int) -> tuple[bytes, bytes, Any, int]:
    draw = np.random.default_rng([len(split), number])
    label, size = int(draw.integers(3)), int(draw.integers(2))
    name, colour = list(COLOURS.items())[label]
    pixels = np.full((16, 16, 3), 128) + draw.integers(-20, 20, (16, 16, 3))
    side = 4 + 8 * size
    pixels[2 : 2 + side, 2 : 2 + side] = colour
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out := BytesIO(), "JPEG", quality=95)
    words = f"a {SIZES[size]} {name} square" if draw.random() < 0.5 else f"{name} and {SIZES[size]}"
    readings = (np.array([label, size, 1, 0, -1]) + draw.normal(size=5)).astype(np.float32)
    return out.getvalue(), words.encode(), readings, label


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
BERT = {"model_type": "bert", "intermediate_size": 32, "max_position_embeddings": 24, **SMALL}
VIT = {"model_type": "vit", "intermediate_size": 32, "patch_size": 4, **SMALL}
EXPERIMENT: dict[str, Any] = {
    "data": {
        "build": {"source": "tests.mixed.Mixed"},
        "protocol": {"test": "test"},
        "batch": {"labelled": 15},
        "epoch": "labelled",
        "views": [
            {"stored": "image", "augment": ["flip"]},
            {"stored": "caption", "tokens": 24},
            {"stored": "sensors", "augment": ["noise"]},
        ],
        "standardise": True,
    },
    "model": {
        "encoder": {"kind": "mlp", "widths": [12], "dropout": 0.2},
        "encoders": {
            "image": {"kind": "transformers", "config": VIT},
            "caption": {"kind": "transformers", "config": BERT},
        },
        "projection_width": 8,
    },
    "objective": {"clip": {}},
    "optim": {"kind": "adamw", "lr": 0.005},
    "train": {"steps": 4, "epochs": 9, "cpu_threads": 1},
    "evaluate": {"cross_view": True, "map_rows": 10},
}


def mixed(folder: Path, name: str = "run", **changes: Any) -> Config:
    """A short run on all three views."""
    places = {"run": {"dir": str(folder / name)}, "data": {"path": str(folder / "mixed")}}
    return parse_config(merge(merge(EXPERIMENT, places), changes))


def captions(rows: Sequence[int]) -> list[str]:
    """What the rows of the test split are called."""
    return [_row("test", row)[1].decode() for row in rows]


def picture(row: int) -> bytes:
    """The picture of a row of the test split."""
    return _row("test", row)[0]
