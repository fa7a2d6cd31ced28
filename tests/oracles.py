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


def cmc(z: Sequence[Tensor], tau: float) -> Tensor:
    """CMC: of each ordered pair of views, InfoNCE of one against the samples of the other."""
    views, batch = len(z), len(z[0])
    losses = []
    for u in range(views):
        for v in range(views):
            for i in range(batch):
                if u != v:
                    inside = [torch.exp(cos(z[u][i], z[v][k]) / tau) for k in range(batch)]
                    losses.append(torch.log(torch.stack(inside).sum()) - torch.log(inside[i]))
    return torch.stack(losses).mean()


def clip(z: Sequence[Tensor], s: Tensor) -> Tensor:
    """Radford et al. 2021, Fig. 3: cross entropy of each row and each column of the logits."""
    terms, rows = [], range(len(z[0]))
    for u in range(len(z)):
        for v in range(len(z)):
            for i in rows if u != v else ():
                logits = torch.stack([s[i] * cos(z[u][i], z[v][k]) for k in rows])
                terms.append(torch.logsumexp(logits, 0) - logits[i])
    return torch.stack(terms).mean()


def siglip(z: Sequence[Tensor], s: Tensor, b: Tensor) -> Tensor:
    """Zhai et al. 2023, Eq. 1."""
    batch, losses = len(z[0]), []
    for u in range(len(z)):
        for v in range(u + 1, len(z)):
            total = z[0].new_zeros(())
            for i in range(batch):
                for k in range(batch):
                    logit = s[i] * cos(z[u][i], z[v][k]) + b[i]
                    total = total + torch.log(1 + torch.exp(-logit if i == k else logit)) / batch
            losses.append(total)
    return torch.stack(losses).mean()


def input_weighted_unsupervised(
    z: Sequence[Tensor], x: Sequence[Tensor], tau: float, anchors: str
) -> Tensor:
    """HCL Eq. 4; a view of another width than the anchor's stands aside for the anchor's."""
    views, batch = len(z), len(z[0])
    losses = []
    for u in range(1 if anchors == "first" else views):
        for v in range(views):
            for i in range(batch):
                if u == v:
                    continue
                positive = torch.exp(cos(z[u][i], z[v][i]) / tau)
                inside = positive
                for k in range(batch):
                    for j in range(views):
                        if k != i:
                            same = x[j].shape == x[u].shape
                            g = torch.exp(1 - cos(x[u][i], x[j][k] if same else x[u][k]))
                            inside = inside + g * torch.exp(cos(z[u][i], z[j][k]) / tau)
                losses.append(torch.log(inside) - torch.log(positive))
    return torch.stack(losses).mean()


def single_view_unsupervised(
    x: Sequence[Tensor], z: Sequence[Tensor], h: Sequence[Tensor], tau: float
) -> Tensor:
    """HeroCon Eq. 4, of each view on its own."""
    losses = []
    for own, seen, weight in zip(x, z, h, strict=True):
        for i in range(len(seen)):
            positive = inside = torch.exp(cos(own[i], seen[i]) / tau)
            for k in range(len(seen)):
                if k != i:
                    one = torch.exp(1 - cos(seen[i], weight[k]))
                    other = torch.exp(1 - cos(seen[k], weight[i]))
                    inside = inside + (one + other) / 2 * torch.exp(cos(own[i], seen[k]) / tau)
            losses.append(torch.log(inside) - torch.log(positive))
    return torch.stack(losses).mean()


def supcon(z: Sequence[Tensor], label: Tensor, tau: float) -> Tensor:
    """Khosla et al. 2020, Eq. 2, summed over anchors and divided by their number."""
    rows, y = [row for view in z for row in view], [int(c) for _ in z for c in label]
    total = sum((view.sum() * 0 for view in z), z[0].new_zeros(()))
    for i in range(len(rows)):
        others = [a for a in range(len(rows)) if a != i]
        positives = [p for p in others if y[p] == y[i]]
        for p in positives:
            f = [torch.exp(cos(rows[i], rows[a]) / tau) for a in others]
            ratio = torch.exp(cos(rows[i], rows[p]) / tau) / torch.stack(f).sum()
            total = total - torch.log(ratio) / len(positives)
    return total / len(rows)


def hard(
    z: Sequence[Tensor],
    label: Tensor | None,
    tau: float,
    hardening: str,
    beta: float,
    threshold: float,
    positives: str,
    detach: bool,
) -> Tensor:
    """H-SCL Eq. 3, the mean over pairs of an anchor and a positive."""
    batch, rows = len(z[0]), [row for view in z for row in view]
    sample = [i for _ in z for i in range(batch)]
    y = sample if label is None else [int(c) for _ in z for c in label]
    losses = []
    for i in range(len(rows)):
        total, weights = [], []
        for k in range(len(rows)):
            g = cos(rows[i], rows[k]) / tau
            held = g.detach() if detach else g
            eta = {
                "none": torch.ones_like(g),
                "exp": torch.exp(beta * held),
                "threshold": (torch.exp(held) >= threshold).to(g),
            }[hardening]
            if y[k] != y[i] and eta > 0:
                total.append(eta * torch.exp(g))
                weights.append(eta)
        mean = torch.stack(total).sum() / torch.stack(weights).sum() if total else 0.0
        for p in range(len(rows)):
            same = y[p] == y[i] if positives == "label" else sample[p] == sample[i]
            if same and p != i:
                far = len(z) * (batch - 1) * mean
                losses.append(torch.log(1 + far * torch.exp(-cos(rows[i], rows[p]) / tau)))
    return torch.stack(losses).mean()


def debiased(z: Sequence[Tensor], tau: float, tau_plus: float) -> Tensor:
    """Chuang et al. 2020, Eq. 7 and 8."""
    views, batch = len(z), len(z[0])
    losses = []
    for u in range(views):
        for v in range(views):
            for i in range(batch):
                if u != v:
                    positive = torch.exp(cos(z[u][i], z[v][i]) / tau)
                    negative = [
                        torch.exp(cos(z[u][i], z[j][k]) / tau)
                        for k in range(batch)
                        for j in range(views)
                        if k != i
                    ]
                    n = len(negative)
                    rest = torch.stack(negative).sum() - n * tau_plus * positive
                    rest = torch.clamp(rest / (1 - tau_plus), min=n * math.e ** (-1 / tau))
                    losses.append(-torch.log(positive / (positive + rest)))
    return torch.stack(losses).mean()


def mulco(
    q: Tensor,
    key: Tensor,
    queue: Tensor,
    prob_q: Tensor,
    prob_queue: Tensor,
    ybar: Tensor,
    tau: float,
    kind: str,
) -> Tensor:
    """MulCo Eq. 4, 5, 9, 10, and the debiased one with the prior 1 / K."""
    losses = []
    classes = prob_q.shape[1]
    for i in range(len(q)):
        positive = torch.exp(cos(q[i], key[i]) / tau)
        own, total = int(prob_q[i].argmax()), torch.zeros_like(positive)
        for n in range(len(queue)):
            weight = {
                "standard": 1.0,
                "debiased": 1.0,
                "sifted": float(own != int(prob_queue[n].argmax())),
                "soft": 1 - float(prob_queue[n, own]),
                "weighted": float(sum(ybar[i, c] * prob_queue[n, c] for c in range(classes))),
            }[kind]
            total = total + weight * torch.exp(cos(q[i], queue[n]) / tau)
        if kind == "debiased":
            rest = (total - len(queue) / classes * positive) / (1 - 1 / classes)
            total = torch.clamp(rest, min=len(queue) * math.e ** (-1 / tau))
        losses.append(-torch.log(positive / (positive + total)))
    return torch.stack(losses).mean()


def hierarchical(
    z: Sequence[Tensor], levels: Tensor, tau: float, constrain: bool, penalty: str | None
) -> Tensor:
    """HiMulConE, Eq. 3 to 6; finest level first, so that the largest loss so far is known."""
    rows = [row for view in z for row in view]
    path = [tuple(p) for _ in z for p in levels.tolist()]
    depth, everyone = levels.shape[1], range(len(rows))

    def loss(i: int, p: int) -> Tensor:
        f = [torch.exp(cos(rows[i], rows[a]) / tau) for a in everyone if a != i]
        return torch.log(torch.stack(f).sum()) - cos(rows[i], rows[p]) / tau

    total, largest = sum((view.sum() * 0 for view in z), z[0].new_zeros(())), None
    for distance, level in enumerate(range(depth, 0, -1), start=1):
        weight = 2 ** (1 / distance) if penalty else 1.0
        of_anchors, found = [], []
        for i in everyone:
            mine = []
            for p in everyone:
                agree = path[i][:level] == path[p][:level]
                finer = level < depth and path[i][: level + 1] == path[p][: level + 1]
                if i != p and agree and not finer:
                    pair = loss(i, p)
                    raised = constrain and largest is not None and bool(pair < largest)
                    mine.append(largest if raised and largest is not None else pair)
            if mine:
                of_anchors.append(torch.stack(mine).mean())
                found += mine
        if found:
            total = total + weight * torch.stack(of_anchors).mean()
            top = max(found, key=Tensor.item)
            largest = top if largest is None or bool(top > largest) else largest
    return total / depth


def complementary(name: str, logits: Tensor, ybar: Tensor) -> Tensor:
    """Losses of sets of wrong classes, class by class."""
    losses = []
    classes = logits.shape[1]
    for scores, wrong in zip(logits, ybar, strict=True):
        p = torch.exp(scores) / torch.exp(scores).sum()
        inside = [j for j in range(classes) if wrong[j] == 1]
        outside = [j for j in range(classes) if wrong[j] != 1]
        size = len(inside)

        def single(j: int, p: Tensor = p) -> Tensor:
            if name == "mse":
                return torch.stack([(p[k] - float(k == j)) ** 2 for k in range(classes)]).sum()
            return (1 - p[j] ** 0.7) / 0.7

        right = torch.stack([p[j] for j in outside]).sum()
        if name == "ub_log":
            losses.append(-torch.log(right))
        elif name == "ub_exp":
            losses.append(torch.exp(-right))
        elif name in ("mse", "gce"):
            known = torch.stack([single(j) for j in inside]).sum()
            losses.append(
                torch.stack([single(j) for j in outside]).sum()
                - (classes - 1 - size) / size * known
            )
        elif name == "l_uw":
            q = torch.exp(1 - p) / torch.exp(1 - p).sum()
            losses.append(-torch.stack([torch.log(q[j]) for j in inside]).mean())
        elif name == "scl_nl":
            losses.append(-torch.stack([torch.log(1 - p[j]) for j in inside]).mean())
        elif name == "mlcl":
            chance = [size / (classes - 1) * (1 - p[j]) for j in range(classes)]
            each = [torch.log(c if j in inside else 1 - c) for j, c in enumerate(chance)]
            losses.append(-torch.stack(each).sum())
    return torch.stack(losses).mean()
