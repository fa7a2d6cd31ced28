"""FixMatch: what the classifier is sure of in one view of a row, it must say of the others."""

from collections.abc import Callable, Sequence
from typing import Annotated

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from heron.base.errors import ConfigError
from heron.losses.batch import GlobalBatch
from heron.losses.classification import CrossEntropy
from heron.losses.inputs import RowCounts, Views, as_views
from heron.losses.loss import Loss
from heron.losses.run import TermSetting
from heron.losses.terms import Needs
from heron.models.heterogeneous import Encoded, Features, ModelSpec

Sure = Annotated[float, Field(gt=0, lt=1)]


def fixmatch(
    logits: Float[Tensor, "own classes"],
    others: Sequence[Float[Tensor, "own classes"]],
    *,
    threshold: float,
    total: int,
) -> Float[Tensor, ""]:
    """FixMatch (Sohn et al. 2020, Eq. 4): cross-entropy with the class that one view is sure of.

    Args:
        logits: of this process's rows in their first view, which has no gradient.
        others: of the same rows in their other views.
        threshold: smallest probability of a class that a row learns.
        total: number of rows in the whole batch; 0 gives a loss of 0.

    Returns:
        The process's share of the mean over rows and other views; a row of which the first view is
        not sure adds 0.
    """
    probability, classes = logits.detach().softmax(1).max(1)
    sure = probability >= threshold
    losses = [(F.cross_entropy(x, classes, reduction="none") * sure).sum() for x in others]
    return sum(losses, logits.new_zeros(())) / max(total * len(others), 1)


class ViewLogits(nn.Module):
    """The classifier's logits of each view but the first, which `logits` has."""

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `view_logits`, a tensor a view."""
        classifier = encoded.classifier
        return {"view_logits": [classifier(x) for x in encoded.hidden[1:]] if classifier else []}


class Fixmatch(Loss):
    r"""FixMatch (Sohn et al. 2020, Eq. 4) on all rows, with a label or without.

    With the class :math:`c_i` of largest probability :math:`p_i` in the first view of row i,

    .. math:: \frac{1}{N (V - 1)} \sum_{i: p_i \ge t} \sum_{v > 1} -\log p(c_i | x_{iv})

    so that unlabelled rows teach the classifier what it is sure of. Views are augmentations of one
    picture; in the paper the first is a weak one. The classifier, which `cross_entropy` trains on
    the labelled rows, must see the first view alone (`model.classify_on: first_view`).
    """

    needs = Needs(own=("logits", "view_logits"), views=2)

    def __init__(self, *, threshold: Sure = 0.95, gather: bool = True) -> None:
        """Sets the threshold t.

        Args:
            threshold: smallest probability of a class that a row learns; .95 in the paper.
            gather: take the mean over the rows of all processes.
        """
        super().__init__(gather=gather)
        self.threshold = threshold

    def refuse(self, name: str, setting: TermSetting) -> None:
        """Raises ConfigError without a classifier of classes that sees one view."""
        if not any(isinstance(term, CrossEntropy) for term in setting.terms.values()):
            raise ConfigError(
                f"objective.{name} needs a classifier of classes, so add cross_entropy to the "
                f"terms; the terms are {', '.join(setting.terms)}"
            )
        if setting.model.classify_on != "first_view":
            raise ConfigError(
                f"objective.{name} compares what the classifier says of two views, so it must see "
                "one at a time; set model.classify_on=first_view and model.shared_encoder=true"
            )

    def build_parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns what classifies the other views; it learns nothing of its own."""
        return {"view_logits": ViewLogits}

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `fixmatch` of this process's rows."""
        (logits,), others = batch.own["logits"], batch.own["view_logits"]
        return fixmatch(logits, others, threshold=self.threshold, total=batch.num_rows)

    def forward(self, logits: Tensor, others: Views, *, sizes: RowCounts = None) -> Tensor:
        """Returns the mean over the rows of all processes.

        Args:
            logits: the classifier's, of the first view of this process's rows, [batch, classes].
            others: those of the other views, a tensor [batch, classes] each.
            sizes: numbers of rows of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        views = as_views(others, "others")
        return self.evaluate({"logits": logits, "view_logits": views}, sizes=sizes)
