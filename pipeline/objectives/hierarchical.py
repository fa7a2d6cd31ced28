"""Hierarchical contrastive learning: positives by the depth to which two labels agree."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from heron.pipeline.config.terms import Needs, Temperature, Term
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.contrast import MATCH_PART, Match, Matches, Pairs, contrast
from heron.pipeline.objectives.engine import class_members, strips, unit, working_dtype
from heron.pipeline.objectives.present import Present, lay, own_places

Penalty = Literal["exp_inverse"] | None


class Hierarchical(Term):
    """HiMulCon, HiConE, HiMulConE."""

    tau: Temperature = 0.1
    constrain: bool = True
    penalty: Penalty = "exp_inverse"

    needs: ClassVar[Needs] = Needs(
        gathered=("projections",), labelled=("paths",), labels=("hierarchical",)
    )
    missing_views: ClassVar[bool] = True

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `hierarchical`."""
        return hierarchical(
            batch.labelled_projections,
            batch.gathered_labelled["paths"][0],
            tau=self.tau,
            constrain=self.constrain,
            penalty=self.penalty,
            rows=batch.labelled,
            present=batch.labelled_present,
        )


def hierarchical(
    z: Sequence[Float[Tensor, "batch dim"]],
    levels: Shaped[Tensor, "..."],
    *,
    tau: float = 0.1,
    constrain: bool = True,
    penalty: Penalty = "exp_inverse",
    rows: slice = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    r"""HiMulCon, HiConE and HiMulConE (Zhang et al., CVPR 2022, Eq. 3 to 6).

    With A(i) all views of all samples but i, and P_l(i) those whose labels agree with i's on the
    levels 1 to l and not on l + 1,

    .. math:: \frac{1}{L} \sum_l \lambda_l \operatorname{mean}_i \frac{1}{|P_l(i)|}
              \sum_{p \in P_l(i)} \Big(\log \sum_{a \in A(i)} f_{ia} - \log f_{ip}\Big)

    the mean taken over the anchors with a positive at level l. `constrain` (HiConE) raises a pair's
    loss to the largest one among all finer levels of the batch, since pairs that are closer in the
    hierarchy shall not lie further apart; its gradient then goes to that largest pair.

    Args:
        z: projections of the labelled samples of the whole batch, [batch, dim], one a view.
        levels: their paths through the hierarchy, [batch, depth], coarsest level first; a number
            means a class below its parent, so that paths alone decide.
        tau: temperature, > 0.
        constrain: HiConE and HiMulConE; False is HiMulCon.
        penalty: lambda_l: None is 1 (HiConE), `exp_inverse` is 2^(1/d) with d = 1 for the finest
            level, 2 for the next and so on, as in the authors' code.
        rows: the samples whose anchors are summed here; counts are those of the whole batch.
        present: which views each sample has, over which i, A(i) and P_l(i) run.

    Returns:
        The share of the loss that belongs to `rows`: a scalar, 0 without a positive pair.

    Raises:
        ValueError: tau <= 0, or levels that are not whole numbers [batch, depth].
    """
    batch = z[0].shape[0]
    if levels.dim() != 2 or levels.is_floating_point() or levels.shape != (batch, levels.shape[1]):
        raise ValueError(
            f"levels are {levels.dtype} {tuple(levels.shape)}; expected whole numbers "
            f"[{batch}, depth], a path a sample"
        )
    dtype = working_dtype(z[0].dtype, tau)
    vectors = [unit(view).to(dtype) for view in z]
    keys, paths = lay(vectors, present), lay([levels] * len(z), present)
    number = torch.arange(len(keys), device=keys.device)
    tree = _Tree(paths, penalty)
    own = own_places(batch, len(z), present, rows, keys.device)
    anchors = lay(vectors, present, rows)
    # A pair at level l is raised to the largest of the levels below; -inf raises nothing.
    least = keys.new_full((tree.depth,), -math.inf)
    if constrain:
        least = _largest_below(keys, tree, tau)

    def finish(sums: Tensor, per_anchor: Sequence[Tensor], matches: Matches | None) -> Tensor:
        assert matches is not None
        row, level = own[matches.rows][matches.anchor], tree.agreement(matches, own)
        log_total = torch.where(sums > 0, sums, 1.0).log()[:, 0]
        loss = log_total[matches.anchor] - matches.logits
        raised = torch.maximum(loss, per_anchor[0][matches.anchor, level])
        return (raised * tree.weight[row, level].to(dtype)).sum()

    pairs = Pairs([anchors / tau], [keys], anchor_tag=own, key_tag=number, exclude=own[:, None])
    return contrast(pairs, finish, [least.expand(len(own), -1).contiguous()], match=tree.match(own))


class _Tree:
    """The paths of a batch, and what follows from them: levels of pairs, counts, weights.

    Attributes:
        depth: L; level L - 1 counts from 0 and is the finest.
        weight: of a pair of an anchor at a level, lambda / (L * anchors there * |P_l(i)|),
            [rows, depth].
    """

    def __init__(self, paths: Tensor, penalty: str | None) -> None:
        self.paths, self.depth = paths, paths.shape[1]
        groups = [
            torch.unique(paths[:, : level + 1], dim=0, return_inverse=True)[1]
            for level in range(self.depth)
        ]
        sizes = [torch.bincount(group)[group] for group in groups]
        counts = [
            size - (sizes[level + 1] if level + 1 < self.depth else 1)
            for level, size in enumerate(sizes)
        ]
        count = torch.stack(counts, 1).double()
        having = (count > 0).sum(0)
        factor = torch.tensor(
            [2 ** (1 / d) if penalty else 1.0 for d in range(self.depth, 0, -1)],
            dtype=torch.float64,
            device=paths.device,
        )
        self.weight = factor / (self.depth * having.clamp(min=1) * count.clamp(min=1))
        self.root, self.members = groups[0], class_members(groups[0])

    def match(self, own: Tensor) -> Match:
        """Pairs that share the coarsest class, of anchors that are the rows `own`."""
        return lambda strip: self.members(self.root[own[strip]], own[strip])

    def agreement(self, matches: Matches, own: Tensor) -> Tensor:
        """The finest level on which each pair agrees, from 0."""
        mine = self.paths[own[matches.rows][matches.anchor]]
        return (mine == self.paths[matches.key]).long().cumprod(1).sum(1) - 1


def _largest_below(keys: Tensor, tree: _Tree, tau: float) -> Tensor:
    """For each level the largest loss of a pair at any finer level, differentiable, [depth].

    Every process finds the pair among all anchors of the batch, without a gradient; then its loss
    is computed anew with one. Raising does not change a level's largest, so raw losses do.
    """
    own = torch.arange(len(keys), device=keys.device)
    best = [(-math.inf, 0, 0)] * tree.depth
    with torch.no_grad():
        for rows in strips(len(keys), len(keys), keys.device, MATCH_PART):
            logits = (keys[rows] / tau) @ keys.T
            anchor, key = tree.match(own)(rows)
            pair = logits[anchor, key]
            logits.scatter_(1, own[rows, None], -math.inf)
            loss = torch.logsumexp(logits, 1)[anchor] - pair
            level = tree.agreement(Matches(anchor, key, pair, rows), own)
            for depth in range(tree.depth):
                found = torch.where(level == depth, loss, -math.inf)
                if len(found) and (value := float(found.max())) > best[depth][0]:
                    at = int(found.argmax())
                    best[depth] = value, int(anchor[at]) + rows.start, int(key[at])
    largest, below = [keys.new_tensor(-math.inf)], (-math.inf, 0, 0)
    for found_at in reversed(best[1:]):
        below = max(below, found_at)
        value, i, p = below
        if value == -math.inf:
            largest.append(keys.new_tensor(-math.inf))
            continue
        logits = keys @ keys[i] / tau
        others = torch.cat([logits[:i], logits[i + 1 :]])
        largest.append(torch.logsumexp(others, 0) - logits[p])
    return torch.stack(largest[::-1])
