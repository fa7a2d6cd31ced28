"""A step of 4,096 processes, torch's fake ones: what is exchanged is what arithmetic says."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scaling_bytes import Case, Tally, count, predict
from heron.config.terms import Terms
from heron.distributed import collectives

HEROCON: dict[str, object] = {"bce": {}, "weighted_unsupervised": {}, "weighted_supervised": {}}


@contextmanager
def processes(world: int) -> Iterator[None]:
    """This one as the first of many, the others of which do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    yield
    dist.destroy_process_group()


class Told:
    """A gate of `benchmarks.scaling` that keeps what it is told."""

    def __init__(self) -> None:
        self.connection, self.found = self, list[Any]()

    def send(self, told: Any) -> None:
        self.found.append(told)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("world", "by_ring"), [(8, False), (4096, False), (8, True), (64, True)])
def test_a_step_exchanges_what_the_arithmetic_says(world: int, by_ring: bool) -> None:
    """Shares are uneven, so that what is padded counts too."""
    case, told = (
        Case(Terms.model_validate(HEROCON), 2 * world + 5, world + 7, 16, (4, 6), 8, by_ring),
        Told(),
    )
    with processes(world):
        gate: Any = told
        count(gate, case)
    predicted, calls = predict(case, world)
    assert told.found == [({kind: n for kind, (n, _) in predicted.items()}, calls)]
    passed = calls.pop("passed")
    assert passed == (5 * (world - 1) if by_ring else 0)  # L_u twice round, L_s three times
    assert sum(calls.values()) < 50  # in any number of processes


def test_what_goes_well_is_a_few_small_messages() -> None:
    """Beside a step: one number where nobody has anything to say, and a broadcast."""
    with processes(4096), Tally() as tally:
        assert collectives.gather_if_any({}) == []
        assert collectives.broadcast_object(("step-00000200", ["a line"])) == (
            "step-00000200",
            ["a line"],
        )
    assert dict(tally.calls) == {"statistics": 1, "broadcast_": 2}
    assert sum(tally.bytes.values()) < 200
