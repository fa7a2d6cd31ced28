"""Modules called on the rows of one stream at a time."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.distributed.sync_batchnorm import side_by_side


def node_features(encoder: nn.Module) -> Callable[..., Tensor]:
    """Returns what gives the features of the nodes of graphs, of an encoder that has such."""
    nodes: Callable[..., Tensor] | None = getattr(encoder, "nodes", None)
    if nodes is None:
        raise ConfigError(
            f"a term compares nodes of graphs, and {type(encoder).__name__} has no method "
            "nodes(x, rng_keys) that gives [rows, nodes, width]; expected model.encoder.kind: gin"
        )
    return nodes


def by_stream(
    modules: Sequence[Callable[..., Tensor]],
    sizes: Sequence[int],
    inputs: Sequence[Sequence[Tensor]],
    present: Tensor | None = None,
) -> list[Tensor]:
    """Calls a module a view on the rows of one stream at a time, and puts each view's together.

    Labelled and unlabelled rows are drawn differently, so batch norm sees each alone, as in
    HeroCon's code (on Scene, statistics of both together cost more than ten points of F1).

    Args:
        modules: one a view; they may be the same.
        sizes: how many rows each stream has, in order.
        inputs: of each view what its module takes, tensors [rows, ...].
        present: which views each row has, [rows, views]; a module sees those rows alone, and of the
            others the result is zeros. None: all of them.
    """
    calls, places = [], []
    for view, (module, given) in enumerate(zip(modules, inputs, strict=True)):
        counts, at = list(sizes), None
        if present is not None:
            at = present[:, view].nonzero()[:, 0]
            counts = [int(part.sum()) for part in torch.split(present[:, view], counts)]
            given = [x[at] for x in given]
        calls += [
            partial(module, *rows)
            for rows in zip(*(torch.split(x, counts) for x in given), strict=True)
        ]
        places.append(at)
    # A graph that torch has compiled cannot stop at a norm for the others.
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
    found = [call() for call in calls] if compiled else side_by_side(calls)
    joined = [torch.cat(found[i : i + len(sizes)]) for i in range(0, len(found), len(sizes))]
    return [
        x if at is None else x.new_zeros(len(inputs[0][0]), *x.shape[1:]).index_copy(0, at, x)
        for x, at in zip(joined, places, strict=True)
    ]
