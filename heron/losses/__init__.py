"""Every loss of Heron: a module for any training loop, and by its name a term of an experiment.

    loss = WeightedSupervised(tau=0.1)(features, labels)
    loss.backward()

A loss compares the rows of all processes. On every process its value is that of one process with
the whole batch, and so is its gradient after DistributedDataParallel's mean over processes.
`heron.losses.functional` has the losses as plain functions. What comes in are features, labels and
a run's batches; what goes out is a scalar.
"""

from heron.losses.barlow_twins import BarlowTwins
from heron.losses.c2ae import C2ae
from heron.losses.classification import Bce, CrossEntropy, Gce, LUw, Mlcl, Mse, UbExp, UbLog
from heron.losses.clip import Clip, Siglip
from heron.losses.comco import Comco
from heron.losses.deepmtmv import Deepmtmv
from heron.losses.families import InputLoss, LabelledLoss, LogitLoss, ProjectionLoss
from heron.losses.fixmatch import Fixmatch
from heron.losses.hard import Debiased, Hard
from heron.losses.hierarchical import Hierarchical
from heron.losses.infograph import Infograph
from heron.losses.inputs import LossError
from heron.losses.loss import Loss
from heron.losses.matryoshka import Matryoshka
from heron.losses.mib import Mib
from heron.losses.momentum import MomentumEncoder
from heron.losses.mulco import Mulco
from heron.losses.pico import Pico
from heron.losses.plnl import Plnl
from heron.losses.single_view import SingleViewUnsupervised
from heron.losses.supcon import Supcon
from heron.losses.supervised import WeightedSupervised
from heron.losses.unsupervised import Cmc, InputWeightedUnsupervised, NtXent, WeightedUnsupervised
from heron.losses.vicreg import Vicreg

# Names that people search for.
InfoNCE = NTXentLoss = NtXent
SupConLoss = Supcon
CLIPLoss, SigLIPLoss = Clip, Siglip
BarlowTwinsLoss, VICRegLoss = BarlowTwins, Vicreg
MatryoshkaLoss = Matryoshka

__all__ = [
    "BarlowTwins",
    "BarlowTwinsLoss",
    "Bce",
    "C2ae",
    "CLIPLoss",
    "Clip",
    "Cmc",
    "Comco",
    "CrossEntropy",
    "Debiased",
    "Deepmtmv",
    "Fixmatch",
    "Gce",
    "Hard",
    "Hierarchical",
    "InfoNCE",
    "Infograph",
    "InputLoss",
    "InputWeightedUnsupervised",
    "LUw",
    "LabelledLoss",
    "LogitLoss",
    "Loss",
    "LossError",
    "Matryoshka",
    "MatryoshkaLoss",
    "Mib",
    "Mlcl",
    "MomentumEncoder",
    "Mse",
    "Mulco",
    "NTXentLoss",
    "NtXent",
    "Pico",
    "Plnl",
    "ProjectionLoss",
    "SigLIPLoss",
    "Siglip",
    "SingleViewUnsupervised",
    "SupConLoss",
    "Supcon",
    "UbExp",
    "UbLog",
    "VICRegLoss",
    "Vicreg",
    "WeightedSupervised",
    "WeightedUnsupervised",
]
