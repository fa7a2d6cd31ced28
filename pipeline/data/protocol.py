"""Which rows are labelled, unlabelled and tested: chosen by index, so no shard is rebuilt."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold

from pipeline.config import Protocol
from pipeline.data.reader import Reader, Rows
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Roles:
    """Row numbers by role; labelled and unlabelled rows are apart and make up the split."""

    labelled: Rows
    unlabelled: Rows
    test: Rows


def assign(reader: Reader, split: str, protocol: Protocol) -> Roles:
    """Give every row of a split its role.

    Args:
        reader: the data set.
        split: the split that is trained on.
        protocol: how many rows are labelled, which fold, which seed, what is tested.

    Returns:
        The roles; rows are in the data set's order.

    Raises:
        ConfigError: more labelled rows than there are, more folds than rows of the rarest
            label, or a test split that is not there.
    """
    rows = reader.split_rows(split)
    if protocol.folds is not None:
        chosen = _fold(reader.labels(rows), protocol.folds, protocol.fold)
    elif protocol.labelled == "all":
        chosen = np.arange(len(rows))
    elif protocol.labelled > len(rows):
        raise ConfigError(
            f"data.protocol.labelled is {protocol.labelled}, but split '{split}' has "
            f"{len(rows)} rows; expected at most {len(rows)}, or 'all'"
        )
    else:
        rng = np.random.default_rng([protocol.seed, protocol.fold])
        chosen = np.sort(rng.permutation(len(rows))[: protocol.labelled])
    unlabelled = np.delete(rows, chosen)
    if protocol.test == "unlabelled":
        if not len(unlabelled):
            raise ConfigError(
                "data.protocol.test is 'unlabelled', but every row is labelled; "
                f"expected a split: {', '.join(reader.splits)}"
            )
        test = unlabelled
    else:
        test = reader.split_rows(protocol.test)
    return Roles(rows[chosen], unlabelled, test)


def _fold(labels: NDArray[Any], folds: int, fold: int) -> Rows:
    """Rows of one fold of scikit-learn's unshuffled stratified split on whole label vectors.

    The classes are the label vectors as they stand, as in HeroCon's Scene protocol; vectors
    rarer than the number of folds are spread as they come.
    """
    flat = labels.reshape(len(labels), -1)
    classes = np.unique(flat, axis=0, return_inverse=True)[1].reshape(-1)
    if np.bincount(classes).max() < folds:
        raise ConfigError(
            f"data.protocol.folds is {folds}, but no label vector occurs as often; "
            f"expected at most {np.bincount(classes).max()}"
        )

    with warnings.catch_warnings():  # label vectors rarer than folds are part of the protocol
        warnings.simplefilter("ignore", UserWarning)
        splits = list(StratifiedKFold(folds).split(np.zeros(len(flat)), classes))
    chosen: Rows = splits[fold][1]
    return chosen
