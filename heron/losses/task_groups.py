"""A classifier whose layers are shared by tasks (labels) with similar errors (DeepMTMV)."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from heron.distributed.derivatives import first_derivative

ROUNDS = 45  # of alternating over the views, as in DeepMTMV's code
SEEDS = 10  # of k-means; the cheapest clusters are taken
Affinity = Float[np.ndarray, "views branches branches"]


@dataclass(frozen=True)
class SplitRule:
    """When and how layers are split: the options of `Deepmtmv`."""

    every_epochs: int
    errors: Literal["view", "joint"]
    decay: float
    cost: float
    separation: float
    consensus: float


class _SelectGroups(torch.autograd.Function):
    """Selects each group's row from a row per task; a group's gradient goes to all its tasks."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, first_tasks: list[int], group_of_task: list[int]
    ) -> Tensor:
        ctx.index = [first_tasks.index(group) for group in group_of_task]  # type: ignore[attr-defined]
        return rows[first_tasks]

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.index], None, None  # type: ignore[attr-defined]


class GroupedLinear(nn.Module):
    """A linear layer per group of tasks.

    Every task has weights of its own. Those of a group are equal and get the gradient of the layer
    that they share, so they stay equal, up to rounding, under any optimiser that updates elements
    one by one or a parameter by its norm; a group uses the weights of its first task. Splitting a
    group then only changes `groups`: the new groups start with copies of weights and of optimiser
    state, however a strategy shards these, and the set of parameters never changes.

    Attributes:
        groups: number of each task's group, which is that of its first task; part of the state.
        group_of_task: the same as a list, which can be read without a device synchronisation.
    """

    groups: Tensor
    group_of_task: list[int]

    def __init__(self, groups: Int[Tensor, " tasks"], width: int, out: int) -> None:
        """Initialises a layer per group as `nn.Linear` does; `out` is the width of its output."""
        super().__init__()
        initial = nn.Linear(width, len(groups) * out)
        self.weight = nn.Parameter(initial.weight.detach().view(-1, out, width)[groups])
        self.bias = nn.Parameter(initial.bias.detach().view(-1, out)[groups])
        self.register_buffer("groups", groups.clone())
        self.group_of_task = groups.tolist()
        self.register_load_state_dict_post_hook(lambda layer, _: layer.set_groups(()))  # type: ignore[no-untyped-call]

    def set_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Splits the tasks into groups; with none given, reads those of a state just loaded."""
        for group in groups:
            self.groups[list(group)] = min(group)
        self.group_of_task = self.groups.tolist()

    def forward(
        self, x: Float[Tensor, "below rows width"], groups_below: Sequence[int]
    ) -> Float[Tensor, "groups rows out"]:
        """Applies each group's layer to the output of the group below that holds its tasks.

        `x` has a slice per group of the layer below, in order of group number; `groups_below` is
        that layer's `group_of_task`.
        """
        first_tasks, slices = sorted(set(self.group_of_task)), sorted(set(groups_below))
        index = [slices.index(groups_below[task]) for task in first_tasks]
        weight, bias = (
            _SelectGroups.apply(p, first_tasks, self.group_of_task)  # type: ignore[no-untyped-call]
            for p in (self.weight, self.bias)
        )
        outputs: Tensor = torch.baddbmm(bias[:, None], x[index], weight.mT)
        return outputs


class TaskGroups(nn.Module):
    """The classifier of DeepMTMV (Zheng, Cheng and He 2019), in which a task is a label.

    Layers shared by groups of tasks take the views' concatenated features; each task has an output
    unit of its own. At first all tasks share all layers; from the top down, layers are split into
    groups of tasks that find the same samples difficult (see `partition`). The averages of the
    errors over batches are part of the state and the same on every process.

    Attributes:
        margins: mean error of each task, [views, tasks].
        agreement: probability that two tasks find a sample both difficult (an error of at least its
            mean) or both easy (below), [views, tasks, tasks].
        weight: sum of the weights of the batches in these averages.
    """

    margins: Tensor
    agreement: Tensor
    weight: Tensor

    def __init__(
        self, rule: SplitRule, widths: Sequence[int] | None, width: int, views: int, tasks: int
    ) -> None:
        """Builds the layers, all shared, for `views` views of `width` features each.

        `widths` are those of the hidden layers; None: 1/2 and 1/4 of the input's.
        """
        super().__init__()
        self.rule, self.view_width, self.views = rule, width, views
        in_width = width * views
        widths = widths or [max(1, in_width // 2), max(1, in_width // 4)]
        sizes = zip([in_width, *widths], widths, strict=False)
        one_group = torch.zeros(tasks, dtype=torch.int64)
        self.hidden = nn.ModuleList(GroupedLinear(one_group, n, out) for n, out in sizes)
        self.heads = GroupedLinear(torch.arange(tasks), widths[-1], 1)
        self.register_buffer("margins", torch.zeros(views, tasks))
        self.register_buffer("agreement", torch.zeros(views, tasks, tasks))
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, features: Float[Tensor, "rows width"]) -> Float[Tensor, "rows tasks"]:
        """Returns the logits of rows with their views' features concatenated."""
        x, groups_below = features[None], [0] * len(self.heads.group_of_task)
        for layer in self.layers:
            x, groups_below = layer(x, groups_below).relu(), layer.group_of_task
        logits: Tensor = self.heads(x, groups_below)[:, :, 0].T
        return logits

    @property
    def layers(self) -> list[GroupedLinear]:
        """The hidden layers, from the features up."""
        return [layer for layer in self.hidden if isinstance(layer, GroupedLinear)]

    @torch.no_grad()
    def per_view(self, features: Float[Tensor, "rows width"]) -> list[Float[Tensor, "rows tasks"]]:
        """Returns the logits of each view alone, with zeros for the other views; no gradient."""
        if self.views == 1 or self.rule.errors == "joint":
            return [self.forward(features)] * self.views
        by_view = torch.split(features, self.view_width, 1)
        zeros = torch.zeros_like(by_view[0])
        return [
            self.forward(torch.cat([x if u == v else zeros for u, x in enumerate(by_view)], 1))
            for v in range(self.views)
        ]

    @torch.no_grad()
    def update_averages(self, errors: Float[Tensor, "rows views tasks"]) -> None:
        """Adds the errors |y - p| of a whole batch's labelled rows to the averages.

        With e = 1 where an error is at least the mean of the batches before, the agreement of two
        tasks is E[e_i e_j + (1 - e_i)(1 - e_j)] (Lu et al. 2017). `decay` multiplies the weight of
        earlier batches; the new one has the weight 1.
        """
        if not len(errors):
            return
        errors = errors.to(self.margins)
        hard = (errors >= self.margins).to(errors)
        pairs = torch.stack([torch.einsum("rvi,rvj->vij", e, e) for e in (hard, 1 - hard)])
        old_weight = self.weight * self.rule.decay
        self.weight.copy_(old_weight + 1)
        self.margins.mul_(old_weight).add_(errors.mean(0)).div_(self.weight)
        self.agreement.mul_(old_weight).add_(pairs.sum(0) / len(errors)).div_(self.weight)

    @torch.no_grad()
    def choose_groups(self) -> tuple[int, list[list[int]]]:
        """Returns the highest layer that all tasks share, by number, and its new groups of tasks.

        It needs the full, gathered weights. There is one group if no split is cheaper or no layer
        is left to split.
        """
        tasks = self.heads.group_of_task
        shared = [i for i, layer in enumerate(self.layers) if not any(layer.group_of_task)]
        if not shared or not self.weight:
            return 0, [tasks]
        level = shared[-1]
        above = [*self.layers, self.heads][level + 1].group_of_task
        branches = [[n for n, g in enumerate(above) if g == group] for group in sorted(set(above))]
        # Views are weighted by the first layer's mean positive weight, as in the authors' code.
        by_view = torch.split(self.layers[0].weight[0].relu(), self.view_width, 1)
        importance = torch.stack([weight.mean() for weight in by_view]).double().softmax(0)
        groups = partition(
            self.agreement.double().cpu().numpy(),
            branches,
            importance.cpu().numpy(),
            cost=self.rule.cost * 2 ** (len(self.layers) - 1 - level),
            separation=self.rule.separation,
            consensus=self.rule.consensus,
        )
        return level, groups


def partition(
    agreement: Float[np.ndarray, "views tasks tasks"],
    branches: Sequence[Sequence[int]],
    importance: Float[np.ndarray, " views"],
    *,
    cost: float,
    separation: float,
    consensus: float,
) -> list[list[int]]:
    r"""Returns the cheapest groups of branches (Zheng, Cheng and He 2019; Lu et al. 2017).

    The cost of C groups g, with A from `affinity` and the view's importance alpha_v, is

    .. math:: (C - 1) \, \mathrm{cost} + \frac{\mathrm{separation}}{V C} \sum_v \alpha_v
        \sum_g \left(1 - \operatorname{mean}_{k \in g} \min_{l \in g} A^v_{kl}\right)

    For every C from 1 to one less than the number of branches, the groups are clusters of
    `embedding`; those of the cheapest C are returned. So, as in DeepMTMV's code, some branches
    always stay together.

    `branches` has the tasks of each branch of the layer above, the result those of each group, in
    order of their first task. The views' `importance` sums to 1; `consensus` is the lambda of
    `embedding`.
    """
    a = affinity(agreement, branches)
    one_group = np.zeros(len(branches), np.int64)
    candidates = [(disagreement(a, one_group, importance), one_group.tolist())]
    for count in range(2, len(branches)):
        points = embedding(a, count, consensus)
        clusterings = [_cluster(points, count, seed) for seed in range(SEEDS)]
        valid = [labels for labels in clusterings if len(set(labels.tolist())) == count]
        scores = [disagreement(a, labels, importance) for labels in valid]
        if scores:
            best = int(np.argmin(scores))
            candidates.append((scores[best], valid[best].tolist()))
    weight = separation / len(a)
    costs = [(len(set(labels)) - 1) * cost + weight * score for score, labels in candidates]
    labels = candidates[int(np.argmin(costs))][1]
    groups: dict[int, list[int]] = {}
    for label, tasks in zip(labels, branches, strict=True):
        groups.setdefault(label, []).extend(tasks)
    return sorted(sorted(group) for group in groups.values())


def affinity(
    agreement: Float[np.ndarray, "views tasks tasks"], branches: Sequence[Sequence[int]]
) -> Affinity:
    """Returns the affinity of branches (Lu et al. 2017), averaged over both directions.

    It is the mean, over the tasks of one branch, of the least agreement with a task of the other.
    """
    index = [[np.ix_(tasks, others) for others in branches] for tasks in branches]
    a = np.array([[[view[i].min(1).mean() for i in row] for row in index] for view in agreement])
    mean: NDArray[np.float64] = (a + a.transpose(0, 2, 1)) / 2
    return mean


def disagreement(
    a: Affinity, labels: Int[np.ndarray, " branches"], importance: NDArray[np.float64]
) -> float:
    """Returns the disagreement inside groups: the mean over groups, weighted over views."""
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    by_view = [[1 - view[np.ix_(g, g)].min(1).mean() for g in groups] for view in a]
    return float(importance @ np.mean(by_view, 1))


def embedding(
    a: Affinity, count: int, consensus: float
) -> Float[np.ndarray, "branches coordinates"]:
    r"""Co-regularised spectral embedding (Kumar, Rai and Daume 2011, its pairwise form).

    Returns the bases' rows, each of length 1, concatenated over views. With
    L_v = D_v^{-1/2} A_v D_v^{-1/2}, the views' bases U_v of `count` orthonormal columns are
    optimised in turn to maximise

    .. math:: \sum_v \operatorname{tr}(U_v^T L_v U_v)
        + \lambda \sum_{v < w} \operatorname{tr}(U_v U_v^T U_w U_w^T)
    """
    root = np.sqrt(np.maximum(a.sum(2), np.finfo(np.float64).tiny))
    laplacians = a / (root[:, :, None] * root[:, None, :])
    bases = np.stack([_top_eigenvectors(laplacian, count) for laplacian in laplacians])
    for _ in range(ROUNDS if len(a) > 1 else 0):
        for v in range(len(a)):
            others = np.delete(bases, v, 0)
            projections = np.einsum("wik,wjk->ij", others, others)
            bases[v] = _top_eigenvectors(laplacians[v] + consensus * projections, count)
    norms = np.linalg.norm(bases, axis=2, keepdims=True)
    return np.concatenate(list(bases / np.where(norms > 0, norms, 1)), 1)


def _top_eigenvectors(symmetric: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    columns: NDArray[np.float64] = np.linalg.eigh(symmetric)[1][:, -count:]
    return columns


def _cluster(points: NDArray[np.float64], count: int, seed: int) -> NDArray[np.int64]:
    from sklearn.cluster import KMeans  # imported here, as only task groups need it and its scipy
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters
        labels = KMeans(count, n_init=1, random_state=seed).fit_predict(points)
    return np.asarray(labels, np.int64)
