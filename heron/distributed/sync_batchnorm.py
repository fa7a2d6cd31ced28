"""Batch norm over the global batch: P processes normalise as one does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from heron.base.errors import TrainingError
from heron.distributed.collectives import gather_stacked, sum_over_processes, world_size
from heron.distributed.derivatives import first_derivative


class GlobalBatchNorm(_BatchNorm):
    """Batch norm whose training statistics are those of all processes' rows, on any device.

    `torch.nn.SyncBatchNorm` refuses CPU tensors. This one combines the processes' counts, means and
    variances (Chan, Golub and LeVeque 1983), so that its variance is as exact as a single
    process's. Under autocast it computes in float32.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Accepts any input whose second dimension is the channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises [rows, channels, ...]."""
        if not self.training or world_size() == 1:
            return super().forward(input)
        assert self.running_mean is not None  # see `synchronise`
        weight = torch.ones_like(self.running_mean) if self.weight is None else self.weight
        bias = torch.zeros_like(weight) if self.bias is None else self.bias
        x = input.float() if input.dtype.itemsize < 4 else input
        output: Tensor
        output, mean, variance, count = _Normalise.apply(x, weight, bias, self.eps)  # type: ignore[no-untyped-call]
        if self.track_running_stats and count > 1:  # a view may be in no row of a batch
            self._update(mean, variance * count / (count - 1))
        return output.to(input.dtype)

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


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
    in `present`, [rows, views], None for all; the result is zeros for the others. On a GPU, where
    launches are the cost of small batches, modules without batch norm see all rows at once.
    """
    if present is None and prefers_few_calls(inputs[0][0].device):
        return call_together(modules, sizes, inputs)
    outputs: list[Tensor] = []
    rows_of_views = []
    for view, (module, arguments) in enumerate(zip(modules, inputs, strict=True)):
        counts, rows = list(sizes), None
        if present is not None:
            rows = present[:, view].nonzero()[:, 0]
            counts = [int(stream.sum()) for stream in torch.split(present[:, view], counts)]
            arguments = [x[rows] for x in arguments]
        outputs += [
            module(*of_stream)
            for of_stream in zip(*(torch.split(x, counts) for x in arguments), strict=True)
        ]
        rows_of_views.append(rows)
    views = [torch.cat(outputs[i : i + len(sizes)]) for i in range(0, len(outputs), len(sizes))]
    return [
        x if rows is None else x.new_zeros(len(inputs[0][0]), *x.shape[1:]).index_copy(0, rows, x)
        for x, rows in zip(views, rows_of_views, strict=True)
    ]


def prefers_few_calls(device: torch.device) -> bool:
    """Whether one call of many rows is faster than a call for each stream and view."""
    return device.type == "cuda"


def call_together(
    modules: Sequence[Callable[..., Tensor]],
    sizes: Sequence[int],
    inputs: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Calls modules as `call_by_stream`, but each without batch norm once, on all of its views.

    No layer of such a module mixes rows, so that only the rounding may differ.
    """
    views_of: dict[tuple[Any, ...], list[int]] = {}
    # Of a bound method, whose own identity changes with each look, the module that it belongs to.
    owners: list[Any] = [getattr(module, "__self__", module) for module in modules]
    for view, arguments in enumerate(inputs):
        shapes = [x.shape for x in arguments]
        alone = view if has_norm(owners[view]) else -1
        views_of.setdefault((id(owners[view]), alone, *shapes), []).append(view)
    outputs: dict[int, Tensor] = {}
    for (_, alone, *_), views in views_of.items():
        columns = zip(*(inputs[view] for view in views), strict=True)
        joined = [torch.cat(column) for column in columns]
        counts = list(sizes) if alone >= 0 else [len(joined[0])]
        split = zip(*(torch.split(x, counts) for x in joined), strict=True)
        output = torch.cat([modules[views[0]](*rows) for rows in split])
        outputs |= dict(zip(views, output.chunk(len(views)), strict=True))
    return [outputs[view] for view in range(len(inputs))]


class _Normalise(torch.autograd.Function):
    """A batch norm over all processes' rows, by PyTorch's kernels and one exchange each way.

    Returns the output, then mean, variance and the number of values per channel.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = x.shape[1]
        mean = variance = x.new_zeros(channels)
        if x.numel():
            mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        own = torch.cat([x.new_tensor([x.numel() / max(channels, 1)]), mean, variance])
        counts, means, variances = torch.split(gather_stacked(own), [1, channels, channels], 1)
        count = counts.sum().clamp(min=1)
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight * scale, mean, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        output = functional.batch_norm(x, mean, variance, weight, bias, eps=eps)
        return output, mean, variance, count

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        x, slope, mean, scale, count = ctx.saved_tensors
        grad_weight = grad_bias = torch.zeros_like(slope)
        if x.numel():
            _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad, x, slope, None, None, mean, scale, True, 0.0, [False, True, True]
            )
        summed = sum_over_processes(torch.cat([grad_weight, grad_bias]))
        sum_weight, sum_bias = torch.split(summed, len(slope))
        # dx = slope (dy - mean(dy) - xhat mean(dy xhat)), xhat = (x - mean) scale
        shape = [1, -1] + [1] * (x.dim() - 2)
        factor = slope * scale * sum_weight / count
        grad_x = torch.addcmul(
            (mean * factor - slope * sum_bias / count).view(shape), x, -factor.view(shape)
        )
        return grad_x.addcmul_(grad, slope.view(shape)), grad_weight, grad_bias, None


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
                        f"{name} is {type(child).__name__}, a batch norm that does more, so each "
                        "process would see only its own rows; use torch's own, one process, or a "
                        "frozen network"
                    )
                if child.running_mean is None or not child.momentum:
                    raise TrainingError(
                        f"{name} is {child}; it needs running statistics and a momentum to be "
                        "synchronised over processes"
                    )
                kind = GpuBatchNorm if child.running_mean.is_cuda else GlobalBatchNorm
                norm = kind(child.num_features, child.eps, child.momentum, child.affine)
                norm.load_state_dict(child.state_dict())
                norm.to(child.running_mean)
                norm.weight, norm.bias = child.weight, child.bias  # with `rate_share`, or frozen
                replaced[child] = norm
                setattr(module, name, norm)
