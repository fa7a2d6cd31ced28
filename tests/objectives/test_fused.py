"""The fused terms against dense float64, and the switch.

The kernels run on a GPU if there is one. Where there is none they run in Triton's interpreter,
which has to be asked for before Triton is imported, and for a whole process: so one test runs this
file again in a process of its own, and there the others no longer skip.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.losses import fused
from heron.losses.fused import switch
from tests.objectives.kernel_cases import (
    DEVICE,
    INTERPRETED,
    OPTIONS,
    assert_same,
    complete,
    dense_distance,
    dense_pairs,
    dense_sums,
    draw,
    integers,
    kernels,
    labels,
    with_triton,
)

SIZES = [(1, 1, 1), (16, 32, 16), (17, 20, 300), (3, 40, 128)]
MOMENTS = [(1.0,), (1.5, 0.5), (1.0, 0.0)]
SIZED = [  # every size with all moments, and either of them with tags apart and without
    (size, moments, (i + j) % 2 == 0)
    for i, size in enumerate(SIZES)
    for j, moments in enumerate(MOMENTS)
]


@with_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(path) for path in sorted(Path(__file__).parent.glob("test_fused*.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop(switch.SWITCH, None)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout + done.stderr


@kernels
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sums_are_the_dense_ones(options: dict[str, Any]) -> None:
    options = complete(37, 70, options)
    assert_same(
        lambda a, k: fused.exponential_sums(a, k, **options, precision="ieee"),
        lambda a, k: dense_sums(a, k, **options),
        [draw(37, 20, 1), draw(70, 20, 2)],
    )


@kernels
@pytest.mark.parametrize(("size", "moments", "apart"), SIZED)
def test_sums_at_any_size(
    size: tuple[int, int, int], moments: tuple[float, ...], apart: bool
) -> None:
    """Weights are 0 of keys past the end; without, the last tile's mask alone leaves these out.

    Tags that lie apart spare the other mask.
    """
    n, m, d = size
    options = complete(n, m, {"moments": moments} | ({} if apart else {"weights": 2}))
    if apart:
        options |= {"anchor_tag": integers(n, 5, 3), "key_tag": 9 + integers(m, 5, 4)}
    assert_same(
        lambda a, k: fused.exponential_sums(a, k, **options, precision="ieee"),
        lambda a, k: dense_sums(a, k, **options),
        [draw(n, d, 1), draw(m, d, 2)],
    )


@kernels
def test_only_one_side_wants_a_gradient() -> None:
    a, k = draw(20, 8, 1), draw(30, 8, 2)
    expected = torch.autograd.grad(dense_sums(a.double(), k.double(), moments=(1.0,)).sum(), [a, k])
    for side, (x, y) in enumerate([(a, k.detach()), (a.detach(), k)]):
        sums = fused.exponential_sums(x, y, precision="ieee")
        (found,) = torch.autograd.grad(sums.sum(), [a, k][side])
        torch.testing.assert_close(found, expected[side], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert not fused.exponential_sums(a, k).requires_grad


@kernels
@pytest.mark.parametrize("distance", ["hamming", "indicator"])
@pytest.mark.parametrize(("n", "m", "d", "c"), [(37, 70, 20, 5), (5, 17, 300, 17)])
def test_label_sums_are_the_dense_ones(distance: Any, n: int, m: int, d: int, c: int) -> None:
    anchor_y, key_y = labels(n, c, 3), labels(m, c, 4)
    key_y[:4] = anchor_y[:4]  # pairs of distance 0

    def dense(a: Tensor, k: Tensor) -> Tensor:
        repulsion = dense_distance(anchor_y, key_y, distance) * torch.exp(a @ k.T)
        return repulsion @ (1 - key_y.double())

    assert_same(
        lambda a, k: fused.label_sums(a, k, anchor_y, key_y, distance, "ieee"),
        dense,
        [draw(n, d, 1), draw(m, d, 2)],
    )


@kernels
@pytest.mark.parametrize("distance", ["hamming", "indicator", "none"])
@pytest.mark.parametrize(("n", "m", "d", "c"), [(37, 70, 20, 5), (17, 18, 300, 3)])
def test_pair_losses_are_the_dense_ones(distance: Any, n: int, m: int, d: int, c: int) -> None:
    anchor_y, key_y, weight = labels(n, c, 3), labels(m, c, 4), draw(1, c, 5).detach()[0].abs()
    number = integers(n, m + 3, 6) - 3
    number[number < 0] = -1
    key_y[number.clamp(min=0).long()] = anchor_y
    options = (anchor_y, key_y, weight, number)
    assert_same(
        lambda a, k, t: fused.pair_losses(a, k, t.exp(), *options, distance, "ieee"),
        lambda a, k, t: dense_pairs(a, k, t, *options, distance),
        [draw(n, d, 1), draw(m, d, 2), draw(c, n, 7).detach().T.requires_grad_()],  # strided
    )


@kernels
@pytest.mark.parametrize("classes", [1, 4, 60])
def test_tagged_pair_losses_are_the_dense_ones(classes: int) -> None:
    n, m = 37, 70
    tags = integers(n, classes, 3) - 2, integers(m, classes, 4) - 2
    number = integers(n, m, 6)
    weight = draw(1, n, 5).detach()[0].abs()

    def dense(a: Tensor, k: Tensor, total: Tensor) -> Tensor:
        other = number[:, None] != torch.arange(m, device=DEVICE)
        pair = (tags[0][:, None] == tags[1]) & other
        loss = torch.nn.functional.softplus(total[:, None] - a @ k.T)
        return (torch.where(pair, loss, 0.0).sum(1) * weight.double()).sum()

    total = draw(1, n, 7).detach()[0].requires_grad_()
    assert_same(
        lambda a, k, t: fused.tagged_pair_losses(a, k, t, *tags, number, weight, "ieee"),
        dense,
        [draw(n, 20, 1), draw(m, 20, 2), total],
    )


@kernels
def test_small_and_large_ratios_keep_their_digits() -> None:
    """D / f between exp(-24) and exp(60): neither rounds away nor overflows."""
    n = 16
    a, k = draw(n, 4, 1).detach(), torch.zeros(n, 4, device=DEVICE)
    k[:, 0], a[:, 0] = 1.0, torch.linspace(-30, 12, n)
    total = torch.linspace(30, -12, n, device=DEVICE)
    tag, number = torch.zeros(n, device=DEVICE).int(), torch.arange(n, device=DEVICE).int()
    for i in range(n):
        one = slice(i, i + 1)
        found = fused.tagged_pair_losses(
            a[one], k, total[one], tag[one], tag, number[one], torch.ones(1, device=DEVICE), "ieee"
        )
        margin = torch.tensor([total[i].item() - a[i, 0].item()], dtype=torch.float64)
        expected = 15 * torch.nn.functional.softplus(margin).item()
        assert found.item() == pytest.approx(expected, rel=1e-5)


@kernels
def test_without_a_negative_the_loss_is_zero() -> None:
    """Every key has label 0: D = 0, log D = -inf; label 1 has negatives still."""
    anchors, keys = draw(9, 6, 1), draw(11, 6, 2)
    anchor_y, key_y = labels(9, 2, 3), labels(11, 2, 4)
    anchor_y[:, 0] = key_y[:, 0] = 1
    sums = fused.label_sums(anchors, keys, anchor_y, key_y, "hamming", "ieee")
    assert (sums[:, 0] == 0).all()
    weight, number = torch.tensor([1.0, 0.0], device=DEVICE), integers(9, 11, 5)
    loss = fused.pair_losses(
        anchors, keys, sums, anchor_y, key_y, weight, number, "hamming", "ieee"
    )
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, [anchors, keys]):
        assert (gradient == 0).all()


@kernels
@pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0), (0, 0)])
def test_no_anchors_or_no_keys_give_zeros(n: int, m: int) -> None:
    a, k, total = draw(n, 6, 1), draw(m, 6, 2), draw(n, 3, 3)
    y, number = (labels(n, 3, 4), labels(m, 3, 5)), integers(n, 1, 6)
    tags, ones = (integers(n, 2, 7), integers(m, 2, 8)), torch.ones(n, device=DEVICE)
    results = [
        fused.exponential_sums(a, k),
        fused.exponential_sums(a, k, moments=(2.0, 1.0)),
        fused.label_sums(a, k, *y, "hamming"),
        fused.pair_losses(a, k, total.exp(), *y, torch.ones(3, device=DEVICE), number, "hamming"),
        fused.tagged_pair_losses(a, k, total[:, 0], *tags, number, ones),
    ]
    assert [list(x.shape) for x in results] == [[n, 1], [n, 2], [n, 3], [], []]
    for result in results:
        assert (result == 0).all()
        for gradient in torch.autograd.grad(result.sum(), [a, k]):
            assert (gradient == 0).all()


@kernels
def test_labels_without_a_pair_give_zero() -> None:
    a, k, total = draw(5, 6, 1), draw(7, 6, 2), draw(5, 3, 3)
    none = torch.zeros(7, 3, device=DEVICE)
    options = torch.ones(3, device=DEVICE), integers(5, 7, 4)
    for anchor_y in (none[:5], none[:5] + 1):
        loss = fused.pair_losses(a, k, total.exp(), anchor_y, none, *options, "none")
        assert loss.item() == 0
        for gradient in torch.autograd.grad(loss, [a, k, total]):
            assert (gradient == 0).all()
