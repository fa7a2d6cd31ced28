"""Batch norm over the global batch: P processes normalise as one does."""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from heron.config.errors import TrainingError
from heron.distributed.collectives import gather_stacked, sum_over_processes, world_size
from heron.distributed.derivatives import first_derivative

Result = TypeVar("Result")
NormCall = tuple[_BatchNorm, Tensor]  # a batch norm and its input


class GlobalBatchNorm(_BatchNorm):
    """Batch norm whose training statistics are those of all processes' rows, on any device.

    `torch.nn.SyncBatchNorm` refuses CPU tensors. This one combines the processes' counts, means and
    variances (Chan, Golub and LeVeque 1983), so that its variance is as exact as a single
    process's. Under autocast it computes in float32. `side_by_side` shares messages among norms.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Accepts any input whose second dimension is the channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises [rows, channels, ...]."""
        if not self.training or world_size() == 1:
            return super().forward(input)
        x = input.float() if input.dtype.itemsize < 4 else input
        return _run_jointly((self, x), _normalise).to(input.dtype)


class GpuBatchNorm(nn.SyncBatchNorm):
    """PyTorch's SyncBatchNorm, in float32 also under autocast.

    In bfloat16 its processes exchange tensors of different dtypes where one of them has no rows,
    and without running statistics it refuses its own counts.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalises [rows, channels, ...]."""
        if not self.training or input.dtype.itemsize >= 4:
            return super().forward(input)
        return super().forward(input.float()).to(input.dtype)


def call_by_stream(
    modules: Sequence[Callable[..., Tensor]],
    sizes: Sequence[int],
    inputs: Sequence[Sequence[Tensor]],
    present: Tensor | None = None,
) -> list[Tensor]:
    """Calls one module per view on each stream's rows separately; returns a tensor per view.

    Labelled and unlabelled rows are drawn differently, so batch norm sees each alone, as in
    HeroCon's code (on Scene, statistics of both together cost more than ten points of F1).

    Modules may be the same. `sizes` are the rows of each stream, in order; `inputs` are the
    arguments of each view's module, tensors [rows, ...]. A module sees only the rows with its view
    in `present`, [rows, views], None for all; the result is zeros for the others.
    """
    calls, rows_of_views = [], []
    for view, (module, arguments) in enumerate(zip(modules, inputs, strict=True)):
        counts, rows = list(sizes), None
        if present is not None:
            rows = present[:, view].nonzero()[:, 0]
            counts = [int(stream.sum()) for stream in torch.split(present[:, view], counts)]
            arguments = [x[rows] for x in arguments]
        calls += [
            partial(module, *of_stream)
            for of_stream in zip(*(torch.split(x, counts) for x in arguments), strict=True)
        ]
        rows_of_views.append(rows)
    # A compiled graph cannot pause at a norm for the other calls.
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
    outputs = [call() for call in calls] if compiled else side_by_side(calls)
    views = [torch.cat(outputs[i : i + len(sizes)]) for i in range(0, len(outputs), len(sizes))]
    return [
        x if rows is None else x.new_zeros(len(inputs[0][0]), *x.shape[1:]).index_copy(0, rows, x)
        for x, rows in zip(views, rows_of_views, strict=True)
    ]


def side_by_side(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Returns the results of independent calls, such as those of the encoders of several views.

    With several processes the calls take turns on one thread, each up to its next batch norm, where
    the statistics of all are exchanged in one message; backward does the same with gradients. Every
    process must make the same calls in the same order.
    """
    if len(calls) == 1 or world_size() == 1:
        return [call() for call in calls]
    branches = [_Branch(call) for call in calls]
    # Of a branch that is not done, its norm call and the function that runs such calls jointly.
    results = [branch.switch() for branch in branches]
    while waiting := [i for i, branch in enumerate(branches) if not branch.dead]:
        run_batch = results[waiting[0]][1]
        for i, output in zip(waiting, run_batch([results[i][0] for i in waiting]), strict=True):
            results[i] = branches[i].switch(output)
    return results


class _Branch(greenlet):  # type: ignore[misc]
    """A call of `side_by_side`, which pauses at its batch norms."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(call)
        self.state, self.gr_context = _thread_state(), copy_context()


def _thread_state() -> tuple[object, ...]:
    """Returns the state of the thread that a branch must not leave changed while others run."""
    autocast = [
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    ]
    checkpointed = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), checkpointed, *autocast


def _run_jointly(call: NormCall, run_batch: Callable[[list[NormCall]], Sequence[Tensor]]) -> Tensor:
    """Returns a norm's output; `run_batch` gets the calls of all waiting branches, or it alone."""
    current = getcurrent()
    if isinstance(current, _Branch) and current.state == _thread_state():
        output: Tensor = current.parent.switch((call, run_batch))
        return output
    return run_batch([call])[0]


def _normalise(calls: list[NormCall]) -> list[Tensor]:
    """Normalises by the rows of all processes, and updates the running statistics."""
    arguments: list[Any] = []
    for norm, x in calls:
        assert norm.running_mean is not None  # see `synchronise`
        weight = torch.ones_like(norm.running_mean) if norm.weight is None else norm.weight
        bias = torch.zeros_like(weight) if norm.bias is None else norm.bias
        arguments += x, weight, bias, norm.eps
    results = _Normalise.apply(*arguments)  # type: ignore[no-untyped-call]
    moments = _chunks(3, results[len(calls) :])
    for (norm, _), (mean, variance, count) in zip(calls, moments, strict=True):
        if norm.track_running_stats and count > 1:  # a view may be in no row of a batch
            assert norm.running_mean is not None and norm.running_var is not None
            assert norm.num_batches_tracked is not None and norm.momentum is not None
            with torch.no_grad():
                norm.num_batches_tracked.add_(1)
                norm.running_mean.lerp_(mean, norm.momentum)
                norm.running_var.lerp_(variance * count / (count - 1), norm.momentum)
    return list(results[: len(calls)])


class _Normalise(torch.autograd.Function):
    """Several batch norms over all processes' rows, by PyTorch's kernels and one exchange each way.

    Takes an input, a weight, a bias and an epsilon for each norm; returns all outputs, then a mean,
    a variance and the number of values per channel for each.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        moments: list[Tensor] = []
        for x, *_ in _chunks(4, arguments):
            channels = x.shape[1]
            mean = variance = x.new_zeros(channels)
            if x.numel():
                mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
            moments += x.new_tensor([x.numel() / max(channels, 1)]), mean, variance
        gathered = torch.split(gather_stacked(torch.cat(moments)), [len(m) for m in moments], 1)
        outputs, statistics, saved = [list[Tensor]() for _ in range(3)]
        for (x, weight, bias, eps), (counts, means, variances) in zip(
            _chunks(4, arguments), _chunks(3, gathered), strict=True
        ):
            count = counts.sum().clamp(min=1)
            mean = (counts * means).sum(0) / count
            variance = (counts * (variances + (means - mean).square())).sum(0) / count
            scale = torch.rsqrt(variance + eps)
            outputs.append(functional.batch_norm(x, mean, variance, weight, bias, eps=eps))
            statistics += mean, variance, count
            saved += x, weight * scale, mean, scale, count
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*statistics)
        return *outputs, *statistics

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved, local_grads = _chunks(5, ctx.saved_tensors), list[Tensor]()
        for (x, slope, mean, scale, _), grad in zip(saved, grads, strict=False):
            grad_weight = grad_bias = torch.zeros_like(slope)
            if x.numel():
                _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                    grad, x, slope, None, None, mean, scale, True, 0.0, [False, True, True]
                )
            local_grads += grad_weight, grad_bias
        sums = torch.split(
            sum_over_processes(torch.cat(local_grads)), [len(g) for g in local_grads]
        )
        result: list[Tensor | None] = []
        for (x, slope, mean, scale, count), grad, (sum_weight, sum_bias), local in zip(
            saved, grads, _chunks(2, sums), _chunks(2, local_grads), strict=False
        ):
            # dx = slope (dy - mean(dy) - xhat mean(dy xhat)), xhat = (x - mean) scale
            shape = [1, -1] + [1] * (x.dim() - 2)
            factor = slope * scale * sum_weight / count
            grad_x = torch.addcmul(
                (mean * factor - slope * sum_bias / count).view(shape), x, -factor.view(shape)
            )
            result += grad_x.addcmul_(grad, slope.view(shape)), *local, None
        return tuple(result)


def _chunks(length: int, items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[i : i + length] for i in range(0, len(items), length)]


def has_norm(model: nn.Module) -> bool:
    """Returns whether the model has batch norm in training mode, which mixes rows."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def synchronise(model: nn.Module) -> None:
    """Replaces the model's batch norms by ones over all processes, in place; parameters stay.

    They are `GpuBatchNorm` on GPUs, else `GlobalBatchNorm`. With one process nothing changes.
    """
    if world_size() == 1:
        return
    replaced: dict[object, nn.Module] = {}  # a norm may be a part of several modules
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in replaced:
                setattr(module, name, replaced[child])
            elif isinstance(child, _BatchNorm) and child.training:  # and not frozen
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
                norm.to(child.running_mean)
                norm.weight, norm.bias = child.weight, child.bias  # with `rate_share`, or frozen
                replaced[child] = norm
                setattr(module, name, norm)
