"""The losses as plain functions of the tensors of a whole batch.

With `rows` (or `total`) they return the share of some rows of the batch; the shares of all rows
add up to the loss.
"""

from heron.losses.barlow_twins import barlow_twins
from heron.losses.c2ae import c2ae
from heron.losses.classification import bce, cross_entropy, gce, l_uw, mlcl, mse, ub_exp, ub_log
from heron.losses.clip import clip, siglip
from heron.losses.comco import comco, scl_nl
from heron.losses.fixmatch import fixmatch
from heron.losses.hard import debiased, hard
from heron.losses.hierarchical import hierarchical
from heron.losses.infograph import infograph
from heron.losses.mib import mib
from heron.losses.mulco import mulco
from heron.losses.pico import pico, pseudo_target_loss
from heron.losses.plnl import plnl
from heron.losses.single_view import single_view_unsupervised
from heron.losses.supcon import supcon
from heron.losses.supervised import weighted_supervised
from heron.losses.unsupervised import (
    cmc,
    input_weighted_unsupervised,
    nt_xent,
    weighted_unsupervised,
)
from heron.losses.vicreg import vicreg

__all__ = [
    "barlow_twins",
    "bce",
    "c2ae",
    "clip",
    "cmc",
    "comco",
    "cross_entropy",
    "debiased",
    "fixmatch",
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
    "vicreg",
    "weighted_supervised",
    "weighted_unsupervised",
]
