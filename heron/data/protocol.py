"""Chooses labelled, validation and test rows, and hides views and labels, at load time.

The roles of a large data set, one byte per row, are written once and memory-mapped by training.
"""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from heron.base.artefact import MANIFEST, Artefact, FileName, FileSum, Fingerprint, sha256
from heron.base.atomic import atomic_write, new_folder
from heron.base.errors import ConfigError
from heron.data.label_files import leave_out
from heron.data.options import Data, Protocol
from heron.data.random_keys import rng_keys, uniforms
from heron.data.reader import Reader
from heron.data.rows import ROLES, Marked, Roles, Rows

VALIDATION_DRAW = 1  # joins seed and fold, so that validation and labelled rows differ in draw
MARKS, SIZES = "marks.npy", "sizes.npy"  # marks [rows], and row counts [roles, shards]


def assign(reader: Reader, split: str, protocol: Protocol) -> Roles:
    """Assigns a role to every row of a split; the rows of a role are in the data set's order.

    Raises ConfigError for too many labelled rows, more folds than rows of a label vector, no test
    split, a validation set of no row or all rows, or a file of rows to leave out that does not fit.
    """
    roles = _assign(reader, split, protocol)
    if protocol.leave_out is None:
        return roles
    return leave_out(reader, roles, Path(protocol.leave_out))


def _assign(reader: Reader, split: str, protocol: Protocol) -> Roles:
    if _needs_no_labels(reader, protocol):
        no_rows, shards = np.empty(0, np.int64), reader.shards_of(split)
        sizes = np.zeros(len(reader.shards), np.int64)
        sizes[shards.start : shards.stop] = reader.shard_rows(split).sizes
        return Roles(reader.starts, no_rows, Marked(reader.starts, sizes), no_rows, no_rows)
    rows = reader.split_rows(split)
    has_label = reader.is_labelled(rows)
    candidates = np.flatnonzero(has_label)  # only rows with a label can be labelled rows
    chosen = candidates
    if protocol.folds is not None:
        chosen = candidates[_labelled_by_fold(reader.labels(rows[has_label]), protocol)]
    elif protocol.labelled != "all":
        if protocol.labelled > len(candidates):
            available = "rows" if has_label.all() else f"rows with a label, of {len(rows)},"
            raise ConfigError(
                f"data.protocol.labelled is {protocol.labelled}, but split '{split}' has only "
                f"{len(candidates)} {available}; lower it, or use 'all'"
            )
        rng = np.random.default_rng([protocol.seed, protocol.fold])
        if protocol.stratified:
            chosen = candidates[stratified(reader.targets(rows[has_label]), protocol.labelled, rng)]
        else:
            chosen = candidates[np.sort(rng.permutation(len(candidates))[: protocol.labelled])]
    unlabelled = np.delete(rows, chosen)
    if protocol.test in ("unlabelled", "fold"):
        if not len(unlabelled):
            raise ConfigError(
                "data.protocol.test is 'unlabelled', but every row is labelled; use a split: "
                f"{', '.join(reader.splits)}"
            )
        test = unlabelled
    else:
        test = reader.split_rows(protocol.test)
    labelled = rows[chosen]
    validation = _draw_validation(reader, labelled, protocol)
    if len(validation):
        labelled, test = (np.setdiff1d(role, validation) for role in (labelled, test))
    return Roles(reader.starts, labelled, unlabelled, test[reader.is_labelled(test)], validation)


def _needs_no_labels(reader: Reader, protocol: Protocol) -> bool:
    """Returns whether no row has a label and the protocol needs none: no label is read then."""
    if protocol.test not in ("unlabelled", "fold"):
        reader.shards_of(protocol.test)
    needs_labels = protocol.labelled != "all" or protocol.folds or protocol.validation
    return reader.manifest.labels.kind == "none" and not needs_labels


def _draw_validation(reader: Reader, labelled: Rows, protocol: Protocol) -> Rows:
    count = round(protocol.validation * len(labelled))
    if not protocol.validation:
        return labelled[:0]
    if not 0 < count < len(labelled):
        raise ConfigError(
            f"data.protocol.validation is {protocol.validation:g} of {len(labelled)} labelled "
            f"rows, which is {count}; it must leave at least 1 for validation and 1 to train on: "
            "change the share, or label more rows"
        )
    rng = np.random.default_rng([protocol.seed, protocol.fold, VALIDATION_DRAW])
    return labelled[stratified(reader.targets(labelled), count, rng)]


def _labelled_by_fold(labels: NDArray[Any], protocol: Protocol) -> Rows:
    """Returns the positions of the labelled rows: one fold, or all folds except the tested one.

    In the latter case rows are first shuffled with (`seed`, n), where folds 0 to `folds` - 1 have
    n = 0, the next `folds` have n = 1, and so on: repeated cross-validation.
    """
    assert protocol.folds is not None
    if protocol.test != "fold":
        return _fold_rows(labels, protocol.folds, protocol.fold)
    repetition, fold = divmod(protocol.fold, protocol.folds)
    order = np.random.default_rng([protocol.seed, repetition]).permutation(len(labels))
    tested_positions = order[_fold_rows(labels[order], protocol.folds, fold)]
    return np.setdiff1d(np.arange(len(labels)), tested_positions)


def hide_views(reader: Reader, shares: Mapping[str, float], protocol: Protocol) -> None:
    """Hides each view from its share of the rows of a data set; every row keeps at least one view.

    What is hidden is a function of (seed, row, view). A row that would lose all of its views keeps
    the hidden one with the largest draw. Raises ConfigError for a name of no stored view.
    """
    names, stored = list(shares), [view.name for view in reader.manifest.views]
    if unknown := [name for name in names if name not in stored]:
        raise ConfigError(
            f"data.protocol.hide_views: {reader.store} has no stored view '{unknown[0]}'; it has "
            f"{', '.join(stored)}"
        )
    rows = np.arange(int(reader.starts[-1]))
    draws = np.concatenate([_row_draws(protocol, rows, f"view {name}", 1) for name in names], 1)
    hidden = draws < np.array([shares[name] for name in names], np.float32)
    hidden &= reader.present(rows, names)
    keeps_one = reader.present(rows, stored).sum(1) > hidden.sum(1)
    largest = np.argmax(np.where(hidden, draws, -1), 1)
    hidden[~keeps_one, largest[~keeps_one]] = False
    reader.hide_views(names, hidden)


def _row_draws(protocol: Protocol, rows: Rows, purpose: str, count: int) -> NDArray[np.float32]:
    """Returns uniform numbers that are a function of (seed, row, purpose), [rows, count]."""
    row_keys = torch.from_numpy(rng_keys(protocol.seed, np.array([0]), rows))
    drawn: NDArray[np.float32] = uniforms(row_keys, zlib.crc32(purpose.encode()), count).numpy()
    return drawn


def hide_labels(reader: Reader, rows: Rows, protocol: Protocol) -> None:
    """Makes single labels of labelled rows unknown; every row keeps at least one label.

    What is hidden is a function of (seed, row, label). A row that would lose all of its labels
    keeps the one with the largest draw. Raises ConfigError if the labels are not multi_label.
    """
    labels = reader.manifest.labels
    if labels.kind != "multi_label":
        raise ConfigError(
            "data.protocol.hide_labels hides single labels and needs multi_label ones, but those "
            f"of {reader.store} are {labels.kind}; set it to 0, or label fewer rows"
        )
    in_rows = _row_draws(protocol, rows, "rows", 1) < protocol.hide_label_rows
    draws = _row_draws(protocol, rows, "labels", len(labels.names))
    is_known = reader.labels(rows) != labels.unlabelled_value
    hidden = (draws < protocol.hide_labels) & in_rows & is_known
    loses_all = ~(is_known & ~hidden).any(1)
    largest = np.argmax(np.where(hidden, draws, -1), 1)
    hidden[loses_all, largest[loses_all]] = False
    reader.hide_labels(rows, hidden)


def drop_partial(reader: Reader, roles: Roles, names: Sequence[str], protocol: Protocol) -> Roles:
    """Removes the rows that cannot be trained on or tested: see `Protocol.partial_rows`.

    `names` are the stored views that the model sees. Raises ConfigError if partial rows are kept,
    and a row has none of these.
    """
    if not (reader.may_lack_views or reader.may_lack_labels):
        return roles
    names = [name for name in names if name not in reader.absent]

    def count_views(rows: Rows) -> NDArray[np.int64]:
        count: NDArray[np.int64] = reader.present(rows, names).sum(1)
        return count

    if protocol.partial_rows == "keep":
        used = np.concatenate([roles.labelled, roles.unlabelled, roles.test, roles.validation])
        if len(empty := used[count_views(used) == 0]):
            raise ConfigError(
                f"data.views: {len(np.unique(empty)):,} rows of {reader.store} have none of "
                f"{', '.join(names)}, starting with {reader.sample_key(int(empty[0]))}; add "
                "another view, or drop them with data.protocol.partial_rows=drop"
            )
        return roles
    labelled = roles.labelled[count_views(roles.labelled) == len(names)]
    known = reader.labels(labelled) != reader.manifest.labels.unlabelled_value
    return Roles(
        reader.starts,
        labelled[known.all(axis=tuple(range(1, known.ndim)))],
        roles.unlabelled[count_views(roles.unlabelled) == len(names)],
        roles.test[count_views(roles.test) > 0],
        roles.validation[count_views(roles.validation) > 0],
    )


def _fold_rows(labels: NDArray[Any], folds: int, fold: int) -> Rows:
    """Returns the positions of one fold of scikit-learn's unshuffled stratified split.

    Each distinct label vector is a class of its own, as in HeroCon's Scene protocol; vectors rarer
    than the number of folds are spread in the order they come.
    """
    if not len(labels):
        raise ConfigError(f"data.protocol.folds is {folds}, but no row has a label; remove folds")
    flat = labels.reshape(len(labels), -1)
    classes = np.unique(flat, axis=0, return_inverse=True)[1].reshape(-1)
    if np.bincount(classes).max() < folds:
        raise ConfigError(
            f"data.protocol.folds is {folds}, but no label vector occurs that often; use "
            f"{np.bincount(classes).max()} or fewer"
        )

    from sklearn.model_selection import StratifiedKFold  # here: it loads scipy

    with warnings.catch_warnings():  # the protocol accepts label vectors rarer than folds
        warnings.simplefilter("ignore", UserWarning)
        splits = list(StratifiedKFold(folds).split(np.zeros(len(flat)), classes))
    positions: Rows = splits[fold][1]
    return positions


def stratified(y: NDArray[np.float32], count: int, rng: np.random.Generator) -> Rows:
    """Draws `count` rows that have each label about as often as all rows have it.

    y is 0/1, [rows, labels]; returns positions in it, ascending. Exclusive classes get their exact
    shares to within one row; the largest remainders are rounded up. With several labels: iterative
    stratification into two parts (Sechidis, Tsoumakas and Vlahavas, "On the stratification of
    multi-label data", ECML PKDD 2011, Algorithm 1). It takes the label with the fewest rows left,
    and assigns each of these rows to the part that lacks most of the label, or else most rows; rows
    without a label come last.
    """
    rows, has = len(y), y > 0
    if (has.sum(1) <= 1).all():
        return _stratified_classes(np.where(has.any(1), has.argmax(1) + 1, 0), count, rng)
    part_sizes = np.array([count, rows - count], float)  # of the drawn rows, of the others
    missing = has.sum(0)[None] * (part_sizes / rows)[:, None]  # [part, label]
    capacity, drawn = part_sizes.copy(), np.zeros(rows, bool)
    waiting = np.ones(rows, bool)
    unused = has.sum(0)
    while waiting.any():
        label = int(np.where(unused > 0, unused, rows + 1).argmin()) if unused.any() else None
        candidates = np.flatnonzero(waiting & has[:, label] if label is not None else waiting)
        for row in rng.permutation(candidates):
            missing_label = np.zeros(2) if label is None else missing[:, label]
            part = max((0, 1), key=lambda p: (capacity[p] >= 1, missing_label[p], capacity[p]))
            drawn[row] = part == 0
            capacity[part] -= 1
            missing[part] -= has[row]
        waiting[candidates] = False
        unused = unused - has[candidates].sum(0)
    return np.flatnonzero(drawn)


def _stratified_classes(classes: NDArray[np.int64], count: int, rng: np.random.Generator) -> Rows:
    """Draws `count` rows of exclusive classes: see `stratified`; `classes` is [rows]."""
    expected = np.bincount(classes) * count / max(len(classes), 1)
    quotas = np.floor(expected).astype(int)
    quotas[np.argsort(quotas - expected, kind="stable")[: count - quotas.sum()]] += 1
    drawn = [rng.permutation(np.flatnonzero(classes == k))[:n] for k, n in enumerate(quotas)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *drawn]))


class WrittenRoles(Artefact):
    """The manifest of written roles, with the data set and the protocol that they belong to."""

    description: ClassVar[str] = "the manifest of roles"
    error: ClassVar[type[ConfigError]] = ConfigError
    remedy: ClassVar[str] = "write them again with heron shards protocol"
    versions: ClassVar[tuple[int, ...]] = (1,)

    format: Literal[1] = 1
    data: Fingerprint
    protocol: dict[str, Any]
    files: dict[FileName, FileSum]


def role_inputs(data: Data) -> dict[str, Any]:
    """Returns the options that determine the roles of a data set's rows."""
    protocol = data.protocol.model_dump(mode="json", exclude={"complementary", "label_weights"})
    if data.protocol.leave_out is not None:  # by its content, wherever it lies
        protocol["leave_out"] = sha256(Path(data.protocol.leave_out))
    return {**protocol, "split": data.split, "views": sorted({v.stored for v in data.views})}


def write_roles(reader: Reader, roles: Roles, data: Data, folder: Path) -> WrittenRoles:
    """Writes roles to a new folder; ConfigError if it exists, or the protocol hides anything."""
    if data.protocol.hide_views or data.protocol.hide_labels:
        raise ConfigError(
            "data.protocol hides views or labels, which is for studies of small data sets; roles "
            "cannot be written with anything hidden"
        )
    if folder.exists():
        raise ConfigError(f"{folder} already exists; choose a new folder")
    marks = np.zeros(int(reader.starts[-1]), np.uint8)
    for bit, shard_rows in enumerate(roles.by_shard.values()):
        for number in np.flatnonzero(shard_rows.sizes).tolist():
            marks[shard_rows.rows_of(number)] |= 1 << bit
    sizes = np.array([shard_rows.sizes for shard_rows in roles.by_shard.values()])
    with new_folder(folder, False, ConfigError) as partial:
        for name, array in ((MARKS, marks), (SIZES, sizes)):
            with atomic_write(partial / name) as stream:
                np.save(stream, array)
        files = {name: FileSum.of(partial / name) for name in (MARKS, SIZES)}
        return WrittenRoles(
            data=reader.manifest.fingerprint, protocol=role_inputs(data), files=files
        ).write(partial / MANIFEST)


def read_roles(reader: Reader, data: Data, folder: Path) -> Roles:
    """Returns written roles; ConfigError if they belong to other data or were altered."""
    manifest = WrittenRoles.read(folder / MANIFEST)
    for what, found, expected in (
        ("the data set", manifest.data, reader.manifest.fingerprint),
        ("the protocol", manifest.protocol, role_inputs(data)),
    ):
        if found != expected:
            raise ConfigError(
                f"data.roles: {folder} was written for {what} {found}, not {expected}; "
                f"{manifest.remedy}"
            )
    if sorted(manifest.files) != [MARKS, SIZES]:
        raise ConfigError(f"{folder} must list {MARKS}, {SIZES}, got {sorted(manifest.files)}")
    manifest.check_files(folder, manifest.files)
    sizes = np.load(folder / SIZES, allow_pickle=False)
    marks = [
        Marked(reader.starts, sizes[bit], folder / MARKS, 1 << bit) for bit in range(len(ROLES))
    ]
    return Roles(reader.starts, *marks)
