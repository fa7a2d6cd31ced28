"""A small network with each loss: what several processes train, one must train too."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heron import losses as h

ROWS, CLASSES, DIM = 23, 3, 4
SHARES = ([7, 4], [3, 6], [5, 0], [6, 5])  # rows of each of two processes, a step
EPOCHS = 0.0, 0.5, 1.5, 2.5


@dataclass
class Seen:
    """What a loss may ask for, of this process's rows."""

    x: list[Tensor]
    z: list[Tensor]
    logits: Tensor
    second: Tensor
    keys: Tensor
    labels: Tensor
    classes: Tensor
    wrong: Tensor
    paths: Tensor
    indices: Tensor
    epoch: float


def wrong_labels() -> Tensor:
    """Complementary labels of all rows."""
    row = torch.arange(ROWS)
    return nn.functional.one_hot(row * 7 % CLASSES, CLASSES).float()


Case = tuple[Callable[[], h.Loss], Callable[[Any, Seen], Tensor]]
NETWORKS: dict[str, Any] = {
    "pretrain_epochs": 0, "warmup_epochs": 1, "consistency_epochs": 2, "epochs": 1, "sure": 0.3,
    "neighbours": 5,
}  # fmt: skip
CASES: dict[str, Case] = {
    "BarlowTwins": (h.BarlowTwins, lambda loss, s: loss(s.z)),
    "Bce": (h.Bce, lambda loss, s: loss(s.logits, s.labels)),
    "C2ae": (lambda: h.C2ae(2 * DIM, CLASSES, hidden=5), lambda loss, s: loss(s.z, s.labels)),
    "Clip": (lambda: h.Clip(tau=0.3), lambda loss, s: loss(s.z)),
    "Cmc": (h.Cmc, lambda loss, s: loss(s.z)),
    "Comco": (
        lambda: h.Comco(DIM, CLASSES, queue=13, neighbours=2, neighbour_epochs=2),
        lambda loss, s: loss(s.z[0], s.keys, s.logits, s.wrong, epoch=s.epoch),
    ),
    "CrossEntropy": (h.CrossEntropy, lambda loss, s: loss(s.logits, s.classes)),
    "Debiased": (h.Debiased, lambda loss, s: loss(torch.stack(s.z, 1))),
    "Deepmtmv": (
        lambda: h.Deepmtmv(DIM, CLASSES, 2, widths=[5, 4], cost=0.0),
        lambda loss, s: loss(s.z, s.labels),
    ),
    "Fixmatch": (
        lambda: h.Fixmatch(threshold=0.4),
        lambda loss, s: loss(s.logits, [s.second, s.second * 2]),
    ),
    "Gce": (lambda: h.Gce(q=0.5), lambda loss, s: loss(s.logits, s.wrong)),
    "Hard": (h.Hard, lambda loss, s: loss(s.z, s.classes)),
    "Hard, threshold": (
        lambda: h.Hard(hardening="threshold", threshold_epochs=2),
        lambda loss, s: loss(s.z, s.labels, epoch=s.epoch),
    ),
    "Hard, without labels": (
        lambda: h.Hard(supervised=False, positives="augmentation", hardening="exp"),
        lambda loss, s: loss(s.z),
    ),
    "Hierarchical": (h.Hierarchical, lambda loss, s: loss(s.z, s.paths)),
    "Infograph": (
        lambda: h.Infograph(DIM),
        lambda loss, s: loss(torch.stack([*s.z, *s.z], 1), s.labels[:, [0, 1, 2, 0]].bool()),
    ),
    "InputWeightedUnsupervised": (
        h.InputWeightedUnsupervised,
        lambda loss, s: loss(s.z, s.x),
    ),
    "LUw": (h.LUw, lambda loss, s: loss(s.logits, s.wrong.argmax(1))),
    "Mib": (
        lambda: h.Mib(DIM, beta_epochs=2),
        lambda loss, s: loss(s.z, epoch=s.epoch, rng_keys=s.indices * 31 + int(2 * s.epoch)),
    ),
    "Mlcl": (h.Mlcl, lambda loss, s: loss(s.logits, s.wrong)),
    "Mse": (h.Mse, lambda loss, s: loss(s.logits, s.wrong)),
    "Mulco": (
        lambda: h.Mulco(DIM, CLASSES, queue=13, tau=0.3),
        lambda loss, s: loss(s.z[0], s.keys, s.logits, s.wrong),
    ),
    "NtXent": (h.NtXent, lambda loss, s: loss(s.z)),
    "Vicreg": (h.Vicreg, lambda loss, s: loss(s.z)),
    "Pico": (
        lambda: h.Pico(DIM, wrong_labels(), queue=13, phi_epochs=2),
        lambda loss, s: loss(s.z[0], s.keys, s.logits, s.indices, epoch=s.epoch),
    ),
    "Plnl": (
        lambda: h.Plnl(wrong_labels(), **NETWORKS),
        lambda loss, s: loss(
            [s.logits, s.logits + s.z[1].sum(1, keepdim=True) * s.labels],
            [s.second, s.second * 2],
            s.indices,
            epoch=s.epoch,
        ),
    ),
    "Siglip": (lambda: h.Siglip(scale=2.0, bias=-1.0), lambda loss, s: loss(s.z)),
    "SingleViewUnsupervised": (
        lambda: h.SingleViewUnsupervised(DIM, [6]),
        lambda loss, s: loss(s.z, s.x),
    ),
    "Supcon": (h.Supcon, lambda loss, s: loss(s.z, s.classes)),
    "UbExp": (h.UbExp, lambda loss, s: loss(s.logits, s.wrong)),
    "UbLog": (h.UbLog, lambda loss, s: loss(s.logits, s.wrong)),
    "WeightedSupervised": (
        lambda: h.WeightedSupervised(tau=0.5),
        lambda loss, s: loss(s.z, s.labels),
    ),
    "WeightedSupervised, classes": (
        lambda: h.WeightedSupervised(num_classes=CLASSES),
        lambda loss, s: loss(s.z, s.classes),
    ),
    "WeightedUnsupervised": (
        lambda: h.WeightedUnsupervised(DIM, tau=0.5),
        lambda loss, s: loss(s.z),
    ),
}


class Net(nn.Module):
    """An encoder of both views, two classifiers, a slow encoder, and the loss, which is its own."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, DIM))
        self.classifier, self.second = nn.Linear(DIM, CLASSES), nn.Linear(DIM, CLASSES)
        self.slow = h.MomentumEncoder(self.encoder, momentum=0.8)
        make, self.call = CASES[case]
        self.loss, self.bce = make(), h.Bce()
        self.double()

    def forward(self, rows: Tensor, epoch: float) -> dict[str, Tensor]:
        """The loss of some rows; every parameter takes part."""
        x = [drawn(v)[rows] for v in (0, 1)]
        z = [self.encoder(view) for view in x]
        logits, second = self.classifier(z[0]), self.second(z[1])
        classes, labels = rows % CLASSES, (drawn(2)[rows, :CLASSES] > 0.3).double()
        paths = torch.stack([classes // 2, classes, rows % 2], 1)
        wrong = wrong_labels()[rows].double()
        seen = Seen(
            x, z, logits, second, self.slow(x[1]), labels, classes, wrong, paths, rows, epoch
        )
        loss = self.call(self.loss, seen)
        return {"loss": loss + self.bce(logits, labels) + self.bce(second, labels)}

    def after_step(self, *_: Any) -> None:
        """What follows a step of the optimizer."""
        self.slow.update()
        if isinstance(self.loss, h.Deepmtmv):
            self.loss.part()

    def result(self) -> dict[str, Tensor]:
        """All parameters and buffers."""
        return {name: value.clone() for name, value in self.state_dict().items()}


def drawn(view: int) -> Tensor:
    """Numbers of all rows."""
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(view)).double()


def batches(rank: int, world: int) -> Iterator[tuple[Tensor, float]]:
    """This process's rows of each step, and the epoch; without rows a process still takes part."""
    for step, (shares, epoch) in enumerate(zip(SHARES, EPOCHS, strict=True)):
        rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))[: sum(shares)]
        yield rows if world == 1 else torch.split(rows, shares)[rank], epoch
