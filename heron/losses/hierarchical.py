"""Hierarchical contrastive learning: positives at each depth to which two paths agree."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from heron.losses.batch import GlobalBatch
from heron.losses.classes import Classes, class_losses, largest_pairs
from heron.losses.engine import count_members, group_numbers, unit_and_scaled, working_dtype
from heron.losses.families import LabelledLoss
from heron.losses.inputs import LossError, as_groups, is_whole, shown
from heron.losses.mirroring import Mirroring, gather_anchor_values, mirrored_sums
from heron.losses.pairs import (
    Pairs,
    Present,
    Rows,
    as_slice,
    join_views,
    key_numbers,
    own_row_positions,
)
from heron.losses.terms import Needs, Temperature

Penalty = Literal["exp_inverse"] | None


class Hierarchical(LabelledLoss):
    r"""HiMulCon, HiConE and HiMulConE (Zhang et al., CVPR 2022, Eq. 3 to 6).

    Labels are paths: whole numbers [batch, levels], coarsest level first. With P_l(i) the samples
    whose paths agree with that of i on the levels 1 to l and not on l + 1,

    .. math:: \frac{1}{L} \sum_l \lambda_l \operatorname{mean}_i \frac{1}{|P_l(i)|}
              \sum_{p \in P_l(i)} \Big(\log \sum_{a \in A(i)} f_{ia} - \log f_{ip}\Big)
    """

    needs = Needs(labelled=("paths",), labelled_vectors=("projections",), labels=("hierarchical",))
    missing_views = True

    def __init__(
        self,
        *,
        tau: Temperature = 0.1,
        constrain: bool = True,
        penalty: Penalty = "exp_inverse",
        gather: bool = True,
    ) -> None:
        """Sets the options.

        Args:
            tau: temperature, at least 0.003.
            constrain: raise a pair's loss to the largest of all finer levels; False: HiMulCon.
            penalty: lambda_l: None is 1 (HiConE), `exp_inverse` that of the authors' code.
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.tau, self.constrain, self.penalty = tau, constrain, penalty

    def columns(self, labels: Tensor) -> Tensor:
        """Returns the paths, after a check."""
        if not is_whole(labels) or labels.dim() != 2 or not labels.shape[1]:
            raise LossError(
                "labels must be paths, whole numbers [batch, levels] with the coarsest level "
                f"first, got {shown(labels)}"
            )
        return as_groups(labels)

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `hierarchical` of this process's anchors."""
        return hierarchical(
            batch.labelled_vectors["projections"],
            batch.gathered_labelled["paths"][0],
            tau=self.tau,
            constrain=self.constrain,
            penalty=self.penalty,
            rows=batch.own_labelled_rows,
            present=batch.labelled_present,
        )


def hierarchical(
    z: Sequence[Float[Tensor, "batch dim"]],
    levels: Shaped[Tensor, "..."],
    *,
    tau: float = 0.1,
    constrain: bool = True,
    penalty: Penalty = "exp_inverse",
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    """HiMulCon, HiConE and HiMulConE (Zhang et al., CVPR 2022, Eq. 3 to 6): see `Hierarchical`.

    A(i) are all views of all samples except i. The mean is over the anchors with a positive at
    level l. `constrain` (HiConE) raises a pair's loss to the largest one at any finer level of the
    batch, since pairs that are closer in the hierarchy shall not lie further apart; its gradient
    then goes to that largest pair.

    Args:
        z: projections of the labelled samples of the whole batch, [batch, dim] for each view.
        levels: their paths through the hierarchy, [batch, depth], coarsest level first. A number
            identifies a class only below its parent, so prefixes of paths are compared.
        tau: temperature, > 0.
        constrain: HiConE and HiMulConE; False is HiMulCon.
        penalty: lambda_l: None is 1 (HiConE), `exp_inverse` is 2^(1/d) with d = 1 for the finest
            level, 2 for the next and so on, as in the authors' code.
        rows: as in `nt_xent`.
        present: which views each sample has; i, A(i) and P_l(i) run over these.

    Returns:
        The share of the loss that belongs to `rows`: a scalar, 0 without a positive pair.

    Raises:
        ValueError: tau <= 0, or levels that are not whole numbers [batch, depth].
    """
    batch, own_rows = len(z[0]), as_slice(rows)
    is_path = levels.dim() == 2 and len(levels) == batch and levels.shape[1] > 0
    if not is_path or levels.is_floating_point():
        raise ValueError(
            f"levels must be whole numbers [{batch}, depth], a path of at least one level per "
            f"sample, got {levels.dtype} {tuple(levels.shape)}"
        )
    dtype = working_dtype(z[0].dtype, tau)
    vectors, scaled = unit_and_scaled(z, tau, dtype)
    keys, paths = join_views(vectors, present), join_views([levels] * len(z), present)
    positions = key_numbers(len(paths), keys.device)
    own = own_row_positions(batch, len(z), present, own_rows, keys.device)
    groups = [group_numbers(paths[:, 0])]
    for level in paths.T[1:]:
        groups.append(group_numbers(groups[-1] * len(paths) + group_numbers(level)))
    classes = Classes(groups, _weight(groups, penalty).to(dtype), own, soft=False)
    mirroring = Mirroring.of(rows, batch, [0], [0], [range(len(z))], present)
    anchors = join_views(scaled, present, own_rows)

    def log_total(anchors: Tensor, own: Tensor, mirroring: Mirroring | None) -> Tensor:
        exclude = own[:, None]
        pairs = Pairs([anchors], [keys], anchor_tag=own, key_tag=positions, exclude=exclude)
        sums = mirrored_sums(pairs, mirroring)[0][:, 0]
        return torch.where(sums > 0, sums, 1.0).log()

    log_sums = log_total(anchors, own, mirroring)
    # Losses at level l are raised to the largest one at any finer level; -inf raises nothing.
    floor = keys.new_full((len(groups),), -math.inf)
    all_log_sums = gather_anchor_values(mirroring, log_sums)
    if constrain:
        with torch.no_grad():
            of_keys = all_log_sums
            if of_keys is None:
                of_keys = log_total(keys / tau, positions.long(), None)
        floor = _largest_below(keys, largest_pairs(keys, of_keys, classes, tau), tau)
    return class_losses(anchors, keys, log_sums, floor, classes, rows, all_log_sums)


def _weight(groups: Sequence[Tensor], penalty: Penalty) -> Tensor:
    """Returns a pair's weight at each level, lambda / (L * anchors * |P_l(i)|), [keys, levels]."""
    sizes = [count_members(group, len(group))[group] for group in groups]
    finer_sizes = [*sizes[1:], torch.ones_like(sizes[0])] if sizes else []
    counts = [size - finer for size, finer in zip(sizes, finer_sizes, strict=True)]
    count = torch.stack(counts, 1).double()
    depth, anchor_count = len(groups), (count > 0).sum(0)
    factor = [2 ** (1 / d) if penalty else 1.0 for d in range(depth, 0, -1)]
    shares = depth * anchor_count.clamp(min=1) * count.clamp(min=1)
    by_level = zip(factor, shares.unbind(1), strict=True)
    return torch.stack([torch.full_like(share, f) / share for f, share in by_level], 1)


def _largest_below(keys: Tensor, best: Sequence[tuple[float, int, int]], tau: float) -> Tensor:
    """Returns for each level the largest loss of a pair at any finer level, [levels].

    `best` has each level's largest pair, whose loss is computed again, with a gradient. Raising
    losses does not change a level's largest one, so raw losses suffice.
    """
    largest, best_below = [keys.new_full((), -math.inf)], (-math.inf, 0, 0)
    for best_of_level in reversed(best[1:]):
        best_below = max(best_below, best_of_level)
        value, i, p = best_below
        if value == -math.inf:
            largest.append(keys.new_full((), -math.inf))
            continue
        logits = keys @ keys[i] / tau
        other_logits = torch.cat([logits[:i], logits[i + 1 :]])
        largest.append(torch.logsumexp(other_logits, 0) - logits[p])
    return torch.stack(largest[::-1])
