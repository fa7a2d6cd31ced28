"""The equations as loops in float64: slow, plain, and next to their source."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def cos(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b) / (torch.dot(a, a).sqrt() * torch.dot(b, b).sqrt())


def weighted_unsupervised(
    z: Sequence[Tensor], h: Sequence[Tensor], tau: float, anchors: str, negatives: str
) -> Tensor:
    """HeroCon Eq. 5; cross_view as in the authors' code, without its constant log(2 size)."""
    views, batch = len(z), len(z[0])

    def f(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(cos(a, b) / tau)

    def g(i: int, u: int, k: int, j: int) -> Tensor:
        one = torch.exp(1 - cos(z[u][i], h[j][k]))
        other = torch.exp(1 - cos(z[j][k], h[u][i]))
        return (one + other) / 2

    losses, zero = [], z[0].new_zeros(())
    for u in range(1 if anchors == "first" else views):
        for v in range(views):
            for i in range(batch):
                if u == v:
                    continue
                positive = f(z[u][i], z[v][i])
                if negatives == "cross_view":
                    inside = sum((g(i, u, k, v) * f(z[u][i], z[v][k]) for k in range(batch)), zero)
                else:
                    others = [(k, j) for k in range(batch) for j in range(views) if k != i]
                    inside = sum((g(i, u, k, j) * f(z[u][i], z[j][k]) for k, j in others), positive)
                losses.append(torch.log(inside) - torch.log(positive))
    return torch.stack(losses).mean()


def weighted_supervised(
    s: Tensor, y: Tensor, tau: float, distance: str, self_pairs: bool
) -> Tensor:
    """HeroCon Eq. 7."""
    batch, labels = y.shape

    def f(i: int, k: int) -> Tensor:
        return torch.exp(cos(s[i], s[k]) / tau)

    def dist(i: int, k: int) -> float:
        hamming = float((y[i] != y[k]).sum())
        return hamming if distance == "hamming" else float(hamming > 0)

    def sigma(i: int, j: int) -> float:
        return 1 - dist(i, j) / labels if distance == "hamming" else 1.0

    total = (s * 0).sum()
    for a in range(labels):
        positives = [i for i in range(batch) if y[i, a] == 1]
        negatives = [i for i in range(batch) if y[i, a] != 1]
        pairs = [(i, j) for i in positives for j in positives if self_pairs or i != j]
        for i, j in pairs:
            attract = sigma(i, j) * f(i, j)
            repel = sum((dist(i, k) * f(i, k) for k in negatives), s.new_zeros(()))
            total = total + (torch.log(attract + repel) - torch.log(attract)) / len(pairs)
    return total / labels


def nt_xent(z: Sequence[Tensor], tau: float) -> Tensor:
    """SimCLR with the positive pair in the denominator and no weights."""
    views, batch = len(z), len(z[0])
    losses = []
    for u in range(views):
        for v in range(views):
            for i in range(batch):
                if u != v:
                    positive = math.e ** (cos(z[u][i], z[v][i]) / tau)
                    rest = sum(
                        math.e ** (cos(z[u][i], z[j][k]) / tau)
                        for k in range(batch)
                        for j in range(views)
                        if k != i
                    )
                    losses.append(torch.log(positive + rest) - torch.log(positive))
    return torch.stack(losses).mean()
