"""What a GPU's step of a loss launches and copies, counted on a CPU by `benchmarks.launches`."""

import pytest
import torch

from tests.objectives.kernel_cases import INTERPRETED, with_triton

launches = pytest.importorskip("benchmarks.launches")
pytestmark = [
    with_triton,
    pytest.mark.skipif(INTERPRETED, reason="the interpreter would run the kernels"),
]

# Before: 226, 255, 419, 148, 281, 313 and 569. The goal is 30, and 60 for L_s.
MOST = {
    "NtXent": 30, "Supcon": 54, "WeightedUnsupervised": 63, "Clip": 43, "WeightedSupervised": 71,
    "Cmc": 39, "SingleViewUnsupervised": 247,
}  # fmt: skip
READS = {"Supcon": 1, "WeightedSupervised": 2}  # for unknown labels, and the number of entries


@pytest.mark.parametrize("name", MOST)
def test_a_step_launches_no_more(name: str) -> None:
    """At any size of a batch, without a copy from the host."""
    for rows in (64, 1024):
        counted, up, down = launches.step(name, rows).totals()
        assert (up, down) == (0, READS.get(name, 0))
        assert counted <= MOST[name], (name, rows)


def test_what_is_counted() -> None:
    """An operation is a launch; views and memory are none; numbers of the host are a copy."""
    x = torch.ones(4, 4, requires_grad=True)
    with launches.counting() as counts:
        y = (x.T[1:] * 2).sum()  # two
        torch.autograd.backward(y)  # a one for y, the product's, the slice's, the copy into x.grad
        torch.empty(3).view(3, 1)
    assert counts.totals() == [6, 0, 0], counts.launches
    with launches.counting() as counts:
        torch.tensor([1.0])
        x.detach()[x.detach() > 0]  # the comparison, and the selection
        float(x.detach()[0, 0])
    assert counts.totals() == [3, 1, 2], (counts.launches, counts.down)


def test_a_kernel_is_one_launch() -> None:
    from heron.losses import fused

    x = torch.ones(4, 16)
    with launches.counting() as counts:
        fused.unit_rows(x, 0.5)
    assert counts.totals() == [1, 0, 0]
    assert not fused.available(torch.device("cpu"))  # what stands in has gone


def test_the_host_waits_for_no_row_of_pico() -> None:
    """At any size it waits six times; before, also for each round of a class's rows: 353."""
    assert {launches.step("Pico", rows).totals()[2] for rows in (64, 256)} == {6}
