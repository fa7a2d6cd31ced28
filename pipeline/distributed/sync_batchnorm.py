"""Batch norm over the global batch, so that P processes normalise as one does."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from heron.pipeline.config.errors import TrainingError
from heron.pipeline.distributed.collectives import stack, sum_over_processes, world_size


class GlobalBatchNorm(_BatchNorm):
    """Batch norm whose training statistics are those of all processes' rows, on any device.

    `torch.nn.SyncBatchNorm` refuses CPU tensors. This one joins the processes' counts, means and
    variances (Chan, Golub and LeVeque 1983), so that its variance is as exact as a single
    process's. Under autocast it computes in float32.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Any input with channels in the second place will do."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [rows, channels, ...]."""
        if not self.training or world_size() == 1:
            return super().forward(input)
        dtype, input = input.dtype, input.float() if input.dtype.itemsize < 4 else input
        assert self.running_mean is not None  # see `synchronise`
        weight = torch.ones_like(self.running_mean) if self.weight is None else self.weight
        bias = torch.zeros_like(weight) if self.bias is None else self.bias
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, self.eps
        )
        if self.track_running_stats and count > 1:  # no row of a batch may have the view
            assert self.running_var is not None
            assert self.num_batches_tracked is not None and self.momentum is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        normalised: Tensor = output.to(dtype)
        return normalised


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


class _Normalise(torch.autograd.Function):
    """Batch norm of all processes' rows: PyTorch's kernels for a process's own, two exchanges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        channels = x.shape[1]
        own = x.new_tensor([x.numel() / max(channels, 1)])
        mean = variance = x.new_zeros(channels)
        if x.numel():
            mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        parts = stack(torch.cat([own, mean, variance]))
        counts, means, variances = torch.split(parts, [1, channels, channels], 1)
        count = counts.sum().clamp(min=1)
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.mark_non_differentiable(mean, variance, count)
        output = functional.batch_norm(x, mean, variance, weight, bias, eps=eps)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        x, weight, mean, scale, count = ctx.saved_tensors
        of_weight = of_bias = torch.zeros_like(weight)
        if x.numel():
            _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, None, None, mean, scale, True, 0.0, [False, True, True]
            )
        means = sum_over_processes(torch.stack([of_weight, of_bias])) / count
        # dx = weight scale (dy - mean(dy) - xhat mean(dy xhat)), xhat = (x - mean) scale
        shape = [1, -1] + [1] * (x.dim() - 2)
        slope, turn = weight * scale, scale * means[0]
        of_x = torch.addcmul((mean * turn - means[1]).view(shape), x, -turn.view(shape))
        return of_x.add_(grad).mul_(slope.view(shape)), of_weight, of_bias, None


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
