"""Losses with the faults that `heron check` is to find."""

import time
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from heron.losses import NtXent
from heron.losses import functional as f


def gathered(x: Tensor, with_gradient: bool) -> Tensor:
    """The rows of all processes, the own ones with their gradient if asked."""
    if not dist.is_initialized():
        return x
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(x)]))
    parts = [x.new_empty(int(size), x.shape[1]) for size in sizes]
    padded = [x.new_empty(max(map(len, parts)), x.shape[1]) for _ in parts]
    own = torch.cat([x.detach(), x.new_zeros(len(padded[0]) - len(x), x.shape[1])])
    dist.all_gather(padded, own)
    rows = [part[: int(size)] for part, size in zip(padded, sizes, strict=True)]
    if with_gradient:
        rows[dist.get_rank()] = x
    return torch.cat(rows)


class Detached(nn.Module):
    """Gathers the rows of all processes without a gradient."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        return f.nt_xent([gathered(z1, False) + 0 * z1.sum(), gathered(z2, False)])


class Halved(nn.Module):
    """Gathers with the gradient of its own rows, which the mean over processes then divides."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        return f.nt_xent([gathered(z1, True), gathered(z2, True)])


class Own(nn.Module):
    """Compares the rows of its own process."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        return f.nt_xent([z1, z2])


def unguarded(z1: Tensor, z2: Tensor) -> Tensor:
    """A cosine that divides by the norm of a row, also by 0, and a constant second derivative."""
    value: Tensor = 1 - ((z1 / z1.norm(dim=1, keepdim=True)) * z2).sum(1).mean()
    return value


class Drawn(nn.Module):
    """A loss with noise of its own."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        value: Tensor = (z1 - z2 + float(np.random.default_rng().normal())).square().mean()
        return value


@cache
def import_slowly() -> None:
    time.sleep(4)


def slow() -> nn.Module:
    """A right loss whose library takes long to be imported, on several processes."""
    if dist.is_initialized():
        import_slowly()
    return NtXent()
