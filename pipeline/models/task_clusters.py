"""Which tasks are parted from which: clusters of the tasks whose errors agree, in several views."""

import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

ROUNDS = 45  # of the views' alternation, as in DeepMTMV's code
SEEDS = 10  # of k-means, of which the cheapest clusters are taken

Affinity = Float[np.ndarray, "views branches branches"]


def partition(
    agreement: Float[np.ndarray, "views tasks tasks"],
    branches: Sequence[Sequence[int]],
    importance: Float[np.ndarray, " views"],
    *,
    cost: float,
    separation: float,
    consensus: float,
) -> list[list[int]]:
    r"""The groups of branches that cost least (Zheng, Cheng and He 2019; Lu et al. 2017).

    C groups g cost, with A of `affinity` and the view's importance alpha_v,

    .. math:: (C - 1) \, \mathrm{cost} + \frac{\mathrm{separation}}{V C} \sum_v \alpha_v
        \sum_g \left(1 - \operatorname{mean}_{k \in g} \min_{l \in g} A^v_{kl}\right)

    For every C from 1 to the branches less one the groups are clusters of `embedding`; of the
    cheapest C the groups are taken. As in DeepMTMV's code, some branches always stay together.

    Args:
        agreement: of the tasks' errors: see `TaskGroups.agreement`.
        branches: the tasks of each branch of the layer above.
        importance: weights of the views, which sum to 1.
        cost: of a further group.
        separation: weight of the groups' disagreement.
        consensus: see `embedding`.

    Returns:
        The tasks of each group, groups in order of their first task.
    """
    a = affinity(agreement, branches)
    found = [(disagreement(a, np.zeros(len(branches), np.int64), importance), [0] * len(branches))]
    for count in range(2, len(branches)):
        points = embedding(a, count, consensus)
        tries = [_cluster(points, count, seed) for seed in range(SEEDS)]
        full = [labels for labels in tries if len(set(labels.tolist())) == count]
        costs = [disagreement(a, labels, importance) for labels in full]
        if costs:
            least = int(np.argmin(costs))
            found.append((costs[least], full[least].tolist()))
    total = [(len(set(labels)) - 1) * cost + separation / len(a) * apart for apart, labels in found]
    labels = found[int(np.argmin(total))][1]
    groups: dict[int, list[int]] = {}
    for label, tasks in zip(labels, branches, strict=True):
        groups.setdefault(label, []).extend(tasks)
    return sorted(sorted(group) for group in groups.values())


def affinity(
    agreement: Float[np.ndarray, "views tasks tasks"], branches: Sequence[Sequence[int]]
) -> Affinity:
    """How far the tasks of branches agree (Lu et al. 2017, affinity of branches).

    A_kl is the mean over the tasks of k of the least agreement with a task of l, made symmetric by
    the mean with A_lk.
    """
    a = np.array(
        [
            [[of[np.ix_(one, other)].min(1).mean() for other in branches] for one in branches]
            for of in agreement
        ]
    )
    mean: NDArray[np.float64] = (a + a.transpose(0, 2, 1)) / 2
    return mean


def disagreement(
    a: Affinity, labels: Int[np.ndarray, " branches"], importance: NDArray[np.float64]
) -> float:
    """How little the branches of a group agree, the mean over groups, weighted over views."""
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    apart = [[1 - of[np.ix_(g, g)].min(1).mean() for g in groups] for of in a]
    return float(importance @ np.mean(apart, 1))


def embedding(
    a: Affinity, count: int, consensus: float
) -> Float[np.ndarray, "branches coordinates"]:
    r"""Co-regularised spectral embedding (Kumar, Rai and Daume 2011, its pairwise form).

    With L_v = D_v^{-1/2} A_v D_v^{-1/2}, the views' bases U_v of `count` orthonormal columns take
    turns to maximise

    .. math:: \sum_v \operatorname{tr}(U_v^T L_v U_v)
        + \lambda \sum_{v < w} \operatorname{tr}(U_v U_v^T U_w U_w^T)

    Returns:
        The bases' rows, each of length 1, side by side over views.
    """
    root = np.sqrt(np.maximum(a.sum(2), np.finfo(np.float64).tiny))
    laplacians = a / (root[:, :, None] * root[:, None, :])
    bases = np.stack([_top(laplacian, count) for laplacian in laplacians])
    for _ in range(ROUNDS if len(a) > 1 else 0):
        for v in range(len(a)):
            others = np.delete(bases, v, 0)
            drawn = np.einsum("wik,wjk->ij", others, others)
            bases[v] = _top(laplacians[v] + consensus * drawn, count)
    lengths = np.linalg.norm(bases, axis=2, keepdims=True)
    return np.concatenate(list(bases / np.where(lengths > 0, lengths, 1)), 1)


def _top(symmetric: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Eigenvectors of the largest eigenvalues, as columns."""
    found: NDArray[np.float64] = np.linalg.eigh(symmetric)[1][:, -count:]
    return found


def _cluster(points: NDArray[np.float64], count: int, seed: int) -> NDArray[np.int64]:
    from sklearn.cluster import KMeans  # here: only task groups need it, and it loads scipy
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer points apart than clusters
        labels = KMeans(count, n_init=1, random_state=seed).fit_predict(points)
    return np.asarray(labels, np.int64)
