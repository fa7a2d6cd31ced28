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

from heron.pipeline.config.errors import ConfigError, TrainingError
from heron.pipeline.data.batches import Batch
from heron.pipeline.distributed.collectives import sum_over_processes
from heron.pipeline.distributed.exchange import ShardSizes
from heron.pipeline.distributed.strategy import Strategy
from heron.pipeline.models.heterogeneous import Features


@dataclass(frozen=True)
class MicroBatch:
    """Some of a process's rows of a step.

    Attributes:
        indices: which, in order.
        sizes: how many of each stream, in order.
    """

    indices: Tensor
    sizes: list[int]


def count(micro_batch: int | None, sizes: ShardSizes, norm: bool) -> int:
    """How many micro-batches a step has, on every process.

    Args:
        micro_batch: most rows of a process that are embedded with a graph at a time, about.
        sizes: the rows of every process.
        norm: whether the model has batch norm, which needs two rows of a stream.

    Raises:
        ConfigError: a stream has too few rows for so many micro-batches.
    """
    if micro_batch is None:
        return 1
    number = -(-max(sizes.rows) // micro_batch)
    for name, rows in (("labelled", sum(sizes.labelled)), ("unlabelled", sum(sizes.unlabelled))):
        if norm and number > 1 and 0 < rows < 2 * number:
            raise ConfigError(
                f"train.micro_batch is {micro_batch}, which cuts a step into {number}, and batch "
                f"norm would see fewer than 2 of the {rows} {name} rows at a time; expected at "
                f"least {-(-max(sizes.rows) // max(1, rows // 2))}"
            )
    return number


def micro_batches(sizes: Sequence[int], offsets: Sequence[int], number: int) -> list[MicroBatch]:
    """A process's rows in so many micro-batches, the same ones however many processes there are.

    Row r of a stream's global batch is in micro-batch r mod `number`, so batch norm, which takes a
    micro-batch over all processes, sees the same rows on any number of them.

    Args:
        sizes: rows of each stream on this process.
        offsets: where its part of each stream's global batch begins.
        number: of micro-batches.
    """
    found: list[list[Tensor]] = [[] for _ in range(number)]
    starts = itertools.accumulate(sizes, initial=0)
    for start, size, offset in zip(starts, sizes, offsets, strict=False):
        local = torch.arange(size)
        for j, parts in enumerate(found):
            parts.append(start + local[(local + offset) % number == j])
    return [MicroBatch(torch.cat(parts), [len(rows) for rows in parts]) for parts in found]


def refuse_lonely_rows(batch: Batch, micro: Sequence[MicroBatch], names: Sequence[str]) -> None:
    """Refuses a step in which batch norm would see one row of a view; every process calls it.

    Args:
        batch: the rows.
        micro: the micro-batches, each of which is normalised by itself.
        names: of the views.

    Raises:
        TrainingError: one row of a stream has the view, over all processes; none may have it.
    """
    if batch.present is None:
        return
    counts = [
        part.sum(0)
        for one in micro
        for part in torch.split(batch.present[one.indices.to(batch.present.device)], one.sizes)
    ]
    summed = sum_over_processes(torch.stack(counts))
    if len(alone := (summed == 1).any(0).nonzero()[:, 0].tolist()):
        raise TrainingError(
            f"view '{names[alone[0]]}' is in one row of a stream's batch, of which batch norm has "
            "no variance; expected none or several: make data.batch larger, or the micro-batches, "
            "or use an encoder without batch norm"
        )


def embed(
    strategy: Strategy,
    inputs: Sequence[Tensor],
    batch: Batch,
    micro: Sequence[MicroBatch],
) -> tuple[Features, Callable[[Tensor], None]]:
    """The features of a process's rows, and what brings a loss of them back to the parameters.

    Args:
        strategy: has the model.
        inputs: a tensor a view, [rows, ...].
        batch: the rows.
        micro: the micro-batches; one is the whole.

    Returns:
        The features, and a function of this process's share of the loss, which every process must
        call once.
    """
    labels = batch.targets.new_zeros(len(batch.rng_keys), batch.targets.shape[1])
    labels[: batch.labelled] = batch.targets  # unlabelled rows show no part of the model a label
    if len(micro) == 1:
        with strategy.accumulate(last=True):
            given = batch.rng_keys, batch.sizes, labels, batch.present
            return strategy(inputs, *given), strategy.backward

    def forward(one: MicroBatch) -> Features:
        rows = one.indices.to(batch.rng_keys.device)
        present = None if batch.present is None else batch.present[rows]
        given = batch.rng_keys[rows], one.sizes, labels[rows], present
        return strategy([x[rows] for x in inputs], *given)

    with torch.no_grad(), _unchanged_statistics(strategy.model):
        found = [forward(one) for one in micro]
    order = torch.cat([one.indices for one in micro]).argsort().to(batch.rng_keys.device)

    def joined(parts: Sequence[Tensor]) -> Tensor:
        # A view of a parameter, such as siglip's bias, requires a gradient even where none is kept.
        whole = torch.cat([part.detach() for part in parts])[order]
        return whole.requires_grad_() if whole.is_floating_point() else whole

    features = {
        name: [joined(parts) for parts in zip(*(one[name] for one in found), strict=True)]
        for name in found[0]
    }

    def backward(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for one in micro:
            rows = one.indices.to(batch.rng_keys.device)
            with strategy.accumulate(last=one is micro[-1]):
                again = forward(one)
                sums = [
                    (own * whole.grad[rows]).sum()
                    for name, tensors in features.items()
                    for own, whole in zip(again[name], tensors, strict=True)
                    if whole.grad is not None
                ]
                strategy.backward(torch.stack(sums).sum())

    return features, backward


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
