"""Activation checkpointing: blocks save only their input, and recompute the rest in backward.

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
    """Makes backward recompute the blocks of an encoder, in place; returns their number.

    The blocks are the members of the longest list of composite modules, and of all lists of the
    same type: the layers of a transformer, those of each stage of a ResNet. An encoder without such
    a list is one block. The names of parameters stay the same.
    """
    lists = [
        module
        for module in encoder.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(_composites(module)) > 1
    ]
    blocks: list[nn.Module] = [encoder]
    if lists:
        kind = type(_composites(max(lists, key=lambda modules: len(_composites(modules))))[0])
        blocks = [child for modules in lists for child in modules if type(child) is kind]
    for block in blocks:
        _recompute(block)
    return len(blocks)


def again(call: Callable[..., Any], modules: Sequence[nn.Module], *args: Any) -> Any:
    """Calls a function that runs `modules`, now and in backward; it may draw no random numbers."""
    if not torch.is_grad_enabled():
        return call(*args)
    return checkpoint(
        call,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), unchanged_statistics(modules)),
    )


def _composites(modules: Any) -> list[nn.Module]:
    """Returns the members that have submodules with parameters, and are not lists."""
    return [
        child
        for child in modules
        if not isinstance(child, nn.ModuleList | nn.Sequential)
        and any("." in name for name, _ in child.named_parameters())
    ]


def _recompute(block: nn.Module) -> None:
    """Changes a block's class to one that recomputes; a wrapper would rename its parameters."""
    kind = type(block)

    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        return again(lambda *inputs: kind.forward(self, *inputs, **options), [self], *args)

    block.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})


@contextmanager
def unchanged_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """While it lasts, batch norm updates copies of its running statistics, not themselves."""
    norms = [m for module in modules for m in module.modules() if isinstance(m, _BatchNorm)]
    saved = [dict(norm._buffers) for norm in norms]
    try:
        for norm in norms:
            for name, buffer in norm._buffers.items():
                norm._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for norm, buffers in zip(norms, saved, strict=True):
            norm._buffers.update(buffers)
