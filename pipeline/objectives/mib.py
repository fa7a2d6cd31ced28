"""MIB: views agree on what they share, and the codes of a sample on everything else."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from heron.pipeline.config.sections import Natural, Positive
from heron.pipeline.config.terms import Needs, Term
from heron.pipeline.data.random_keys import normals
from heron.pipeline.models.heterogeneous import Encoded, Features, ModelSpec
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.engine import RuleResult, blockwise
from heron.pipeline.objectives.present import OwnRows, Rows, as_slice
from heron.pipeline.objectives.ring import Block, blocks, over_blocks, ring_of, row_count
from heron.pipeline.objectives.unsupervised import pair_widths

SALT = 9000  # apart from those of dropout, which count the views and layers of an encoder
LEAST_STD = 0.1  # D_SKL divides by its square, and with the authors' 1e-7 overflowed


class Bottleneck(nn.Module):
    """p(z|v) of one view, and the view's side of the critic (Federici et al. 2020).

    The Gaussian is read off the view's projection. The critic C(z_u, z_v) = c_u(z_u) . c_v(z_v) is
    separable, where the authors' is a network of both side by side: so a view's vectors are
    gathered like any projection, and every pair of the global batch is judged at the price of an
    inner product. The paper leaves its form open.
    """

    def __init__(self, dim: int, view: int) -> None:
        """Takes projections of `dim` numbers; `view` keeps the draws of the views apart."""
        super().__init__()
        self.salt = SALT + view
        self.gaussian = nn.Linear(dim, 2 * dim)
        self.critic = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(
        self, projection: Float[Tensor, "rows dim"], rng_keys: Int[Tensor, " rows"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns mean and standard deviation of z, and c(z) of a draw, each [rows, dim].

        The draw is a function of each row's key, so it is the same on any number of processes.
        """
        mean, raw = self.gaussian(projection).chunk(2, 1)
        std = F.softplus(raw) + LEAST_STD
        z = mean + std * normals(rng_keys, self.salt, mean.shape[1]).to(mean)
        return mean, std, self.critic(z)


class Bottlenecks(nn.ModuleList):
    """One a view; under `model.matryoshka` one a width and view, of the projection's first numbers.

    Widths share no weights: what a critic makes of the first numbers of a code is not the critic of
    a shorter code.
    """

    def __init__(self, widths: Sequence[int], views: int) -> None:
        """Builds them, all views of a width before the next width."""
        super().__init__(Bottleneck(width, view) for width in widths for view in range(views))
        self.widths, self.views = widths, views

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `means` and `stds` of p(z|v), and `critics`, c(z), of each width and view."""
        parts = [z[:, :width] for width in self.widths for z in encoded.projections]
        modules = [
            self[at * self.views + view]
            for at in range(len(self.widths))
            for view in range(len(encoded.projections))
        ]
        pairs = zip(modules, parts, strict=True)
        found = zip(*(module(z, encoded.rng_keys) for module, z in pairs), strict=True)
        return dict(zip(("means", "stds", "critics"), map(list, found), strict=True))


class Mib(Term):
    """MIB's objective.

    Attributes:
        beta: weight of the information that is left out, at the end.
        beta_start: the weight at first, which grows exponentially.
        beta_epochs: epochs over which it grows.
    """

    beta: Positive = 1.0
    beta_start: Positive = 1e-3
    beta_epochs: Natural = 100

    needs: ClassVar[Needs] = Needs(
        vectors=("critics",), own=("projections", "means", "stds"), views=2
    )
    nested: ClassVar[tuple[str, ...] | None] = ()  # a width has bottlenecks of its own
    rings: ClassVar[bool] = True

    def parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Brings a bottleneck a view."""
        widths = spec.config.matryoshka or [spec.config.projection_width]
        return {"bottlenecks": lambda: Bottlenecks(widths, len(spec.shapes))}

    def ring_widths(self, views: int, widths: Mapping[str, int]) -> list[int]:
        """Of two views at a time, loss and gradient in one round."""
        return pair_widths(views, widths["critics"])

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `mib`; beta grows as in the paper's experiments."""
        share = min(batch.epoch / self.beta_epochs, 1.0)
        beta = self.beta_start * (self.beta / self.beta_start) ** share
        own, critics = batch.own, batch.vectors["critics"]
        views = len(own["projections"])
        losses = [
            mib(
                critics[at : at + views],
                own["means"][at : at + views],
                own["stds"][at : at + views],
                beta=beta,
                rows=batch.own_rows,
            )
            for at in range(0, len(critics), views)
        ]
        return torch.stack(losses).mean()


def mib(
    critics: Sequence[Float[Tensor, "held dim"]],
    means: Sequence[Float[Tensor, "rows code"]],
    stds: Sequence[Float[Tensor, "rows code"]],
    *,
    beta: float = 1.0,
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    r"""The multi-view information bottleneck (Federici et al. 2020, Section 3.2, L_MIB).

    .. math:: -I(z_1; z_2) + \beta D_{SKL}(p(z_1|v_1) \,\|\, p(z_2|v_2))

    I is the Jensen-Shannon estimate (Hjelm et al. 2019, Eq. 4) with the critic
    C_ij = c_1(z_1i) . c_2(z_2j),

    .. math:: I = -E_i[\log(1 + e^{-C_{ii}})] - E_{i \ne j}[\log(1 + e^{C_{ij}})]

    over all pairs of the batch, where the authors' code has one j for each i. D_SKL is the mean
    over samples of (KL(p_1 || p_2) + KL(p_2 || p_1)) / 2 of diagonal Gaussians, in closed form
    where the code draws. Of more than two views, the mean over their pairs.

    Args:
        critics: c(z) of the whole batch, one tensor a view.
        means: of p(z|v) of this process's rows, one tensor a view.
        stds: standard deviations, as the means.
        beta: weight of D_SKL, >= 0.
        rows: this process's rows in the batch, as of `nt_xent`.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: fewer than two views.
    """
    if len(critics) < 2:
        raise ValueError(f"mib has {len(critics)} view; expected at least 2")
    couples = list(itertools.combinations(range(len(critics)), 2))
    batch = row_count(rows, critics[0])
    own, places = as_slice(rows), torch.arange(batch, device=critics[0].device)
    parts = []
    for u, v in couples:
        apart = _divergence(means[u], stds[u], means[v], stds[v])
        if ring_of(rows) is not None:
            parts.append(_around(critics[u], critics[v], rows, batch))
        elif not isinstance(rows, OwnRows):
            parts.append(_minus_information(critics[u][own], critics[v], places[own], batch))
        else:  # what own anchors find; then what the anchors of all find for own keys: a gradient
            constant = critics[u].detach(), critics[v].detach()
            parts.append(_minus_information(critics[u][own], constant[1], places[own], batch))
            mine = torch.where((places >= own.start) & (places < own.stop), places - own.start, -1)
            pull = _minus_information(constant[0], critics[v][own], mine, batch)
            parts.append(pull - pull.detach())
        parts.append(beta * apart / max(batch, 1))
    return torch.stack(parts).sum() / len(couples)


def _around(anchors: Tensor, keys: Tensor, rows: Rows, batch: int) -> Tensor:
    """As where all are here, with the keys of a process after those of another."""
    assert isinstance(rows, OwnRows)
    number = torch.arange(len(anchors), device=anchors.device)

    def share(own: Sequence[Tensor], block: Block) -> Tensor:
        (near, far), (of_anchors, of_keys) = own, block.keys
        at = number if block.own else number.new_full((max(len(near), len(of_keys)),), -1)
        pull = _minus_information(of_anchors, far, at, batch)
        return _minus_information(near, of_keys, at, batch) + pull - pull.detach()

    def around() -> Iterator[Block]:
        return blocks([anchors, keys], rows, [[0], [0]])

    return over_blocks(share, [anchors, keys], around)


def _minus_information(anchors: Tensor, keys: Tensor, own: Tensor, batch: int) -> Tensor:
    """The share of some pairs in -I; `own` is an anchor's place among the keys, -1: none."""
    of_positive, of_negative = 1 / max(batch, 1), 1 / max(batch * (batch - 1), 1)

    def rule(rows: slice, logits: Sequence[Tensor], _: Sequence[Tensor]) -> RuleResult:
        (strip,) = logits
        anchor = (own[rows] >= 0).nonzero()[:, 0]
        at = anchor, own[rows][anchor]
        positive = strip[at]
        loss = F.softplus(-positive).sum() * of_positive
        each = F.softplus(strip)
        each[at] = 0.0
        slope = strip.sigmoid_().mul_(of_negative)
        slope[at] = -of_positive * torch.sigmoid(-positive)
        return loss + each.sum() * of_negative, [slope], []

    return blockwise(rule, [anchors], [keys])


def _divergence(mean: Tensor, std: Tensor, other: Tensor, width: Tensor) -> Tensor:
    """Sum over rows of the mean of KL(p || q) and KL(q || p), whose logarithms cancel."""
    p, q = std.square(), width.square()
    shift = (mean - other).square()
    return ((p + shift) / q + (q + shift) / p - 2).sum() / 4
