"""What pictures have in common, by which a first experiment chooses crops and mirror images."""

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
from heron.evaluation.options import Evaluate
from heron.evaluation.probe import fit_logistic
from heron.evaluation.scikit import folds, projection

MOST_ROWS = 1000  # that are looked at
LEAST_ROWS, LEAST_LABELLED = 100, 20  # fewer say nothing about mirror images
SIDE = 16  # pixels of a side that pictures are reduced to
ALIGNED = 0.05  # CIFAR-10 .02, CelebA .08, KMNIST .13, MNIST .38
TOLD_APART = 0.6  # CIFAR-10 .51, CelebA .51, KMNIST .79, digits .79, MNIST .94
ERRORS = 3.0  # standard errors that labels may lose
C = 0.1, 0.01  # of logistic regression on labels, and on mirror images


@dataclass(frozen=True)
class Alignment:
    """What the pictures of a view have in common.

    Attributes:
        share: of the variance of pixels, within and between pictures, that of the mean picture: 0
            where objects are anywhere, 1 where all pictures are the same.
        mirrored: accuracy with which logistic regression tells unseen pictures from their mirror
            images; .5: they are alike.
        lost: accuracy of held-out labelled rows that logistic regression loses where it also learns
            the mirror images of the others, and its standard error; NaN without labels.
    """

    share: float
    mirrored: float
    lost: tuple[float, float]

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
        loss, error = self.lost
        return self.mirrored < TOLD_APART and loss <= ERRORS * error


def read_alignment(section: Mapping[str, Any]) -> Alignment:
    """Looks at the pictures of the first view, of up to 1,000 rows that are trained on.

    `section` is `data` of an experiment. Of labels only those of its labelled rows are read.
    Unreadable pictures are left out. Raises a HeronError if the data cannot be opened.
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

    def pictures(rows: Rows) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        shown = np.linspace(0, len(rows) - 1, min(MOST_ROWS, len(rows))).astype(int)
        found = evaluator.inputs(rows[shown], {0: reduced})
        assert found.hidden is not None
        return found.hidden.reshape(-1, channels, *side), found.y

    everything, _ = pictures(reader.split_rows(data.split))
    x, y = pictures(load_or_assign_roles(reader, data).labelled)
    return measure(everything, x, y, evaluator.exclusive)


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
    mean = pictures.mean(0)
    level = pictures.mean((0, 2, 3))[:, None, None]
    variance = ((pictures - level) ** 2).mean()
    within = ((pictures - mean) ** 2).mean() / max(1, len(pictures) - 1)  # of a mean of few
    share = ((mean - level) ** 2).mean() - within
    lost = _lost(x, y, exclusive) if len(x) >= LEAST_LABELLED else (np.nan, 0.0)
    return Alignment(float(share / max(variance, 1e-12)), _told_apart(pictures), lost)


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
    predict = fit_logistic(project(x), y, True, C[1], 300)
    right = predict(project(_flat(others))).argmax(1) == 0
    return float(np.mean([*right, *(predict(project(_flat(others, True))).argmax(1) == 1)]))


def _lost(x: NDArray[np.float32], y: NDArray[np.float32], exclusive: bool) -> tuple[float, float]:
    """Returns the accuracy, and its error, that held-out rows lose by others' mirror images."""
    losses = list[NDArray[Any]]()
    for rows, labels, held, truth in folds(x, y):
        right = []
        for mirrors in (False, True):
            seen = np.concatenate([_flat(rows), _flat(rows, True)][: 1 + mirrors])
            known = np.concatenate([labels, labels][: 1 + mirrors])
            project = projection(seen, 50)
            found = fit_logistic(project(seen), known, exclusive, C[0], 300)(project(_flat(held)))
            if exclusive:
                right.append((found.argmax(1) == truth.argmax(1)).astype(float))
            else:
                right.append(
                    np.nanmean(np.where(np.isnan(truth), np.nan, (found > 0.5) == truth), 1)
                )
        losses.append(right[0] - right[1])
    lost = np.concatenate(losses)
    lost = lost[~np.isnan(lost)]
    return float(lost.mean()), float(lost.std() / np.sqrt(len(lost)))
