"""Optimisers, and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from heron.experiment.options import Optim


class Lars(SGD):
    """SGD whose step in each parameter is bounded by that parameter's own length (LARC).

    Layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, arXiv:1708.03888) in the
    clipping form of NVIDIA's LARC, which HeroCon used: the rate of a parameter is
    min(lr, trust * |w| / (|g| + weight_decay * |w|)); a parameter or gradient of length zero
    keeps lr.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.02,
        exclude_1d: bool = False,
    ) -> None:
        """See torch.optim.SGD; `trust_coefficient` bounds a step's share of the parameter's length.

        With `exclude_1d`, biases and batch norm's parameters take SGD's step, without decay.
        """
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.trust_coefficient = trust_coefficient
        self.exclude_1d = exclude_1d

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Scales each gradient in place, then takes SGD's step: one `backward` serves one step."""
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            scaled = [
                p
                for p in group["params"]
                if p.grad is not None and not (self.exclude_1d and p.dim() == 1)
            ]
            self._scale(scaled, group["lr"], group["weight_decay"])
            group["weight_decay"] = 0.0  # already inside the scaled gradient
        result = super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        return result

    def _scale(self, params: list[Tensor], lr: float, decay: float) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        if not params or any(isinstance(p, DTensor) for p in params):  # whose norms do not stack
            for p, grad in zip(params, grads, strict=True):
                factor = self._factor(p.norm(), grad.norm(), lr, decay)
                grad.add_(p, alpha=decay).mul_(factor)
            return
        # A few kernels for all parameters, where one by one ten each would be launched.
        length, slope = (torch.stack(torch._foreach_norm(xs)) for xs in (params, grads))
        factors = self._factor(length, slope, lr, decay)
        torch._foreach_add_(grads, params, alpha=decay)
        torch._foreach_mul_(grads, factors.unbind())

    def _factor(self, length: Tensor, slope: Tensor, lr: float, decay: float) -> Tensor:
        bound = self.trust_coefficient * length / (slope + decay * length + 1e-8)
        usable = (length > 0) & (slope > 0)
        return torch.where(usable, (bound / lr).clamp(max=1.0), 1.0)


def build_optimizer(config: Optim, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Returns the optimiser of a configuration; Adam's decay is L2, AdamW's is decoupled.

    Frozen parameters are left out. Those with a `rate_share` (see `models.networks`) are in a group
    with that share of the learning rate: see `training.strategy.set_rate`.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    fused = None  # on a GPU one kernel for all parameters; elsewhere torch's own choice
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(getattr(parameter, "rate_share", 1.0), []).append(parameter)
            fused = True if parameter.is_cuda else fused
    params = [{"params": group, "rate_share": share} for share, group in groups.items()]
    lr, decay = config.lr, config.weight_decay
    if config.kind == "adam":
        return Adam(params, lr=lr, weight_decay=decay, fused=fused)
    if config.kind == "adamw":
        return AdamW(params, lr=lr, weight_decay=decay, fused=fused)
    if config.kind == "sgd":
        return SGD(params, lr=lr, momentum=config.momentum, weight_decay=decay)
    trust, exclude = config.trust_coefficient, config.lars_exclude_1d
    return Lars(params, lr, config.momentum, decay, trust, exclude)


def learning_rate(config: Optim, epoch: float, epochs: float) -> float:
    """Returns the learning rate after `epoch` of a run's `epochs`, which may be fractions.

    It rises linearly over `warmup_epochs`; then it is constant, half a cosine down to 0, or a step
    down by `gamma` at each of `milestones`.
    """
    if epoch < config.warmup_epochs:
        return config.lr * (epoch + 1e-8) / config.warmup_epochs
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "step":
        return config.lr * config.gamma ** sum(epoch >= m for m in config.milestones)
    progress = (epoch - config.warmup_epochs) / max(epochs - config.warmup_epochs, 1e-8)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
