"""The measures against loops and closed forms, and what must be called a collapse."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from heron.evaluation import collapse
from heron.evaluation.collapse import (
    alignment,
    collapsed,
    effective_rank,
    measure,
    uniformity,
)


def draw(rows: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def test_measures_are_those_of_loops() -> None:
    """Three views; the worst view counts."""
    views = [draw(7, 3, seed) * scale for seed, scale in enumerate((1, 20, 0.1))]
    views[1] += 60  # a cone, so that the views differ
    units = [(z.double() / z.double().norm(dim=1, keepdim=True)).numpy() for z in views]
    apart = [
        ((x[i] - y[i]) ** 2).sum() for x, y in itertools.combinations(units, 2) for i in range(7)
    ]
    spread, ranks = [], []
    for x in units:
        pairs = itertools.combinations(range(7), 2)
        spread.append(np.log(np.mean([np.exp(-2 * ((x[i] - x[j]) ** 2).sum()) for i, j in pairs])))
        p = np.linalg.svd(x, compute_uv=False)
        p /= p.sum()
        ranks.append(np.exp(-sum(q * np.log(q) for q in p)))
    assert measure(views) == {
        "alignment": pytest.approx(np.mean(apart), rel=1e-5),
        "uniformity": pytest.approx(max(spread), rel=1e-5),
        "effective_rank": pytest.approx(min(ranks), rel=1e-5),
    }
    assert max(spread) == spread[1] and min(ranks) == ranks[1]


def test_closed_forms() -> None:
    """The axes: distance sqrt(2), full rank; opposite points; singular values 2 and 1."""
    axes = torch.eye(5, dtype=torch.float64)
    assert uniformity(axes) == pytest.approx(-4)
    assert effective_rank(axes) == pytest.approx(5)
    assert alignment(axes, axes.roll(1, 0)) == pytest.approx(2)
    assert alignment(axes, -axes) == pytest.approx(4)
    opposite = torch.tensor([[1.0, 0], [-1, 0]], dtype=torch.float64)
    assert uniformity(opposite) == pytest.approx(-8)
    unequal = torch.tensor([[1.0, 0, 0]] * 4 + [[0, 1, 0]], dtype=torch.float64)
    assert effective_rank(unequal) == pytest.approx(3 / 2 ** (2 / 3))  # entropy of 2/3 and 1/3


def test_a_circle_has_the_uniformity_of_its_integral() -> None:
    """The mean of exp(4 cos a - 4) over a circle is exp(-4) I0(4)."""
    angle = torch.arange(500, dtype=torch.float64) * (2 * math.pi / 500)
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    mean = math.exp(-4) * float(torch.special.i0(torch.tensor(4.0, dtype=torch.float64)))
    assert uniformity(circle) == pytest.approx(math.log((500 * mean - 1) / 499))
    assert effective_rank(circle) == pytest.approx(2)


@pytest.mark.parametrize("strip", [1, 3, 8, 20, 64])
def test_strips_equal_the_whole(strip: int) -> None:
    x = torch.nn.functional.normalize(draw(20, 4).double(), dim=1)
    whole = torch.nn.functional.pdist(x).square().mul(-2).exp().mean().log()
    assert uniformity(x, strip) == pytest.approx(float(whole), rel=1e-12)


def test_many_rows_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    z = draw(11, 4)
    some = measure([z[[0, 2, 5, 8]]])
    monkeypatch.setattr(collapse, "ROWS", 4)
    assert measure([z]) == some
    views = [z, z.clone()]
    views[1][1] *= -1  # a row that is left out of the two, but not of the alignment
    assert measure(views) == some | {"alignment": pytest.approx(4 / 11)}


def test_wide_and_tall_embeddings_have_the_same_rank() -> None:
    x = draw(6, 9).double()
    assert effective_rank(x) == pytest.approx(effective_rank(x.T))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("noise", [0, 1e-4])
def test_one_point_is_a_collapse(dtype: torch.dtype, noise: float) -> None:
    """Also where rounding leaves the rows apart."""
    z = (draw(1, 128) + noise * draw(300, 128, 1)).to(dtype)
    measures = measure([z, z])
    assert measures["alignment"] == 0
    assert measures["uniformity"] == pytest.approx(0, abs=1e-4)
    assert measures["effective_rank"] == pytest.approx(1, abs=0.05)
    assert "one point" in collapsed(measures) and "one line" in collapsed(measures)


def test_a_point_for_every_view_is_a_collapse() -> None:
    a, b = draw(2, 8).unbind()
    assert collapsed(measure([a.expand(50, -1), b.expand(50, -1)]))
    assert collapsed(measure([draw(50, 8), b.expand(50, -1)]))  # one view is enough


@pytest.mark.parametrize("dim", [2, 3, 128])
def test_a_line_is_a_collapse(dim: int) -> None:
    measures = measure([draw(200, 1) * draw(1, dim, 1)])
    assert measures["effective_rank"] == pytest.approx(1, abs=1e-3)
    assert collapsed(measures) == "effective rank is 1.000, below 1.5: rows are on one line"


@pytest.mark.parametrize("dim", [2, 3, 16, 128])
@pytest.mark.parametrize("rows", [16, 300])
@pytest.mark.parametrize("seed", range(5))
def test_random_directions_are_none(dim: int, rows: int, seed: int) -> None:
    measures = measure([draw(rows, dim, seed), draw(rows, dim, seed + 100)])
    assert not collapsed(measures)
    assert measures["effective_rank"] > 0.75 * min(rows, dim)


@pytest.mark.parametrize("z", [torch.zeros(9, 4), draw(1, 4), torch.zeros(1, 1)])
def test_zeros_and_one_row_are_one_point(z: Tensor) -> None:
    measures = measure([z, z])
    assert measures == {
        "alignment": 0,
        "uniformity": pytest.approx(0),
        "effective_rank": pytest.approx(1),
    }
    assert collapsed(measures)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_lengths_do_not_count(scale: float) -> None:
    z = draw(12, 4)
    assert measure([z * scale]) == pytest.approx(measure([z]), rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan(value: float) -> None:
    views = [draw(6, 3), draw(6, 3, 1)]
    views[1][2, 1] = value
    measures = measure(views)
    assert list(measures) == ["alignment", "uniformity", "effective_rank"]
    assert all(math.isnan(v) for v in measures.values())
    assert not collapsed(measures)


def test_one_view_has_no_alignment_and_no_graph_is_kept() -> None:
    z = draw(6, 3).requires_grad_()
    assert list(measure([z])) == ["uniformity", "effective_rank"]


@pytest.mark.parametrize("shapes", [[], [(2, 3), (2, 4)], [(2, 3), (1, 3)], [(0, 3)], [(3,)]])
def test_views_of_other_shapes_are_refused(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="must all have the same shape .rows, dim., got"):
        measure([torch.zeros(shape) for shape in shapes])
