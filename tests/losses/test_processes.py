"""Two processes train what one trains, with every loss, in three kinds of loops, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from heron.pipeline.config.terms import named_terms
from heron.pipeline.distributed import collectives
from tests import ranks
from tests.losses.nets import CASES, Net, batches

Result = dict[str, Tensor]


def plain(cases: list[str]) -> dict[str, Result]:
    """Trains each case in a loop of one's own; the values of the losses, and the last weights."""
    found = {}
    for case in cases:
        net = Net(case)
        wrapped = DistributedDataParallel(net)
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(net.after_step)
        values = []
        for rows, epoch in batches(collectives.rank(), collectives.world_size()):
            optimizer.zero_grad()
            loss = wrapped(rows, epoch)["loss"]
            loss.backward()
            optimizer.step()
            values.append(loss.detach())
        found[case] = net.result() | {"values": torch.stack(values)}
    return found


def assert_one(one: Result, several: Result) -> None:
    assert one.keys() == several.keys()
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=1e-8, atol=1e-10, msg=name)


def test_every_term_is_a_case() -> None:
    names = {name.partition(",")[0] for name in CASES}
    assert names == {term.__name__ for term in named_terms().values()}


def test_two_processes_are_one_in_a_loop_of_ones_own() -> None:
    (one,), two = ranks.run(1, plain, list(CASES)), ranks.run(2, plain, list(CASES))
    for case in CASES:
        for process in two:  # the value of the loss is the same on both, to the last bit
            assert_one(one[case], process[case])
        assert torch.equal(two[0][case]["values"], two[1][case]["values"]), case


FEW = ["WeightedSupervised", "WeightedUnsupervised", "Mulco", "C2ae"]
