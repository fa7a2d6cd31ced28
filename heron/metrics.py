"""Scores of predictions and of embeddings, as in a run's report.

| function | returns |
|---|---|
| `multi_label_scores`, `multi_class_scores` | F1, accuracy, AUC, mAP of probabilities and labels |
| `fitted_threshold` | the threshold with the best weighted F1 on some rows |
| `label_auc` | the AUC of every label |
| `linear_probe` | probabilities by logistic regression on frozen features |
| `collapse_measures` | the three measures below, of raw embeddings |
| `alignment`, `uniformity`, `effective_rank` | a measure of collapse, of float64 unit vectors |
"""

from heron.evaluation.collapse import alignment, effective_rank, uniformity
from heron.evaluation.collapse import measure as collapse_measures
from heron.evaluation.metrics import (
    fitted_threshold,
    label_auc,
    multi_class_scores,
    multi_label_scores,
)
from heron.evaluation.probe import linear_probe

__all__ = [
    "alignment",
    "collapse_measures",
    "effective_rank",
    "fitted_threshold",
    "label_auc",
    "linear_probe",
    "multi_class_scores",
    "multi_label_scores",
    "uniformity",
]
