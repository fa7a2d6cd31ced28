"""Exponentials with nothing between them, to learn how many a GPU makes in a second.

Imported on a GPU only: Triton is not installed everywhere.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

STEPS, BLOCK = 1024, 1024


@triton.jit
@no_type_check
def chain_kernel(pointer, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """x = 2^-x, over and over; memory is touched twice."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(pointer + offsets)
    for _ in range(STEPS):
        x = tl.exp2(-x)
    tl.store(pointer + offsets, x)


def exponentials(x: Tensor) -> int:
    """Run the chain on x, a multiple of BLOCK numbers; how many exponentials that made."""
    kernel: Any = chain_kernel
    with torch.no_grad():
        kernel[(x.numel() // BLOCK,)](x, STEPS=STEPS, BLOCK=BLOCK)
    return x.numel() * STEPS
