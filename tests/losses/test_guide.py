"""The loops of docs/losses.md run as they stand, on one process and on two, to the same weights."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heron import losses
from heron.distributed import collectives
from tests import ranks

GUIDE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def run_blocks() -> list[dict[str, Tensor]]:
    """Runs the guide from top to bottom; the weights after each block."""
    names: dict[str, Any] = {}
    found, environment = [], dict(os.environ)
    for number, block in enumerate(BLOCKS):
        if number == len(BLOCKS) - 1 and collectives.world_size() > 1:
            continue  # the last loop has no wrapper: it is one process's
        os.environ |= environment  # Lightning takes WORLD_SIZE out when it ends
        exec(compile(block, "docs/losses.md", "exec"), names)
        if "network" in names:
            found.append({n: x.clone() for n, x in names["network"].state_dict().items()})
    return found


def test_the_loops_of_the_guide_train_the_same_on_two_processes() -> None:
    (one,), two = ranks.run(1, run_blocks), ranks.run(2, run_blocks)
    assert (len(BLOCKS), len(one)) == (5, 4)
    for process in two:
        for block, (expected, found) in enumerate(zip(one, process, strict=False)):
            for name, value in expected.items():
                torch.testing.assert_close(
                    found[name], value, rtol=1e-5, atol=1e-6, msg=f"block {block}, {name}"
                )


def test_every_class_is_in_the_table() -> None:
    named = set(re.findall(r"`(\w+)[(`]", GUIDE))
    assert set(losses.__all__) - {"Loss", "LossError"} <= named, set(losses.__all__) - named
