"""Predictions for the rows of a role: each row once, on whichever process, in order."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heron.pipeline.config.errors import ConfigError, TrainingError
from heron.pipeline.config.extras import require
from heron.pipeline.config.training import Evaluate
from heron.pipeline.data.batches import Batch
from heron.pipeline.data.plan import Rows, even_sizes, even_slice
from heron.pipeline.data.protocol import Roles
from heron.pipeline.data.reader import Reader
from heron.pipeline.data.views import Views
from heron.pipeline.distributed.collectives import (
    broadcast_object,
    gather,
    gather_objects,
    rank,
    world_size,
)
from heron.pipeline.distributed.watchdog import Watchdog
from heron.pipeline.evaluation import collapse
from heron.pipeline.evaluation.cross_view import cross_view_recalls
from heron.pipeline.evaluation.metrics import (
    Scores,
    fitted_threshold,
    multi_class_scores,
    multi_label_scores,
)
from heron.pipeline.evaluation.probe import linear_probe, support_vectors
from heron.pipeline.models.heterogeneous import Features, Heterogeneous

Columns = Callable[[NDArray[Any]], NDArray[Any]]  # of some numbers of each row, [rows, numbers]


@dataclass(frozen=True)
class Predictions:
    """The model's outputs of some rows, on every process."""

    probability: NDArray[np.float32] | None  # [rows, labels]; None: no classifier and no probe
    hidden: NDArray[np.float32] | None  # S of the classified views, [rows, width]; None: not asked
    y: NDArray[np.float32]  # their labels as 0/1, [rows, labels]
    rows: Rows  # their numbers, [rows]: those asked for, without what could not be read
    projections: list[NDArray[np.float32]] = field(default_factory=list)  # z of each, if asked for


@dataclass(frozen=True)
class Evaluator:
    """Scores a model on rows of a data set, as `config` says; tells `watchdog` of its progress."""

    reader: Reader
    views: Views
    config: Evaluate
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(math.inf))

    def __post_init__(self) -> None:
        """Refuses what cannot score.

        Raises:
            MissingPackage: neighbours are to vote, and FAISS is not installed.
            ConfigError: support vector machines are to tell labels of which a row has several, or
                baselines are to see graphs.
        """
        stored = sorted({view.stored for view in self.views.views})
        graphs = [name for name in stored if self.reader.view(name).kind == "graph"]
        if graphs and self.config.baselines is True:  # `plain` makes no columns of them
            raise ConfigError(
                f"evaluate.baselines is true, and '{graphs[0]}' holds graphs, which are no "
                "columns of numbers; expected false"
            )
        if self.config.probe_by == "svm" and not self.exclusive:
            raise ConfigError(
                "evaluate.probe_by is 'svm', which tells classes apart, and a row has several "
                "labels; expected 'logistic'"
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
        """Returns predictions for the rows of a role and their scores; every process must call it.

        They are the classifier's. Where there is none, they are those of a linear probe on the
        labelled rows; `evaluate.probe: always` adds the probe's scores beside the classifier's,
        as `probe_...`, and `never` trains no probe. With `evaluate.knn` there are the scores of the
        labelled rows' vote by hidden features, as `knn_...`, and `rankme` of the role's rows' (see
        `collapse.effective_rank`). With `evaluate.threshold: fitted` each of these has its own
        `threshold`, by the validation rows.
        """
        rows = roles.test if role == "test" else roles.validation
        if not len(rows):
            return self.predict(model, rows), {}  # no row of it has a label
        found, measured = self.predictors(model, roles.labelled, rows)
        fitted = found
        if role == "test" and self.fits:
            fitted, _ = self.predictors(model, roles.labelled, roles.validation)
        scores: Scores = {}
        for prefix, predictions in found.items():
            its = self.score(predictions, self.threshold(fitted.get(prefix)))
            scores |= {f"{prefix}{name}": value for name, value in its.items()}
        return found[""], scores | measured

    def predictors(
        self, model: Heterogeneous, known: Rows, rows: Rows
    ) -> tuple[dict[str, Predictions], Scores]:
        """Returns what predicts some rows, by the prefix of its scores, and what needs no label.

        `known` are labelled rows, for the probe and the vote.

        Raises:
            TrainingError: hidden features or projections are not finite.
        """
        alone = model.classifier is None
        probed = self.config.probe == "always" or (self.config.probe == "auto" and alone)
        voted = self.config.knn is not None
        own = self.predict(model, rows, hidden=probed or voted, projected=self.config.cross_view)
        _refuse_nonfinite(own)
        found, measured = {"": own}, Scores()
        if self.config.cross_view:
            names = self.views.names[: model.classified]
            projections = [torch.from_numpy(view) for view in own.projections]
            present = self._present(own.rows, len(names))
            measured |= cross_view_recalls(projections, names, present)
        if voted and own.hidden is not None and own.hidden.size:
            hidden = torch.from_numpy(own.hidden).double()
            measured |= {"rankme": collapse.effective_rank(hidden)}
        if not (probed or voted):
            return found, measured
        labelled = self.predict(model, known, hidden=True)
        _refuse_nonfinite(labelled)
        if not len(labelled.y) or not len(own.y):
            return found, measured  # a probe and a vote need both
        if voted:
            found["knn_"] = self._vote(labelled, own)
        if probed:
            found["" if alone else "probe_"] = self._probe(labelled, own)
        return found, measured

    @torch.no_grad()
    def predict(
        self, model: Heterogeneous, rows: Rows, hidden: bool = False, projected: bool = False
    ) -> Predictions:
        """Runs the model over rows; every process must call it, each computes its share.

        Rows that cannot be read are left out where `data.on_error` is "skip".
        """
        own = rows[even_slice(len(rows), rank(), world_size())]
        names = [view.stored for view in self.views.views[: model.classified]]
        model.eval()
        logits: list[Tensor] = []
        features: list[Tensor] = []
        views: list[list[Tensor]] = []
        readable: list[bool] = []
        size = self.config.batch
        # A process without rows still runs one empty batch, to know the widths it gathers.
        # All run as many: under ZeRO 3 each is an exchange of parameters.
        sizes = even_sizes(len(rows), world_size())
        for start in range(0, max(*sizes, 1), size):
            self.watchdog.beat()
            rows_here = own[start : start + size]
            batch = self._batch(rows_here, names)
            inputs = self.views(batch, train=False, first=model.classified)
            given = batch.rng_keys, batch.sizes
            output: Features = model(inputs, *given, present=batch.present)
            logits += output.get("logits", [])
            features += output["hidden"] if hidden else []
            views += [output["projections"]] if projected else []
            readable += [row not in self.reader.lost for row in rows_here.tolist()]
        model.train()
        flags = torch.tensor(readable, device=self.views.device, dtype=torch.uint8)
        kept = gather(flags, sizes).bool().cpu().numpy()
        probability = None
        if logits:
            scores = gather(torch.cat(logits), sizes).float()
            scores = scores.softmax(1) if self.exclusive else scores.sigmoid()
            probability = scores.cpu().numpy()[kept]
        s = gather(torch.cat(features), sizes).float().cpu().numpy()[kept] if hidden else None
        z = [
            gather(torch.cat(parts), sizes).float().cpu().numpy()[kept]
            for parts in zip(*views, strict=True)
        ]
        return Predictions(probability, s, self.reader.ground_truth(rows[kept]), rows[kept], z)

    def inputs(self, rows: Rows, made: Mapping[int, Columns] | None = None) -> Predictions:
        """Returns inputs of the model as `hidden` [rows, numbers]; this process reads them all.

        Of a view that a row lacks they are the means over the rows that have it. `made` says which
        views, by their places, and what is made of their numbers; None: all, as they are.
        """
        made = dict.fromkeys(range(len(self.views.views)), np.asarray) if made is None else made
        stored = [view.stored for view in self.views.views]
        inputs = []
        for start in range(0, max(len(rows), 1), self.config.batch):
            batch = self._batch(rows[start : start + self.config.batch], stored)
            views, columns = self.views(batch, False), list[NDArray[np.float32]]()
            for place, make in made.items():
                columns.append(make(views[place].flatten(1).cpu().numpy()).astype(np.float32))
                if batch.present is not None:
                    columns[-1][~batch.present[:, place].cpu().numpy()] = np.nan
            inputs.append(np.concatenate(columns, 1))
        kept = np.array([row not in self.reader.lost for row in rows.tolist()], bool)
        rows, hidden = rows[kept], np.concatenate(inputs)[kept]
        return Predictions(None, with_means(hidden), self.reader.ground_truth(rows), rows)

    @property
    def fits(self) -> bool:
        """Whether thresholds are fitted on the validation rows."""
        return self.config.threshold == "fitted" and not self.exclusive

    def threshold(self, validation: Predictions | None) -> float:
        """Returns the threshold: as configured, or fitted on predictions of the validation rows."""
        if self.config.threshold != "fitted":
            return self.config.threshold
        if self.exclusive or validation is None or validation.probability is None:
            return 0.5
        return fitted_threshold(validation.probability, validation.y)

    def score(self, predictions: Predictions, threshold: float) -> Scores:
        """Returns scores, a fitted threshold among them; none without probabilities or labels."""
        if predictions.probability is None or not len(predictions.y):
            return {}
        if self.exclusive:
            return multi_class_scores(predictions.probability, predictions.y)
        scores = multi_label_scores(predictions.probability, predictions.y, threshold)
        return scores | ({"threshold": threshold} if self.fits else {})

    def _probe(self, labelled: Predictions, test: Predictions) -> Predictions:
        """Returns what a probe on the labelled rows predicts; the main process trains it."""
        assert labelled.hidden is not None and test.hidden is not None
        probability = None
        if rank() == 0:
            with self.watchdog.busy():
                known = labelled.hidden, labelled.y, test.hidden
                by_svm = self.config.probe_by == "svm"
                probability = (
                    support_vectors(*known) if by_svm else linear_probe(*known, self.exclusive)
                )
        return replace(test, probability=broadcast_object(probability))

    def _vote(self, labelled: Predictions, test: Predictions) -> Predictions:
        """Returns what the nearest labelled rows vote for; each process asks for its test rows."""
        assert labelled.hidden is not None and test.hidden is not None and self.config.knn
        from heron.pipeline.evaluation.knn import faiss, vote  # here: most runs need neither

        faiss.omp_set_num_threads(torch.get_num_threads())
        mine = even_slice(len(test.rows), rank(), world_size())
        # As many neighbours on every process: `vote` knows of its own test rows alone.
        others = len(labelled.rows) - bool(np.isin(test.rows, labelled.rows).any())
        with self.watchdog.busy():
            votes = vote(
                (labelled.rows, labelled.hidden, labelled.y),
                (test.rows[mine], test.hidden[mine]),
                min(self.config.knn, others),
                self.config.knn_tau,
            )
        return replace(test, probability=np.concatenate(gather_objects(votes)))

    def _batch(self, rows: Rows, names: Sequence[str]) -> Batch:
        numbers = torch.from_numpy(rows)
        empty = torch.empty(0, len(self.reader.manifest.labels.names))
        stored = {n: torch.from_numpy(self.reader.read(n, rows)) for n in dict.fromkeys(names)}
        rng_keys = torch.zeros_like(numbers)  # evaluation draws no random numbers
        batch = Batch(stored, empty, numbers, rng_keys, [len(rows)])
        return replace(batch, present=self._present(rows, len(names))).to(self.views.device)

    def _present(self, rows: Rows, views: int) -> Tensor | None:
        """Returns which of the first views rows have, [rows, views]; None: all of them."""
        if not self.reader.may_lack_views:
            return None
        names = [view.stored for view in self.views.views[:views]]
        return torch.from_numpy(self.reader.present(rows, names))


def _refuse_nonfinite(found: Predictions) -> None:
    """Raises TrainingError on every process, as all have all rows: none waits for another."""
    hidden = [] if found.hidden is None else [found.hidden]
    for what, features in (("hidden features", hidden), ("projections", found.projections)):
        for one in features:
            if len(bad := np.flatnonzero(~np.isfinite(one).all(1))):
                raise TrainingError(
                    f"{what} of {len(bad)} of {len(one)} rows are not finite, the first is row "
                    f"{found.rows[bad[0]]}; expected numbers: the model's weights or its inputs "
                    "are not finite; lower optim.lr, and check the data with `heron shards verify`"
                )


def with_means(columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns columns with the mean of what is there, [rows, columns], where there is NaN."""
    lacking = np.isnan(columns)
    if not lacking.any():
        return columns
    total = np.where(lacking, 0, columns).sum(0, dtype=np.float64)
    filled = np.where(lacking, total / np.maximum(1, (~lacking).sum(0)), columns)
    return filled.astype(np.float32)
