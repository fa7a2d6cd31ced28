"""The main job with small parts of kept features, each of which takes its time: to be killed in."""

import time
from collections.abc import Sequence
from typing import Any

from heron.api import job
from heron.data import views
from heron.training import frozen

ROWS, SLOW_S = 4, 0.05
encode = frozen.FrozenEncoders._encode


def slow(*arguments: Any) -> Any:
    time.sleep(SLOW_S)
    return encode(*arguments)


def main(words: Sequence[str]) -> int:
    views.PART_ROWS = ROWS
    frozen.FrozenEncoders._encode = slow  # type: ignore[assignment, method-assign]
    return job.main(words)
