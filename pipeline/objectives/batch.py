"""What the terms of the objective see of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Contrasts:
    """What the momentum encoder gives of the labelled rows.

    Attributes:
        keys: of the own rows.
        posteriors: what goes into the queue with them: class probabilities, or one class, or that
            and the complementary labels.
        queue: the keys before them, with their `queue_posteriors`.
        pseudo: where PiCO or ComCo is trained.
    """

    keys: Tensor
    posteriors: Tensor
    queue: Tensor
    queue_posteriors: Tensor
    pseudo: "PseudoLabels | None" = None


@dataclass(frozen=True)
class PseudoLabels:
    """What complementary labels are taken to mean.

    Attributes:
        keys: of all labelled rows.
        classes: what each of them is taken for.
        targets: PiCO's pseudo-targets of the own rows.
    """

    keys: Tensor
    classes: Tensor
    targets: Tensor | None = None


@dataclass(frozen=True)
class Selected:
    """What PLNL's networks know of the labelled rows of each of them.

    Attributes:
        sets: complementary labels of the own rows with what was added, [networks, rows, classes].
        guesses: classes of the own rows, or -1, [networks, rows].
        guessed: how many labelled rows of the whole batch have one, [networks].
    """

    sets: Tensor
    guesses: Tensor
    guessed: Tensor


@dataclass(frozen=True)
class GlobalBatch:
    """What the terms see: vectors of the whole batch, and which rows are this process's own.

    Attributes:
        logits: of the classifier on the own labelled rows, or None without a classifier.
        targets: labels of the own labelled rows, 0/1.
        hidden: S of all labelled rows.
        all_targets: labels of all labelled rows.
        labelled: the own rows among all labelled rows.
        projections: z of all rows, a tensor a view.
        weights: H(z) of all rows, a tensor a view.
        rows: the own rows among all rows.
        places: where the labelled rows lie among all rows.
        paths: hierarchical labels of all labelled rows, coarsest level first, where a term needs
            them.
        inputs: raw inputs of all rows, a tensor a view, where a term needs them.
        input_projections: of the own rows' raw inputs, a tensor a view, where a term needs them.
        contrasts: of the momentum encoder, where a term has one.
        codes: of the label autoencoder for all labelled rows, where a term has one.
        means: of MIB's p(z|v) of the own rows, a tensor a view, where a term needs them.
        deviations: as the means.
        critics: c(z) of all rows, a tensor a view, where a term needs them.
        networks: logits of the own labelled rows, a tensor a view of each PLNL network in turn.
        selected: where PLNL is trained.
    """

    logits: Tensor | None
    targets: Tensor
    hidden: Tensor
    all_targets: Tensor
    labelled: slice
    projections: Sequence[Tensor]
    weights: Sequence[Tensor]
    rows: slice
    places: Tensor
    paths: Tensor
    inputs: Sequence[Tensor] = field(default_factory=list)
    input_projections: Sequence[Tensor] = field(default_factory=list)
    contrasts: Contrasts | None = None
    codes: Sequence[Tensor] = field(default_factory=list)
    means: Sequence[Tensor] = field(default_factory=list)
    deviations: Sequence[Tensor] = field(default_factory=list)
    critics: Sequence[Tensor] = field(default_factory=list)
    networks: Sequence[Tensor] = field(default_factory=list)
    selected: Selected | None = None

    @cached_property
    def labelled_projections(self) -> list[Tensor]:
        """The projections of all labelled rows, a tensor a view."""
        return [z.index_select(0, self.places) for z in self.projections]

    @cached_property
    def classes(self) -> Tensor:
        """A number a labelled row: rows with the same labels share it."""
        if not len(self.all_targets):
            return self.places
        number: Tensor = torch.unique(self.all_targets, dim=0, return_inverse=True)[1]
        return number
