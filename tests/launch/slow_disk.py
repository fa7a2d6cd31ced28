"""The main job on a disk that takes its time, so that a save can be met while it goes on."""

import time
from collections.abc import Sequence
from pathlib import Path

from heron.api import job as pretrain
from heron.training import checkpoint

flush = checkpoint._flush


def slow(path: Path) -> None:
    time.sleep(0.05)
    flush(path)


def main(words: Sequence[str]) -> int:
    checkpoint._flush = slow
    return pretrain.main(words)
