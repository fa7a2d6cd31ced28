"""A step over more rows than memory holds at once, with the gradient of the whole (GradCache).

Gao, Zhang, Han and Callan 2021 (arXiv:2101.06983): all rows are embedded without a graph, the loss
is taken of all of them and brought back to the embeddings, and then each micro-batch is embedded
again and given its rows' gradient.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.batches import Batch
from heron.pipeline.distributed.exchange import Split
from heron.pipeline.distributed.strategy import Strategy
from heron.pipeline.models.heterogeneous import Features


@dataclass(frozen=True)
class Piece:
    """A micro-batch of a process's rows.

    Attributes:
        rows: which, [rows of the piece].
        parts: how many of each stream, in order.
    """

    rows: Tensor
    parts: list[int]


def count(micro_batch: int | None, split: Split, norm: bool) -> int:
    """How many micro-batches a step has, on every process.

    Args:
        micro_batch: most rows of a process that are embedded with a graph at a time, about.
        split: the rows of every process.
        norm: whether the model has batch norm, which needs two rows of a stream.

    Raises:
        ConfigError: a stream has too few rows for so many micro-batches.
    """
    if micro_batch is None:
        return 1
    number = -(-max(split.rows) // micro_batch)
    for name, rows in (("labelled", sum(split.labelled)), ("unlabelled", sum(split.unlabelled))):
        if norm and number > 1 and 0 < rows < 2 * number:
            raise ConfigError(
                f"train.micro_batch is {micro_batch}, which cuts a step into {number}, and batch "
                f"norm would see fewer than 2 of the {rows} {name} rows at a time; expected at "
                f"least {-(-max(split.rows) // max(1, rows // 2))}"
            )
    return number


def cut(parts: Sequence[int], firsts: Sequence[int], number: int) -> list[Piece]:
    """A process's rows in so many micro-batches, the same ones however many processes there are.

    Row r of a stream's global batch is in micro-batch r mod `number`, so batch norm, which takes a
    micro-batch over all processes, sees the same rows on any number of them.

    Args:
        parts: rows of each stream on this process.
        firsts: where its part of each stream's global batch begins.
        number: of micro-batches.
    """
    pieces: list[list[Tensor]] = [[] for _ in range(number)]
    starts = itertools.accumulate(parts, initial=0)
    for start, size, first in zip(starts, parts, firsts, strict=False):
        place = torch.arange(size)
        for j, piece in enumerate(pieces):
            piece.append(start + place[(place + first) % number == j])
    return [Piece(torch.cat(piece), [len(rows) for rows in piece]) for piece in pieces]


def embed(
    strategy: Strategy, inputs: Sequence[Tensor], batch: Batch, pieces: Sequence[Piece]
) -> tuple[Features, Callable[[Tensor], None]]:
    """The features of a process's rows, and what brings a loss of them back to the parameters.

    Args:
        strategy: has the model.
        inputs: a tensor a view, [rows, ...].
        batch: the rows.
        pieces: the micro-batches; one is the whole.

    Returns:
        The features, and a function of this process's share of the loss, which every process must
        call once.
    """
    labels = batch.targets.new_zeros(len(batch.keys), batch.targets.shape[1])
    labels[: batch.labelled] = batch.targets  # a label autoencoder sees no other rows' either
    if len(pieces) == 1:
        with strategy.accumulate(last=True):
            return strategy(inputs, batch.keys, batch.parts, labels), strategy.backward

    def part(piece: Piece) -> Features:
        rows = piece.rows.to(batch.keys.device)
        return strategy([x[rows] for x in inputs], batch.keys[rows], piece.parts, labels[rows])

    with torch.no_grad(), _unchanged_statistics(strategy.model):
        found = [part(piece) for piece in pieces]
    order = torch.cat([piece.rows for piece in pieces]).argsort().to(batch.keys.device)
    whole = [
        torch.cat(parts)[order].requires_grad_() for parts in zip(*map(_flat, found), strict=True)
    ]

    def backward(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for piece in pieces:
            rows = piece.rows.to(batch.keys.device)
            with strategy.accumulate(last=piece is pieces[-1]):
                pairs = zip(_flat(part(piece)), whole, strict=True)
                sums = [
                    (own * all_.grad[rows]).sum() for own, all_ in pairs if all_.grad is not None
                ]
                strategy.backward(torch.stack(sums).sum())

    rest = iter(whole)
    return found[0].each(lambda _: next(rest)), backward


def _flat(features: Features) -> list[Tensor]:
    parts = ([part] if isinstance(part, Tensor) else part for part in features if part is not None)
    return [tensor for part in parts for tensor in part]


@contextmanager
def _unchanged_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norm normalises by its rows as in training, and its running statistics rest."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    kept = [norm.track_running_stats for norm in norms]
    try:
        for norm in norms:
            norm.track_running_stats = False
        yield
    finally:
        for norm, track in zip(norms, kept, strict=True):
            norm.track_running_stats = track
