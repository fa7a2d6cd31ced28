"""Predictions for the rows of a role: each row once, on whichever process, in order."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.collectives import gather, rank, world_size
from pipeline.config import Evaluate
from pipeline.data.batches import Batch, read
from pipeline.data.plan import share, shares
from pipeline.data.reader import Reader, Rows
from pipeline.data.views import Views
from pipeline.metrics import Scores, multi_class_scores, multi_label_scores
from pipeline.models.heterogeneous import Heterogeneous


@dataclass(frozen=True)
class Predictions:
    """What the model says of some rows, on every process.

    Attributes:
        probability: [rows, labels], or None without a classifier.
        hidden: S of the rows, [rows, width], or None when not asked for.
        y: their labels as 0/1, [rows, labels].
    """

    probability: NDArray[np.float32] | None
    hidden: NDArray[np.float32] | None
    y: NDArray[np.float32]


@dataclass(frozen=True)
class Evaluator:
    """Scores a model on rows of a data set.

    Attributes:
        config: threshold, and rows a process reads at a time.
    """

    reader: Reader
    views: Views
    config: Evaluate

    @property
    def exclusive(self) -> bool:
        """Whether classes exclude each other: softmax and argmax, else sigmoid and threshold."""
        return self.reader.manifest.labels.kind in ("multi_class", "hierarchical")

    @torch.no_grad()
    def predict(self, model: Heterogeneous, rows: Rows, hidden: bool = False) -> Predictions:
        """Run the model over rows; every process must call it, each computes its part."""
        own = rows[share(len(rows), rank(), world_size())]
        model.eval()
        logits, features = [], []
        size = self.config.batch
        # A process without rows still runs one empty batch, to know the widths it gathers.
        for start in range(0, max(len(own), 1), size):
            batch = self._batch(own[start : start + size])
            part = model(self.views(batch, train=False), batch.keys, batch.parts)
            logits.append(part.logits)
            if hidden:
                features.append(part.hidden)
        model.train()
        sizes = shares(len(rows), world_size())
        probability = None
        if logits[0] is not None:
            whole = gather(torch.cat(logits), sizes).float()
            probability = (whole.softmax(1) if self.exclusive else whole.sigmoid()).cpu().numpy()
        s = gather(torch.cat(features), sizes).float().cpu().numpy() if hidden else None
        return Predictions(probability, s, self.reader.targets(rows))

    def score(self, predictions: Predictions) -> Scores:
        """Scores of predictions; none without a classifier."""
        if predictions.probability is None:
            return {}
        if self.exclusive:
            return multi_class_scores(predictions.probability, predictions.y)
        return multi_label_scores(predictions.probability, predictions.y, self.config.threshold)

    def _batch(self, rows: Rows) -> Batch:
        names = [view.stored for view in self.views.views]
        numbers = torch.from_numpy(rows)
        empty = torch.empty(0, len(self.reader.manifest.labels.names))
        stored = read(self.reader, list(dict.fromkeys(names)), rows)
        keys = torch.zeros_like(numbers)  # evaluation draws no random numbers
        return Batch(stored, empty, numbers, keys, [len(rows)]).to(self.views.device)
