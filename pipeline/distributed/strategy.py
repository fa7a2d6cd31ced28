"""How parameters and optimiser state lie on the processes, and how a step moves them.

What the processes exchange of the data is in `collectives`; this is about the weights.
A strategy takes the gradient of a value that is a process's share of the global loss, and leaves
the gradient of the whole on the parameters, whatever the number of processes.

A step over more rows than memory holds at once has the gradient of the whole, too: GradCache (Gao,
Zhang, Han and Callan 2021, arXiv:2101.06983) embeds all rows without a graph, takes the loss of all
of them back to the embeddings, and then embeds each micro-batch again and gives it its rows'
gradient.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from heron.pipeline.config.errors import ConfigError, TrainingError
from heron.pipeline.data.batches import Batch
from heron.pipeline.distributed.collectives import rank, sum_over_processes, world_size
from heron.pipeline.distributed.exchange import ShardSizes
from heron.pipeline.models.heterogeneous import Features, Heterogeneous

State = dict[str, Tensor]


class Strategy:
    """One process, or DistributedDataParallel: every process holds all parameters.

    Attributes:
        model: what is trained, unwrapped.
        parameters: how many numbers that is.
    """

    def __init__(self, model: Heterogeneous, wrapped: nn.Module, optimizer: Optimizer) -> None:
        """Train a model through its wrapper, which may be the model itself."""
        self.model, self.optimizer = model, optimizer
        self.parameters = sum(_shape(p).numel() for p in model.parameters())
        self._wrapped = wrapped

    def embed(
        self, inputs: Sequence[Tensor], batch: Batch, micro: Sequence["MicroBatch"]
    ) -> tuple[Features, Callable[[Tensor], None]]:
        """The features of a process's rows, and what brings a loss of them back to the parameters.

        Args:
            inputs: a tensor a view, [rows, ...].
            batch: the rows.
            micro: the micro-batches; one is the whole.

        Returns:
            The features, and a function of this process's share of the loss, which every process
            must call once.
        """
        labels = batch.targets.new_zeros(len(batch.rng_keys), batch.targets.shape[1])
        labels[: len(batch.targets)] = batch.targets  # unlabelled rows show the model no label
        if len(micro) == 1:
            given = batch.rng_keys, batch.sizes, labels, batch.present
            with self.accumulate(last=True):
                return self._wrapped(inputs, *given), self.backward

        def forward(one: MicroBatch) -> Features:
            rows = one.indices.to(batch.rng_keys.device)
            present = None if batch.present is None else batch.present[rows]
            given = batch.rng_keys[rows], one.sizes, labels[rows], present
            features: Features = self._wrapped([x[rows] for x in inputs], *given)
            return features

        with torch.no_grad(), _unchanged_statistics(self.model):
            found = [forward(one) for one in micro]
        order = torch.cat([one.indices for one in micro]).argsort().to(batch.rng_keys.device)

        def joined(parts: Sequence[Tensor]) -> Tensor:
            # A view of a parameter, such as siglip's bias, requires a gradient though none is kept.
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
                with self.accumulate(last=one is micro[-1]):
                    again = forward(one)
                    sums = [
                        (own * whole.grad[rows]).sum()
                        for name, tensors in features.items()
                        for own, whole in zip(again[name], tensors, strict=True)
                        if whole.grad is not None
                    ]
                    self.backward(torch.stack(sums).sum())

        return features, backward

    def describe(self) -> str:
        """What runs, in a few words."""
        return "DDP" if isinstance(self._wrapped, DistributedDataParallel) else "one process"

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a part of a step; gradients are exchanged in the last."""
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        return self._wrapped.no_sync()

    def backward(self, value: Tensor) -> None:
        """Add the gradient of a value that is this process's share of a sum over processes.

        The means over processes that strategies take are undone: the gradient is of the sum.
        """
        (value * world_size()).backward()  # type: ignore[no-untyped-call]

    def gradient_norm(self) -> Tensor | float:
        """Length of the gradient over all parameters; not finite if one of them is not."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def step(self, rate: float) -> None:
        """Move the parameters at a learning rate, and clear the gradient."""
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """While it is open, every process can read all of `model`; every process must open it."""
        yield

    def model_state(self) -> State:
        """Parameters and buffers in full by name, on rank 0; every process must call it."""
        return {
            name: _copy(value) for name, value in self.model.state_dict().items() if rank() == 0
        }

    def optimizer_state(self) -> State:
        """What the optimiser keeps of each parameter, in full, as NAME/KEY, on rank 0; no counts.

        It is the same for any strategy and number of processes. Every process must call it.
        """
        state = self.optimizer.state
        return {
            f"{name}/{key}": _copy(value)
            for name, parameter in self.model.named_parameters()
            for key, value in state.get(parameter, {}).items()
            if key != "step" and value is not None and rank() == 0
        }

    def load_optimizer(self, state: State, step: int) -> None:
        """Take up what `optimizer_state` gave, after so many steps; every process must call it."""
        for name, parameter in self.model.named_parameters():
            found = _of(state, name)
            if found:
                self.optimizer.state[parameter] = {
                    key: value.clone().to(parameter) for key, value in found.items()
                } | _count(self.optimizer, step)


def _shape(parameter: Tensor) -> torch.Size:
    """Of the whole parameter, also where this process has a part of it (ZeRO 3)."""
    found: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return found


def _copy(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu").copy_(value.detach())


def _of(state: State, name: str) -> State:
    """The entries of one parameter, by key."""
    return {
        key.rpartition("/")[2]: value
        for key, value in state.items()
        if key.rpartition("/")[0] == name
    }


def _count(optimizer: Optimizer, step: int) -> dict[str, Tensor]:
    """Adam's count of steps; every parameter takes part in every step."""
    adam = isinstance(optimizer, torch.optim.Adam)  # AdamW too
    return {"step": torch.tensor(float(step))} if adam else {}


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the learning rate of a step, of each group its share: see `build_optimizer`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_share"]


@dataclass(frozen=True)
class MicroBatch:
    """Some of a process's rows of a step.

    Attributes:
        indices: which, in order.
        sizes: how many of each stream, in order.
    """

    indices: Tensor
    sizes: list[int]


def count_micro_batches(micro_batch: int | None, sizes: ShardSizes, norm: bool) -> int:
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
    starts = itertools.accumulate([0, *sizes[:-1]])
    for start, size, offset in zip(starts, sizes, offsets, strict=True):
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
