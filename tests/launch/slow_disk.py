"""The main job on a disk that takes its time, so that a save can be met while it goes on."""

import sys
import time
from pathlib import Path

from heron.pipeline.pretrain import main
from heron.pipeline.training import checkpoint

flush = checkpoint._flush


def slow(path: Path) -> None:
    time.sleep(0.05)
    flush(path)


if __name__ == "__main__":
    checkpoint._flush = slow
    sys.exit(main())
