"""Backward passes written by hand: they have a first derivative, and refuse a second.

`one_operation` is a loss with its gradient as one operation of torch, which `torch.compile` takes
without looking inside.
"""

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Modules by their id, for `one_operation`: an operation takes tensors and constants alone.
OPERATIONS: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


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


def one_operation(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Returns the value of a loss module of `OPERATIONS`, a scalar, as one operation.

    Its value and gradients are computed together, as where nothing is compiled. The value is
    float64 if a tensor is, else float32. Arguments are tensors, lists of them, and constants.
    """
    tensors: list[Tensor] = []
    words = ", ".join([f"'{name}': {_written(x, tensors)}" for name, x in kwargs.items()])
    call = f"({_written(list(args), tensors)}, {{{words}}})"
    tensors += list(module.parameters())
    needed = [x.requires_grad and torch.is_grad_enabled() for x in tensors]
    value: Tensor = _operation(tensors, needed, id(module), call)[0]
    return value


def _written(x: Any, tensors: list[Tensor]) -> str:
    """Returns an argument as a literal with dots for its tensors, which it appends to `tensors`."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return "..."
    if isinstance(x, list | tuple):
        return "[" + ", ".join([_written(y, tensors) for y in x]) + "]"
    return repr(x)


def _read(x: Any, tensors: list[Tensor]) -> Any:
    """Puts the first of `tensors` in the place of dots, and takes it away."""
    if isinstance(x, list | tuple):
        return [_read(y, tensors) for y in x]
    if isinstance(x, dict):
        return {name: _read(y, tensors) for name, y in x.items()}
    return tensors.pop(0) if x is ... else x


def _value_type(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


@torch.library.custom_op("heron::loss", mutates_args=())
def _operation(tensors: list[Tensor], needed: list[bool], number: int, call: str) -> list[Tensor]:
    """Returns the value, and the gradient of each tensor, empty where none is `needed`."""
    module, keys = OPERATIONS[number], torch._C.DispatchKey
    own = list(module.parameters())
    given = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    given[len(given) - len(own) :] = own
    args, kwargs = _read(ast.literal_eval(call), list(given))
    # torch computes operations below its autograd, which a gradient within one needs.
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
        torch.set_grad_enabled(any(needed)),
    ):
        value = module(*args, **kwargs)
        wanted = [x for x, is_needed in zip(given, needed, strict=True) if is_needed]
        found = torch.autograd.grad(value, wanted, allow_unused=True) if wanted else ()
    gradients = iter(found)
    results = [value.detach().to(_value_type(tensors), copy=True)]
    for x, is_needed in zip(given, needed, strict=True):
        gradient = next(gradients) if is_needed else x.new_empty(0)
        if gradient is None:
            gradient = torch.zeros_like(x)
        results.append(gradient.detach().clone(memory_format=torch.contiguous_format))
    return results


@_operation.register_fake
def _(tensors: list[Tensor], needed: list[bool], number: int, call: str) -> list[Tensor]:
    value = tensors[0].new_empty((), dtype=_value_type(tensors))
    by_tensor = zip(tensors, needed, strict=True)
    return [value, *(x.new_empty(x.shape if is_needed else 0) for x, is_needed in by_tensor)]


def _keep(ctx: Any, inputs: Any, output: Sequence[Tensor]) -> None:
    ctx.needed = inputs[1]
    ctx.save_for_backward(*output[1:])


def _scale(ctx: Any, grads: Sequence[Tensor]) -> tuple[list[Tensor | None], None, None, None]:
    by_tensor = zip(ctx.saved_tensors, ctx.needed, strict=True)
    scaled = [(grads[0] * x).to(x.dtype) if is_needed else None for x, is_needed in by_tensor]
    return scaled, None, None, None


_operation.register_autograd(_scale, setup_context=_keep)
