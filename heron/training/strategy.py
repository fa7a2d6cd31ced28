"""How parameters and optimiser state are distributed over processes, and how a step updates them.

A strategy differentiates a process's share of the global loss, and leaves the gradient of the
global loss on the parameters, whatever the number of processes.

Steps over more rows than fit into memory have the exact gradient, too: GradCache (Gao, Zhang, Han
and Callan 2021, arXiv:2101.06983) embeds all rows without a graph, takes the gradient of the loss
with respect to the embeddings, and then embeds each micro-batch again, with a graph, and
backpropagates its rows of that gradient.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from heron.base.errors import ConfigError, TrainingError
from heron.data.batches import Batch
from heron.distributed.collectives import rank, sum_over_processes, world_size
from heron.losses.exchange import ShardSizes
from heron.models.heterogeneous import Features, Heterogeneous
from heron.models.recompute import unchanged_statistics

State = dict[str, Tensor]
SCALER = "loss_scale"  # a metric; the name of its state beside those of parameters
FIRST_SCALE = 2.0**16  # as `GradScaler`'s


class Strategy:
    """One process, or DistributedDataParallel: every process holds all parameters.

    `model` is unwrapped; `parameters` is the number of its parameters. Under `fp16` the loss is
    scaled (Micikevicius et al. 2018, arXiv:1710.03740); a step whose gradient overflows is skipped.
    """

    def __init__(
        self,
        model: Heterogeneous,
        wrapped: nn.Module,
        optimizer: Optimizer,
        clip_norm: float | None = None,
    ) -> None:
        """Trains a model through its wrapper, or itself; `clip_norm` bounds the gradient's norm."""
        self.model, self.optimizer, self._clip_norm = model, optimizer, clip_norm
        self.parameters = sum(_full_shape(p).numel() for p in model.parameters())
        self._wrapped = wrapped
        device, half = next(model.parameters()).device.type, model.precision == "fp16"
        # A gradient of float16 is then scaled alike on any number of processes: see `backward`.
        self._scaler = GradScaler(device, FIRST_SCALE / world_size(), enabled=half)
        self._skipped = 0  # steps that Adam does not count, before this process began

    def embed(
        self, inputs: Sequence[Tensor], batch: Batch, micro: Sequence["MicroBatch"]
    ) -> tuple[Features, Callable[[Tensor], None]]:
        """Returns the features of a process's rows, and the function that runs backward.

        `inputs` are a tensor a view, [rows, ...]; a single micro-batch in `micro` holds all rows.
        The function takes this process's share of the loss and accumulates the parameters'
        gradients; every process must call it once.
        """
        labels = batch.targets.new_zeros(len(batch.rng_keys), batch.targets.shape[1])
        labels[: len(batch.targets)] = batch.targets  # unlabelled rows show the model no label
        if len(micro) == 1:
            with self.accumulate(last=True):
                features = self._wrapped(inputs, batch.rng_keys, batch.sizes, labels, batch.present)
                return features, self.backward

        def forward(micro_batch: MicroBatch) -> Features:
            rows = micro_batch.indices
            present = None if batch.present is None else batch.present[rows]
            views = [x[rows] for x in inputs]
            features: Features = self._wrapped(
                views, batch.rng_keys[rows], micro_batch.sizes, labels[rows], present
            )
            return features

        with torch.no_grad(), unchanged_statistics([self.model]):
            outputs = [forward(micro_batch) for micro_batch in micro]
        order = torch.cat([micro_batch.indices for micro_batch in micro]).argsort()

        def join(chunks: Sequence[Tensor]) -> Tensor:
            # Detached: a view of a parameter, such as siglip's bias, has requires_grad regardless.
            x = torch.cat([chunk.detach() for chunk in chunks])[order]
            return x.requires_grad_() if x.is_floating_point() else x

        embedded = {
            name: [join(chunks) for chunks in zip(*(out[name] for out in outputs), strict=True)]
            for name in outputs[0]
        }

        def backward(loss: Tensor) -> None:
            loss.backward()  # type: ignore[no-untyped-call]
            for micro_batch in micro:
                rows = micro_batch.indices
                with self.accumulate(last=micro_batch is micro[-1]):
                    recomputed = forward(micro_batch)
                    products = [
                        (y * x.grad[rows]).sum()
                        for name, tensors in embedded.items()
                        for y, x in zip(recomputed[name], tensors, strict=True)
                        if x.grad is not None
                    ]
                    self.backward(torch.stack(products).sum())

        return embedded, backward

    def describe(self) -> str:
        """Returns the strategy in a few words."""
        return "DDP" if isinstance(self._wrapped, DistributedDataParallel) else "one process"

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch's forward and backward; only the last exchanges gradients."""
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        return self._wrapped.no_sync()

    def backward(self, value: Tensor) -> None:
        """Accumulates the gradient of a sum over processes, of which `value` is this one's share.

        The factor undoes the mean over processes that gradient synchronisation takes.
        """
        self._scaler.scale(value * world_size()).backward()  # type: ignore[no-untyped-call]

    def loss_scale(self) -> State:
        """Returns the scale of the loss by the name of its metric; {} where it is not scaled."""
        if not self._scaler.is_enabled():
            return {}
        device = next(self.model.parameters()).device
        return {SCALER: self._scaler.scale(torch.full((), float(world_size()), device=device))}

    def gradient_norm(self) -> Tensor | float:
        """Returns the gradient norm over all parameters; not finite where any of it is not.

        Between `backward` and `step` it must be called once: it undoes the scale of the loss.
        """
        self._scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def step(self, rate: float, norm: Tensor | float) -> None:
        """Takes an optimiser step at a learning rate, and clears the gradient.

        `norm` is the `gradient_norm`.
        """
        set_rate(self.optimizer, rate)
        if self._clip_norm is not None:
            total = norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float64)
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self._clip_norm, total)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """While it is open, all of `model` can be read; every process must open it."""
        yield

    def own_tensors(self) -> State:
        """Returns tensors by name, or own shards, to read or write; every process must call it."""
        return self.model.state_dict()

    def own_part(self, name: str, full: Tensor) -> Tensor:
        """Returns what `own_tensors` has of a full tensor; every process must call it."""
        return full.to(next(self.model.parameters()).device)

    def copies(self, state: State) -> State:
        """Copies tensors like `own_tensors` to host memory.

        What `in_full` makes of the copies is on rank 0 alone.
        """
        return copies_on_main(state)

    def model_state(self) -> State:
        """Returns `copies` of parameters and buffers by name; every process must call it."""
        return self.copies(self.own_tensors())

    def optimizer_state(self, step: int) -> State:
        """Copies the optimiser state after `step` steps as NAME/KEY: see `model_state`.

        In full it is the same for any strategy and number of processes.
        """
        return self.copies(self._optimizer_tensors()) | self._scaler_state(step)

    def in_full(self, state: State) -> State:
        """Returns the full tensors of a `model_state` or `optimizer_state`, on rank 0.

        Every process must call it, in any thread and while training goes on.
        """
        return state

    def _optimizer_tensors(self) -> State:
        return {
            f"{name}/{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if key != "step" and value is not None
        }

    def _scaler_state(self, step: int) -> State:
        """Returns the loss scale, the steps since it fell, and the steps that Adam skipped."""
        numbers, skipped = dict[str, float](), self._skipped
        if self._scaler.is_enabled():
            state = self._scaler.state_dict()
            numbers = {"scale": state["scale"] * world_size(), "streak": state["_growth_tracker"]}
            updates = next((s["step"] for s in self.optimizer.state.values() if "step" in s), step)
            skipped = step - int(updates)
        if skipped:  # also in the precision in which a run goes on
            numbers["skipped"] = skipped
        return {
            f"{SCALER}/{key}": torch.tensor(number, dtype=torch.float64)
            for key, number in numbers.items()
        }

    def load_optimizer(self, state: State, step: int) -> None:
        """Loads the `optimizer_state` after `step` steps; every process must call it."""
        numbers = {key: value.item() for key, value in _entries_of(state, SCALER).items()}
        self._skipped = int(numbers.get("skipped", 0))
        if "scale" in numbers and self._scaler.is_enabled():
            scale, streak = numbers["scale"] / world_size(), int(numbers["streak"])
            saved = {"scale": scale, "_growth_tracker": streak}
            self._scaler.load_state_dict(self._scaler.state_dict() | saved)
        others = {k: v for k, v in state.items() if not k.startswith(f"{SCALER}/")}
        self._load_optimizer(others, step - self._skipped)

    def _load_optimizer(self, state: State, step: int) -> None:
        """Loads the optimiser's state after `step` updates."""
        for name, parameter in self.model.named_parameters():
            if entries := _entries_of(state, name):
                self.optimizer.state[parameter] = {
                    key: self._like(parameter, value) for key, value in entries.items()
                } | _step_count(self.optimizer, step)

    def _like(self, parameter: Tensor, full: Tensor) -> Tensor:
        """Returns what a process holds of a full tensor that is distributed as a parameter."""
        return full.clone().to(parameter)


def _full_shape(parameter: Tensor) -> torch.Size:
    """Returns the shape of the full parameter, of which a process has a shard under ZeRO 3."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def copies_on_main(state: State) -> State:
    """Returns copies in host memory, on rank 0; {} on other processes."""
    return {name: _cpu_copy(value) for name, value in state.items() if rank() == 0}


def _cpu_copy(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu").copy_(value.detach())


def _entries_of(state: State, name: str) -> State:
    return {
        key.rpartition("/")[2]: value
        for key, value in state.items()
        if key.rpartition("/")[0] == name
    }


def _step_count(optimizer: Optimizer, step: int) -> dict[str, Tensor]:
    """Returns Adam's step count; every step updates every parameter."""
    is_adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is a subclass
    return {"step": torch.tensor(float(step))} if is_adam else {}


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the learning rate, scaled by each group's share: see `build_optimizer`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_share"]


@dataclass(frozen=True)
class MicroBatch:
    """Some of a process's rows of a step.

    `indices` are of these rows among the process's; `sizes` are the rows of each stream, in order.
    """

    indices: Tensor
    sizes: list[int]


def count_micro_batches(micro_batch: int | None, sizes: ShardSizes, norm: bool) -> int:
    """Returns the number of micro-batches of a step, the same on every process.

    `micro_batch` is about the most rows of a process that are embedded with a graph at a time; with
    `norm`, batch norm needs two rows of a stream. Raises ConfigError for too few rows.
    """
    if micro_batch is None:
        return 1
    number = -(-max(sizes.rows) // micro_batch)
    for name, rows in (("labelled", sum(sizes.labelled)), ("unlabelled", sum(sizes.unlabelled))):
        if norm and number > 1 and 0 < rows < 2 * number:
            raise ConfigError(
                f"train.micro_batch must be at least {-(-max(sizes.rows) // max(1, rows // 2))}, "
                f"got {micro_batch}, which splits a step into {number} micro-batches, so that "
                f"batch norm would see fewer than 2 of the {rows} {name} rows at a time"
            )
    return number


def micro_batches(
    sizes: Sequence[int], offsets: Sequence[int], number: int, device: torch.device | None = None
) -> list[MicroBatch]:
    """Splits a process's rows into micro-batches that do not depend on the number of processes.

    Row r of a stream's global batch is in micro-batch r mod `number`, so that batch norm over a
    micro-batch of all processes sees the same rows on any number of them. `offsets` say where the
    process's share of each stream's global batch begins.
    """
    rows_by_stream: list[list[Tensor]] = [[] for _ in range(number)]  # of each micro-batch
    starts = itertools.accumulate([0, *sizes[:-1]])
    for start, size, offset in zip(starts, sizes, offsets, strict=True):
        for j, streams in enumerate(rows_by_stream):
            first = min((j - offset) % number, size)  # where a stream has fewer rows: none
            streams.append(start + torch.arange(first, size, number, device=device))
    return [
        MicroBatch(torch.cat(streams), [len(rows) for rows in streams])
        for streams in rows_by_stream
    ]


def refuse_lonely_rows(batch: Batch, micro: Sequence[MicroBatch], names: Sequence[str]) -> None:
    """Refuses a step in which batch norm would see one row of a view; every process calls it.

    Each micro-batch is normalised by itself. Raises TrainingError if a view is in exactly one row
    of a stream, over all processes.
    """
    if batch.present is None:
        return
    counts = [
        stream.sum(0)
        for one in micro
        for stream in torch.split(batch.present[one.indices], one.sizes)
    ]
    totals = sum_over_processes(torch.stack(counts))
    if lonely := (totals == 1).any(0).nonzero()[:, 0].tolist():
        raise TrainingError(
            f"only one row of a stream's batch has view '{names[lonely[0]]}', and batch norm needs "
            "a variance; raise data.batch or train.micro_batch, or use an encoder without batch "
            "norm"
        )
