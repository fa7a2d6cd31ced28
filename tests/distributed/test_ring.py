"""Keys that come round a ring make the numbers of gathered ones, two processes' rows at a time."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heron.config.errors import ConfigError
from heron.config.experiment import parse_config
from heron.config.terms import named_terms
from heron.distributed import collectives
from heron.objectives import exchange
from heron.objectives.clip import siglip
from heron.objectives.exchange import ShardSizes, uses_ring
from heron.objectives.hard import hard
from heron.objectives.objective import Objective
from heron.objectives.present import Rows, as_slice
from heron.objectives.supcon import supcon
from heron.objectives.supervised import weighted_supervised
from heron.objectives.unsupervised import nt_xent, weighted_unsupervised
from tests import ranks
from tests.distributed.terms import BOTTLENECKS, HEROCON, MISSING, OTHERS, named
from tests.distributed.test_distribution import step

ALL_ROWS = {k: t for k, t in OTHERS["contrast of all rows"].items() if not t.why_no_ring()}
LABELLED_ROWS = named(
    bce={},
    supcon={},
    hierarchical={"constrain": False},
    hard={"hardening": "threshold", "threshold_epochs": 2},
    weighted_supervised={"distance": "indicator", "self_pairs": True},
)
CASES: dict[str, dict[str, Any]] = {
    "herocon": {"encoder": "plain", "shared": False, "chosen": HEROCON},
    "all rows": {"encoder": "plain", "shared": True, "chosen": ALL_ROWS},
    "labelled rows": {"encoder": "plain", "shared": True, "chosen": LABELLED_ROWS},
    "two labelled": {"encoder": "plain", "shared": False, "chosen": HEROCON, "count": 2},
    "missing": {"encoder": "plain", "shared": False, "chosen": MISSING, "missing": True},
    "bottlenecks": {"encoder": "plain", "shared": False, "chosen": BOTTLENECKS, "pieces": 2},
    "prefixes": {
        "encoder": "no dropout",
        "shared": True,
        "chosen": HEROCON,
        "matryoshka": [2, 4],
    },
}


def steps(by_ring: bool) -> dict[str, dict[str, Tensor]]:
    return {name: step(**case, by_ring=by_ring) for name, case in CASES.items()}


@cache
def alone() -> dict[str, dict[str, Tensor]]:
    (result,) = ranks.run(1, steps, True)
    return dict(result)


@pytest.mark.parametrize("by_ring", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_values_and_gradients_are_those_of_one_process(world: int, by_ring: bool) -> None:
    for result in ranks.run(world, steps, by_ring):
        for case, expected in alone().items():
            for name, value in expected.items():
                torch.testing.assert_close(
                    result[case][name], value, rtol=1e-8, atol=1e-11, msg=f"{case} {name}"
                )


class Longest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most rows of a tensor whose rows are vectors, by their width."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == WIDTH:
                self.rows = max(self.rows, len(x))
        return found


COUNT, WIDTH = 22, 37


def ones(rows: Rows) -> Tensor:
    own = as_slice(rows)
    return torch.ones(own.stop - own.start, dtype=torch.float64)


ONE_VECTOR: dict[str, Callable[[Sequence[Tensor], Rows], Tensor]] = {
    "nt_xent": lambda z, rows: nt_xent([z[0], z[0]], rows=rows),
    "L_u": lambda z, rows: weighted_unsupervised(z, z[::-1], rows=rows),
    "supcon": lambda z, rows: supcon(z[:1], torch.arange(COUNT) % 3, rows=rows),
    "hard": lambda z, rows: hard([z[0], z[0]], torch.arange(COUNT) % 3, rows=rows),
    "siglip": lambda z, rows: siglip(z, ones(rows), -ones(rows), rows=rows),
    "L_s": lambda z, rows: weighted_supervised(
        z[0], (torch.arange(COUNT)[:, None] % torch.arange(2, 5) == 0).double(), rows=rows
    ),
}


def most_rows(by_ring: bool) -> dict[str, list[float]]:
    """Of each term, the rows of its longest tensor of vectors, and of keys that came, at a time.

    Keys are counted in rows of what a term passes on of a row.
    """
    world, rank, real = collectives.world_size(), collectives.rank(), collectives.ring
    sizes = ShardSizes([COUNT - 5 * (world - 1), *[5] * (world - 1)], [0] * world)
    came = 0.0

    def counted(
        own: Sequence[Tensor], counts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, list[Tensor]]]:
        nonlocal came
        memory: dict[int, int] = {}
        of_row = sum(x.nbytes for x in own) / sizes.rows[rank]
        for source, found in real(own, counts):
            memory |= {(m := x.untyped_storage()).data_ptr(): m.nbytes() for x in found}
            came = max(came, sum(memory.values()) / of_row)
            yield source, found

    told = {}
    generator = torch.Generator().manual_seed(rank)
    for name, term in ONE_VECTOR.items():
        came = 0.0
        z = [torch.randn(sizes.rows[rank], WIDTH, generator=generator) for _ in range(2)]
        own = [x.double().requires_grad_() for x in z]
        whole = own if by_ring else [collectives.gather(x, sizes.rows) for x in own]
        with Longest() as longest, pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "ring", counted)
            rows = exchange.own_row_sets(sizes, by_ring)
            assert rows is not None
            term(whole, rows[0]).backward()  # type: ignore[no-untyped-call]
        told[name] = [float(longest.rows), came]
    return told


def test_no_more_than_two_processes_keys_are_held() -> None:
    """Counted while terms are computed; where keys are gathered, the count sees them."""
    share = COUNT - 5 * 3
    for of_process in ranks.run(4, most_rows, True):
        for name, (longest, came) in of_process.items():
            assert came == pytest.approx(2 * share), name
            assert longest <= 2 * share, name  # the views of own rows, or of another's
    for of_process in ranks.run(4, most_rows, False):
        for name, (longest, came) in of_process.items():
            assert came == 0 and longest >= COUNT, name


def test_a_term_without_a_ring_is_named() -> None:
    tree: dict[str, Any] = {
        "run": {"dir": "runs/ring"},
        "data": {"path": "shards/faces", "batch": {"labelled": 8}, "views": [{"stored": "image"}]},
        "objective": {"hierarchical": {}},
        "distributed": {"exchange": "ring"},
    }
    fault = "exchange is ring, and objective.hierarchical has no ring: with constrain.*; expected"
    with pytest.raises(ConfigError, match=fault + " gather, or auto"):
        parse_config(tree)
    tree["objective"] = {"hierarchical": {"constrain": False}}
    assert parse_config(tree).distributed.exchange == "ring"


def test_which_terms_have_none() -> None:
    without = {name for name, term in named_terms().items() if term().why_no_ring()}
    assert without == {
        "c2ae",
        "comco",
        "hierarchical",
        "infograph",
        "input_weighted_unsupervised",
        "pico",
    }


def chosen(asked: str, terms: dict[str, Any], memory: int) -> bool:
    sizes = ShardSizes([0] * 2, [3, 4])
    features = {"projections": [torch.zeros(3, 5), torch.zeros(3, 5)]}
    return uses_ring(asked, features, Objective(named(**terms)), sizes, memory)


def test_auto_takes_a_ring_where_gathered_keys_fill_an_eighth() -> None:
    """7 rows of 2 x 5 numbers of 4 bytes, three times over, are 840 bytes."""
    cases: list[tuple[str, dict[str, Any], int, bool]] = [
        ("auto", {"nt_xent": {}}, 8 * 840, False),
        ("auto", {"nt_xent": {}}, 8 * 840 - 1, True),
        ("auto", {"nt_xent": {}, "pico": {}}, 1, False),
        ("gather", {"nt_xent": {}}, 1, False),
        ("ring", {"nt_xent": {}}, 10**9, True),
    ]
    for asked, terms, memory, expected in cases:
        assert ranks.run(2, chosen, asked, terms, memory) == [expected] * 2
