"""The inputs of losses, checked: views of features, and labels in their usual forms."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heron.base.errors import HeronError, format_shape

Views = Tensor | Sequence[Tensor]
RowCounts = Sequence[int] | None  # numbers of rows of every process; None exchanges them


class LossError(HeronError):
    """An input does not fit a loss: the message names the input and what is expected."""


def as_views(features: Views, name: str) -> list[Tensor]:
    """Returns features as a list with a tensor [batch, dim] for each view.

    They are [batch, dim] of one view, [batch, views, dim], or such a list. Raises LossError, which
    calls them `name`, if they have another shape or type, or views differ in their rows.
    """
    if isinstance(features, Tensor) and features.dim() == 3:
        features = features.unbind(1)
    views: list[Any] = list(features) if isinstance(features, list | tuple) else [features]
    for x in views:
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
            raise LossError(
                f"{name} must be floats [batch, dim], [batch, views, dim], or a list with a tensor "
                f"[batch, dim] per view, got {shown(x)}"
            )
    if not views:
        raise LossError(f"{name} are an empty list; pass a tensor [batch, dim] per view")
    same_rows({f"{name} of view {view + 1}": x for view, x in enumerate(views)})
    return views


def refuse_one_view(z: Sequence[Tensor], term: str) -> None:
    """Raises ValueError for projections of fewer than two views."""
    if len(z) < 2:
        raise ValueError(
            f"{term} needs at least 2 views, got {len(z)}; a single-view data set needs two "
            "augmentations of its view"
        )


def as_rows(features: Tensor, name: str) -> Tensor:
    """Returns features of one view, unchanged; LossError unless they are floats [batch, dim]."""
    if not isinstance(features, Tensor) or features.dim() != 2 or not features.is_floating_point():
        raise LossError(f"{name} must be floats [batch, dim] of one view, got {shown(features)}")
    return features


def as_inputs(inputs: Tensor | Sequence[Tensor], views: int) -> list[Tensor]:
    """Returns raw inputs flattened to rows of numbers, a tensor [batch, width] per view.

    They are [batch, ...] of one view, or a list with such a tensor for each view. Raises LossError
    if they have another shape, or their number is not `views`.
    """
    tensors: list[Any] = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    for x in tensors:
        if not isinstance(x, Tensor) or x.dim() < 2:
            raise LossError(f"inputs must be a tensor [batch, ...] per view, got {shown(x)}")
    if len(tensors) != views:
        raise LossError(
            f"inputs must be a list with a tensor [batch, ...] for each of {views} views, as "
            f"projections, got {len(tensors)}"
        )
    return [x.flatten(1) for x in tensors]


def as_columns(labels: Tensor, classes: int | None) -> Tensor:
    """Returns labels as columns of floats, [batch, labels].

    They are columns of any real type, or class numbers [batch] below `classes`; None accepts no
    numbers. Raises LossError if they have another shape, or a number is no class.
    """
    is_real = isinstance(labels, Tensor) and not labels.is_complex()
    if is_real and labels.dim() == 1 and classes is not None:
        return _one_hot(labels, classes)
    if not is_real or labels.dim() != 2 or labels.shape[1] != (classes or labels.shape[1] or None):
        numbers = "" if classes is None else ", or class numbers [batch]"
        raise LossError(
            f"labels must be 0 or 1 for each label, [batch, {classes or 'labels'}]{numbers}, "
            f"got {shown(labels)}"
            + ("; set num_classes to use class numbers [batch]" if classes is None else "")
        )
    return labels if labels.is_floating_point() else labels.float()


def as_probabilities(labels: Tensor, classes: int | None) -> Tensor:
    """Returns labels as columns of floats from 0 to 1; see `as_columns`."""
    columns = as_columns(labels, classes)
    refuse_rows(columns, (columns >= 0) & (columns <= 1), "0 to 1")
    return columns


def as_label_weights(weights: Tensor, targets: Tensor) -> Tensor:
    """Returns weights of labels, or of rows, in the shape and the type of the targets.

    Raises LossError if they have another shape, or some are not from 0 to 1.
    """
    if weights.dim() == 1:  # a weight for each row
        weights = weights[:, None].expand(targets.shape)
    if weights.shape != targets.shape or not ((weights >= 0) & (weights <= 1)).all():
        raise LossError(
            f"label_weights must be 0 to 1, of the shape of the labels {list(targets.shape)}, "
            f"got {shown(weights)}"
        )
    return weights.to(targets.dtype if targets.is_floating_point() else torch.float32)


def as_groups(labels: Tensor) -> Tensor:
    """Returns as columns labels that are only compared for equality; class numbers as [batch, 1].

    Raises LossError if they are neither whole numbers [batch] nor columns, or some are negative or
    NaN: rows without a label would be taken for a class.
    """
    if not isinstance(labels, Tensor) or not (
        (labels.dim() == 1 and is_whole(labels))
        or (labels.dim() == 2 and labels.shape[1] and not labels.is_complex())
    ):
        raise LossError(
            "labels must be class numbers [batch], or columns [batch, labels], got "
            f"{shown(labels)}; take argmax(1) of one-hot labels"
        )
    columns = labels[:, None] if labels.dim() == 1 else labels
    refuse_rows(columns, columns >= 0, "0 or more", "; remove rows without a label")
    return columns


def refuse_rows(columns: Tensor, valid: Tensor, expected: str, remedy: str = "") -> None:
    """Raises LossError for the first row of labels that are not all `valid`, as NaN never is."""
    if not valid.all():
        row = int((~valid).any(1).nonzero()[0])
        labels = columns[row].tolist()
        raise LossError(f"labels of row {row} must be {expected}, got {labels}{remedy}")


def same_rows(tensors: dict[str, Tensor]) -> None:
    """Raises LossError for the first two tensors that differ in their rows or their device."""
    (first, x), *others = tensors.items()
    for name, y in others:
        for aspect, a, b in (("number of rows", len(x), len(y)), ("device", x.device, y.device)):
            if a != b:
                raise LossError(f"{first} and {name} must have the same {aspect}, got {a} and {b}")


def expect_width(name: str, x: Tensor, dim: int) -> None:
    """Raises LossError for a tensor whose width is not the `dim` that a loss was built with."""
    if x.shape[1] != dim:
        raise LossError(f"{name} must have {dim} numbers, got {x.shape[1]}")


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    if not is_whole(labels):
        raise LossError(f"labels must be whole numbers [batch], or columns, got {shown(labels)}")
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise LossError(
            f"the label of row {row} must be 0 to {classes - 1}, got {int(labels[row])}"
            + ("; remove rows without a label" if labels[row] < 0 else "")
        )
    return torch.nn.functional.one_hot(labels.long(), classes).float()


def is_whole(x: object) -> bool:
    """Whether `x` is a tensor of integers (bool does not count)."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex():
        return False
    return x.dtype != torch.bool


def shown(x: object) -> str:
    """Returns the dtype and shape of a tensor, or the type of anything else, for messages."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')} {format_shape(x.shape)}"
