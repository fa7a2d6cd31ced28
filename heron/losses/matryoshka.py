"""A loss on the first numbers of projections, too, so that embeddings can be cut."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from heron.losses.inputs import LossError
from heron.losses.loss import Loss


class Matryoshka(nn.Module):
    r"""The mean of a loss over the widths m of the projections' first m numbers.

    .. math:: \frac{1}{|M|} \sum_{m \in M} L(z_{1:m})

    (Kusupati et al. 2022, Eq. 1, of a contrastive loss. The paper adds them up; the mean keeps the
    loss's scale, and so the learning rate.) Every loss normalises the vectors that it compares, so
    each z_{1:m} too. Projections are exchanged once, at full width.
    """

    def __init__(self, loss: Loss, widths: Sequence[int]) -> None:
        """Wraps a loss; it takes what the loss takes.

        Args:
            loss: a loss that compares projections, such as `NtXent`.
            widths: the widths M, ascending, such as [32, 64, 128].

        Raises:
            LossError: the loss has no meaning on the first numbers of projections, or the widths
                are not ascending whole numbers.
        """
        super().__init__()
        if loss.truncated is None or "projections" not in loss.needs.features:
            raise LossError(
                f"Matryoshka: {type(loss).__name__} does not compare the first numbers of "
                "projections; use a loss that does, such as NtXent"
            )
        if not widths or list(widths) != sorted({int(width) for width in widths}) or widths[0] < 1:
            raise LossError(
                "Matryoshka: widths must be ascending whole numbers, such as [32, 64, 128], got "
                f"{list(widths)}"
            )
        loss.set_widths(widths)
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the mean over the widths of the loss, of the loss's own arguments."""
        return self.loss(*args, **kwargs)
