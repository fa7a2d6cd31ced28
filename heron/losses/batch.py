"""The batch of a step as the losses see it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from heron.losses.engine import group_numbers
from heron.losses.pairs import OwnRows, Rows
from heron.losses.products import in_run

DIGITS = 39  # 3^39 < 2^63


class FeatureMap(dict[str, list[Tensor]]):
    """Features by name: a list with a tensor for each view, or with a single tensor."""

    def __init__(self, scope: str, features: Mapping[str, list[Tensor]]) -> None:
        """Holds the features that terms request by the field of `Needs` that `scope` names."""
        super().__init__(features)
        self.scope = scope

    def prefix(self, names: Collection[str], width: int) -> "FeatureMap":
        """Returns these features, those in `names` cut to their first `width` columns."""
        return FeatureMap(
            self.scope, {k: [x[:, :width] for x in v] if k in names else v for k, v in self.items()}
        )

    def __missing__(self, name: str) -> list[Tensor]:
        """Raises ValueError: the loss reads a feature that it has not requested."""
        raise ValueError(f"the loss reads '{name}', which is not among its needs.{self.scope}")


@dataclass(frozen=True)
class GlobalBatch:
    """The features of the whole batch, and which of its rows are this process's own.

    "All rows" are those of all processes. Labelled rows come before unlabelled ones in `own`,
    `inputs`, `indices` and `rng_keys`.

    Attributes:
        own: features of this process's rows.
        gathered: features of all rows, as the terms need them. Differentiable: backward adds up the
            gradients that the processes computed for each row.
        gathered_labelled: features of all labelled rows, differentiable in the same way.
        targets: labels of all labelled rows, 0/1, [all labelled, labels].
        rows: the own rows among all rows.
        labelled: the own labelled rows among all labelled rows.
        labelled_indices: positions of the labelled rows among all rows, [all labelled].
        inputs: inputs of this process's rows, a tensor per view.
        indices: row numbers in the data set of this process's rows.
        rng_keys: keys of the random numbers of this process's rows.
        epoch: the current epoch, a float.
        gather_labelled: maps this process's labelled rows to those of all processes, by rank;
            differentiable. Every process must call it.
        present: which views each of all rows has, [all rows, views]; None: all of them. Features of
            a view that a row lacks are zeros.
        vectors: features of all rows, of which only `own_rows` have a gradient (see `Needs`).
        labelled_vectors: the same of all labelled rows and `own_labelled_rows`.
        own_row_sets: the own rows, and the own labelled rows, where other processes have rows too.
        labels_known: whether the data have no unknown label, so that none need be looked for.
        num_rows: the number of rows of all processes.
        label_weights: how much each label of all labelled rows counts, 0 to 1, [all labelled,
            labels]; None: all count 1.
    """

    own: FeatureMap
    gathered: FeatureMap
    gathered_labelled: FeatureMap
    targets: Tensor
    rows: slice
    labelled: slice
    labelled_indices: Tensor
    inputs: Sequence[Tensor]
    indices: Tensor
    rng_keys: Tensor
    epoch: float
    gather_labelled: Callable[[Tensor], Tensor]
    present: Tensor | None = None
    vectors: FeatureMap = field(default_factory=lambda: FeatureMap("vectors", {}))
    labelled_vectors: FeatureMap = field(default_factory=lambda: FeatureMap("labelled_vectors", {}))
    own_row_sets: tuple[OwnRows, OwnRows] | None = None
    labels_known: bool = False
    num_rows: int = 0
    label_weights: Tensor | None = None

    def prefix(self, names: Collection[str], width: int) -> "GlobalBatch":
        """Returns the batch, its features in `names` cut to their first `width` columns.

        They are slices of the gathered tensors: nothing more is sent.
        """
        maps = ((field, x) for field, x in vars(self).items() if isinstance(x, FeatureMap))
        cut: dict[str, Any] = {field: x.prefix(names, width) for field, x in maps}
        return replace(self, **cut)

    @property
    def num_labelled(self) -> int:
        """The number of labelled rows of all processes."""
        return len(self.targets)

    @property
    def own_targets(self) -> Tensor:
        """Labels of this process's labelled rows."""
        return self.targets[self.labelled]

    @cached_property
    def known_weights(self) -> Tensor | None:
        """`label_weights`, 0 where a label is unknown; None: all are known and count 1.

        They are of booleans where there are no weights, but unknown labels.
        """
        if self.unknown is None:
            return self.label_weights
        if self.label_weights is None:
            return ~self.unknown
        return self.label_weights.masked_fill(self.unknown, 0.0)

    def own_labelled(self, name: str) -> list[Tensor]:
        """Returns features of this process's labelled rows, a tensor per view."""
        count = self.labelled.stop - self.labelled.start
        return [feature[:count] for feature in self.own[name]]

    @property
    def logits(self) -> Tensor:
        """The classifier's logits of this process's labelled rows."""
        return self.own_labelled("logits")[0]

    @property
    def projections(self) -> Sequence[Tensor]:
        """The projections z of all rows, a tensor per view."""
        return self.gathered["projections"]

    @property
    def own_rows(self) -> Rows:
        """The rows whose `vectors` have a gradient."""
        return self.rows if self.own_row_sets is None else self.own_row_sets[0]

    @property
    def own_labelled_rows(self) -> Rows:
        """The labelled rows whose `labelled_vectors` have a gradient."""
        return self.labelled if self.own_row_sets is None else self.own_row_sets[1]

    @cached_property
    def labelled_present(self) -> Tensor | None:
        """Which views each of all labelled rows has, [all labelled, views]; None: all of them."""
        return None if self.present is None else self.present.index_select(0, self.labelled_indices)

    @cached_property
    def unknown(self) -> Tensor | None:
        """Which labels of all labelled rows are unknown, [all labelled, labels]; None: none."""
        if self.labels_known:
            return None
        unknown = self.targets.isnan()
        return unknown if unknown.any() else None

    @cached_property
    def class_present(self) -> Tensor | None:
        """`labelled_present` for terms that compare whole label vectors.

        A row with an unknown label, and so of an unknown class, counts with no view. None: all rows
        count with all views.
        """
        if self.unknown is None:
            return self.labelled_present
        present = self.labelled_present
        if present is None:
            views = len(self.own["projections"])
            present = self.targets.new_ones(len(self.targets), views, dtype=torch.bool)
        return present & ~self.unknown.any(1, keepdim=True)

    @cached_property
    def classes(self) -> Tensor:
        """A class number for each labelled row: rows with the same labels share it."""
        if not len(self.targets):
            return self.labelled_indices
        if self.targets.shape[1] == 1:
            return group_numbers(self.targets[:, 0].nan_to_num(2))
        targets = self.targets.nan_to_num(2)
        if not in_run():  # labels may be any numbers
            numbers: Tensor = torch.unique(targets, dim=0, return_inverse=True)[1]
            return numbers
        # In a run a label is 0, 1 or unknown: a digit. A whole number holds 39 of them.
        classes = torch.zeros_like(targets[:, 0], dtype=torch.int64)
        for digits in torch.split(targets.long(), DIGITS, 1):
            powers = 3 ** torch.arange(digits.shape[1] - 1, -1, -1, device=digits.device)
            digit = group_numbers((digits * powers).sum(1))
            classes = group_numbers(classes * len(targets) + digit)
        return classes
