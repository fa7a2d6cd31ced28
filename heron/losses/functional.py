"""The losses as plain functions of the tensors of a whole batch.

With `rows` (or `total`) they return the share of some rows of the batch; the shares of all rows
add up to the loss.
"""

from heron.pipeline.objectives.c2ae import c2ae
from heron.pipeline.objectives.classification import bce, cross_entropy
from heron.pipeline.objectives.clip import clip, siglip
from heron.pipeline.objectives.comco import comco, scl_nl
from heron.pipeline.objectives.complementary import gce, l_uw, mlcl, mse, ub_exp, ub_log
from heron.pipeline.objectives.hard import debiased, hard
from heron.pipeline.objectives.hierarchical import hierarchical
from heron.pipeline.objectives.infograph import infograph
from heron.pipeline.objectives.mib import mib
from heron.pipeline.objectives.mulco import mulco
from heron.pipeline.objectives.pico import pico, pseudo_target_loss
from heron.pipeline.objectives.plnl import plnl
from heron.pipeline.objectives.single_view import single_view_unsupervised
from heron.pipeline.objectives.supcon import supcon
from heron.pipeline.objectives.supervised import weighted_supervised
from heron.pipeline.objectives.unsupervised import (
    cmc,
    input_weighted_unsupervised,
    nt_xent,
    weighted_unsupervised,
)

__all__ = [
    "bce",
    "c2ae",
    "clip",
    "cmc",
    "comco",
    "cross_entropy",
    "debiased",
    "gce",
    "hard",
    "hierarchical",
    "infograph",
    "input_weighted_unsupervised",
    "l_uw",
    "mib",
    "mlcl",
    "mse",
    "mulco",
    "nt_xent",
    "pico",
    "plnl",
    "pseudo_target_loss",
    "scl_nl",
    "siglip",
    "single_view_unsupervised",
    "supcon",
    "ub_exp",
    "ub_log",
    "weighted_supervised",
    "weighted_unsupervised",
]
