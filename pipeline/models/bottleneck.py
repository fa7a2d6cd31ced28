"""MIB's end of an encoder: a Gaussian a row, a draw from it, and what the critic makes of that."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from heron.pipeline.data.random_keys import normals

SALT = 9000  # apart from those of dropout, which count the views and layers of an encoder
LEAST = (
    0.1  # standard deviation; D_SKL divides by its square, and with the authors' 1e-7 overflowed
)


class Bottleneck(nn.Module):
    """p(z|v) of one view, and the view's side of the critic (Federici et al. 2020).

    The Gaussian is read off the view's projection.

    The critic C(z_u, z_v) = c_u(z_u) . c_v(z_v) is separable, where the authors' is a network of
    both side by side: so a view's vectors are gathered like any projection, and every pair of the
    global batch is judged at the price of an inner product. The paper leaves its form open.
    """

    def __init__(self, dim: int, view: int) -> None:
        """Build the layers.

        Args:
            dim: of the view's projection, of z, and of what the critic makes of it.
            view: its number, which keeps the draws of the views apart.
        """
        super().__init__()
        self.salt = SALT + view
        self.gaussian = nn.Linear(dim, 2 * dim)
        self.critic = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(
        self, projection: Float[Tensor, "rows dim"], keys: Int[Tensor, " rows"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and standard deviation of z, and c(z) of a reparametrised draw, each [rows, dim].

        The draw is a function of each row's key, so it is the same on any number of processes.
        """
        mean, raw = self.gaussian(projection).chunk(2, 1)
        deviation = F.softplus(raw) + LEAST
        z = mean + deviation * normals(keys, self.salt, mean.shape[1]).to(mean)
        return mean, deviation, self.critic(z)
