"""The communication of a step, computed: which collectives, how often, and how many bytes.

`benchmarks.scaling` counts the same at torch's dispatcher, and both must agree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from heron.distributed.sync_batchnorm import record_norms
from heron.models.heterogeneous import Heterogeneous
from heron.objectives.exchange import ShardSizes
from heron.objectives.objective import Objective
from heron.training.throughput import meta_copy

Kind = Literal["gathered", "passed", "scattered", "statistics", "gradients"]
HALF, FLOAT, INTEGER = 2, 4, 8  # bytes of an element
BUCKET = 25 * 2**20  # bytes of a bucket of gradients, of DistributedDataParallel


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind that send one thing, once a step.

    Attributes:
        kind: `gathered` is an all-gather, `passed` messages of each process to the next,
            `scattered` a reduce-scatter; the others are all-reduces.
        rows: of one process, padded to the longest share; 1 where it does not depend on rows.
        width: elements a row.
        size: bytes an element.
        calls: the number of collectives; 0: it shares that of the next exchange with any.
    """

    kind: Kind
    content: str
    rows: int
    width: int
    size: int = FLOAT
    calls: int = 1

    @property
    def is_partitioned(self) -> bool:
        """Whether each process contributes a part, as in a gather or a scatter, not an addend."""
        return self.kind in ("gathered", "passed", "scattered")

    @property
    def category(self) -> Literal["gathers", "norm", "gradients"]:
        """Its purpose: vectors and labels of others, batch norm, or gradients."""
        if self.content in ("moments", "sums"):
            return "norm"
        return "gathers" if self.is_partitioned else "gradients"

    @property
    def bytes(self) -> int:
        """Bytes of one process's part of a gather or a scatter, or of the vector that is summed."""
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
    """Returns every exchange of a step without micro-batches under DDP; none on one process.

    One collective gathers, of each row, the projections and, with weights, H of them; of labelled
    rows, where terms need them, S, the `labels` and the paths of `levels` levels; and all inputs
    where weights are of inputs. The numbers a row of `Term.exchanged_sums` follow, and in backward
    the gradients of the features of `Needs.gathered` and `Needs.labelled`.

    `shapes` are of one sample of each view. With `half`, vectors are sent in bfloat16. With
    `by_ring`, they are not gathered but sent round as often as `Term.ring_widths` says. Under
    `model.matryoshka` a term exchanges sums and rings for each width that it compares.
    """
    if len(sizes.rows) == 1:
        return []
    rows, labelled, needs = max(sizes.rows), max(sizes.labelled), objective.needs
    widths = {
        name: [shape.numel() for shape in of_views]
        for name, of_views in row_shapes(model, shapes, labels).items()
    }
    totals = {name: sum(of_views) for name, of_views in widths.items()}
    all_vectors = {*needs.vectors, *needs.labelled_vectors}
    vectors, labelled_vectors = ((), ()) if by_ring else (needs.vectors, needs.labelled_vectors)

    def gathered_features(rows: int, labelled: int) -> list[Exchange]:
        of_all = dict.fromkeys((*needs.gathered, *vectors), rows)
        of_labelled = dict.fromkeys((*needs.labelled, *labelled_vectors), labelled)
        features = []
        for name, count in (of_all | of_labelled | of_all).items():  # in both: sent for all rows
            if name in totals:
                size = HALF if half and name in all_vectors else FLOAT
                features.append(Exchange("gathered", name, count, totals[name], size, calls=0))
        if "paths" in needs.labelled:
            features.append(Exchange("gathered", "paths", labelled, levels, INTEGER, calls=0))
        return [*features, Exchange("gathered", "labels", labelled, labels)]

    # The process with most to send counts: the others pad theirs.
    counts = zip(sizes.rows, sizes.labelled, strict=True)
    by_process = [gathered_features(*of_process) for of_process in counts]
    result = max(by_process, key=lambda features: sum(x.bytes for x in features))
    for name, term in objective.terms.items():
        count = rows if term.requires().vectors else labelled
        for pass_widths in objective.widths_per_pass(term, totals, len(shapes)):
            sums = term.exchanged_sums(shapes, labels, levels)
            result += [Exchange("gathered", f"sums of {name}", count, width) for width in sums]
            ring_widths = term.ring_widths(len(shapes), pass_widths) if by_ring else []
            result += [
                Exchange("passed", f"keys of {name}", count, width, calls=len(sizes.rows) - 1)
                for width in ring_widths
            ]
    messages = norms(model, shapes, [n for n in (labelled, rows - labelled) if n], labels)
    channels = [n for of_message in messages for n in of_message]
    if messages:
        moments = sum(2 * n + 1 for n in channels)
        result.append(Exchange("gathered", "moments", 1, moments, calls=len(messages)))
    for names, count in ((needs.gathered, rows), (needs.labelled, labelled)):
        result += [
            Exchange("scattered", name, count, totals[name], calls=len(widths[name]))
            for name in names
            if name in widths and name != "inputs"  # which have no gradient
        ]
    if messages:
        sums_width = 2 * sum(channels)
        result.append(Exchange("statistics", "sums", 1, sums_width, calls=len(messages)))
    weights = sum(parameter.numel() for parameter in model.parameters())
    buckets = -(-FLOAT * weights // BUCKET)
    return [*result, Exchange("gradients", "gradients", 1, weights, calls=buckets)]


def norms(
    model: Heterogeneous, shapes: Sequence[Sequence[int]], sizes: Sequence[int], labels: int
) -> list[list[int]]:
    """Returns the channels of the batch norms of each message of a forward, in order.

    It runs a copy of the model on the meta device. `sizes` are the rows of each non-empty stream;
    batch norm sees one at a time.
    """
    meta, inputs, rng_keys = meta_copy(model, shapes, sum(sizes))
    pairs = zip(meta.modules(), model.modules(), strict=True)
    synchronised = [norm for norm, real in pairs if isinstance(norm, _BatchNorm) and real.training]
    with record_norms(synchronised) as channels:
        meta.embed(inputs, rng_keys, sizes, torch.empty(sum(sizes), labels, device="meta"))
    return channels


def row_shapes(
    model: Heterogeneous, shapes: Sequence[Sequence[int]], labels: int
) -> dict[str, list[torch.Size]]:
    """Returns, by name, the shapes of a row's features in training and of its flat inputs.

    Features that views have each have a shape a view; a copy of the model runs on the meta device.
    """
    meta, inputs, rng_keys = meta_copy(model, shapes, 1)
    features = meta.embed(inputs, rng_keys, [1], torch.empty(1, labels, device="meta"))
    of_row = {name: [x.shape[1:] for x in tensors] for name, tensors in features.items()}
    return of_row | {"inputs": [torch.Size([math.prod(shape)]) for shape in shapes]}
