"""C2AE's networks: features and labels to one code, and back to labels."""

from jaxtyping import Float
from torch import Tensor, nn

from heron.pipeline.config import model as architecture


class LabelAutoencoder(nn.Module):
    """A label encoder F_e, a decoder F_d, and the last layer of F_x (Yeh et al. 2017, Figure 1).

    The rest of F_x is the model's encoders. Units are those of the authors' code: leaky ReLU
    inside, codes in (-1/2, 1/2), and outputs whose sigmoid is the score of a label. Calling it
    gives F_d(F_x(x)), the prediction.
    """

    def __init__(self, config: architecture.LabelAutoencoder, width: int, labels: int) -> None:
        """Build the three.

        Args:
            config: widths.
            width: of the features that F_x ends on.
            labels: how many there are.
        """
        super().__init__()
        code = config.width or max(1, round(0.8 * labels))
        self.embed = nn.Linear(width, code)
        self.encode = nn.Sequential(
            nn.Linear(labels, config.hidden), nn.LeakyReLU(), nn.Linear(config.hidden, code)
        )
        self.decode = nn.Sequential(
            nn.Linear(code, config.hidden), nn.LeakyReLU(), nn.Linear(config.hidden, labels)
        )

    def forward(self, seen: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        """The logits F_d(F_x(x)) of rows whose labels are not known."""
        logits: Tensor = self.decode(self.embed(seen).sigmoid() - 0.5)
        return logits

    def codes(
        self, seen: Float[Tensor, "rows width"], y: Float[Tensor, "rows labels"]
    ) -> list[Tensor]:
        """What training compares: F_x(x), F_e(y), both [rows, code], and F_d(F_e(y)) as logits."""
        code = self.encode(y).sigmoid() - 0.5
        return [self.embed(seen).sigmoid() - 0.5, code, self.decode(code)]
