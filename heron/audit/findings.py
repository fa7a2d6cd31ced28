"""What is found in embedded samples, and tables of it: labels, pairs of views, copies, outliers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from heron.audit.copies import Copies, find_copies, joined, other_labels, outliers
from heron.audit.labels import FOLDS, LabelModel, Labels, Near, suspicion
from heron.audit.pairs import Pairs, score_pairs
from heron.audit.planting import Estimate, estimate
from heron.base.errors import RetrievalError
from heron.base.workers import ALONE, Executor
from heron.data.reader import Reader
from heron.evaluation.knn import Numbers
from heron.evaluation.scikit import log_loss
from heron.retrieval.embeddings import Embeddings, Layer
from heron.retrieval.exact import nearest_of
from heron.retrieval.some_views import EmbeddingsOfViews

LABEL_COLUMNS = ["key", "label", "given", "likely", "suspicion", "decision"]
K = 10  # nearest others that vote, and that tell copies and outliers
FEWEST = 50  # labelled rows, or rows with both views, that a judgement needs


@dataclass(frozen=True)
class LabelFindings:
    """Labels by how suspicious they are.

    Attributes:
        rows: numbers of the samples with labels, [rows].
        y: their labels, 0/1, NaN where unknown, [rows, labels].
        probability: of each label, by models that have not seen the row's, [rows, labels].
        suspicion: of each given label, [rows, labels]; of exclusive classes, [rows, 1].
        estimate: how many are wrong, and how many of these are found.
    """

    rows: Numbers
    y: Labels
    probability: Labels
    suspicion: Labels
    estimate: Estimate
    exclusive: bool  # whether each row has one class
    told: bool  # whether the probabilities say more of the labels than how frequent they are

    def ranking(self) -> Numbers:
        """Returns the flattened places of all known labels, the most suspicious first."""
        flat = self.suspicion.reshape(-1)
        order = np.argsort(-np.nan_to_num(flat, nan=-1.0), kind="stable")
        return order[: int(np.isfinite(flat).sum())]


@dataclass(frozen=True)
class PairFindings:
    """How well two stored views go together, of the samples that have both."""

    views: tuple[str, str]
    rows: Numbers  # numbers of the samples, in the order of their keys
    pairs: Pairs  # whose rows are places in `rows`


@dataclass(frozen=True)
class Findings:
    """All that was found in embeddings.

    Attributes:
        split: the split of each sample, an index of `splits`, which is empty if they are not known.
        outliers: by view, the samples that are like no other, the furthest first, and how far each
            sample is: see `copies.outliers`.
        notes: what was not looked at, and why.
    """

    embeddings: Embeddings
    layer: Layer
    splits: list[str]
    split: NDArray[np.int64]
    copies: Copies
    y: Labels  # of all samples; NaN where there is no label
    outliers: dict[str, tuple[Numbers, NDArray[np.float32]]]
    labels: LabelFindings | None
    pairs: list[PairFindings]
    notes: list[str] = field(default_factory=list)


def look(
    embeddings: Embeddings,
    layer: Layer,
    reader: Reader | None,
    groups: NDArray[np.int64] | None = None,
    seed: int = 0,
    executor: Executor = ALONE,
) -> Findings:
    """Looks at all samples of embeddings.

    Labels and splits are those of `reader`; without one, labels are those that were embedded, and
    splits are not known. `groups` [samples] number samples that belong together (of one person);
    neither their labels nor those of copies vouch for each other. Raises a RetrievalError if there
    are fewer than 50 samples, or the reader has other labels.
    """
    count, everyone = len(embeddings), np.arange(len(embeddings))
    if count < FEWEST:
        raise RetrievalError(
            f"{embeddings.where} has {count:,} samples, but an audit needs {FEWEST} or more; embed "
            "more of the data set"
        )
    near = Near(*nearest_of(embeddings, layer, everyone, K, executor=executor))
    copies = find_copies(near)
    y, why = _labels(embeddings, reader)
    known = np.asarray(np.isfinite(y).any(1))
    splits, split = _splits(embeddings, reader)
    together = copies.group if groups is None else joined(copies.group, groups)
    if not why and len(np.unique(together[known])) < FOLDS:
        why = (
            f"the samples belong to fewer than {FOLDS} groups, or are copies of each other, so "
            "that nothing is left to judge them by"
        )
    labels, notes = None, list[str]()
    if why:
        notes.append(f"labels: {why}")
    else:
        labels = _audit_labels(embeddings, layer, y, known, near, together, seed, executor)
    pairs, odd = list[PairFindings](), {"all views": outliers(near)}
    if len(embeddings.views) > 1:
        pairs = _audit_pairs(embeddings, layer, notes, seed)
        odd = {}
        for name in embeddings.views:
            one = EmbeddingsOfViews(embeddings, [name])
            there = _there(one, layer)
            if len(there) < FEWEST:
                notes.append(f"view '{name}': {len(there):,} samples have it, too few to compare")
                continue
            own = nearest_of(one, layer, there, K, np.isin(everyone, there), executor)
            found, score = outliers(Near(*own))
            whole = np.zeros(count, np.float32)
            whole[there] = score
            odd[name] = there[found], whole
    return Findings(embeddings, layer, splits, split, copies, y, odd, labels, pairs, notes)


def _labels(embeddings: Embeddings, reader: Reader | None) -> tuple[Labels, str]:
    """Returns the labels of all samples, NaN where unknown, and why none are judged, if so."""
    samples = embeddings.samples
    rows, why = np.asarray(samples.rows), ""
    y, known = samples.targets.astype(np.float32), np.asarray(samples.known)
    if reader is not None and samples.kind != "complementary":
        labels = reader.manifest.labels
        if (labels.kind, labels.names) != (samples.kind, samples.names):
            raise RetrievalError(
                f"{reader.store} has other labels than {embeddings.where}; pass the shards that "
                "were embedded with --data, or embed these"
            )
        y, known = reader.ground_truth(rows), reader.is_labelled(rows)
    y[~known] = np.nan
    if not samples.names or not known.any():
        why = "the data set has none"
    elif samples.kind == "complementary":
        why = "complementary labels say what a sample is not, and are not compared with features"
    elif (count := int(known.sum())) < FEWEST:
        why = f"{count:,} samples have some, and {FEWEST} or more are needed"
    elif not other_labels(np.flatnonzero(known), y):
        why = "all samples have the same"
    return y, why


def same_samples(embeddings: Embeddings, reader: Reader) -> bool:
    """Returns whether shards hold the samples that were embedded, at the same rows."""
    rows = np.asarray(embeddings.samples.rows)
    if len(rows) and rows.max() >= reader.starts[-1]:
        return False
    keys = [key.encode() for key in reader.sample_keys(rows)]
    return bool(keys == embeddings.samples.keys.tolist())


def _splits(embeddings: Embeddings, reader: Reader | None) -> tuple[list[str], NDArray[np.int64]]:
    rows = np.asarray(embeddings.samples.rows)
    if reader is None:
        return [], np.zeros(len(rows), np.int64)
    names = list(reader.manifest.splits)
    starts = [int(reader.shard_rows(name).starts[0]) for name in names]
    return names, np.searchsorted(starts, rows, side="right") - 1


def _audit_labels(
    embeddings: Embeddings,
    layer: Layer,
    y: Labels,
    known: NDArray[np.bool_],
    near: Near,
    groups: NDArray[np.int64],
    seed: int,
    executor: Executor,
) -> LabelFindings:
    """Judges the labels of the samples that have some."""
    rows, exclusive = np.flatnonzero(known), embeddings.samples.exclusive
    if len(rows) < len(y):  # neighbours without labels would leave fewer to vote
        numbers, cosine = nearest_of(embeddings, layer, rows, K, known, executor)
        near = Near(np.searchsorted(rows, numbers), cosine)
    given = y[rows]
    features = embeddings.take(layer, rows)
    model = LabelModel.of(features, given, exclusive, near, groups[rows], seed)
    probability = model.probabilities(given)
    suspicious = suspicion(probability, given, exclusive)
    found = estimate(model, given, probability, suspicious, seed)
    share = np.nansum(given, 0) / np.maximum(np.isfinite(given).sum(0), 1)
    blind = np.broadcast_to(share, given.shape)
    told = log_loss(probability, given, exclusive) < log_loss(blind, given, exclusive)
    return LabelFindings(rows, given, probability, suspicious, found, exclusive, told)


def _there(one: Embeddings, layer: Layer) -> Numbers:
    """Returns the samples that have a view, whose numbers are not all 0."""
    found = [first + np.flatnonzero(block.any(1)) for first, block in one.blocks(layer)]
    return np.concatenate(found)


def _audit_pairs(
    embeddings: Embeddings, layer: Layer, notes: list[str], seed: int
) -> list[PairFindings]:
    order = np.argsort(embeddings.samples.keys, kind="stable")
    views = {name: EmbeddingsOfViews(embeddings, [name]) for name in embeddings.views}
    there = {name: _there(one, layer) for name, one in views.items()}
    found = []
    for first, second in combinations(views, 2):
        both = order[np.isin(order, np.intersect1d(there[first], there[second]))]
        if len(both) < FEWEST:
            notes.append(
                f"pairs of '{first}' and '{second}': {len(both):,} samples have both, too few to "
                "compare"
            )
            continue
        vectors = [views[name].take(layer, both) for name in (first, second)]
        found.append(PairFindings((first, second), both, score_pairs(vectors[0], vectors[1], seed)))
    return found


def likely_class(labels: LabelFindings, rows: Any) -> Any:
    """Returns the most probable class of rows of `labels` other than the given one."""
    return np.where(labels.y[rows] == 1, -1, labels.probability[rows]).argmax(1)


def label_table(found: Findings, labels: LabelFindings) -> pd.DataFrame:
    """Returns all known labels, the most suspicious first.

    Of exclusive classes, `label` is empty, `given` and `likely` are names of classes; else `given`
    and `likely` are 0 or 1.
    """
    top, samples = labels.ranking(), found.embeddings.samples
    names = np.array(samples.names, object)
    rows, column = (top, None) if labels.exclusive else np.divmod(top, len(names))
    keys = np.array([key.decode() for key in samples.keys[labels.rows].tolist()], object)
    table: dict[str, Any] = {"key": keys[rows]}
    if column is None:
        given, likely = names[labels.y[rows].argmax(1)], names[likely_class(labels, rows)]
        table |= {"label": "", "given": given, "likely": likely}
    else:
        value = labels.y.reshape(-1)[top].astype(int)
        table |= {"label": names[column], "given": value, "likely": 1 - value}
    suspicious = labels.suspicion.reshape(-1)[top]
    return pd.DataFrame(table | {"suspicion": suspicious, "decision": ""}, columns=LABEL_COLUMNS)


def pair_table(found: Findings, one: PairFindings) -> pd.DataFrame:
    """Returns all samples that have two views, those that go together least first.

    Those that are out of step come last.
    """
    samples, order = found.embeddings.samples, worst_pairs(one)
    key = np.array([samples.key(int(row)) for row in one.rows], object)
    by = np.zeros(len(key), np.int64)
    for shift in one.pairs.shifts:
        by[shift.start : shift.stop] = shift.by
    first, second = one.views
    return pd.DataFrame(
        {
            "key": key,
            "first": first,
            "second": second,
            "suspicion": one.pairs.suspicion,
            "second_belongs_to": key[one.pairs.home],
            "out_of_step_by": by,
        }
    ).iloc[order]


def worst_pairs(one: PairFindings) -> Any:
    """Returns the places of pairs, the most suspicious first, those out of step last."""
    late = np.zeros(len(one.rows), bool)
    for shift in one.pairs.shifts:
        late[shift.start : shift.stop] = True
    return np.lexsort((-one.pairs.suspicion, late))


def split_of(found: Findings, row: int) -> str:
    """Returns the split of a sample, "" if it is not known."""
    return found.splits[found.split[row]] if found.splits else ""


def groups_of_copies(found: Findings) -> list[Any]:
    """Returns the groups of copies: those across splits first, then those with other labels."""

    def rank(rows: Any) -> tuple[int, int]:
        return -len(set(found.split[rows].tolist())), -int(other_labels(rows, found.y))

    return sorted(found.copies.members(), key=rank)


def copy_table(found: Findings, groups: Sequence[Any]) -> pd.DataFrame:
    """Returns the samples of which there are copies, by group."""
    samples = found.embeddings.samples
    rows = [
        {
            "group": number,
            "key": samples.key(int(row)),
            "split": split_of(found, row),
            "distance": float(found.copies.nearest[row]),
            "equal": bool(found.copies.equal[row]),
            "labels_differ": other_labels(members, found.y),
            "decision": "",
        }
        for number, members in enumerate(groups)
        for row in members
    ]
    columns = ["group", "key", "split", "distance", "equal", "labels_differ", "decision"]
    return pd.DataFrame(rows, columns=columns)


def outlier_table(found: Findings) -> pd.DataFrame:
    """Returns the samples that are like no other, by view, the furthest first."""
    samples = found.embeddings.samples
    rows = [
        {"key": samples.key(int(row)), "view": view, "deviations": float(score[row])}
        for view, (odd, score) in found.outliers.items()
        for row in odd
    ]
    return pd.DataFrame(rows, columns=["key", "view", "deviations"])
