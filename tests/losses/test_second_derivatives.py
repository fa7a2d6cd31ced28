"""Derivatives of a loss's gradient are right, or refused: never silently something else."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.workloads import TERMS, Draw
from heron import losses as h
from heron.distributed.collectives import gather, rank, with_local_gradient
from heron.distributed.derivatives import SecondDerivativeError
from heron.losses.named_terms import named_terms
from tests import ranks
from tests.losses.nets import CASES, CLASSES, DIM, Seen, wrong_labels

ROWS = 6
STEP = 1e-5  # of the differences, in float64
PLAIN = {  # computed by torch's own operations, which have every derivative
    *("Bce", "CrossEntropy", "Gce", "LUw", "Mlcl", "Mse", "UbExp", "UbLog", "Infograph", "Plnl"),
}
Loss = Callable[[Sequence[Tensor]], Tensor]


def seen(inputs: Sequence[Tensor]) -> Seen:
    """What a loss may ask for, made of these inputs."""
    source = torch.Generator().manual_seed(1)
    one, two, logits, second, keys = inputs
    rows = torch.arange(ROWS)
    classes, paths = rows % CLASSES, torch.stack([rows % CLASSES // 2, rows % CLASSES, rows % 2], 1)
    x = [torch.randn(ROWS, 6, generator=source, dtype=torch.float64) for _ in range(2)]
    labels = (torch.randn(ROWS, CLASSES, generator=source) > 0).double()
    wrong = wrong_labels()[:ROWS].double()
    return Seen(x, [one, two], logits, second, keys, labels, classes, wrong, paths, rows, 0.5)


def drawn(seed: int = 0) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    widths = (DIM, DIM, CLASSES, CLASSES, DIM)
    return [
        torch.randn(ROWS, width, generator=source, dtype=torch.float64, requires_grad=True)
        for width in widths
    ]


def with_constants(loss: Loss, constants: list[Tensor]) -> Loss:
    """The loss, in which what it takes as a constant (a pseudo-label, say) is one.

    The first call records what `detach` returns, the others return that.
    """

    def held(inputs: Sequence[Tensor]) -> Tensor:
        first, numbers, real = not constants, itertools.count(), Tensor.detach

        def detach(x: Tensor) -> Tensor:
            if first:
                constants.append(real(x))
            return constants[next(numbers)]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "detach", detach)
            return loss(inputs)

    return held


def gradient(loss: Loss, inputs: Sequence[Tensor], graph: bool) -> list[Tensor]:
    """The gradient with respect to each input; zeros where the loss does not look at it."""
    total = loss(inputs)
    found = torch.autograd.grad(total, inputs, create_graph=graph, allow_unused=True)
    pairs = zip(found, inputs, strict=True)
    return [torch.zeros_like(x) if g is None else g for g, x in pairs]


def second_by_differences(loss: Loss, inputs: Sequence[Tensor], along: Sequence[Tensor]) -> float:
    """d/dt of |gradient|^2 / 2 along a direction, by central differences of the gradient."""

    def half_square(sign: float) -> float:
        moved = [
            (x + sign * STEP * d).detach().requires_grad_()
            for x, d in zip(inputs, along, strict=True)
        ]
        return sum(float((g**2).sum()) / 2 for g in gradient(loss, moved, graph=False))

    return (half_square(1) - half_square(-1)) / (2 * STEP)


def check(loss: Loss, inputs: Sequence[Tensor]) -> bool:
    """Whether the loss has a second derivative, which is right; False where it is refused."""
    source = torch.Generator().manual_seed(2)
    along = [torch.randn(x.shape, generator=source, dtype=x.dtype) for x in inputs]
    try:
        first = gradient(loss, inputs, graph=True)
    except SecondDerivativeError as error:
        assert "create_graph=True" in str(error) and "plain torch" in str(error)
        return False
    penalty = torch.stack([(g**2).sum() / 2 for g in first]).sum()
    if penalty.requires_grad:
        second = torch.autograd.grad(penalty, inputs, allow_unused=True)
        pairs = zip(second, along, strict=True)
        found = sum(float((g * d).sum()) for g, d in pairs if g is not None)
    else:
        found = 0.0
    expected = second_by_differences(loss, inputs, along)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-8)
    return True


@pytest.mark.parametrize("case", CASES)
def test_every_public_loss(case: str) -> None:
    make, call = CASES[case]
    torch.manual_seed(0)
    module: Any = make().double()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    inputs, names = drawn(), [name for name, _ in module.named_parameters()]
    weights = [value.detach().clone().requires_grad_() for value in module.parameters()]

    def loss(moved: Sequence[Tensor]) -> Tensor:
        module.load_state_dict(state)  # a memory does not move on
        put = dict(zip(names, moved[len(inputs) :], strict=True))
        with torch.nn.utils.stateless._reparametrize_module(module, put):
            value: Tensor = call(module, seen(moved[: len(inputs)]))
        return value

    has_second = check(with_constants(loss, []) if case == "Plnl" else loss, [*inputs, *weights])
    if case in PLAIN:
        assert has_second


def test_all_terms_are_here() -> None:
    cases = {case.partition(",")[0] for case in CASES}
    assert cases == {term.loss.__name__ for term in named_terms().values()}


@pytest.mark.parametrize("name", TERMS)
def test_the_dense_form_that_a_refusal_proposes(name: str) -> None:
    """Whole matrices in plain torch: the same value and gradient, and a second derivative."""
    term = TERMS[name]
    inputs = term.draw(Draw(8, 4, "cpu"))
    leaves = [
        x for value in inputs.values() for x in (value if isinstance(value, list) else [value])
    ]
    wanted = [x for x in leaves if x.requires_grad]

    def of(function: Callable[..., Tensor]) -> Loss:
        def loss(moved: Sequence[Tensor]) -> Tensor:
            put = dict(zip(map(id, wanted), moved, strict=True))

            def replaced(x: Tensor) -> Tensor:
                y = put.get(id(x), x)
                return y.double() if y.is_floating_point() else y

            arguments = {
                key: [replaced(x) for x in value] if isinstance(value, list) else replaced(value)
                for key, value in inputs.items()
            }
            return function(**arguments, **term.options)

        return loss

    start = [x.detach().double().requires_grad_() for x in wanted]
    assert not check(of(term.ours), start)
    assert check(of(term.dense), start)
    ours, dense = of(term.ours), of(term.dense)
    torch.testing.assert_close(ours(start), dense(start))
    for one, two in zip(gradient(ours, start, False), gradient(dense, start, False), strict=True):
        torch.testing.assert_close(one, two)


def refused_here(kind: str) -> bool:
    """Whether a penalty on the gradient is refused, on this process of several."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    sizes = [3, 3]
    gathered = (
        gather(x, sizes)
        if kind == "gather"
        else with_local_gradient(x, gather(x.detach(), sizes), slice(3 * rank(), 3 * rank() + 3))
    )
    with pytest.raises(SecondDerivativeError, match="create_graph=True"):
        torch.autograd.grad((gathered**3).sum(), x, create_graph=True)
    with pytest.raises(SecondDerivativeError, match="create_graph=True"):
        torch.autograd.grad(h.NtXent()([x, x.flip(0)]), x, create_graph=True)
    (first,) = torch.autograd.grad((gather(x, sizes) ** 3).sum(), x)
    torch.testing.assert_close(first, 2 * 3 * x.detach() ** 2)  # of both processes
    return True


@pytest.mark.parametrize("kind", ["gather", "local"])
def test_rows_of_two_processes(kind: str) -> None:
    """The sum of cubes of gathered rows had a second derivative of 16 where 112 is right."""
    assert ranks.run(2, refused_here, kind) == [True, True]


def test_what_was_wrong_without_a_word() -> None:
    """A penalty on the gradient of NT-Xent came out .48 where .71 is right."""
    z = [x.detach().requires_grad_() for x in drawn()[:2]]
    hessian: Any = torch.autograd.functional.hessian
    with pytest.raises(SecondDerivativeError):
        hessian(lambda one: h.NtXent()([one, z[1]]), z[0])
    with pytest.raises(RuntimeError, match="functorch transforms|setup_context"):
        torch.func.grad(lambda one: h.NtXent()([one, z[1]]))(z[0])
    loss = h.NtXent()(z)  # a first derivative, as often as one likes
    for _ in range(2):
        assert torch.autograd.grad(loss, z, retain_graph=True)[0].any()
