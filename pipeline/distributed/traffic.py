"""What the processes of a step exchange: which collectives, how often, and how many bytes.

Arithmetic only. `benchmarks.scaling` counts the same at torch's dispatcher, and both must agree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from heron.pipeline.distributed.exchange import ShardSizes
from heron.pipeline.distributed.sync_batchnorm import meetings
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.objectives.objective import Objective
from heron.pipeline.training.throughput import skeleton

Kind = Literal["gathered", "passed", "scattered", "statistics", "gradients"]
HALF, FLOAT, INTEGER = 2, 4, 8  # bytes of an element
BUCKET = 25 * 2**20  # bytes of a bucket of gradients, of DistributedDataParallel


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind that move one thing, once a step.

    Attributes:
        kind: `gathered` is an all-gather, `passed` a round of messages, each to the next process,
            `scattered` a reduce-scatter; the others are all-reduces.
        what: is moved.
        rows: of one process, padded to the longest share; 1 where it is no matter of rows.
        width: elements a row.
        size: bytes an element.
        calls: how many collectives it is cut into; 0: it goes with the next that has one.
    """

    kind: Kind
    what: str
    rows: int
    width: int
    size: int = FLOAT
    calls: int = 1

    @property
    def of_parts(self) -> bool:
        """Whether each process adds a part: of a gather or a scatter, but not of a sum."""
        return self.kind in ("gathered", "passed", "scattered")

    @property
    def part(self) -> Literal["gathers", "norm", "gradients"]:
        """What it is of: the vectors and labels of others, batch norm, or gradients."""
        if self.what in ("moments", "sums"):
            return "norm"
        return "gathers" if self.of_parts else "gradients"

    @property
    def bytes(self) -> int:
        """Of one process's part of a gather or a scatter; of the vector that is summed."""
        return self.rows * self.width * self.size


def exchanges(
    objective: Objective,
    model: Heterogeneous,
    shapes: Sequence[Sequence[int]],
    sizes: ShardSizes,
    labels: int,
    levels: int = 0,
    half: bool = False,
    by_ring: bool = False,
) -> list[Exchange]:
    """Returns every exchange of a step in one piece under DDP; one process makes none.

    Per row go the projections and, with weights, H of them; of a labelled row where terms need
    them S, the labels (a width) and the paths (of so many levels); and all inputs where weights are
    of inputs: all by one collective. Then go the few numbers a row of `Term.exchanged_sums`, and
    back the gradients of what terms need by `Needs.gathered` and `Needs.labelled`. `shapes` are of
    one sample of each view; with `half`, vectors travel in bfloat16. `by_ring`: vectors are not
    gathered, and go round as often as `Term.ring_widths` says. Under `model.matryoshka` a term
    exchanges these for each width that it compares.
    """
    if len(sizes.rows) == 1:
        return []
    rows, own, needs = max(sizes.rows), max(sizes.labelled), objective.needs
    widths = {
        name: [shape.numel() for shape in of_views]
        for name, of_views in row_shapes(model, shapes, labels).items()
    }
    totals = {name: sum(of_views) for name, of_views in widths.items()}
    compared = {*needs.vectors, *needs.labelled_vectors}
    vectors, few_vectors = ((), ()) if by_ring else (needs.vectors, needs.labelled_vectors)

    def travelling(rows: int, own: int) -> list[Exchange]:
        every = dict.fromkeys((*needs.gathered, *vectors), rows)
        few = dict.fromkeys((*needs.labelled, *few_vectors), own)
        found = []
        for name, count in (every | few | every).items():  # what both ask for goes of every row
            if name in totals:
                size = HALF if half and name in compared else FLOAT
                found.append(Exchange("gathered", name, count, totals[name], size, calls=0))
        if "paths" in needs.labelled:
            found.append(Exchange("gathered", "paths", own, levels, INTEGER, calls=0))
        return [*found, Exchange("gathered", "labels", own, labels)]

    # The process with most to send; the others fill up.
    each = zip(sizes.rows, sizes.labelled, strict=True)
    moved = max((travelling(*of) for of in each), key=lambda of: sum(one.bytes for one in of))
    for name, term in objective.terms.items():
        count = rows if term.requires().vectors else own
        for narrowed in objective.narrowed(term, totals, len(shapes)):
            told = term.exchanged_sums(shapes, labels, levels)
            moved += [Exchange("gathered", f"sums of {name}", count, width) for width in told]
            rounds = term.ring_widths(len(shapes), narrowed) if by_ring else []
            moved += [
                Exchange("passed", f"keys of {name}", count, width, calls=len(sizes.rows) - 1)
                for width in rounds
            ]
    met = norms(model, shapes, [n for n in (own, rows - own) if n], labels)
    channels = [n for of_meeting in met for n in of_meeting]
    if met:
        moments = sum(2 * n + 1 for n in channels)
        moved.append(Exchange("gathered", "moments", 1, moments, calls=len(met)))
    for names, count in ((needs.gathered, rows), (needs.labelled, own)):
        moved += [
            Exchange("scattered", name, count, totals[name], calls=len(widths[name]))
            for name in names
            if name in widths and name != "inputs"  # which take no gradient
        ]
    if met:
        moved.append(Exchange("statistics", "sums", 1, 2 * sum(channels), calls=len(met)))
    weights = sum(parameter.numel() for parameter in model.parameters())
    buckets = -(-FLOAT * weights // BUCKET)
    return [*moved, Exchange("gradients", "gradients", 1, weights, calls=buckets)]


def norms(
    model: Heterogeneous, shapes: Sequence[Sequence[int]], sizes: Sequence[int], labels: int
) -> list[list[int]]:
    """Returns the channels of the batch norms of each meeting of a forward, in order.

    A copy of the model that computes nothing is followed. `sizes` are the rows of each stream that
    there is; batch norm sees one at a time.
    """
    meta, inputs, rng_keys = skeleton(model, shapes, sum(sizes))
    pairs = zip(meta.modules(), model.modules(), strict=True)
    learnt = [norm for norm, own in pairs if isinstance(norm, _BatchNorm) and own.training]
    with meetings(learnt) as passed:
        meta.embed(inputs, rng_keys, sizes, torch.empty(sum(sizes), labels, device="meta"))
    return passed


def row_shapes(
    model: Heterogeneous, shapes: Sequence[Sequence[int]], labels: int
) -> dict[str, list[torch.Size]]:
    """Returns the shapes of what a model makes of a row in training, and of the row's flat inputs.

    They are by name, one a view where a feature has one a view; a copy of the model is followed,
    which computes nothing.
    """
    meta, inputs, rng_keys = skeleton(model, shapes, 1)
    features = meta.embed(inputs, rng_keys, [1], torch.empty(1, labels, device="meta"))
    found = {name: [x.shape[1:] for x in tensors] for name, tensors in features.items()}
    return found | {"inputs": [torch.Size([math.prod(shape)]) for shape in shapes]}
