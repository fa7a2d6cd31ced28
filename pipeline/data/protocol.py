"""Which rows are labelled, with what, and which are tested: chosen without rebuilding a shard."""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heron.pipeline.config.data import Protocol
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.plan import Marked, Rows
from heron.pipeline.data.random_keys import rng_keys, uniforms
from heron.pipeline.data.reader import Reader
from heron.pipeline.data.roles import Roles as Roles

VALIDATION = 1  # beside seed and fold: the draw of the validation rows is none of the labelled


def assign(reader: Reader, split: str, protocol: Protocol) -> Roles:
    """Gives every row of a split its role; the rows of a role are in the data set's order.

    Raises:
        ConfigError: more labelled rows than there are, more folds than rows of the rarest
            label, a test split that is not there, or a share for validation that is no row or all.
    """
    if _labels_decide_nothing(reader, protocol):
        none, numbers = np.empty(0, np.int64), reader.shards_of(split)
        sizes = np.zeros(len(reader.shards), np.int64)
        sizes[numbers.start : numbers.stop] = reader.shard_rows(split).sizes
        return Roles(reader.starts, none, Marked(reader.starts, sizes), none, none)
    rows = reader.split_rows(split)
    known = reader.known(rows)
    candidates = np.flatnonzero(known)  # rows that have a label; the others are never labelled
    chosen = candidates
    if protocol.folds is not None:
        chosen = candidates[_labelled(reader.labels(rows[known]), protocol)]
    elif protocol.labelled != "all":
        if protocol.labelled > len(candidates):
            some = "rows" if known.all() else f"rows with a label, of {len(rows)},"
            raise ConfigError(
                f"data.protocol.labelled is {protocol.labelled}, but split '{split}' has "
                f"{len(candidates)} {some}; expected at most {len(candidates)}, or 'all'"
            )
        rng = np.random.default_rng([protocol.seed, protocol.fold])
        if protocol.stratified:
            chosen = candidates[stratified(reader.targets(rows[known]), protocol.labelled, rng)]
        else:
            chosen = candidates[np.sort(rng.permutation(len(candidates))[: protocol.labelled])]
    unlabelled = np.delete(rows, chosen)
    if protocol.test in ("unlabelled", "fold"):
        if not len(unlabelled):
            raise ConfigError(
                "data.protocol.test is 'unlabelled', but every row is labelled; "
                f"expected a split: {', '.join(reader.splits)}"
            )
        test = unlabelled
    else:
        test = reader.split_rows(protocol.test)
    labelled = rows[chosen]
    validation = _validation(reader, labelled, protocol)
    if len(validation):
        labelled, test = (np.setdiff1d(given, validation) for given in (labelled, test))
    return Roles(reader.starts, labelled, unlabelled, test[reader.known(test)], validation)


def _labels_decide_nothing(reader: Reader, protocol: Protocol) -> bool:
    """Returns whether no row has a label, and the protocol asks for none: then none is read."""
    if protocol.test not in ("unlabelled", "fold"):
        reader.shards_of(protocol.test)
    asks = protocol.labelled != "all" or protocol.folds or protocol.validation
    return reader.manifest.labels.kind == "none" and not asks


def _validation(reader: Reader, labelled: Rows, protocol: Protocol) -> Rows:
    """Draws the validation rows among the labelled ones."""
    count = round(protocol.validation * len(labelled))
    if not protocol.validation:
        return labelled[:0]
    if not 0 < count < len(labelled):
        raise ConfigError(
            f"data.protocol.validation is {protocol.validation:g} of {len(labelled)} labelled "
            f"rows, which is {count} of them; expected 1 or more, and 1 or more to train on: give "
            "another share, or more labelled rows"
        )
    draw = np.random.default_rng([protocol.seed, protocol.fold, VALIDATION])
    return labelled[stratified(reader.targets(labelled), count, draw)]


def complementary(
    y: NDArray[np.float32], rows: Rows, count: int, protocol: Protocol
) -> NDArray[np.float32]:
    """Draws complementary labels: `count` of the classes that each row is not, uniformly.

    MulCo, Section 5.1, with s = `count`, 1 to classes - 1; y is one-hot. A row's set is a function
    of (seed, fold, row), whatever the batch.

    Returns:
        1 where a class is known to be wrong, [rows, classes].
    """
    row_keys = torch.from_numpy(rng_keys(protocol.seed, np.array([protocol.fold]), rows))
    draws = uniforms(row_keys, salt=7, count=y.shape[1]).numpy()
    order = np.argsort(np.where(y == 1, np.inf, draws), axis=1, kind="stable")
    wrong = np.zeros_like(y)
    np.put_along_axis(wrong, order[:, :count], 1.0, axis=1)
    return wrong


def _labelled(labels: NDArray[Any], protocol: Protocol) -> Rows:
    """Returns the rows that are labelled: those of a fold, or of all folds but a tested one.

    The latter are shuffled with (`seed`, n) where folds 0 to `folds` - 1 have n = 0, the next
    `folds` n = 1, and so on: repeated cross-validation.
    """
    assert protocol.folds is not None
    if protocol.test != "fold":
        return _fold(labels, protocol.folds, protocol.fold)
    again, fold = divmod(protocol.fold, protocol.folds)
    order = np.random.default_rng([protocol.seed, again]).permutation(len(labels))
    tested = order[_fold(labels[order], protocol.folds, fold)]
    return np.setdiff1d(np.arange(len(labels)), tested)


def hide_views(reader: Reader, shares: Mapping[str, float], protocol: Protocol) -> None:
    """Hides views from rows of a data set, each from its share; a row keeps one view at least.

    Which is a function of (seed, row, view): one that would lose all of its views keeps that of the
    largest draw among those hidden.

    Raises:
        ConfigError: there is no view of such a name.
    """
    names, every = list(shares), [view.name for view in reader.manifest.views]
    if unknown := [name for name in names if name not in every]:
        raise ConfigError(
            f"data.protocol.hide_views: stored view '{unknown[0]}' is not in {reader.store}; found "
            f"{', '.join(every)}"
        )
    rows = np.arange(int(reader.starts[-1]))
    draws = np.concatenate([_draws(protocol, rows, f"view {name}", 1) for name in names], 1)
    hidden = draws < np.array([shares[name] for name in names], np.float32)
    hidden &= reader.present(rows, names)
    left = reader.present(rows, every).sum(1) > hidden.sum(1)
    last = np.argmax(np.where(hidden, draws, -1), 1)
    hidden[~left, last[~left]] = False
    reader.hide_views(names, hidden)


def _draws(protocol: Protocol, rows: Rows, what: str, count: int) -> NDArray[np.float32]:
    """Returns uniform numbers of (seed, row, what), [rows, count]."""
    row_keys = torch.from_numpy(rng_keys(protocol.seed, np.array([0]), rows))
    drawn: NDArray[np.float32] = uniforms(row_keys, zlib.crc32(what.encode()), count).numpy()
    return drawn


def hide_labels(reader: Reader, rows: Rows, protocol: Protocol) -> None:
    """Makes single labels of labelled rows unknown, but one of each row at least.

    Which is a function of (seed, row, label): a row that would lose all of them keeps that of the
    largest draw.

    Raises:
        ConfigError: the labels are of another kind than multi_label.
    """
    labels = reader.manifest.labels
    if labels.kind != "multi_label":
        raise ConfigError(
            f"data.protocol.hide_labels hides single labels, but those of {reader.store} are "
            f"{labels.kind}; expected multi_label, or 0; of classes, label fewer rows"
        )
    chosen = _draws(protocol, rows, "rows", 1) < protocol.hide_label_rows
    draws = _draws(protocol, rows, "labels", len(labels.names))
    stated = reader.labels(rows) != labels.unlabelled
    hidden = (draws < protocol.hide_labels) & chosen & stated
    lost = ~(stated & ~hidden).any(1)
    last = np.argmax(np.where(hidden, draws, -1), 1)
    hidden[lost, last[lost]] = False
    reader.hide_labels(rows, hidden)


def drop_partial(reader: Reader, roles: Roles, names: Sequence[str], protocol: Protocol) -> Roles:
    """Returns the roles of rows that can be trained on and tested: see `Protocol.partial_rows`.

    Args:
        reader: of the rows.
        roles: of the split.
        names: stored views that the model sees.
        protocol: says what becomes of rows that are not whole.

    Raises:
        ConfigError: a row has none of these views, and such rows are kept.
    """
    if not (reader.partial or reader.unknown):
        return roles

    def views(rows: Rows) -> NDArray[np.int64]:
        count: NDArray[np.int64] = reader.present(rows, names).sum(1)
        return count

    if protocol.partial_rows == "keep":
        used = np.concatenate([roles.labelled, roles.unlabelled, roles.test, roles.validation])
        if len(none := used[views(used) == 0]):
            raise ConfigError(
                f"data.views: {len(np.unique(none)):,} rows of {reader.store} have none of "
                f"{', '.join(names)}, the first {reader.sample_key(int(none[0]))}; expected one at "
                "least: see another view too, or leave them out with "
                "data.protocol.partial_rows=drop"
            )
        return roles
    labelled = roles.labelled[views(roles.labelled) == len(names)]
    stated = reader.labels(labelled) != reader.manifest.labels.unlabelled
    return Roles(
        reader.starts,
        labelled[stated.all(axis=tuple(range(1, stated.ndim)))],
        roles.unlabelled[views(roles.unlabelled) == len(names)],
        roles.test[views(roles.test) > 0],
        roles.validation[views(roles.validation) > 0],
    )


def _fold(labels: NDArray[Any], folds: int, fold: int) -> Rows:
    """Returns one fold's rows of scikit-learn's unshuffled stratified split on whole label vectors.

    The classes are the label vectors as they stand, as in HeroCon's Scene protocol; vectors
    rarer than the number of folds are spread as they come.
    """
    if not len(labels):
        raise ConfigError(
            f"data.protocol.folds is {folds}, but no row has a label; leave folds out"
        )
    flat = labels.reshape(len(labels), -1)
    classes = np.unique(flat, axis=0, return_inverse=True)[1].reshape(-1)
    if np.bincount(classes).max() < folds:
        raise ConfigError(
            f"data.protocol.folds is {folds}, but no label vector occurs as often; "
            f"expected at most {np.bincount(classes).max()}"
        )

    from sklearn.model_selection import StratifiedKFold  # here: it loads scipy

    with warnings.catch_warnings():  # label vectors rarer than folds are part of the protocol
        warnings.simplefilter("ignore", UserWarning)
        splits = list(StratifiedKFold(folds).split(np.zeros(len(flat)), classes))
    chosen: Rows = splits[fold][1]
    return chosen


def stratified(y: NDArray[np.float32], count: int, draw: np.random.Generator) -> Rows:
    """Draws `count` rows in which each label is as frequent as in all, as nearly as can be.

    Of exclusive classes each has its share to within a row, the largest remainders rounded up.
    Several labels: iterative stratification into two parts (Sechidis, Tsoumakas and Vlahavas, "On
    the stratification of multi-label data", ECML PKDD 2011, Algorithm 1). The label with the fewest
    rows left comes first, and each of these goes to the part that still lacks most of the label, or
    most rows in all; rows without a label come last.

    Args:
        y: labels as 0/1, [rows, labels].
        count: how many rows are drawn, 0 to rows.
        draw: orders the rows of a label.

    Returns:
        Places of the drawn rows, ascending.
    """
    rows, has = len(y), y > 0
    if (has.sum(1) <= 1).all():
        return _of_classes(np.where(has.any(1), has.argmax(1) + 1, 0), count, draw)
    parts = np.array([count, rows - count], float)  # drawn, left
    lacking = has.sum(0)[None] * (parts / rows)[:, None]  # [part, label]
    room, drawn = parts.copy(), np.zeros(rows, bool)
    waiting = np.ones(rows, bool)
    left = has.sum(0)
    while waiting.any():
        label = int(np.where(left > 0, left, rows + 1).argmin()) if left.any() else None
        given = np.flatnonzero(waiting & has[:, label] if label is not None else waiting)
        for row in draw.permutation(given):
            wants = np.zeros(2) if label is None else lacking[:, label]
            part = max((0, 1), key=lambda p: (room[p] >= 1, wants[p], room[p]))
            drawn[row] = part == 0
            room[part] -= 1
            lacking[part] -= has[row]
        waiting[given] = False
        left = left - has[given].sum(0)
    return np.flatnonzero(drawn)


def _of_classes(classes: NDArray[np.int64], count: int, draw: np.random.Generator) -> Rows:
    """Draws rows of exclusive classes, [rows]."""
    shares = np.bincount(classes) * count / max(len(classes), 1)
    quotas = np.floor(shares).astype(int)
    quotas[np.argsort(quotas - shares, kind="stable")[: count - quotas.sum()]] += 1
    drawn = [draw.permutation(np.flatnonzero(classes == k))[:n] for k, n in enumerate(quotas)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *drawn]))
