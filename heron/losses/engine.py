"""The block loop under every contrastive term: anchors against keys, a strip of rows at a time.

A contrastive term is a sum over anchors of a function of the anchor's row of logits
(``anchors @ keys.T``). All rows at once take N x N memory; this engine holds one strip of whole
rows, and takes its gradient together with its loss. So logits are computed once, and only the
gradient of the inputs, linear in the batch, is stored for backward.

A term supplies a *rule*: strip of logits -> (its share of the loss, the gradient of that share).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int, Num, Shaped
from torch import Tensor
from torch.autograd.function import FunctionCtx

from heron.distributed.derivatives import first_derivative
from heron.losses import fused, products

# A strip's share of the loss, d loss / d logits (one per head), d loss / d per-anchor tensors.
# The rule may use the logits' own memory for their gradient.
RuleResult = tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]
Rule = Callable[[slice, Sequence[Tensor], Sequence[Tensor]], RuleResult]

# Elements of one strip of logits on the CPU: 2 M float32 = 8 MiB, which the last-level cache keeps
# between the product that writes a strip and the two that read it. On a GPU a strip must fill the
# device instead.
STRIP_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
MIN_STRIP_ROWS = 32  # fewer rows make the products too thin to run near the machine's rate


class _Unit(torch.autograd.Function):
    """Its gradient is taken by hand: autograd would launch fourteen kernels for it."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, dtype: torch.dtype, tau: float | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        scaled = None
        if takes_kernels(x):
            rows, scaled, length = fused.unit_rows(x.flatten(0, -2), tau or 1.0)
            vectors, scaled = rows.view_as(x), scaled.view_as(x)
        else:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            length.masked_fill_(length == 0, 1.0)
            vectors = x / length
        ctx.save_for_backward(vectors, length)
        ctx.tau, ctx.kernels = tau, scaled is not None  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        result = vectors.to(dtype)
        if tau is None:
            return result
        return result, result / tau if scaled is None or dtype != x.dtype else scaled

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        vectors, length = ctx.saved_tensors  # type: ignore[attr-defined]
        (grad, of_scaled), tau = (*grads, None)[:2], ctx.tau or 1.0  # type: ignore[attr-defined]
        if grad is None and of_scaled is None:
            return None, None, None
        if ctx.kernels:  # type: ignore[attr-defined]
            flat = [
                None if x is None else x.to(vectors.dtype).flatten(0, -2) for x in (grad, of_scaled)
            ]
            x = fused.unit_gradient((flat[0], flat[1]), vectors.flatten(0, -2), length, tau)
            return x.view_as(vectors), None, None
        if of_scaled is not None:
            share = 1 / tau
            grad = of_scaled * share if grad is None else torch.add(grad, of_scaled, alpha=share)
        assert grad is not None
        grad = grad.to(vectors.dtype)
        along = (grad * vectors).sum(-1, keepdim=True)
        return torch.addcmul(grad, vectors, along, value=-1).div_(length), None, None


def takes_kernels(x: Tensor) -> bool:
    """Returns whether kernels compute `unit` of some rows."""
    if x.dtype != torch.float32 or not x.numel() or x.shape[-1] > fused.WIDEST or x.dim() < 2:
        return False
    return fused.enabled(x.device) and fused.trusted("unit", x.device)


def _at_least_float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def unit(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """Scales rows to unit length in at least float32; zero rows stay zero (finite gradient)."""
    x = _at_least_float(x)
    vectors: Tensor = _Unit.apply(x, x.dtype, None)  # type: ignore[no-untyped-call]
    return vectors


def unit_and_scaled(
    views: Sequence[Float[Tensor, "batch dim"]], tau: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "views batch dim"], Float[Tensor, "views batch dim"]]:
    """Returns the views' rows as unit vectors, `unit`, and these divided by tau, in a dtype."""
    stacked = views[0][None] if len(views) == 1 else torch.stack(list(views))
    both: tuple[Tensor, Tensor] = _Unit.apply(_at_least_float(stacked), dtype, tau)  # type: ignore[no-untyped-call]
    return both


def sum_of(shares: Sequence[Tensor]) -> Float[Tensor, ""]:
    """Returns the sum of scalars."""
    return shares[0] if len(shares) == 1 else torch.stack(list(shares)).sum()


def working_dtype(dtype: torch.dtype, tau: float) -> torch.dtype:
    """Returns the type that holds exponentials of cos / tau without a running maximum.

    ``|cos| <= 1``, so every ratio of exponentials lies within exp(+-2 / tau). Up to 2 / tau = 60
    float32 holds them, and sums of a million of them; lower temperatures need float64. Raises
    ValueError if tau is not a positive number, or below 0.003.
    """
    if not tau > 0:
        raise ValueError(f"temperature tau must be above 0, e.g. 0.1, got {tau}")
    if 2 / tau > 700:  # e^709 is the largest number there is
        raise ValueError(
            "temperature tau, divided by 1 + beta where negatives are hardened, must be at least "
            f"0.003, because exp(2 / tau) has no float64 below it, got {tau:g}"
        )
    return torch.float64 if dtype == torch.float64 or 2 / tau > 60 else torch.float32


def strip_elements(device: torch.device) -> int:
    """Returns about how many logits a strip holds."""
    return STRIP_ELEMENTS.get(device.type, STRIP_ELEMENTS["cuda"])


def strips(
    n_anchors: int, n_keys: int, device: torch.device, *, triangular: bool = False
) -> Iterator[slice]:
    """Cuts the anchors into strips of about `STRIP_ELEMENTS` logits, all or from a diagonal on."""
    start = 0
    while start < n_anchors:
        width = max(n_keys - (start if triangular else 0), 1)
        step = max(MIN_STRIP_ROWS, strip_elements(device) // width)
        yield slice(start, start := min(start + step, n_anchors))


def mean_over(values: Tensor, count: int) -> Float[Tensor, ""]:
    """Returns the sum of values over a count, which is that of all processes' values."""
    return values.mean() if values.numel() == count else values.sum() / count


def group_numbers(values: Shaped[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Returns a number below n for each value, the number of smaller ones.

    `torch.unique` would let the host wait for the number of distinct values.
    """
    values = values.contiguous()  # or torch warns
    return torch.searchsorted(values.sort()[0], values)


def count_members(group: Int[Tensor, " n"], groups: int) -> Int[Tensor, " groups"]:
    """Returns the number of members of each group; `torch.bincount` would look for the largest."""
    return group.new_zeros(groups).index_add_(0, group, torch.ones_like(group))


def refuse_labels(
    find_wrong: Callable[[], Bool[Tensor, "rows ..."]], message: Callable[[int], str]
) -> None:
    """Raises ValueError with the message of the first row where anything is wrong.

    A run's labels were checked when its data were read: there nothing is computed to look.
    """
    if products.in_run() or not (wrong := find_wrong()).any():
        return
    raise ValueError(message(int(wrong.reshape(len(wrong), -1).any(1).nonzero()[0])))


def class_numbers(label: Tensor, batch: int, term: str) -> Int[Tensor, " batch"]:
    """Returns a number below `batch` for each sample, which it shares with its class alone.

    Raises ValueError, naming `term`, if the labels are not one whole number per sample.
    """
    if label.shape != (batch,) or label.is_floating_point() or label.is_complex():
        raise ValueError(
            f"{term}: labels must be one whole number per sample, [{batch}], got {label.dtype} "
            f"{tuple(label.shape)}; take argmax(1) of one-hot labels"
        )
    return group_numbers(label)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, computed: tuple[Tensor, Sequence[Tensor | None]], *tensors: Tensor
    ) -> Tensor:
        loss, gradients = computed
        ctx.save_for_backward(*gradients)  # type: ignore[arg-type]
        return loss

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        return None, *(None if x is None else x * grad for x in saved)


def with_gradients(
    loss: Tensor, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Float[Tensor, ""]:
    """Returns a loss that was computed together with its gradients, which backward only scales.

    None is the gradient of a tensor that needs none.
    """
    result: Tensor = _WithGradients.apply((loss, gradients), *tensors)  # type: ignore[no-untyped-call]
    return result


def blockwise(
    rule: Rule,
    anchors: Sequence[Float[Tensor, "anchors _"]],
    keys: Sequence[Float[Tensor, "keys _"]],
    per_anchor: Sequence[Num[Tensor, "anchors ..."]] = (),
) -> Float[Tensor, ""]:
    """Sums a rule over all anchors, in memory linear in anchors + keys.

    Heads have the same anchors and keys, but each has vectors of its own, in the working dtype and
    with 1 / tau inside the anchors: head h has the logits ``anchors[h] @ keys[h].T``. The rule sees
    all heads of a strip together, and the strip's rows of `per_anchor`. The result is
    differentiable once with respect to anchors, keys and per_anchor.
    """
    n_anchors, n_keys, device = len(anchors[0]), len(keys[0]), anchors[0].device
    if n_anchors == 0:  # keeps the inputs in the autograd graph
        return sum((t.sum() * 0 for t in (*anchors, *keys)), anchors[0].new_zeros(()))
    d_anchors: list[Tensor | None] = [None] * len(anchors)
    d_keys: list[Tensor | None] = [None] * len(keys)
    losses, d_extras = [], []
    with torch.no_grad():
        buffers: list[Tensor] = []
        sides = [products.factors(a, k) for a, k in zip(anchors, keys, strict=True)]
        for rows in strips(n_anchors, n_keys, device):
            if not buffers:  # the first strip is the longest
                buffers = [a.new_empty(rows.stop, n_keys) for a in anchors]
            count = rows.stop - rows.start
            logits = [
                products.logits(a[rows], k, out=buffer[:count])
                for (a, k), buffer in zip(sides, buffers, strict=True)
            ]
            loss, d_logits, d_extra = rule(rows, logits, [t[rows] for t in per_anchor])
            losses.append(loss)
            d_extras.append(d_extra)
            for h, (a, k) in enumerate(sides):
                d = products.coefficients(d_logits[h], k)
                if anchors[h].requires_grad:
                    d_anchors[h] = products.accumulated(d_anchors[h], anchors[h], rows, d, k)
                if keys[h].requires_grad:  # what takes none, such as a queue, costs no memory
                    d_keys[h] = products.accumulated(d_keys[h], keys[h], slice(None), d.T, a[rows])
        total = losses[0] if len(losses) == 1 else torch.stack(losses).sum(dtype=torch.float64)
        d_per_anchor = [torch.cat(x) if len(x) > 1 else x[0] for x in zip(*d_extras, strict=True)]
    tensors, gradients = (*anchors, *keys, *per_anchor), (*d_anchors, *d_keys, *d_per_anchor)
    return with_gradients(total.to(anchors[0].dtype), tensors, gradients)
