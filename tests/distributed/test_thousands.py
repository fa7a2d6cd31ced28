"""A step of 4,096 processes, torch's fake ones, has as many collectives as one of eight."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scaling_bytes import Case, Tally, count
from heron.distributed import collectives
from heron.losses.named_terms import Terms

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
@pytest.mark.parametrize("world", [8, 4096])
def test_collectives_of_a_step_do_not_grow_with_the_processes(world: int) -> None:
    """By hand: a process has at most 3 labelled rows of 5, and shares are uneven and padded.

    Gathered are, by one collective, z and H(z) of 2 views of 8 floats, and of labelled rows S, 12
    wide, and 40 labels; then the slopes by the sums of L_u, D and the slopes by it of L_s, and the
    moments of 3 batch norms of each view and stream.
    """
    case = Case(Terms.model_validate(HEROCON), 2 * world + 5, world + 7, 16, (4, 6), 8)
    told = Told()
    with processes(world):
        gate: Any = told
        count(gate, case)
    ((sent, calls),) = told.found
    assert calls == {"gathered": 1 + 2 + 12, "scattered": 0, "statistics": 12, "gradients": 1}
    vectors, told_of_anchors = 5 * 2 * 16 + 3 * (12 + 40), 5 * 2 + 3 * 80
    moments = 4 * (9 + 13 + 17)
    assert sent["gathered"] == 4 * (world - 1) * (vectors + told_of_anchors + moments)


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
