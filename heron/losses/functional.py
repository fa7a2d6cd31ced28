"""The losses as plain functions of the tensors of a whole batch.

With `rows` (or `total`) they return the share of some rows of the batch; the shares of all rows
add up to the loss.
"""

from heron.objectives.c2ae import c2ae
from heron.objectives.classification import bce, cross_entropy
from heron.objectives.clip import clip, siglip
from heron.objectives.comco import comco, scl_nl
from heron.objectives.complementary import gce, l_uw, mlcl, mse, ub_exp, ub_log
from heron.objectives.hard import debiased, hard
from heron.objectives.hierarchical import hierarchical
from heron.objectives.infograph import infograph
from heron.objectives.mib import mib
from heron.objectives.mulco import mulco
from heron.objectives.pico import pico, pseudo_target_loss
from heron.objectives.plnl import plnl
from heron.objectives.single_view import single_view_unsupervised
from heron.objectives.supcon import supcon
from heron.objectives.supervised import weighted_supervised
from heron.objectives.unsupervised import (
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
