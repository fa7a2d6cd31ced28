"""Predicts and scores the rows of a role: each row once, in order, on any number of processes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heron.base.errors import ConfigError, TrainingError
from heron.base.extras import require
from heron.data.batches import Batch
from heron.data.plan import even_sizes, even_slice
from heron.data.reader import Reader
from heron.data.rows import Roles, Rows
from heron.data.views import Embedded, Views, features_of
from heron.distributed.collectives import broadcast_object, gather, gather_objects, rank, world_size
from heron.distributed.watchdog import Watchdog
from heron.evaluation import collapse
from heron.evaluation.metrics import (
    Evaluate,
    Scores,
    cross_view_recalls,
    fitted_threshold,
    multi_class_scores,
    multi_label_scores,
)
from heron.evaluation.probe import linear_probe, support_vectors
from heron.models.heterogeneous import Features, Heterogeneous

Columns = Callable[[NDArray[Any]], NDArray[Any]]  # makes columns [rows, columns] of a view's rows


@dataclass(frozen=True)
class Predictions:
    """What the model predicts for some rows; every process holds all of it."""

    probability: NDArray[np.float32] | None  # [rows, labels]; None: no classifier and no probe
    hidden: NDArray[np.float32] | None  # S of the classified views, [rows, width]; None: not wanted
    y: NDArray[np.float32]  # labels as 0/1, [rows, labels]
    rows: Rows  # row numbers, [rows], without rows that could not be read
    projections: list[NDArray[np.float32]] = field(default_factory=list)  # z of each view


UNSCORED = Predictions(None, None, np.empty((0, 0), np.float32), np.empty(0, np.int64))


@dataclass(frozen=True)
class Evaluator:
    """Scores a model on rows of a data set as `config` says; reports progress to `watchdog`.

    `embedded` has features of some rows by the number of a view, read in place of that view.
    """

    reader: Reader
    views: Views
    config: Evaluate
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(math.inf))
    embedded: Mapping[int, Embedded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses settings that cannot score this data set.

        Raises MissingPackage if `evaluate.knn` is set without FAISS; ConfigError if support vector
        machines would have to predict several labels per row, or baselines to read graphs.
        """
        stored = sorted({view.stored for view in self.views.views})
        graphs = [name for name in stored if self.reader.view(name).kind == "graph"]
        if graphs and self.config.fits_columns:  # `plain` makes no columns of them
            raise ConfigError(
                f"evaluate.baselines is {str(self.config.baselines).lower()}, but view "
                f"'{graphs[0]}' has graphs, and baselines need columns of numbers; set it to false"
            )
        if self.config.probe_by == "svm" and not self.exclusive:
            raise ConfigError(
                "evaluate.probe_by is 'svm', which needs one class per row, but a row has several "
                "labels; set it to 'logistic'"
            )
        if self.config.knn is not None:
            require("faiss", "evaluate.knn")

    @property
    def exclusive(self) -> bool:
        """Whether classes exclude each other: softmax and argmax, else sigmoid and threshold."""
        return self.reader.manifest.labels.kind != "multi_label"

    def evaluate(
        self, model: Heterogeneous, roles: Roles, role: Literal["test", "validation"] = "test"
    ) -> tuple[Predictions, Scores]:
        """Predicts and scores the rows of a role; every process must call it.

        The classifier predicts, or, without one, a linear probe on the labelled rows.
        `evaluate.probe: always` adds the probe's scores as `probe_...`; `never` trains no probe.
        `evaluate.knn` adds scores of a vote of the nearest labelled rows, by hidden features, as
        `knn_...`, and the `rankme` of the role's hidden features (see `collapse.effective_rank`).
        With `evaluate.threshold: fitted`, each of them gets its own `threshold`, fitted on the
        validation rows.
        """
        rows = roles.test if role == "test" else roles.validation
        if not len(rows):
            return self.predict(model, rows), {}  # no row of it has a label
        by_prefix, label_free = self.predictors(model, roles.labelled, rows)
        validation = by_prefix
        if role == "test" and self.fits:
            validation, _ = self.predictors(model, roles.labelled, roles.validation)
        scores: Scores = {}
        for prefix, predictions in by_prefix.items():
            prefix_scores = self.score(predictions, self.threshold(validation.get(prefix)))
            scores |= {f"{prefix}{name}": value for name, value in prefix_scores.items()}
        return by_prefix[""], scores | label_free

    def predictors(
        self, model: Heterogeneous, labelled_rows: Rows, rows: Rows
    ) -> tuple[dict[str, Predictions], Scores]:
        """Returns predictions by the prefix of their scores, and the scores that need no labels.

        The probe and the vote learn from `labelled_rows`. Raises TrainingError for non-finite
        features or probabilities.
        """
        no_classifier = model.classifier is None
        use_probe = self.config.probe == "always" or (self.config.probe == "auto" and no_classifier)
        use_knn = self.config.knn is not None
        own = self.predict(
            model, rows, hidden=use_probe or use_knn, projected=self.config.cross_view
        )
        _refuse_nonfinite(own)
        by_prefix, label_free = {"": own}, Scores()
        if self.config.cross_view:
            names = self.views.names[: model.classified]
            projections = [torch.from_numpy(view) for view in own.projections]
            present = self._present(own.rows, len(names))
            label_free |= cross_view_recalls(projections, names, present)
        if use_knn and own.hidden is not None and own.hidden.size:
            hidden = torch.from_numpy(own.hidden).double()
            label_free |= {"rankme": collapse.effective_rank(hidden)}
        if not (use_probe or use_knn):
            return by_prefix, label_free
        labelled = self.predict(model, labelled_rows, hidden=True)
        _refuse_nonfinite(labelled)
        if not len(labelled.y) or not len(own.y):
            return by_prefix, label_free  # nothing to learn from, or nothing to predict
        if use_knn:
            by_prefix["knn_"] = self._vote(labelled, own)
        if use_probe:
            by_prefix["" if no_classifier else "probe_"] = self._probe(labelled, own)
        return by_prefix, label_free

    @torch.no_grad()
    def predict(
        self, model: Heterogeneous, rows: Rows, hidden: bool = False, projected: bool = False
    ) -> Predictions:
        """Runs the model over rows; every process must call it and computes its share.

        With `data.on_error: skip`, rows that cannot be read are left out.
        """
        local_rows = rows[even_slice(len(rows), rank(), world_size())]
        embedded = {n: kept for n, kept in self.embedded.items() if np.isin(rows, kept.rows).all()}
        model.eval()
        logits: list[Tensor] = []
        features: list[Tensor] = []
        views: list[list[Tensor]] = []
        can_read: list[bool] = []
        size = self.config.batch
        # A process without rows still runs one empty batch, to learn the widths it gathers. All
        # processes run equally many batches: under ZeRO 3 each one gathers parameters.
        sizes = even_sizes(len(rows), world_size())
        for start in range(0, max(*sizes, 1), size):
            self.watchdog.beat()
            batch_rows = local_rows[start : start + size]
            batch = self._batch(batch_rows, model.classified, embedded)
            inputs = self.views(batch, train=False, first=model.classified)
            output: Features = model(inputs, batch.rng_keys, batch.sizes, present=batch.present)
            logits += output.get("logits", [])
            features += output["hidden"] if hidden else []
            views += [output["projections"]] if projected else []
            can_read += [row not in self.reader.lost for row in batch_rows.tolist()]
        model.train()
        flags = torch.tensor(can_read, device=self.views.device, dtype=torch.uint8)
        readable = gather(flags, sizes).bool().cpu().numpy()
        probability = None
        if logits:
            scores = gather(torch.cat(logits), sizes).float()
            scores = scores.softmax(1) if self.exclusive else scores.sigmoid()
            probability = scores.cpu().numpy()[readable]

        def gathered(chunks: Sequence[Tensor]) -> NDArray[np.float32]:
            found = gather(torch.cat([*chunks]), sizes).float().cpu().numpy()
            return np.asarray(found[readable])

        hidden_features = gathered(features) if hidden else None
        projections = [gathered(chunks) for chunks in zip(*views, strict=True)]
        y = self.reader.ground_truth(rows[readable])
        return Predictions(probability, hidden_features, y, rows[readable], projections)

    def inputs(self, rows: Rows, transforms: Mapping[int, Columns] | None = None) -> Predictions:
        """Returns the model's inputs as `hidden` [rows, columns]; this process reads all rows.

        `transforms` maps a view's index to the function that turns its values into columns; None
        takes the values of all views. A view that a row lacks gets the mean of the other rows.
        """
        if transforms is None:
            transforms = dict.fromkeys(range(len(self.views.views)), np.asarray)
        inputs = []
        for start in range(0, max(len(rows), 1), self.config.batch):
            batch = self._batch(rows[start : start + self.config.batch], len(self.views.views), {})
            views, columns = self.views(batch, False), list[NDArray[np.float32]]()
            for view, transform in transforms.items():
                columns.append(transform(views[view].flatten(1).cpu().numpy()).astype(np.float32))
                if batch.present is not None:
                    columns[-1][~batch.present[:, view].cpu().numpy()] = np.nan
            inputs.append(np.concatenate(columns, 1))
        readable = np.array([row not in self.reader.lost for row in rows.tolist()], bool)
        rows, hidden = rows[readable], np.concatenate(inputs)[readable]
        return Predictions(None, with_means(hidden), self.reader.ground_truth(rows), rows)

    @property
    def fits(self) -> bool:
        """Whether thresholds are fitted on the validation rows."""
        return self.config.threshold == "fitted" and not self.exclusive

    def threshold(self, validation: Predictions | None) -> float:
        """Returns the configured threshold, or one fitted on the validation predictions."""
        if self.config.threshold != "fitted":
            return self.config.threshold
        if self.exclusive or validation is None or validation.probability is None:
            return 0.5
        return fitted_threshold(validation.probability, validation.y)

    def score(self, predictions: Predictions, threshold: float) -> Scores:
        """Returns scores, and the fitted threshold; empty without probabilities or labels."""
        if predictions.probability is None or not len(predictions.y):
            return {}
        if self.exclusive:
            return multi_class_scores(predictions.probability, predictions.y)
        scores = multi_label_scores(predictions.probability, predictions.y, threshold)
        return scores | ({"threshold": threshold} if self.fits else {})

    def _probe(self, labelled: Predictions, test: Predictions) -> Predictions:
        """Returns predictions of a probe, which the main process trains on the labelled rows."""
        assert labelled.hidden is not None and test.hidden is not None
        probability = None
        if rank() == 0:
            with self.watchdog.busy():
                train, y, queries = labelled.hidden, labelled.y, test.hidden
                if self.config.probe_by == "svm":
                    probability = support_vectors(train, y, queries)
                else:
                    probability = linear_probe(train, y, queries, self.exclusive)
        return replace(test, probability=broadcast_object(probability))

    def _vote(self, labelled: Predictions, test: Predictions) -> Predictions:
        """Returns the vote of the nearest labelled rows; each process votes on its test rows."""
        assert labelled.hidden is not None and test.hidden is not None and self.config.knn
        from heron.evaluation.knn import faiss, vote  # here: most runs need neither

        faiss.omp_set_num_threads(torch.get_num_threads())
        local = even_slice(len(test.rows), rank(), world_size())
        # The number of neighbours must be the same on all processes: `vote` sees local rows only.
        candidates = len(labelled.rows) - bool(np.isin(test.rows, labelled.rows).any())
        with self.watchdog.busy():
            votes = vote(
                (labelled.rows, labelled.hidden, labelled.y),
                (test.rows[local], test.hidden[local]),
                min(self.config.knn, candidates),
                self.config.knn_tau,
            )
        return replace(test, probability=np.concatenate(gather_objects(votes)))

    def _batch(self, rows: Rows, views: int, embedded: Mapping[int, Embedded]) -> Batch:
        numbers = torch.from_numpy(rows)
        empty = torch.empty(0, len(self.reader.manifest.labels.names))
        names = [
            view.stored for n, view in enumerate(self.views.views[:views]) if n not in embedded
        ]
        stored = {n: torch.from_numpy(self.reader.read(n, rows)) for n in dict.fromkeys(names)}
        stored |= {features_of(n): torch.from_numpy(x.read(rows)) for n, x in embedded.items()}
        rng_keys = torch.zeros_like(numbers)  # evaluation draws no random numbers
        batch = Batch(stored, empty, numbers, rng_keys, [len(rows)])
        return replace(batch, present=self._present(rows, views)).to(self.views.device)

    def _present(self, rows: Rows, views: int) -> Tensor | None:
        """Returns which of the first views each row has, [rows, views]; None: all of them."""
        if not self.reader.may_lack_views:
            return None
        names = [view.stored for view in self.views.views[:views]]
        return torch.from_numpy(self.reader.present(rows, names))


def _refuse_nonfinite(predictions: Predictions) -> None:
    """Raises TrainingError on every process alike, since each one holds all rows."""
    named = [("hidden features", predictions.hidden)]
    named += [("projections", view) for view in predictions.projections]
    named += [("probabilities", predictions.probability)]
    for name, rows in named:
        if rows is not None and len(bad := np.flatnonzero(~np.isfinite(rows).all(1))):
            raise TrainingError(
                f"{name} of {len(bad)} of {len(rows)} rows are not finite, the first is row "
                f"{predictions.rows[bad[0]]}: the model's weights or its inputs must be "
                "wrong; lower optim.lr, and check the data with `heron shards verify`"
            )


def with_means(columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replaces each NaN by the mean of its column, [rows, columns]."""
    missing = np.isnan(columns)
    if not missing.any():
        return columns
    total = np.where(missing, 0, columns).sum(0, dtype=np.float64)
    filled = np.where(missing, total / np.maximum(1, (~missing).sum(0)), columns)
    return filled.astype(np.float32)
