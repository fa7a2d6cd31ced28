"""Backward passes written by hand: they have a first derivative, and refuse a second."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class SecondDerivativeError(RuntimeError):
    """A gradient was asked for with `create_graph=True`, and has no derivative of its own."""


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the `backward` of a `torch.autograd.Function` that cannot be differentiated.

    torch's `once_differentiable` alone lets a wrong second derivative pass: where the incoming
    gradient needs none, as that of a loss does not, what it returns counts as a constant.

    Raises:
        SecondDerivativeError: in backward, if it is called with `create_graph=True`.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise SecondDerivativeError(
                "a loss was differentiated with create_graph=True, but Heron computes its "
                "gradient by hand, without a graph; use backward() or grad() without "
                "create_graph, or, for a penalty on the gradient, compute the loss of a small "
                "batch in plain torch"
            )
        return once(ctx, *gradients)

    return checked
