"""Every contrastive term as its formula reads: whole matrices, and autograd for the gradient.

The yardstick of `benchmarks.objectives`; two views, the positives of an anchor being the other view
of its sample or its class. Written for memory as a careful reader of the paper would: one matrix a
quantity, none twice.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted_unsupervised(z: Sequence[Tensor], h: Sequence[Tensor], *, tau: float) -> Tensor:
    """HeroCon, Eq. 5."""
    vectors, weights = stacked(z), stacked(h)
    near = torch.exp(1 - vectors @ weights.T)
    g = (near + near.T) / 2
    f = torch.exp(vectors @ vectors.T / tau)
    negative = (g * f).masked_fill(same_sample(z), 0.0).sum(1)
    return torch.log1p(negative / torch.exp(partners(vectors) / tau)).mean()


def single_view_unsupervised(
    x: Sequence[Tensor], z: Sequence[Tensor], h: Sequence[Tensor], *, tau: float
) -> Tensor:
    """HeroCon, Eq. 4, of one view."""
    inputs, vectors, weights = stacked(x), stacked(z), stacked(h)
    near = torch.exp(1 - vectors @ weights.T)
    f = torch.exp(inputs @ vectors.T / tau)
    negative = ((near + near.T) / 2 * f).masked_fill(itself(f), 0.0).sum(1)
    return torch.log1p(negative / f.diagonal()).mean()


def weighted_supervised(s: Tensor, y: Tensor, *, tau: float) -> Tensor:
    """HeroCon, Eq. 7, label by label."""
    s = F.normalize(s)
    f = torch.exp(s @ s.T / tau)
    dist = y @ (1 - y).T + (1 - y) @ y.T
    attract, repel = (1 - dist / y.shape[1]) * f, dist * f
    total = s.new_zeros(())
    for a in range(y.shape[1]):
        positive = y[:, a] == 1
        attraction = attract[positive][:, positive]
        if len(attraction) > 1:
            inside = attraction + repel[positive][:, ~positive].sum(1, keepdim=True)
            total = total + (inside.log() - attraction.log())[~itself(attraction)].mean()
    return total / y.shape[1]


def nt_xent(z: Sequence[Tensor], *, tau: float) -> Tensor:
    """SimCLR, Eq. 1."""
    vectors = stacked(z)
    logits = (vectors @ vectors.T / tau).masked_fill(itself(vectors), -math.inf)
    partner = torch.arange(len(vectors), device=vectors.device).roll(len(z[0]))
    return F.cross_entropy(logits, partner)


def cmc(z: Sequence[Tensor], *, tau: float) -> Tensor:
    """CMC, Eq. 3, from either view: one matrix serves both."""
    z1, z2 = (F.normalize(view) for view in z)
    logits, partner = z1 @ z2.T / tau, torch.arange(len(z1), device=z1.device)
    return (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2


def input_weighted_unsupervised(z: Sequence[Tensor], x: Sequence[Tensor], *, tau: float) -> Tensor:
    """HCL, Eq. 4."""
    vectors, raw = stacked(z), stacked(x)
    gf = torch.exp(1 - raw @ raw.T + vectors @ vectors.T / tau)
    negative = gf.masked_fill(same_sample(z), 0.0).sum(1)
    return torch.log1p(negative / torch.exp(partners(vectors) / tau)).mean()


def supcon(z: Sequence[Tensor], label: Tensor, *, tau: float) -> Tensor:
    """SupCon, Eq. 2."""
    vectors = stacked(z)
    logits = (vectors @ vectors.T / tau).masked_fill(itself(vectors), -math.inf)
    positive = same_class(label, len(z)) & ~itself(vectors)
    anchor_loss = torch.where(positive, -logits.log_softmax(1), 0.0).sum(1)
    return (anchor_loss / positive.sum(1).clamp(min=1)).mean()


def hard(z: Sequence[Tensor], label: Tensor | None = None, *, tau: float, beta: float) -> Tensor:
    """H-UCL without labels, H-SCL with them: Eq. 3 with eta = e^(beta g)."""
    vectors = stacked(z)
    logits = vectors @ vectors.T / tau
    left_out = same_sample(z) if label is None else same_class(label, len(z))
    eta = torch.exp(beta * logits).masked_fill(left_out, 0.0)
    mean = (eta * torch.exp(logits)).sum(1) / eta.sum(1)
    far = (len(z) * (len(z[0]) - 1) * mean).log()
    if label is None:
        return F.softplus(far - partners(vectors) / tau).mean()
    positive = left_out & ~itself(vectors)
    pair_loss = F.softplus(far[:, None] - logits)
    return torch.where(positive, pair_loss, 0.0).sum() / positive.sum()


def debiased(z: Sequence[Tensor], *, tau: float, tau_plus: float) -> Tensor:
    """Chuang et al. 2020, Eq. 7 and 8."""
    vectors, count = stacked(z), len(z) * (len(z[0]) - 1)
    f = torch.exp(vectors @ vectors.T / tau)
    total = f.masked_fill(same_sample(z), 0.0).sum(1)
    positive = torch.exp(partners(vectors) / tau)
    negative = (total - count * tau_plus * positive) / (1 - tau_plus)
    return torch.log1p(negative.clamp(min=count * math.exp(-1 / tau)) / positive).mean()


def mulco(
    q: Tensor, key: Tensor, queue: Tensor, prob_queue: Tensor, ybar: Tensor, *, tau: float
) -> Tensor:
    """MulCo, Eq. 10: a negative weighs what the query's wrong classes say of it."""
    q = F.normalize(q)
    f = torch.exp(q @ F.normalize(queue).T / tau)
    total = (ybar @ prob_queue.T * f).sum(1)
    return torch.log1p(total / torch.exp((q * F.normalize(key)).sum(1) / tau)).mean()


def hierarchical(z: Sequence[Tensor], levels: Tensor, *, tau: float) -> Tensor:
    """HiMulConE (Zhang et al. 2022, Eq. 3 to 6): finest level first."""
    vectors, path = stacked(z), levels.repeat(len(z), 1)
    logits = (vectors @ vectors.T / tau).masked_fill(itself(vectors), -math.inf)
    loss = torch.logsumexp(logits, 1, keepdim=True) - logits
    agree = [~itself(vectors)]  # the pairs that agree down to level 0, 1, 2, ...
    for level in path.T:
        agree.append(agree[-1] & (level[:, None] == level))
    finer = torch.zeros_like(agree[0])
    total, largest = vectors.new_zeros(()), vectors.new_tensor(-math.inf)
    for distance, below in enumerate(reversed(agree[1:]), start=1):
        positive = below & ~finer
        raised = torch.where(positive, torch.maximum(loss, largest), 0.0)
        count = positive.sum(1)
        mean = (raised.sum(1) / count.clamp(min=1)).sum() / (count > 0).sum().clamp(min=1)
        total = total + 2 ** (1 / distance) * mean
        largest = torch.maximum(largest, raised.masked_fill(~positive, -math.inf).max())
        finer = below
    return total / levels.shape[1]


def stacked(views: Sequence[Tensor]) -> Tensor:
    """All views of all samples as unit vectors, one view after the other."""
    return F.normalize(torch.cat(list(views)))


def partners(vectors: Tensor) -> Tensor:
    """The cosine of every row with the other view of its sample."""
    return (vectors * vectors.roll(len(vectors) // 2, 0)).sum(1)


def itself(rows: Tensor) -> Tensor:
    return torch.eye(len(rows), dtype=torch.bool, device=rows.device)


def same_sample(z: Sequence[Tensor]) -> Tensor:
    return same_class(torch.arange(len(z[0]), device=z[0].device), len(z))


def same_class(label: Tensor, views: int) -> Tensor:
    label = label.repeat(views)
    return label[:, None] == label
