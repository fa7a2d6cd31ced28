"""All collectives; the only file that touches torch.distributed.

The anchors of a process are its own rows; `gather_all` gives it the vectors of all rows. A term
that computes the complete gradient of its own rows takes them by `with_local_gradient`; for any
other, `with_summed_gradient` sums in backward what the processes computed for a row.

Each process's loss is its anchors' share of the global mean, so parameter gradients summed over
processes are those of one process with the whole batch. DistributedDataParallel averages them, so
the loss is multiplied by the number of processes before backward.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from heron.base.errors import HeronError, Stopped
from heron.distributed.derivatives import first_derivative

T = TypeVar("T")
LONGEST = timedelta(days=1)  # a collective waits: the watchdog ends a job that hangs
# torch 2.13 renamed both and deprecates the old names, the only ones of 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def world_size() -> int:
    """Returns the number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Returns this process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    """Waits for all processes."""
    if world_size() > 1:
        dist.barrier()


def sum_over_processes(x: Tensor) -> Tensor:
    """Returns the sum of a tensor over processes, without gradient; bit for bit the same on all."""
    return begin_sum(x)()


def begin_sum(x: Tensor) -> Callable[[], Tensor]:
    """Starts `sum_over_processes` of a tensor; the function returned waits for the sum."""
    if world_size() == 1:
        return lambda: x
    x = x.clone()
    work = dist.all_reduce(x, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return x

    return wait


def gather_stacked(x: Tensor) -> Tensor:
    """Returns every process's tensor, of one shape, as [processes, ...], without gradient."""
    if world_size() == 1:
        return x[None]
    gathered = x.new_empty(world_size() * len(x), *x.shape[1:])
    _all_gather(gathered, x.contiguous())
    return gathered.view(world_size(), *x.shape)


def gather_objects(value: Any) -> list[Any]:
    """Returns a small picklable value of every process, in order of rank, on every process.

    Its cost grows with the number of processes: it is for faults, not for a normal step.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: Any) -> Any:
    """Returns the first process's small picklable value; every process calls it."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def on_main(work: Callable[[], T]) -> T:
    """Returns what `work` returns on the first process; its error is raised on every process."""
    result: T | None = None
    error: Exception | None = None
    if rank() == 0:
        try:
            result = work()
        except (HeronError, OSError, Stopped) as caught:
            error = caught
    result, error = broadcast_object((result, error))
    if error is not None:
        raise error
    return cast(T, result)


def on_all(work: Callable[[], T]) -> T:
    """Returns the result of `work`; an error on one process is raised on all, lest they hang.

    The others raise one of its kind that names its rank.
    """
    error: Exception | None = None
    try:
        result = work()
    except (HeronError, OSError) as caught:
        error = caught
    errors = gather_objects(error)
    if error is not None:
        raise error
    for other, its in enumerate(errors):
        if its is not None:
            raise type(its)(f"rank {other}: {its}")
    return result


def gather_if_any(value: Any) -> list[Any]:
    """Returns `gather_objects`; if all values are falsy, [] after exchanging one number."""
    if world_size() == 1:
        return [value] if value else []
    has_value = torch.tensor([float(bool(value))], device=_device())
    return gather_objects(value) if float(sum_over_processes(has_value)) else []


def broadcast_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the first process's tensors, in host memory; what the others pass is ignored."""
    if world_size() == 1:
        return tensors
    received, device = {}, _device()
    for name, shape, dtype in broadcast_object([(n, x.shape, x.dtype) for n, x in tensors.items()]):
        x = tensors[name] if rank() == 0 else torch.empty(shape, dtype=dtype)
        moved = x.contiguous().to(device)
        dist.broadcast(moved, src=0)
        received[name] = moved.cpu()
    return received


def gather_on_main(share: Tensor, rows: int, group: Any) -> Tensor:
    """Returns a tensor of `rows` rows on rank 0, from every process's share in host memory.

    The shares are as `torch.chunk` cuts them; other processes get their share back. Over a
    `background_group`, a thread may call it while training goes on.
    """
    longest = -(-rows // world_size())
    padded = share.new_zeros(longest, *share.shape[1:])
    padded[: len(share)] = share
    parts = [torch.empty_like(padded) for _ in range(world_size())] if rank() == 0 else None
    dist.gather(padded, parts, dst=0, group=group)
    return torch.cat(parts)[:rows] if parts else share


def background_group() -> Any:
    """Returns a process group over host memory for a thread; every process must call it."""
    return dist.new_group(backend="gloo", timeout=LONGEST)


def _device() -> torch.device:
    """Returns the device of tensors that are exchanged outside a step."""
    return torch.device(dist.distributed_c10d._get_object_coll_device())


def default_store(prefix: str) -> Any:
    """Returns the store of the rendezvous, over a connection of its own if it is a TCPStore."""
    store: Any = dist.distributed_c10d._get_default_store()
    while type(store).__name__ == "PrefixStore":
        store = store.underlying_store
    store = store.clone() if type(store).__name__ == "TCPStore" else store
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def is_lost(error: BaseException) -> bool:
    """Returns whether an error says that another process cannot be reached any more."""
    if isinstance(error, dist.DistError):
        return True
    return any(word in str(error) for word in ("gloo/transport", "NCCL error", "Socket Timeout"))


def close() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_all(tensors: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns all processes' rows of several tensors, in order of rank, by one collective.

    `tensors` are [own rows, ...] each; the results are [sum of the sizes, ...], without gradient.
    They are sent as bytes, so they may differ in dtype; shorter shares are padded. `sizes` has, for
    each tensor, every process's number of rows; it follows from the plan, so it is not exchanged.
    With one number, that of this process alone, nothing is exchanged.
    """
    if len(sizes[0]) == 1:
        return [x.detach() for x in tensors]
    # Copied, since an expanded tensor cannot be viewed as bytes.
    flat = [x.new_empty(x.numel()).copy_(x.detach().reshape(-1)) for x in tensors]
    chunks = [x.view(torch.uint8) for x in flat]
    row_bytes = [x.element_size() * x[:0].new_empty(1, *x.shape[1:]).numel() for x in tensors]
    # Bytes by tensor, then by process.
    byte_counts = [[n * width for n in rows] for rows, width in zip(sizes, row_bytes, strict=True)]
    lengths = [sum(of_process) for of_process in zip(*byte_counts, strict=True)]
    longest = max(lengths)
    if lengths[rank()] < longest:
        chunks.append(chunks[0].new_zeros(longest - lengths[rank()]))
    buffer = chunks[0].new_empty(len(lengths), longest)
    _all_gather(buffer.view(-1), torch.cat(chunks))
    gathered, starts = [], [0] * len(lengths)
    for x, counts, rows in zip(tensors, byte_counts, sizes, strict=True):
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        shares = [data[a:b] for data, a, b in zip(buffer, starts, ends, strict=True)]
        gathered.append(torch.cat(shares).view(x.dtype).view(sum(rows), *x.shape[1:]))
        starts = ends
    return gathered


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, gathered: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.sizes = sizes  # type: ignore[attr-defined]
        return gathered.view_as(gathered)

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        sizes: Sequence[int] = ctx.sizes  # type: ignore[attr-defined]
        longest, grad = max(sizes), grad.contiguous()
        if min(sizes) < longest:
            shares = torch.split(grad, list(sizes))
            padded = [torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]) for x in shares]
            grad = torch.cat(padded)
        local = grad.new_empty(longest, *grad.shape[1:])
        _reduce_scatter(local, grad)
        return local[: sizes[dist.get_rank()]], None, None


class _LocalGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, gathered: Tensor, rows: slice) -> Tensor:
        ctx.rows = rows  # type: ignore[attr-defined]
        return gathered.view_as(gathered)

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.rows], None, None  # type: ignore[attr-defined]


def with_summed_gradient(x: Tensor, gathered: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns `gathered`; in backward x gets its rows' gradients summed over processes."""
    if len(sizes) == 1 or not x.requires_grad:
        return x if len(sizes) == 1 else gathered
    result: Tensor = _SummedGradient.apply(x, gathered, sizes)  # type: ignore[no-untyped-call]
    return result


def with_local_gradient(x: Tensor, gathered: Tensor, rows: slice) -> Tensor:
    """Returns `gathered`; in backward x gets this process's gradient of its `rows`, unsummed."""
    result: Tensor = _LocalGradient.apply(x, gathered, rows)  # type: ignore[no-untyped-call]
    return result


def gather(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns all processes' rows, [sum(sizes), ...], in order of rank, differentiable.

    `x` is [own rows, ...]; `sizes` has every process's number of rows. In backward each row's
    gradient is summed over the processes.
    """
    return with_summed_gradient(x, gather_all([x], [sizes])[0], sizes)
