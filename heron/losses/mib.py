"""MIB: views agree on what they share, and the codes of a sample on everything else."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from heron.base.sections import Natural, Positive
from heron.data.random_keys import normals
from heron.losses.batch import GlobalBatch
from heron.losses.engine import RuleResult, blockwise
from heron.losses.inputs import LossError, RowCounts, Views, as_views, shown
from heron.losses.loss import Loss, projection_spec
from heron.losses.pairs import OwnRows, Rows, as_slice
from heron.losses.terms import Needs
from heron.models.heterogeneous import Encoded, Features, ModelSpec

SALT = 9000  # keeps clear of the salts of dropout, which count the views and layers of an encoder
MIN_STD = 0.1  # D_SKL divides by its square, and overflowed with the authors' 1e-7


class Bottleneck(nn.Module):
    """p(z|v) of one view, and the view's side of the critic (Federici et al. 2020).

    The Gaussian is a linear map of the view's projection. The critic
    C(z_u, z_v) = c_u(z_u) . c_v(z_v) is separable, where the authors' is a network of both codes
    (the paper leaves its form open): so vectors are gathered like any projection, and a pair costs
    only an inner product.
    """

    def __init__(self, dim: int, view: int) -> None:
        """Takes projections of `dim` numbers; `view` makes the views' draws independent."""
        super().__init__()
        self.salt = SALT + view
        self.gaussian = nn.Linear(dim, 2 * dim)
        self.critic = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(
        self, projection: Float[Tensor, "rows dim"], rng_keys: Int[Tensor, " rows"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns mean and standard deviation of z, and c(z) of a draw, each [rows, dim].

        The draw depends on each row's key alone, so it is the same on any number of processes.
        """
        mean, raw = self.gaussian(projection).chunk(2, 1)
        std = F.softplus(raw) + MIN_STD
        z = mean + std * normals(rng_keys, self.salt, mean.shape[1]).to(mean)
        return mean, std, self.critic(z)


class Bottlenecks(nn.ModuleList):
    """A `Bottleneck` per view and, under `model.matryoshka`, per width of a projection's prefix.

    Widths share no weights: a critic applied to the first numbers of a code is not the critic of a
    shorter code.
    """

    def __init__(self, widths: Sequence[int], views: int) -> None:
        """Builds the bottlenecks, all views of a width before the next width."""
        super().__init__(Bottleneck(width, view) for width in widths for view in range(views))
        self.widths, self.views = widths, views

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `means` and `stds` of p(z|v), and `critics`, c(z), of each width and view."""
        outputs = [
            self[i * self.views + view](z[:, :width], encoded.rng_keys)
            for i, width in enumerate(self.widths)
            for view, z in enumerate(encoded.projections)
        ]
        means, stds, critics = zip(*outputs, strict=True)
        return {"means": [*means], "stds": [*stds], "critics": [*critics]}


class Mib(Loss):
    r"""The multi-view information bottleneck (Federici et al. 2020, Section 3.2).

    .. math:: -I(z_1; z_2) + \beta D_{SKL}(p(z_1|v_1) \,\|\, p(z_2|v_2))

    over all pairs of views. The module has a bottleneck :math:`p(z|v)` with a critic for each view.
    :math:`\beta` changes exponentially from `beta_start` to `beta` over `beta_epochs`.
    """

    needs = Needs(vectors=("critics",), own=("projections", "means", "stds"), views=2)
    truncated = ()  # a width has bottlenecks of its own

    def __init__(
        self,
        dim: int | None = None,
        views: int = 2,
        *,
        beta: Positive = 1.0,
        beta_start: Positive = 1e-3,
        beta_epochs: Natural = 100,
        gather: bool = True,
    ) -> None:
        r"""Builds a bottleneck for each view.

        Args:
            dim: width of the projections; a run has that of its model.
            views: number of views, at least 2; a run has that of its data.
            beta: final weight of D_SKL, the information to discard.
            beta_start: its initial weight, which grows exponentially.
            beta_epochs: epochs from `beta_start` to `beta`.
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.dim, self.views = dim, views
        self.beta, self.beta_start, self.beta_epochs = beta, beta_start, beta_epochs
        self.set_widths(())

    def set_widths(self, widths: Sequence[int]) -> None:
        """Builds the bottlenecks anew, a set of them for each width."""
        super().set_widths(widths)
        if self.dim is not None:
            spec = projection_spec(self.dim, [1] * self.views)
            config = spec.config.model_copy(update={"matryoshka": list(widths)})
            self.build_own_parts(replace(spec, config=config), self.dim)

    def build_parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns what builds a bottleneck per view."""
        widths = spec.config.matryoshka or [spec.config.projection_width]
        return {"bottlenecks": lambda: Bottlenecks(widths, len(spec.shapes))}

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `mib` of this process's anchors; beta grows as in the paper's experiments."""
        progress = min(batch.epoch / self.beta_epochs, 1.0)
        beta = self.beta_start * (self.beta / self.beta_start) ** progress
        own, critics = batch.own, batch.vectors["critics"]
        views = len(own["projections"])
        losses = [
            mib(
                critics[start : start + views],
                own["means"][start : start + views],
                own["stds"][start : start + views],
                beta=beta,
                rows=batch.own_rows,
            )
            for start in range(0, len(critics), views)
        ]
        return torch.stack(losses).mean()

    def forward(
        self,
        projections: Views,
        *,
        epoch: float,
        rng_keys: Tensor | None = None,
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the loss over the samples of all processes.

        Args:
            projections: this process's, [batch, views, dim] or a tensor [batch, dim] for each view.
            epoch: the current epoch, which may be fractional.
            rng_keys: int64 [batch], a key for each sample, different in each step. The draws of z
                are a function of the keys, so any number of processes draws the same. None takes
                the keys from torch's generator.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        views = as_views(projections, "projections")
        if len(views) != self.views:
            raise LossError(f"projections must have {self.views} views, got {len(views)}")
        if rng_keys is None:
            rng_keys = torch.randint(1 << 62, (len(views[0]),), device=views[0].device)
        is_int64 = isinstance(rng_keys, Tensor) and rng_keys.dtype == torch.int64
        if not is_int64 or rng_keys.shape != views[0].shape[:1]:
            raise LossError(
                f"rng_keys must be int64 {len(views[0])}, one per sample, got {shown(rng_keys)}"
            )
        return self.evaluate({"projections": views}, rng_keys=rng_keys, epoch=epoch, sizes=sizes)


def mib(
    critics: Sequence[Float[Tensor, "batch dim"]],
    means: Sequence[Float[Tensor, "rows code"]],
    stds: Sequence[Float[Tensor, "rows code"]],
    *,
    beta: float = 1.0,
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    r"""The multi-view information bottleneck (Federici et al. 2020, Section 3.2), as in `Mib`.

    I is the Jensen-Shannon estimate (Hjelm et al. 2019, Eq. 4) with the critic
    C_ij = c_1(z_1i) . c_2(z_2j),

    .. math:: I = -E_i[\log(1 + e^{-C_{ii}})] - E_{i \ne j}[\log(1 + e^{C_{ij}})]

    over all pairs of the batch, where the authors' code has one j for each i. D_SKL is the mean
    over samples of (KL(p_1 || p_2) + KL(p_2 || p_1)) / 2 of diagonal Gaussians, in closed form,
    where the code samples. With more than two views, it is the mean over pairs of views.

    Args:
        critics: c(z) of the whole batch, one tensor a view.
        means: of p(z|v) of this process's rows, one tensor a view.
        stds: standard deviations, of the means' shapes.
        beta: weight of D_SKL, >= 0.
        rows: this process's rows in the batch, as in `nt_xent`.

    Raises:
        ValueError: fewer than two views.
    """
    if len(critics) < 2:
        raise ValueError(f"mib needs at least 2 views, got {len(critics)}")
    couples = list(itertools.combinations(range(len(critics)), 2))
    batch = len(critics[0])
    own, positions = as_slice(rows), torch.arange(batch, device=critics[0].device)
    losses = []
    for u, v in couples:
        divergence = _divergence(means[u], stds[u], means[v], stds[v])
        if not isinstance(rows, OwnRows):
            losses.append(_minus_information(critics[u][own], critics[v], positions[own], batch))
        else:  # `as_keys` adds the own keys' gradient from all anchors, but no value
            anchors, keys = critics[u].detach(), critics[v].detach()
            losses.append(_minus_information(critics[u][own], keys, positions[own], batch))
            is_own = (positions >= own.start) & (positions < own.stop)
            own_positions = torch.where(is_own, positions - own.start, -1)
            as_keys = _minus_information(anchors, critics[v][own], own_positions, batch)
            losses.append(as_keys - as_keys.detach())
        losses.append(beta * divergence / max(batch, 1))
    return torch.stack(losses).sum() / len(couples)


def _minus_information(anchors: Tensor, keys: Tensor, positives: Tensor, batch: int) -> Tensor:
    """Computes the share of some pairs in -I; an anchor's positive is a key, or -1 for none."""
    positive_weight, negative_weight = 1 / max(batch, 1), 1 / max(batch * (batch - 1), 1)

    def rule(rows: slice, logits: Sequence[Tensor], _: Sequence[Tensor]) -> RuleResult:
        (strip,) = logits
        anchor = (positives[rows] >= 0).nonzero()[:, 0]
        pair = anchor, positives[rows][anchor]
        positive = strip[pair]
        positive_loss = F.softplus(-positive).sum() * positive_weight
        negative_losses = F.softplus(strip)
        negative_losses[pair] = 0.0
        d_logits = strip.sigmoid_().mul_(negative_weight)
        d_logits[pair] = -positive_weight * torch.sigmoid(-positive)
        return positive_loss + negative_losses.sum() * negative_weight, [d_logits], []

    return blockwise(rule, [anchors], [keys])


def _divergence(mean: Tensor, std: Tensor, other_mean: Tensor, other_std: Tensor) -> Tensor:
    """Sums over rows the mean of KL(p || q) and KL(q || p), whose logarithms cancel."""
    p, q = std.square(), other_std.square()
    shift = (mean - other_mean).square()
    return ((p + shift) / q + (q + shift) / p - 2).sum() / 4
