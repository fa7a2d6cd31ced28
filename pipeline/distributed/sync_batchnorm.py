"""Batch norm over the global batch, so that P processes normalise as one does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from heron.pipeline.config.errors import TrainingError
from heron.pipeline.distributed.collectives import stack, sum_over_processes, world_size

Result = TypeVar("Result")
Asked = tuple[_BatchNorm, Tensor]  # a batch norm and what it is to normalise


class GlobalBatchNorm(_BatchNorm):
    """Batch norm whose training statistics are those of all processes' rows, on any device.

    `torch.nn.SyncBatchNorm` refuses CPU tensors. This one joins the processes' counts, means and
    variances (Chan, Golub and LeVeque 1983), so that its variance is as exact as a single
    process's. Under autocast it computes in float32. See `side_by_side` for how few messages do.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Any input with channels in the second place will do."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [rows, channels, ...]."""
        if not self.training or world_size() == 1:
            return super().forward(input)
        asked = self, input.float() if input.dtype.itemsize < 4 else input
        return _meet(asked, _normalise).to(input.dtype)


class GpuBatchNorm(nn.SyncBatchNorm):
    """PyTorch's, in float32 also under autocast.

    In bfloat16 its processes exchange numbers of different sizes when one of them has no rows, and
    without running statistics it refuses its own counts.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [rows, channels, ...]."""
        if not self.training or input.dtype.itemsize >= 4:
            return super().forward(input)
        return super().forward(input.float()).to(input.dtype)


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


def side_by_side(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Returns what calls give that do not depend on each other, such as encoders of several views.

    Over processes each runs up to its first batch norm, where all their statistics travel in one
    message, then up to its second, and so on; so do the gradients on the way back. The calls take
    turns on one thread, in order, and every process must make the same ones.
    """
    if len(calls) == 1 or (world_size() == 1 and not _notes):
        return [call() for call in calls]
    running = [_Call(call) for call in calls]
    found = [one.switch() for one in running]
    while waiting := [i for i, one in enumerate(running) if not one.dead]:
        meeting = found[waiting[0]][1]
        for i, answer in zip(waiting, meeting([found[i][0] for i in waiting]), strict=True):
            found[i] = running[i].switch(answer)
    return found


class _Call(greenlet):  # type: ignore[misc]
    """A call of `side_by_side`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(call)
        self.state, self.gr_context = _state(), copy_context()


def _state() -> tuple[object, ...]:
    """What a call may not leave changed while others have their turn; they share a thread."""
    autocast = [
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    ]
    checkpointed = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), checkpointed, *autocast


def _meet(asked: Asked, meeting: Callable[[list[Asked]], Sequence[Tensor]]) -> Tensor:
    """What a meeting of all calls that are side by side makes of this one's; or of it alone."""
    here = getcurrent()
    if isinstance(here, _Call) and here.state == _state():
        answer: Tensor = here.parent.switch((asked, meeting))
        return answer
    return meeting([asked])[0]


_notes: list[list[list[int]]] = []  # see `meetings`


@contextmanager
def meetings(norms: Sequence[_BatchNorm]) -> Iterator[list[list[int]]]:
    """Notes the channels of norms that several processes would normalise together, by meeting."""
    found: list[list[int]] = []

    def note(asked: list[Asked]) -> list[Tensor]:
        found.append([norm.num_features for norm, _ in asked])
        return [x for _, x in asked]

    hooks = [n.register_forward_hook(lambda norm, _, x: _meet((norm, x), note)) for n in norms]
    _notes.append(found)
    try:
        yield found
    finally:
        _notes.pop()
        for hook in hooks:
            hook.remove()


def _normalise(asked: list[Asked]) -> list[Tensor]:
    """Normalises by the rows of all processes, and moves running statistics."""
    given: list[Any] = []
    for norm, x in asked:
        assert norm.running_mean is not None  # see `synchronise`
        weight = torch.ones_like(norm.running_mean) if norm.weight is None else norm.weight
        given += x, weight, torch.zeros_like(weight) if norm.bias is None else norm.bias, norm.eps
    found = _Normalise.apply(*given)  # type: ignore[no-untyped-call]
    for (norm, _), (mean, variance, count) in zip(asked, _by(3, found[len(asked) :]), strict=True):
        if norm.track_running_stats and count > 1:  # no row of a batch may have the view
            assert norm.running_mean is not None and norm.running_var is not None
            assert norm.num_batches_tracked is not None and norm.momentum is not None
            with torch.no_grad():
                norm.num_batches_tracked.add_(1)
                norm.running_mean.lerp_(mean, norm.momentum)
                norm.running_var.lerp_(variance * count / (count - 1), norm.momentum)
    return list(found[: len(asked)])


class _Normalise(torch.autograd.Function):
    """Batch norms of all processes' rows: PyTorch's kernels for a process's own, two exchanges.

    Of each it takes an input, a weight, a bias and an epsilon. It gives the outputs of all, then a
    mean, a variance and a number of values of each.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        parts: list[Tensor] = []
        for x, *_ in _by(4, given):
            channels = x.shape[1]
            mean = variance = x.new_zeros(channels)
            if x.numel():
                mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
            parts += x.new_tensor([x.numel() / max(channels, 1)]), mean, variance
        joined = torch.split(stack(torch.cat(parts)), [len(part) for part in parts], 1)
        outputs, told, kept = [list[Tensor]() for _ in range(3)]
        for (x, weight, bias, eps), (counts, means, variances) in zip(
            _by(4, given), _by(3, joined), strict=True
        ):
            count = counts.sum().clamp(min=1)
            mean = (counts * means).sum(0) / count
            variance = (counts * (variances + (means - mean).square())).sum(0) / count
            scale = torch.rsqrt(variance + eps)
            outputs.append(functional.batch_norm(x, mean, variance, weight, bias, eps=eps))
            told += mean, variance, count
            kept += x, weight * scale, mean, scale, count
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(*told)
        return *outputs, *told

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kept, own = _by(5, ctx.saved_tensors), list[Tensor]()
        for (x, slope, mean, scale, _), grad in zip(kept, grads, strict=False):
            of_weight = of_bias = torch.zeros_like(slope)
            if x.numel():
                _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                    grad, x, slope, None, None, mean, scale, True, 0.0, [False, True, True]
                )
            own += of_weight, of_bias
        sums = torch.split(sum_over_processes(torch.cat(own)), [len(part) for part in own])
        found: list[Tensor | None] = []
        for (x, slope, mean, scale, count), grad, of_all, of_own in zip(
            kept, grads, _by(2, sums), _by(2, own), strict=False
        ):
            # dx = slope (dy - mean(dy) - xhat mean(dy xhat)), xhat = (x - mean) scale
            shape = [1, -1] + [1] * (x.dim() - 2)
            turn = slope * scale * of_all[0] / count
            of_x = torch.addcmul(
                (mean * turn - slope * of_all[1] / count).view(shape), x, -turn.view(shape)
            )
            found += of_x.addcmul_(grad, slope.view(shape)), *of_own, None
        return tuple(found)


def _by(number: int, items: Sequence[Any]) -> list[Sequence[Any]]:
    """Returns so many items at a time."""
    return [items[i : i + number] for i in range(0, len(items), number)]


def has_norm(model: nn.Module) -> bool:
    """Whether rows of a batch are normalised by each other."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def synchronise(model: nn.Module) -> None:
    """Put batch norm over all processes wherever the model has batch norm, in place.

    On GPUs torch's own fused SyncBatchNorm, in float32; elsewhere `GlobalBatchNorm`. With one
    process nothing is changed.
    """
    if world_size() == 1:
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and child.training:  # and not frozen
                if not type(child).__module__.startswith("torch.nn."):
                    raise TrainingError(
                        f"{name} is {type(child).__name__}, a batch norm that does more, and would "
                        "see each process's rows alone; expected torch's own, one process, or "
                        "a frozen network"
                    )
                if child.running_mean is None or not child.momentum:
                    raise TrainingError(
                        f"{name} is {child}; expected running statistics and a momentum, "
                        "with which it can be synchronised over processes"
                    )
                kind = GpuBatchNorm if child.running_mean.is_cuda else GlobalBatchNorm
                norm = kind(child.num_features, child.eps, child.momentum, child.affine)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm.to(child.running_mean))
