"""C2AE: features and labels share a code, from which labels are decoded."""

from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from heron.base.sections import Natural, Positive
from heron.losses.batch import GlobalBatch
from heron.losses.engine import refuse_labels
from heron.losses.families import ClassifierLoss
from heron.losses.pairs import OwnRows, Rows, as_slice
from heron.losses.terms import CLASS_LABELS, Needs
from heron.models.heterogeneous import Encoded, Features, ModelSpec


class LabelAutoencoder(nn.Module):
    """A label encoder F_e, a decoder F_d, and the last layer of F_x (Yeh et al. 2017, Figure 1).

    Activations are those of the authors' code: leaky ReLU inside, codes in (-1/2, 1/2), and outputs
    whose sigmoid is the score of a label.
    """

    def __init__(self, width: int, labels: int, hidden: int, code: int | None) -> None:
        """Builds the parts for features of a width; F_e and F_d have one layer of `hidden` units.

        `code` is the width of a code; None is 0.8 of the labels, as in the authors' code.
        """
        super().__init__()
        code = code or max(1, round(0.8 * labels))
        self.embed = nn.Linear(width, code)
        self.encode = nn.Sequential(
            nn.Linear(labels, hidden), nn.LeakyReLU(), nn.Linear(hidden, code)
        )
        self.decode = nn.Sequential(
            nn.Linear(code, hidden), nn.LeakyReLU(), nn.Linear(hidden, labels)
        )

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        """Returns the logits F_d(F_x(x)) of rows whose labels are not known."""
        logits: Tensor = self.decode(self.embed(x).sigmoid() - 0.5)
        return logits

    def add_features(self, encoded: Encoded) -> Features:
        """Returns in training `codes`, F_x(x) and F_e(y), and `decoded`, the logits F_d(F_e(y))."""
        if encoded.targets is None:
            return {}
        label_code = self.encode(encoded.targets).sigmoid() - 0.5
        feature_code = self.embed(encoded.classified).sigmoid() - 0.5
        return {"codes": [feature_code, label_code], "decoded": [self.decode(label_code)]}


class C2ae(ClassifierLoss):
    r"""C2AE (Yeh et al. 2017, Eq. 1 to 3), with the label autoencoder that predicts.

    With codes :math:`X = F_x(x)` and :math:`E = F_e(y)`,

    .. math:: \|X - E\|_F^2 + \lambda (\|X^T X - I\|_F^2 + \|E^T E - I\|_F^2) + \alpha \sum_i
        \frac{1}{|y_i^1| |y_i^0|} \sum_{p \in y_i^1, q \in y_i^0} e^{s (F_d(e_i)_q - F_d(e_i)_p)}

    divided by the number of samples. In a run the autoencoder replaces the linear classifier.
    """

    needs = Needs(labelled_vectors=("codes",), own=("logits", "decoded"), labels=CLASS_LABELS)

    def __init__(
        self,
        dim: int | None = None,
        labels: int | None = None,
        *,
        alpha: Positive = 0.5,
        penalty: Annotated[float, Field(ge=0)] = 0.5,
        scale: Positive = 5.0,
        hidden: Natural = 512,
        code: Natural | None = None,
        gather: bool = True,
    ) -> None:
        r"""Builds the label autoencoder.

        Args:
            dim: width of the features; a run has that of its model.
            labels: number of labels; a run has that of its data.
            alpha: :math:`\alpha`, the weight of the last sum.
            penalty: :math:`\lambda`.
            scale: s, the factor in the exponentials; 1 in the paper, 5 in the authors' code.
            hidden: width of the autoencoder's hidden layers.
            code: width of a code; None: 0.8 times the number of labels.
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.alpha, self.penalty, self.scale = alpha, penalty, scale
        self.hidden, self.code = hidden, code
        self.build_own_classifier(dim, labels)

    def build_classifier(self, spec: ModelSpec) -> nn.Module:
        """Returns the autoencoder."""
        return LabelAutoencoder(spec.classified_width, spec.labels, self.hidden, self.code)

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `c2ae` of this process's samples."""
        x, e = batch.labelled_vectors["codes"]
        return c2ae(
            x,
            e,
            batch.own_labelled("decoded")[0],
            batch.targets,
            alpha=self.alpha,
            penalty=self.penalty,
            scale=self.scale,
            rows=batch.own_labelled_rows,
        )


def c2ae(
    x: Float[Tensor, "batch code"],
    e: Float[Tensor, "batch code"],
    decoded: Float[Tensor, "own labels"],
    y: Float[Tensor, "batch labels"],
    *,
    alpha: float = 0.5,
    penalty: float = 0.5,
    scale: float = 5.0,
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    """C2AE's objective (Yeh et al. 2017, Eq. 1 to 3), divided by the number of samples: see `C2ae`.

    With codes X = F_x(x) and E = F_e(y), one row per sample, it combines the constrained problem of
    Eq. 2, with a penalty as the paper minimises it, and the label-correlation loss of Eq. 3, Gamma,
    to which a sample with all labels, or with none, adds nothing: it has no pair (p, q).

    Args:
        x: codes of the features of the whole batch's labelled samples.
        e: codes of their labels.
        decoded: the decoder's logits of the codes `e` of `rows`.
        y: the labels, 0 or 1.
        alpha: weight of Gamma; the authors' code has 1/2.
        penalty: lambda; the authors' code has 1/2.
        scale: s; 1 is the equation as printed, the authors' code has 5.
        rows: the samples whose share is computed here, as in `nt_xent`; the rest of the batch
            counts in X^T X.

    Raises:
        ValueError: labels that are not 0 or 1.
    """
    refuse_labels(
        lambda: (y != 0) & (y != 1),
        lambda row: f"c2ae: labels of row {row} must be 0 or 1, got {y[row].tolist()}",
    )
    own = as_slice(rows)
    distance = (x[own] - e[own]).square().sum()
    orthogonality = sum((_identity_penalty(code, rows) for code in (x, e)), distance.new_zeros(()))

    # The double sum over (p, q) is a product of two sums.
    is_label, scores = y[own] == 1, decoded.sigmoid() * scale
    label_sum = torch.where(is_label, torch.exp(-scores), 0.0).sum(1)
    other_sum = torch.where(is_label, 0.0, torch.exp(scores)).sum(1)
    pairs = (is_label.sum(1) * (~is_label).sum(1)).to(scores)
    gamma = (label_sum * other_sum / pairs.clamp(min=1)).sum()
    return (distance + penalty * orthogonality + alpha * gamma) / max(len(y), 1)


def _identity_penalty(code: Tensor, rows: Rows) -> Tensor:
    """The share of `rows` in |C^T C - I|_F^2, which is tr(D C^T C) - tr(D), D = C^T C - I."""
    d = code.T @ code - torch.eye(code.shape[1], dtype=code.dtype, device=code.device)
    own = code[as_slice(rows)]
    d = d.detach() if isinstance(rows, OwnRows) else d
    share = ((own @ d) * own).sum()
    if isinstance(rows, OwnRows):  # in D too: the gradient is twice that with D held constant
        share = 2 * share - share.detach()
    return share - d.diagonal().sum() * (len(own) / max(len(code), 1))
