"""What `benchmarks.objectives` computes: each term's inputs, ours and dense, and its bare work."""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import dense
from heron.losses.engine import unit
from heron.losses.hard import debiased, hard
from heron.losses.hierarchical import hierarchical
from heron.losses.mulco import mulco
from heron.losses.single_view import single_view_unsupervised
from heron.losses.supcon import supcon
from heron.losses.supervised import weighted_supervised
from heron.losses.unsupervised import (
    cmc,
    input_weighted_unsupervised,
    nt_xent,
    weighted_unsupervised,
)

LABELS, DENSITY = 40, 0.225  # CelebA: 9 of 40 attributes hold on average
CLASSES = 100
CHILDREN = (10, 5, 4)  # of a node of the hierarchy, level by level
QUERIES = 256  # MulCo's batch; N is its queue

Inputs = dict[str, Any]  # tensors or lists of them, by the name of the argument


class Draw:
    """Random inputs of a batch, the same for every method; vectors ask for a gradient."""

    def __init__(self, size: int, dim: int, device: str, classes: int = CLASSES) -> None:
        self.size, self.dim, self.device, self.classes = size, dim, device, classes
        self.source = torch.Generator(device).manual_seed(0)

    def vectors(self, rows: int | None = None, *, grad: bool = True) -> Tensor:
        shape = rows or self.size, self.dim
        x = torch.randn(shape, generator=self.source, device=self.device)
        return x.requires_grad_(grad)

    def uniform(self, rows: int, columns: int) -> Tensor:
        return torch.rand(rows, columns, generator=self.source, device=self.device)

    def numbers(self, below: int) -> Tensor:
        shape = (self.size,)
        return torch.randint(below, shape, generator=self.source, device=self.device)

    def views(self) -> Inputs:
        return {"z": [self.vectors(), self.vectors()]}


@dataclass(frozen=True)
class Term:
    """A term, and the work that no method is spared.

    Attributes:
        draw: its inputs.
        ours: its loss of inputs and options; of the anchors `rows` where they are a slice.
        dense: the same of whole matrices.
        options: of both.
        products: of anchors x keys x d, forward and backward: the logits of every head, and the
            gradient of anchors and of keys. A matrix's symmetry is not made use of, and products
            of labels or weights (40 or 100 columns) are not counted.
        exponentials: of a pair, and logarithms, forward alone.
        anchors: vectors of a row of the batch; 0: `QUERIES` in all.
        keys: vectors of a row that an anchor meets.
        largest: N beyond which it would take minutes.
        inf_cl: Inf-CL's loss of as much work.
        siglip: siglip-kernel's loss of as much work, in bfloat16.
    """

    draw: Callable[[Draw], Inputs]
    ours: Callable[..., Tensor]
    dense: Callable[..., Tensor]
    options: Mapping[str, float]
    products: int = 3
    exponentials: float = 1.0
    anchors: int = 2
    keys: int = 2
    largest: float = math.inf
    inf_cl: Callable[..., Tensor] | None = None
    siglip: Callable[..., Tensor] | None = None

    def shape(self, size: int, rows: int | None) -> tuple[int, int]:
        """Anchors and keys of a batch of which `rows`, or all, are anchors."""
        return self.anchors * (rows or size) or QUERIES, self.keys * size


def of_mulco(*, ybar: Tensor, **inputs: Any) -> Tensor:
    """Weighted MulCo, in which the queries' own probabilities play no part."""
    return mulco(prob_q=ybar, ybar=ybar, kind="weighted", **inputs)


def draw_mulco(draw: Draw) -> Inputs:
    queries, wrong = QUERIES, draw.uniform(QUERIES, draw.classes) < 0.5
    return {
        "q": draw.vectors(queries),
        "key": draw.vectors(queries, grad=False),
        "queue": draw.vectors(grad=False),
        "prob_queue": draw.uniform(draw.size, draw.classes).softmax(1),
        "ybar": wrong.float(),
    }


def draw_labels(draw: Draw) -> Inputs:
    y = (draw.uniform(draw.size, LABELS) < DENSITY).float()
    return {"s": draw.vectors(), "y": y}


def inf_cl(anchors: Tensor, keys: Tensor, positive: Tensor) -> Tensor:
    """Inf-CL's InfoNCE; 1 / tau is inside the anchors."""
    package = importlib.import_module("inf_cl")
    head = math.gcd(anchors.shape[1], 256)  # its kernels take a power of two at a time
    loss: Tensor = package.cal_inf_loss(anchors, keys, labels=positive, head_dim=head)
    return loss


def inf_cl_of_cmc(z: list[Tensor], *, tau: float, rows: slice = slice(None)) -> Tensor:
    """The same loss as `cmc`."""
    z1, z2 = (unit(view) for view in z)
    positive = torch.arange(len(z1), device=z1.device)[rows]
    return (inf_cl(z1[rows] / tau, z2, positive) + inf_cl(z2[rows] / tau, z1, positive)) / 2


def inf_cl_of_nt_xent(z: list[Tensor], *, tau: float, rows: slice = slice(None)) -> Tensor:
    """`nt_xent` but for the anchor itself, which Inf-CL cannot leave out of its keys."""
    views, batch = [unit(view) for view in z], len(z[0])
    positive = torch.arange(batch, device=views[0].device)[rows]
    anchors = torch.cat([view[rows] for view in views]) / tau
    return inf_cl(anchors, torch.cat(views), torch.cat([positive + batch, positive]))


def siglip_of_views(z: list[Tensor], *, tau: float) -> Tensor:
    """siglip-kernel's loss of all views with all views: the pairs and products of `nt_xent`."""
    package = importlib.import_module("siglip_kernel")
    vectors = torch.cat([unit(view) for view in z]).bfloat16()
    scale, bias = (torch.tensor(x, device=vectors.device) for x in (-math.log(tau), -10.0))
    loss: Tensor = package.fused_siglip_loss(vectors, vectors, scale, bias)
    return loss


TERMS = {
    "weighted_unsupervised": Term(
        lambda draw: draw.views() | {"h": draw.views()["z"]},
        weighted_unsupervised,
        dense.weighted_unsupervised,
        {"tau": 0.5},
        products=6,
        exponentials=2.0,
    ),
    "single_view_unsupervised": Term(
        lambda draw: {name: [draw.vectors()] for name in ("x", "z", "h")},
        single_view_unsupervised,
        dense.single_view_unsupervised,
        {"tau": 0.5},
        products=9,  # one head is twice as wide
        exponentials=2.0,
        anchors=1,
        keys=1,
    ),
    "weighted_supervised": Term(
        draw_labels,
        weighted_supervised,
        dense.weighted_supervised,
        {"tau": 0.5},
        # the logarithm of every pair that shares a label, label by label
        exponentials=1 + LABELS * DENSITY**2,
        anchors=1,
        keys=1,
    ),
    "nt_xent": Term(
        Draw.views,
        nt_xent,
        dense.nt_xent,
        {"tau": 0.5},
        inf_cl=inf_cl_of_nt_xent,
        siglip=siglip_of_views,
    ),
    "cmc": Term(Draw.views, cmc, dense.cmc, {"tau": 0.5}, keys=1, inf_cl=inf_cl_of_cmc),
    "input_weighted_unsupervised": Term(
        lambda draw: draw.views() | {"x": [draw.vectors(grad=False) for _ in range(2)]},
        input_weighted_unsupervised,
        dense.input_weighted_unsupervised,
        {"tau": 0.5},
        products=4,  # raw inputs are as wide as vectors here, and take no gradient
    ),
    "supcon": Term(
        lambda draw: draw.views() | {"label": draw.numbers(draw.classes)},
        supcon,
        dense.supcon,
        {"tau": 0.1},
    ),
    "h_ucl": Term(
        Draw.views,
        lambda z, **options: hard(z, hardening="exp", positives="augmentation", **options),
        dense.hard,
        {"tau": 0.5, "beta": 1.0},
    ),
    "h_scl": Term(
        lambda draw: draw.views() | {"label": draw.numbers(draw.classes)},
        lambda z, label, **options: hard(z, label, hardening="exp", **options),
        dense.hard,
        {"tau": 0.5, "beta": 1.0},
        exponentials=1 + 2 / CLASSES,  # an exponential and a logarithm of every positive pair
    ),
    "debiased": Term(Draw.views, debiased, dense.debiased, {"tau": 0.5, "tau_plus": 0.01}),
    "mulco": Term(
        draw_mulco,
        of_mulco,
        dense.mulco,
        {"tau": 0.05},
        products=2,  # a queue takes no gradient
        anchors=0,
        keys=1,
    ),
    "hierarchical": Term(
        lambda draw: (
            draw.views()
            | {"levels": torch.stack([draw.numbers(children) for children in CHILDREN], 1)}
        ),
        hierarchical,
        dense.hierarchical,
        {"tau": 0.1},
        largest=65_536,
    ),
}
HEROCON = ("weighted_unsupervised", "weighted_supervised")
