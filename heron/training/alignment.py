"""What pictures have in common, by which a first experiment chooses crops and mirror images."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d

from heron.data.dataset import load_or_assign_roles, open_reader
from heron.data.options import Data
from heron.data.rows import Rows
from heron.data.views import Views
from heron.evaluation.evaluator import Evaluator
from heron.evaluation.metrics import Evaluate
from heron.evaluation.probe import fit_logistic
from heron.evaluation.scikit import folds, projection

MOST_ROWS, MOST_BYTES = 500, 500_000_000  # that are looked at, of all rows and of labelled ones
SEEN_ROWS = 10  # fewer say nothing
LEAST_ROWS, LEAST_LABELLED = 100, 20  # fewer say nothing about mirror images
MOST_LABELS = 10  # of several that a row may have
SIDE = 16  # pixels of a side that pictures are reduced to
ALIGNED = 0.05  # CIFAR-10 .01, CelebA .08, KMNIST .13, MNIST .37
TOLD_APART = 0.65  # CIFAR-10 .46, CelebA .58, KMNIST .76, digits .82, MNIST .89
MOST_LOST = 0.1  # accuracy of labels by mirror images, with two standard errors
C_LABELS, C_MIRRORS = 0.1, 0.01  # inverse weights of logistic regression's penalty


@dataclass(frozen=True)
class Alignment:
    """What the pictures of a view have in common.

    Attributes:
        share: of the variance of pixels, within and between pictures, that of the mean picture: 0
            where objects are anywhere, 1 where all pictures are the same.
        mirrored: accuracy with which logistic regression tells unseen pictures from their mirror
            images; .5: they are alike.
        lost: accuracy of held-out labelled rows that logistic regression loses at most, by two
            standard errors, where it also learns the mirror images of the others; infinite where
            it is no better than the most frequent class, or rows are too few to know.
    """

    share: float
    mirrored: float
    lost: float

    @property
    def aligned(self) -> bool:
        """Whether objects are at the same place, so that a small crop loses what they are."""
        return self.share > ALIGNED

    @property
    def description(self) -> str:
        """Says what was found, and what follows."""
        crops = "aligned pictures, so crops of 70 % or more"
        if not self.aligned:
            crops = "pictures that are not aligned, so crops of 40 % or more"
        return f"{crops}, {'and' if self.flips else 'without'} mirror images"

    @property
    def flips(self) -> bool:
        """Whether a mirror image may stand for a picture, its label too."""
        return self.mirrored < TOLD_APART and self.lost < MOST_LOST


def read_alignment(section: Mapping[str, Any]) -> Alignment | None:
    """Looks at the pictures of the first view, of some rows that are trained on.

    `section` is `data` of an experiment. Of labels only those of its labelled rows are read.
    Unreadable pictures are left out; None if fewer than ten are left. Raises a HeronError if the
    data cannot be opened.
    """
    data = Data(**{**section, "on_error": "skip"})
    reader = open_reader(data)
    views = Views(reader, data, torch.device("cpu"))
    evaluator = Evaluator(reader, views, Evaluate())
    height, width, channels = views.shapes[0]
    side = min(SIDE, height), min(SIDE, width)

    def reduced(columns: NDArray[Any]) -> NDArray[Any]:
        whole = torch.from_numpy(columns).view(-1, channels, height, width)
        return adaptive_avg_pool2d(whole, side).flatten(1).numpy()

    rows_of_all = sum(map(reader.manifest.rows, reader.manifest.splits))
    size = sum(shard.bytes for shard in reader.shards) / rows_of_all
    most = int(min(MOST_ROWS, MOST_BYTES / size))

    def spread(rows: Rows) -> Rows:
        chosen: Rows = rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)]
        return chosen

    labelled = spread(load_or_assign_roles(reader, data).labelled)
    everything = spread(reader.split_rows(data.split))
    found = evaluator.inputs(np.union1d(labelled, everything), {0: reduced})
    if found.hidden is None or len(found.rows) < SEEN_ROWS:
        return None
    pictures = found.hidden.reshape(-1, channels, *side)
    known = np.isin(found.rows, labelled)
    seen = pictures[np.isin(found.rows, everything)]
    return measure(seen, pictures[known], found.y[known], evaluator.exclusive)


def measure(
    pictures: NDArray[np.float32], x: NDArray[np.float32], y: NDArray[np.float32], exclusive: bool
) -> Alignment:
    """Measures the alignment of pictures.

    Args:
        pictures: [rows, channels, height, width], in any order but that of their classes.
        x: those of labelled rows, in the same shape.
        y: their labels as 0/1, [labelled rows, labels]; NaN is unknown.
        exclusive: a row has exactly one label.
    """
    from threadpoolctl import threadpool_limits

    mean = pictures.mean(0)
    level = pictures.mean((0, 2, 3))[:, None, None]
    variance = ((pictures - level) ** 2).mean()
    within = ((pictures - mean) ** 2).mean() / max(1, len(pictures) - 1)  # of a mean of few
    share = float((((mean - level) ** 2).mean() - within) / max(variance, 1e-12))
    with threadpool_limits(1), warnings.catch_warnings():  # of classes with a row each
        warnings.simplefilter("ignore")
        lost = _lost(x, y, exclusive) if len(x) >= LEAST_LABELLED else np.inf
        return Alignment(share, _told_apart(pictures), lost)


def _flat(pictures: NDArray[np.float32], mirror: bool = False) -> NDArray[np.float32]:
    return (pictures[..., ::-1] if mirror else pictures).reshape(len(pictures), -1)


def _told_apart(pictures: NDArray[np.float32]) -> float:
    """Returns the accuracy of logistic regression on mirror images of pictures it has not seen."""
    if len(pictures) < LEAST_ROWS:
        return 1.0
    order, half = np.random.default_rng(0).permutation(len(pictures)), len(pictures) // 2
    seen, others = pictures[order[:half]], pictures[order[half:]]
    x = np.concatenate([_flat(seen), _flat(seen, True)])
    y = np.repeat(np.eye(2, dtype=np.float32), len(seen), axis=0)
    project = projection(x)
    predict = fit_logistic(project(x), y, True, C_MIRRORS, 300)
    right = predict(project(_flat(others))).argmax(1) == 0
    return float(np.mean([*right, *(predict(project(_flat(others, True))).argmax(1) == 1)]))


def _lost(x: NDArray[np.float32], y: NDArray[np.float32], exclusive: bool) -> float:
    """Returns `Alignment.lost` of labelled rows, by their folds."""
    if not exclusive:  # the labels that are most often one thing and another
        y = y[:, np.argsort(-np.nanvar(y, 0), kind="stable")[:MOST_LABELS]]
    rows, most_frequent = list[NDArray[Any]](), np.nanmean(y, 0)
    for part, labels, held, truth in folds(x, y):
        found = [np.tile(most_frequent, (len(truth), 1))]
        for seen in ([_flat(part)], [_flat(part), _flat(part, True)]):
            project = projection(inputs := np.concatenate(seen), 50)
            known = np.concatenate([labels] * len(seen))
            predict = fit_logistic(project(inputs), known, exclusive, C_LABELS, 300)
            found.append(predict(project(_flat(held))))
        if exclusive:
            rows.append(np.array([p.argmax(1) == truth.argmax(1) for p in found], float))
        else:
            right = [np.where(np.isnan(truth), np.nan, (p > 0.5) == truth) for p in found]
            rows.append(np.array([np.nanmean(one, 1) for one in right]))
    by_chance, alone, mirrored = (row := np.concatenate(rows, 1))[:, ~np.isnan(row).any(0)]

    def least(gain: NDArray[Any]) -> float:
        return float(gain.mean() - 2 * gain.std() / np.sqrt(len(gain)))

    return -least(mirrored - alone) if len(alone) and least(alone - by_chance) > 0 else np.inf
