"""Section of an experiment for evaluation."""

from typing import Literal

from heron.base.sections import Natural, Positive, Section, Share


class Evaluate(Section):
    """How predictions are scored, and whether a probe makes some: see `evaluation.probe`.

    Attributes:
        probe: when a probe makes predictions: only if no term trains a classifier (`auto`),
            also beside a classifier (`always`), or `never`.
        probe_by: kind of probe: logistic regression, or support vector machines for exclusive
            classes (see `evaluation.probe`).
        knn: number of labelled neighbours that vote on each test row at every evaluation, which
            then also measures RankMe of the test rows; null: no vote.
        knn_tau: temperature of the neighbours' votes: see `evaluation.knn.vote`.
        cross_view: whether to measure recall@k of each view's test rows by the projections of each
            other view: see `evaluation.metrics`.
        threshold: probability above which a label of a multi-label row is predicted; F1 and
            subset accuracy depend on it, AUC and mAP do not. `fitted`: the one with the best
            weighted F1 on the validation rows, the same for all labels.
        batch: number of rows that are evaluated at a time.
        map: whether the report has a map of test rows, and some rows with their nearest neighbours;
            `auto`: if training took two minutes or more.
        map_rows: largest number of test rows on the map, approximately.
        baselines: whether logistic regression, a random forest, gradient boosting and the plain
            network are trained on the same labels, for comparison; `plain`: only the network;
            `scikit-learn`: only the others, which are fitted beside the run. Boosting has up to 20
            labels.
        seeds: number of seeds, from `seed` on, with which networks are trained, in folders `seed-N`
            of the run's folder; the report shows their spread. scikit-learn's baselines use none.
        test: whether the test rows are scored; false: they stay unread, as in a search's trials.
    """

    probe: Literal["auto", "always", "never"] = "auto"
    probe_by: Literal["logistic", "svm"] = "logistic"
    knn: Natural | None = None
    knn_tau: Positive = 0.07
    cross_view: bool = False
    threshold: Share | Literal["fitted"] = 0.4
    batch: Natural = 512
    map: Literal["auto", "always", "never"] = "auto"
    map_rows: Natural = 1000
    baselines: Literal[True, False, "plain", "scikit-learn"] = False
    seeds: Natural = 1
    test: bool = True

    @property
    def fits_columns(self) -> bool:
        """Whether scikit-learn's baselines are wanted."""
        return self.baselines in (True, "scikit-learn")
