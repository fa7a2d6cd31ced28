"""The block loop under every contrastive term: anchors against keys, a strip of rows at a time.

A contrastive term is a sum over anchors of a function of that anchor's row of logits
(``anchors @ keys.T``). Holding all rows at once costs N x N; this engine holds one strip. Because
the loss is a scalar and an anchor's row lives whole inside its strip, the gradient of a strip can
be taken as soon as its loss is known, so each strip is visited once, its logits are computed once
(where recomputation in a backward pass would compute them twice), and what is stored for the
backward pass is the gradient of the inputs: linear in the batch.

A term supplies a *rule*: strip of logits -> (its share of the loss, the gradient of that share).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# A strip's share of the loss, d loss / d logits (one per head), d loss / d per-anchor tensors.
# The rule may use the logits' own memory for their gradient.
RuleResult = tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]
Rule = Callable[[slice, Sequence[Tensor], Sequence[Tensor]], RuleResult]

# Elements of one strip of logits on the CPU: 2 M float32 = 8 MiB, which the last-level cache keeps
# between the product that writes a strip and the two that read it. On a GPU a strip must fill the
# device instead.
STRIP_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
MIN_STRIP_ROWS = 32  # fewer rows make the products too thin to run near the machine's rate


def unit(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """Scale rows to length one; a zero row stays zero and has a finite gradient.

    Args:
        x: vectors in any float type.

    Returns:
        Vectors of length 1 (or 0) in x's type, in at least float32.
    """
    x = x if x.dtype == torch.float64 else x.float()
    length = x.norm(dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1.0)


def working_dtype(dtype: torch.dtype, tau: float) -> torch.dtype:
    """The type in which exponentials of cos / tau are taken without a running maximum.

    ``|cos| <= 1``, so every ratio of exponentials lies within exp(+-2 / tau). Up to 2 / tau = 60
    float32 holds them, sums over a million keys included; colder temperatures need float64.

    Args:
        dtype: the type of the embeddings.
        tau: temperature, > 0.

    Returns:
        float32 or float64.

    Raises:
        ValueError: tau is not a positive number, or below 0.003.
    """
    if not tau > 0:
        raise ValueError(f"temperature tau is {tau}; expected a number > 0, e.g. 0.1")
    if 2 / tau > 700:  # e^709 is the largest number there is
        raise ValueError(
            f"temperature tau is {tau:g}, divided by 1 + beta where negatives are hardened; "
            "expected at least 0.003: exp(2 / tau) has no float64 below it"
        )
    return torch.float64 if dtype == torch.float64 or 2 / tau > 60 else torch.float32


def strip_elements(device: torch.device) -> int:
    """Logits that a strip holds, about."""
    return STRIP_ELEMENTS.get(device.type, STRIP_ELEMENTS["cuda"])


def strips(n_anchors: int, n_keys: int, device: torch.device, part: int = 1) -> Iterator[slice]:
    """Cut the anchors into strips whose logits hold about ``STRIP_ELEMENTS / part`` elements."""
    step = max(MIN_STRIP_ROWS, strip_elements(device) // part // max(n_keys, 1))
    for start in range(0, n_anchors, step):
        yield slice(start, min(start + step, n_anchors))


def triangle(n_anchors: int, n_keys: int, device: torch.device) -> Iterator[slice]:
    """Strips whose keys begin at their first anchor, all of about as many logits."""
    start = 0
    while start < n_anchors:
        step = max(MIN_STRIP_ROWS, strip_elements(device) // max(n_keys - start, 1))
        yield slice(start, start := min(start + step, n_anchors))


def class_numbers(label: Tensor, batch: int, term: str) -> tuple[Int[Tensor, " batch"], int]:
    """Classes as numbers from 0 on, and how many there are.

    Args:
        label: one whole number a sample.
        batch: samples there are.
        term: the term that asks, for the message.

    Raises:
        ValueError: the labels are of another shape, or no whole numbers.
    """
    if label.shape != (batch,) or label.is_floating_point() or label.is_complex():
        raise ValueError(
            f"{term}: labels are {label.dtype} {tuple(label.shape)}; expected one whole number a "
            f"sample, [{batch}]; take argmax(1) of one-hot labels"
        )
    names, number = torch.unique(label, return_inverse=True)
    return number, len(names)


class _Blockwise(torch.autograd.Function):
    """Loss and gradients of all strips in one pass; backward only scales what forward stored."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rule: Rule,
        part: int,
        n_heads: int,
        *tensors: Tensor,
    ) -> Tensor:
        anchors, keys = tensors[:n_heads], tensors[n_heads : 2 * n_heads]
        per_anchor = tensors[2 * n_heads :]
        n_anchors, n_keys = anchors[0].shape[0], keys[0].shape[0]
        wanted: Sequence[bool] = ctx.needs_input_grad[3:]  # type: ignore[attr-defined]
        nothing = anchors[0].new_empty(0)  # a queue of keys takes no gradient, and no memory for it
        grads = [
            torch.zeros_like(t) if w else nothing for t, w in zip(tensors, wanted, strict=True)
        ]
        d_anchors, d_keys = grads[:n_heads], grads[n_heads : 2 * n_heads]
        d_per_anchor = grads[2 * n_heads :]
        total = torch.zeros((), dtype=torch.float64, device=anchors[0].device)
        buffers: list[Tensor] = []
        for rows in strips(n_anchors, n_keys, anchors[0].device, part):
            if not buffers:  # the first strip is the longest
                buffers = [a.new_empty(rows.stop, n_keys) for a in anchors]
            count = rows.stop - rows.start
            logits = [
                torch.mm(a[rows], k.T, out=buffer[:count])
                for a, k, buffer in zip(anchors, keys, buffers, strict=True)
            ]
            loss, d_logits, d_extra = rule(rows, logits, [t[rows] for t in per_anchor])
            total += loss
            for h in range(n_heads):
                if wanted[h]:
                    torch.mm(d_logits[h], keys[h], out=d_anchors[h][rows])
                if wanted[n_heads + h]:
                    d_keys[h].addmm_(d_logits[h].T, anchors[h][rows])
            for out, value in zip(d_per_anchor, d_extra, strict=True):
                if out is not nothing:
                    out[rows] = value
        ctx.save_for_backward(*grads)
        return total.to(anchors[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        wanted: Sequence[bool] = ctx.needs_input_grad[3:]  # type: ignore[attr-defined]
        found = (g * grad if w else None for g, w in zip(saved, wanted, strict=True))
        return None, None, None, *found


def blockwise(
    rule: Rule,
    anchors: Sequence[Float[Tensor, "anchors _"]],
    keys: Sequence[Float[Tensor, "keys _"]],
    per_anchor: Sequence[Num[Tensor, "anchors ..."]] = (),
    part: int = 1,
) -> Float[Tensor, ""]:
    """Sum a rule over all anchors with memory linear in anchors + keys.

    Several heads share the anchors and keys but not the vectors: head h has the logits
    ``anchors[h] @ keys[h].T``, and the rule sees all heads of a strip together.

    Args:
        rule: the term's share of a strip, with its gradient.
        anchors: one tensor a head, in the working dtype, with 1 / tau already inside.
        keys: one tensor a head.
        per_anchor: tensors of which the rule needs the strip's rows; differentiable.
        part: strips hold this part of the usual number of logits.

    Returns:
        The loss, differentiable once with respect to anchors, keys and per_anchor.
    """
    if anchors[0].shape[0] == 0:  # a process without a share still takes part in the gradient
        return sum((t.sum() * 0 for t in (*anchors, *keys)), anchors[0].new_zeros(()))
    result: Tensor = _Blockwise.apply(  # type: ignore[no-untyped-call]
        rule, part, len(anchors), *anchors, *keys, *per_anchor
    )
    return result
