"""Activation checkpointing: blocks that keep their input alone, and compute the rest in backward.

Chen, Xu, Zhang and Guestrin 2016, "Training deep nets with sublinear memory cost".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recompute_blocks(encoder: nn.Module) -> int:
    """Has the blocks of an encoder computed again in backward, in place; returns how many.

    They are the members of the longest list of modules that have parts of their own, and of all
    lists like it: the layers of a transformer, those of each stage of a ResNet. An encoder without
    such a list is one block. Names of parameters stay as they are.
    """
    lists = [
        one
        for one in encoder.modules()
        if isinstance(one, nn.ModuleList | nn.Sequential) and len(_composed(one)) > 1
    ]
    blocks: list[nn.Module] = [encoder]
    if lists:
        kind = type(_composed(max(lists, key=lambda one: len(_composed(one))))[0])
        blocks = [child for one in lists for child in one if type(child) is kind]
    for block in blocks:
        _recompute(block)
    return len(blocks)


def again(call: Callable[..., Any], modules: Sequence[nn.Module], *args: Any) -> Any:
    """Calls what runs some modules, so that backward does it once more with the same numbers.

    Nothing may be drawn from a generator in it.
    """
    if not torch.is_grad_enabled():
        return call(*args)
    return checkpoint(
        call,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), _statistics_rest(modules)),
    )


def _composed(modules: Any) -> list[nn.Module]:
    """Returns the members that have parts with parameters, and are no lists."""
    return [
        child
        for child in modules
        if not isinstance(child, nn.ModuleList | nn.Sequential)
        and any("." in name for name, _ in child.named_parameters())
    ]


def _recompute(block: nn.Module) -> None:
    """Gives a block a class whose forward is computed again in backward.

    A class, not a wrapper: a copy of the module is one of itself, and its parts keep their names.
    """
    kind = type(block)

    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        return again(lambda *given: kind.forward(self, *given, **options), [self], *args)

    block.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})


@contextmanager
def _statistics_rest(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Batch norm moves copies of its running statistics: the first forward has moved them."""
    norms = [one for module in modules for one in module.modules() if isinstance(one, _BatchNorm)]
    kept = [dict(norm._buffers) for norm in norms]
    try:
        for norm in norms:
            for name, buffer in norm._buffers.items():
                norm._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)
