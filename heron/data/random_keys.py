"""Counter-based random numbers: functions of (seed, epoch, row), whatever the order of the calls.

The numbers of a generator depend on the order of its calls, so augmentation and dropout of a sample
would differ with the number of processes, and a resumed run would need the state of every
generator. A hash of (seed, epoch, row, column) avoids both.
"""

from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

# The finaliser of splitmix64 (Steele, Lea and Flood 2014), its constants as signed 64-bit numbers.
_GOLDEN = -7046029254386353131
_MIX = (-4658895280553007687, -7723592293110705685)


Integers = TypeVar("Integers", Tensor, NDArray[np.int64])  # int64


def rng_keys(seed: int, epoch: Integers, rows: Integers) -> Integers:
    """Returns a key for each row's random numbers, [rows]; `epoch` is of each row, or of all."""
    return _mix(rows + _mix(epoch + _mixed_seed(seed)))


@lru_cache
def _mixed_seed(seed: int) -> int:
    return int(_mix(np.array([seed]))[0])


def uniforms(
    rng_keys: Int[Tensor, " batch"], salt: int, count: int
) -> Float[Tensor, "batch count"]:
    """Returns `count` uniform numbers in [0, 1) per key; use another `salt` for each purpose."""
    column = torch.arange(count, device=rng_keys.device) * _GOLDEN
    mixed = _mix(_mix(rng_keys + salt)[:, None] + column)
    return ((mixed >> 40) & 0xFFFFFF).float() / (1 << 24)


_SCHEMA = "(Tensor rng_keys, int salt, int count) -> Tensor"


@torch.library.custom_op("heron::uniforms", mutates_args=(), schema=_SCHEMA)
def opaque_uniforms(rng_keys: Tensor, salt: int, count: int) -> Tensor:
    """Returns `uniforms`, as one custom operator that compilers leave unchanged.

    Inductor's CPU code (torch 2.13) gives other numbers where the width is no multiple of its
    vectors' width, since 64-bit integers are multiplied.
    """
    return uniforms(rng_keys, salt, count)


@opaque_uniforms.register_fake
def _(rng_keys: Tensor, salt: int, count: int) -> Tensor:
    return rng_keys.new_empty(len(rng_keys), count, dtype=torch.float32)


def normals(rng_keys: Int[Tensor, " batch"], salt: int, count: int) -> Float[Tensor, "batch count"]:
    """Returns standard normal numbers (Box and Muller 1958); see `uniforms`.

    They are computed in float64 and rounded, since the last digit of logarithm and cosine in
    float32, and hence the batches, would differ between kinds of processors.
    """
    radius, angle = uniforms(rng_keys, salt, 2 * count).double().chunk(2, 1)
    return ((-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * torch.pi * angle)).float()


def _mix(x: Integers) -> Integers:
    """Applies one round of splitmix64; int64 wraps around, and masks make the shifts logical."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))
