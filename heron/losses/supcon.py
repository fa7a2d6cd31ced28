"""Supervised contrastive learning: one class per sample, every view of every sample an anchor."""

from collections.abc import Sequence

from jaxtyping import Float, Shaped
from torch import Tensor

from heron.data.graphs import group_sums
from heron.losses.batch import GlobalBatch
from heron.losses.contrast import contrast
from heron.losses.engine import (
    class_numbers,
    count_members,
    mean_over,
    unit_and_scaled,
    working_dtype,
)
from heron.losses.families import LabelledLoss
from heron.losses.mirroring import Mirroring
from heron.losses.pairs import (
    Pairs,
    Present,
    Rows,
    as_slice,
    join_views,
    key_numbers,
    own_row_positions,
)
from heron.losses.terms import CLASS_LABELS, Needs, Temperature


class Supcon(LabelledLoss):
    r"""SupCon's L_out (Khosla et al. 2020, Eq. 2), for one view or more.

    With A(i) all views of all samples except i, and P(i) those of its class, the mean over i of

    .. math:: \frac{-1}{|P(i)|} \sum_{p \in P(i)} \log \frac{f_{ip}}{\sum_{a \in A(i)} f_{ia}},
              \qquad f_{ia} = \exp(\cos(z_i, z_a) / \tau)

    Samples with several labels have the same class if all their labels agree.
    """

    needs = Needs(own=("projections",), labelled_vectors=("projections",), labels=CLASS_LABELS)
    missing_views = True
    unknown_labels = True

    def __init__(self, *, tau: Temperature = 0.1, gather: bool = True) -> None:
        """Sets the options.

        Args:
            tau: temperature, at least 0.003.
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.tau = tau

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `supcon` of this process's anchors."""
        z, rows = batch.labelled_vectors["projections"], batch.own_labelled_rows
        return supcon(z, batch.classes, tau=self.tau, rows=rows, present=batch.class_present)


def supcon(
    z: Sequence[Float[Tensor, "batch dim"]],
    label: Shaped[Tensor, "..."],
    *,
    tau: float = 0.1,
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    """SupCon's L_out (Khosla et al. 2020, Eq. 2): the equation of `Supcon`.

    An anchor without a positive adds 0 and counts in the mean. log f is linear in the positive, so
    the inner sum is one product with the sum of the class's vectors: no pair of positives is
    visited.

    Args:
        z: projections of the labelled samples of the whole batch, [batch, dim] for each view.
        label: their classes, any whole numbers, [batch].
        tau: temperature, > 0.
        rows: as in `nt_xent`.
        present: which views each sample has; i, A(i) and P(i) run over these.

    Raises:
        ValueError: tau <= 0, or labels that are not one whole number per sample.
    """
    dtype = working_dtype(z[0].dtype, tau)
    batch, own_rows = len(z[0]), as_slice(rows)
    number = class_numbers(label, batch, "supcon")
    vectors, scaled = unit_and_scaled(z, tau, dtype)
    keys, classes = join_views(vectors, present), join_views([number] * len(z), present)
    anchors, scaled = (join_views(x, present, own_rows) for x in (vectors, scaled))
    own = own_row_positions(batch, len(z), present, own_rows, keys.device)
    own_classes = classes if len(own) == len(classes) else classes[own]

    members = count_members(classes, batch)
    mirroring = Mirroring.of(rows, batch, [0], [0], [range(len(z))], present)
    class_sums = group_sums(keys if mirroring is None else keys.detach(), classes, batch)
    positive_count = (members[own_classes] - 1).to(dtype)
    positive_sum = class_sums[own_classes] - (anchors if mirroring is None else anchors.detach())
    attraction = (anchors * positive_sum).sum(1) / (tau * positive_count.clamp(min=1))
    if mirroring is not None:  # a pair attracts both of its rows
        attraction = 2 * attraction - attraction.detach()

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        attraction, positive_count = per_anchor
        alone = positive_count == 0
        loss = sums[:, 0].masked_fill(alone, 1.0).log() - attraction
        return mean_over(loss.masked_fill(alone, 0.0), max(len(classes), 1))

    tags = key_numbers(len(classes), keys.device)
    own_tags = tags if len(own) == len(tags) else own.int()
    pairs = Pairs([scaled], [keys], own_tags, tags, exclude=own[:, None])
    return contrast(pairs, finish, [attraction, positive_count], mirroring=mirroring)
