"""Every loss of Heron as a module for any training loop: plain torch, DDP, Lightning, Trainer.

    loss = WeightedSupervised(tau=0.1)(features, labels)
    loss.backward()

A loss compares the rows of all processes. On every process its value is that of one process with
the whole batch, and so is its gradient after DistributedDataParallel's mean over processes.
`heron.losses.functional` has the losses as plain functions.
"""

from heron.losses.classification import Bce, CrossEntropy, Gce, LUw, Mlcl, Mse, UbExp, UbLog
from heron.losses.disambiguation import Pico, Plnl
from heron.losses.inputs import LossError
from heron.losses.learnt import C2ae, Deepmtmv, Infograph, Mib
from heron.losses.loss import Loss
from heron.losses.momentum import Comco, MomentumEncoder, Mulco
from heron.losses.supervised import Hard, Hierarchical, Supcon, WeightedSupervised
from heron.losses.unsupervised import (
    Clip,
    Cmc,
    Debiased,
    InputWeightedUnsupervised,
    NtXent,
    Siglip,
    SingleViewUnsupervised,
    WeightedUnsupervised,
)

__all__ = [
    "Bce",
    "C2ae",
    "Clip",
    "Cmc",
    "Comco",
    "CrossEntropy",
    "Debiased",
    "Deepmtmv",
    "Gce",
    "Hard",
    "Hierarchical",
    "Infograph",
    "InputWeightedUnsupervised",
    "LUw",
    "Loss",
    "LossError",
    "Mib",
    "Mlcl",
    "MomentumEncoder",
    "Mse",
    "Mulco",
    "NtXent",
    "Pico",
    "Plnl",
    "Siglip",
    "SingleViewUnsupervised",
    "Supcon",
    "UbExp",
    "UbLog",
    "WeightedSupervised",
    "WeightedUnsupervised",
]
