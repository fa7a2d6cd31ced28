"""HeroCon's L_u of one view: an input attracts its own representation and repels the others."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heron.losses.batch import GlobalBatch
from heron.losses.contrast import contrast
from heron.losses.engine import unit, working_dtype
from heron.losses.families import InputLoss
from heron.losses.loss import projection_spec
from heron.losses.mirroring import Mirroring, mirrored_sums
from heron.losses.pairs import OwnRows, Pairs, Rows, as_slice, numbers_of
from heron.losses.terms import Needs, Temperature
from heron.losses.unsupervised import WeightNet
from heron.models.heterogeneous import Encoded, Features, ModelSpec


class InputProjectors(nn.ModuleList):
    """Linear maps from each view's input to the width of z; views that share a model share one."""

    def __init__(self, spec: ModelSpec) -> None:
        """Builds a map for each view, or one for all."""
        is_shared = spec.config.shared_encoder and spec.config.shared_projector
        super().__init__(
            nn.Linear(math.prod(shape), spec.config.projection_width, bias=False)
            for shape in (spec.shapes[:1] if is_shared else spec.shapes)
        )

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `input_projections`, a tensor for each view."""
        inputs = enumerate(encoded.inputs)
        return {"input_projections": [self[v % len(self)](x.flatten(1)) for v, x in inputs]}


class SingleViewUnsupervised(InputLoss):
    r"""HeroCon's L_u of one view (KDD 2022, Eq. 4), with its H and its map of the inputs.

    With :math:`x_i` an input, mapped linearly to the width of z, the mean over samples of

    .. math:: \log\big(f(x_i, z_i) + \sum_{k \ne i} g(z_i, z_k) f(x_i, z_k)\big) - \log f(x_i, z_i)

    and over views, if there are several; f and g as in `WeightedUnsupervised`.
    """

    needs = Needs(vectors=("projections", "weights", "input_projections"))
    truncated = ("projections", "weights", "input_projections")
    repels_all = True

    def __init__(
        self,
        dim: int | None = None,
        input_dims: Sequence[int] = (),
        *,
        tau: Temperature = 1.0,
        gather: bool = True,
    ) -> None:
        """Builds H and the maps.

        Args:
            dim: width of the projections; a run has that of its model.
            input_dims: width of each view's flattened inputs; one alone: all views share a map.
            tau: temperature, at least 0.003.
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.tau = tau
        if dim is not None:
            self.build_own_parts(projection_spec(dim, input_dims), dim)

    def build_parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns H, and the maps of the inputs."""
        return {
            "weight": lambda: WeightNet(spec.config.projection_width),
            "input_projectors": lambda: InputProjectors(spec),
        }

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `single_view_unsupervised` of this process's anchors."""
        return single_view_unsupervised(
            batch.vectors["input_projections"],
            batch.vectors["projections"],
            batch.vectors["weights"],
            tau=self.tau,
            rows=batch.own_rows,
        )


def single_view_unsupervised(
    x: Sequence[Float[Tensor, "batch dim"]],
    z: Sequence[Float[Tensor, "batch dim"]],
    h: Sequence[Float[Tensor, "batch dim"]],
    *,
    tau: float = 1.0,
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    """HeroCon's L_u of a single view (KDD 2022, Eq. 4): the equation of `SingleViewUnsupervised`.

    With unit vectors x, z and h the two halves of g f are e/2 exp(x_i . z_k / tau - z_i . h_k) and
    e/2 exp((x_i / tau - h_i) . z_k).

    Args:
        x: projections of the inputs of the whole batch, a tensor for each view.
        z: projections, of the same shapes.
        h: H(z), of the same shapes.
        tau: temperature, > 0.
        rows: as in `nt_xent`.

    Raises:
        ValueError: tau <= 0.
    """
    dtype, batch = working_dtype(z[0].dtype, tau), len(z[0])
    own = as_slice(rows)
    numbers = numbers_of(batch, 1, own, z[0].device)
    mean = 1 / (len(z) * max(batch, 1))

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        return torch.log1p(math.e / 2 * sums * torch.exp(-per_anchor[0])).sum() * mean

    shares = []
    for inputs, projections, weights in zip(x, z, h, strict=True):
        a, v, w = (unit(vectors).to(dtype) for vectors in (inputs, projections, weights))
        anchors, keys = [torch.cat([a / tau, -v], 1), a / tau - w], [torch.cat([v, w], 1), v]
        mirroring = None
        if isinstance(rows, OwnRows):  # adds the mirrored heads, whose sums are not used
            anchors, keys = anchors + keys, keys + anchors
            mirroring = Mirroring.of(rows, batch, [2, 3, 0, 1], [0, 0, 1, 1], [[0], [0]])
        pairs = Pairs(
            [head[own] for head in anchors],
            keys,
            anchor_tag=numbers.anchors,
            key_tag=numbers.keys,
            exclude=numbers.own_keys,
        )
        positives = [(a * v)[own].sum(1, keepdim=True) / tau]
        if mirroring is None:
            shares.append(contrast(pairs, finish, positives))
        else:
            shares.append(finish(mirrored_sums(pairs, mirroring)[0], positives))
    return torch.stack(shares).sum()
