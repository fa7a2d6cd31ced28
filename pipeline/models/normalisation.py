"""Batch norm over the global batch, so that P processes normalise as one does."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.collectives import differentiable_sum, world_size


class GlobalBatchNorm(_BatchNorm):
    """Batch norm whose training statistics are those of all processes' rows, on any device.

    `torch.nn.SyncBatchNorm` refuses CPU tensors. This one sums count, sum and centred squares
    over processes, differentiably; the second sum is taken about the global mean, so that its
    variance is as exact as a single process's.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Any input with channels in the second place will do."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [rows, channels, ...]."""
        if not self.training or world_size() == 1:
            return super().forward(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        own = input.new_tensor([input.numel() / max(input.shape[1], 1)])
        sums = differentiable_sum(torch.cat([input.sum(axes), own]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = input - mean.view(shape)
        variance = differentiable_sum(centred.square().sum(axes)) / count
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None and self.momentum is not None
                self.num_batches_tracked.add_(1)
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scaled = centred * torch.rsqrt(variance + self.eps).view(shape)
        return scaled * self.weight.view(shape) + self.bias.view(shape)


def synchronise(model: nn.Module) -> None:
    """Put batch norm over all processes wherever the model has batch norm, in place.

    On GPUs torch's own fused SyncBatchNorm; elsewhere `GlobalBatchNorm`. With one process nothing
    is changed.
    """
    if world_size() == 1:
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm):
                kind = nn.SyncBatchNorm if child.weight.is_cuda else GlobalBatchNorm
                norm = kind(child.num_features, child.eps, child.momentum or 0.1)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm.to(child.weight))
