"""Every exchange between processes; the only file that touches torch.distributed.

A process owns its rows as anchors and sees the vectors of all, which `gather_all` hands out. A
term that finds the whole gradient of its own rows takes them by `of_own`; for any other, `summed`
adds up in backward what each process found for a row. With each process's loss being its anchors'
share of the global mean, the sum over processes of parameter gradients is that of one process with
the whole batch; DistributedDataParallel takes their mean, so the loss is multiplied by the number
of processes before it goes back.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# torch 2.13 renamed the two and warns of the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    """Wait for all processes."""
    if world_size() > 1:
        dist.barrier()


def sum_over_processes(x: Tensor) -> Tensor:
    """Sum of a tensor over all processes, without gradient; the same bits on every process."""
    return begin_sum(x)()


def begin_sum(x: Tensor) -> Callable[[], Tensor]:
    """Begin `sum_over_processes` of a tensor; what is returned waits for it."""
    if world_size() == 1:
        return lambda: x
    x = x.clone()
    work = dist.all_reduce(x, async_op=True)

    def end() -> Tensor:
        work.wait()
        return x

    return end


def stack(x: Tensor) -> Tensor:
    """A tensor of every process, [processes, ...], without gradient."""
    if world_size() == 1:
        return x[None]
    whole = x.new_empty(world_size() * len(x), *x.shape[1:])
    _all_gather(whole, x.contiguous())
    return whole.view(world_size(), *x.shape)


def gather_objects(value: Any) -> list[Any]:
    """A small picklable value of every process, in order of rank, on every process.

    It grows with the number of processes: for what has gone wrong, never for a step that is well.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """The first process's small picklable value, on every process; every process calls it."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_told(value: Any) -> list[Any]:
    """What each process has to say, in order of rank; empty, after one number, where none has."""
    if world_size() == 1:
        return [value] if value else []
    told = torch.tensor([float(bool(value))], device=_device())
    return gather_objects(value) if float(sum_over_processes(told)) else []


def tensors_from_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first process's tensors by name, on every process, a message each.

    The others give none; all of them find theirs in the memory of the host.
    """
    if world_size() == 1:
        return tensors
    found, device = {}, _device()
    for name, shape, dtype in from_first([(n, x.shape, x.dtype) for n, x in tensors.items()]):
        x = tensors[name] if rank() == 0 else torch.empty(shape, dtype=dtype)
        moved = x.contiguous().to(device)
        dist.broadcast(moved, src=0)
        found[name] = moved.cpu()
    return found


def _device() -> torch.device:
    """Where tensors lie that the processes exchange outside a step."""
    return torch.device(dist.distributed_c10d._get_object_coll_device())


def default_store(prefix: str) -> Any:
    """The store through which the processes met, by a connection of its own where it has any."""
    store: Any = dist.distributed_c10d._get_default_store()
    while type(store).__name__ == "PrefixStore":
        store = store.underlying_store
    own = store.clone() if type(store).__name__ == "TCPStore" else store
    return dist.PrefixStore(prefix, own)  # type: ignore[attr-defined]


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process cannot be reached any more."""
    if isinstance(error, dist.DistError):
        return True
    return any(word in str(error) for word in ("gloo/transport", "NCCL error", "Socket Timeout"))


def close() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_all(tensors: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """All processes' rows of several tensors, in order of rank, by one collective.

    They travel as the bytes that they are, of any types; only where processes have different
    shares is there anything to fill up.

    Args:
        tensors: this process's rows, [own rows, ...] each.
        sizes: of each tensor, every process's number of rows; known from the plan, so it is not
            exchanged. One number, of this process alone, exchanges nothing.

    Returns:
        [sum of the sizes, ...] each, without gradient.
    """
    if len(sizes[0]) == 1:
        return [x.detach() for x in tensors]
    # Copied: one row that stands for several cannot be read as bytes.
    flat = [x.new_empty(x.numel()).copy_(x.detach().reshape(-1)) for x in tensors]
    parts = [x.view(torch.uint8) for x in flat]
    widths = [x.element_size() * x[:0].new_empty(1, *x.shape[1:]).numel() for x in tensors]
    bytes_of = [[n * w for n in of_one] for of_one, w in zip(sizes, widths, strict=True)]
    lengths = [sum(of_process) for of_process in zip(*bytes_of, strict=True)]
    longest = max(lengths)
    if lengths[rank()] < longest:
        parts.append(parts[0].new_zeros(longest - lengths[rank()]))
    whole = parts[0].new_empty(len(lengths), longest)
    _all_gather(whole.view(-1), torch.cat(parts))
    found, starts = [], [0] * len(lengths)
    for x, of_one, rows in zip(tensors, bytes_of, sizes, strict=True):
        ends = [start + n for start, n in zip(starts, of_one, strict=True)]
        own = [part[a:b] for part, a, b in zip(whole, starts, ends, strict=True)]
        found.append(torch.cat(own).view(x.dtype).view(sum(rows), *x.shape[1:]))
        starts = ends
    return found


def ring(
    tensors: Sequence[Tensor], sizes: Sequence[Sequence[int]]
) -> Iterator[tuple[int, list[Tensor]]]:
    """This process's rows, then those of every other, which come while the last are used.

    Each process passes on what it has: of others' rows at most two processes' are here at a time.
    Every process must take all of them; what is given is overwritten when the next is asked for.

    Args:
        tensors: this process's rows, [own rows, ...] each, of one type; without gradient.
        sizes: as of `gather_all`.

    Yields:
        A process's number and its rows of each tensor: own ones first, then of the rank before.
    """
    world, me = len(sizes[0]), rank() if len(sizes[0]) > 1 else 0
    widths = [x[:0].new_empty(1, *x.shape[1:]).numel() for x in tensors]
    lengths = [
        [n * width for n, width in zip(of_process, widths, strict=True)]
        for of_process in zip(*sizes, strict=True)
    ]
    longest = max(sum(of_process) for of_process in lengths)
    here, coming = (tensors[0].new_empty(longest) for _ in range(2))
    here[: sum(lengths[me])] = torch.cat([x.detach().reshape(-1) for x in tensors])
    here[sum(lengths[me]) :] = 0  # what fills up travels, too
    for source in [(me - hop) % world for hop in range(world)]:
        sent: list[Any] = []
        if longest and (source - 1) % world != me:  # else it has come round
            to = dist.P2POp(dist.isend, here, (me + 1) % world)
            sent = dist.batch_isend_irecv([to, dist.P2POp(dist.irecv, coming, (me - 1) % world)])
        ends = list(itertools.accumulate(lengths[source], initial=0))
        cut = zip(tensors, itertools.pairwise(ends), strict=True)
        yield source, [here[start:end].view(-1, *x.shape[1:]) for x, (start, end) in cut]
        for message in sent:
            message.wait()
        here, coming = coming, here


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, whole: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.sizes = sizes  # type: ignore[attr-defined]
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        sizes: Sequence[int] = ctx.sizes  # type: ignore[attr-defined]
        longest, grad = max(sizes), grad.contiguous()
        if min(sizes) < longest:
            parts = torch.split(grad, list(sizes))
            filled = [torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]) for x in parts]
            grad = torch.cat(filled)
        own = grad.new_empty(longest, *grad.shape[1:])
        _reduce_scatter(own, grad)
        return own[: sizes[dist.get_rank()]], None, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, whole: Tensor, rows: slice) -> Tensor:
        ctx.rows = rows  # type: ignore[attr-defined]
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.rows], None, None  # type: ignore[attr-defined]


def summed(x: Tensor, whole: Tensor, sizes: Sequence[int]) -> Tensor:
    """What `gather_all` found of x, differentiable: a row's gradient is summed over processes."""
    if len(sizes) == 1 or not x.requires_grad:
        return x if len(sizes) == 1 else whole
    result: Tensor = _Summed.apply(x, whole, sizes)  # type: ignore[no-untyped-call]
    return result


def of_own(x: Tensor, whole: Tensor, rows: slice) -> Tensor:
    """What `gather_all` found of x, differentiable: own rows take what is found here, alone."""
    result: Tensor = _Own.apply(x, whole, rows)  # type: ignore[no-untyped-call]
    return result


def gather(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """All processes' rows in order of rank, differentiable; shares may differ in length.

    Args:
        x: this process's rows, [own rows, ...].
        sizes: every process's number of rows; see `gather_all`.

    Returns:
        [sum(sizes), ...]. In backward each row's gradient is summed over the processes.
    """
    return summed(x, gather_all([x], [sizes])[0], sizes)
