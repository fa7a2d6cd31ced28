"""What `heron check` says of the losses of other libraries, beside Heron's.

    python -m benchmarks.field_losses [NAME ...]

prints what is found of each loss whose library is installed (open_clip_torch, lightly,
pytorch-metric-learning, sentence-transformers), and at its end a table of them all. A loss that
waits for a process that does not come takes two minutes. To see one again in full:

    heron check benchmarks.field_losses.open_clip_local --inputs clip

Each function here builds a loss as its documentation says for training on several processes; a name
that ends in `_plain` is the loss as it comes.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers_simclr import have_torchvision
from heron.distributed.collectives import rank, world_size
from heron.losses.check import Finding, check_loss
from heron.losses.check_inputs import Form, LossSpec


def _open_clip(name: str, **options: Any) -> Any:
    have_torchvision()
    loss = getattr(importlib.import_module("open_clip.loss"), name)
    return loss(rank=rank(), world_size=world_size(), **options)


def open_clip_plain() -> Any:
    """ClipLoss with its defaults."""
    return _open_clip("ClipLoss")


def open_clip_gradient() -> Any:
    """ClipLoss, gathering with gradients."""
    return _open_clip("ClipLoss", gather_with_grad=True)


def open_clip_local() -> Any:
    """ClipLoss of own rows against all, gathering with gradients: what its README proposes."""
    return _open_clip("ClipLoss", local_loss=True, gather_with_grad=True)


def open_clip_siglip() -> Any:
    """SigLipLoss, which exchanges rows with its neighbours."""
    return _open_clip("SigLipLoss")


def _lightly(name: str, **options: Any) -> Any:
    have_torchvision()
    return getattr(importlib.import_module("lightly.loss"), name)(**options)


def lightly_ntxent_plain() -> Any:
    """NTXentLoss with its defaults, which compares own rows."""
    return _lightly("NTXentLoss")


def lightly_ntxent() -> Any:
    """NTXentLoss, gathering."""
    return _lightly("NTXentLoss", gather_distributed=world_size() > 1)


def lightly_barlow_twins() -> Any:
    """BarlowTwinsLoss, gathering."""
    return _lightly("BarlowTwinsLoss", gather_distributed=world_size() > 1)


def lightly_vicreg() -> Any:
    """VICRegLoss, gathering."""
    return _lightly("VICRegLoss", gather_distributed=world_size() > 1)


def _metric_learning(name: str, wrapped: bool, **options: Any) -> Any:
    loss = getattr(importlib.import_module("pytorch_metric_learning.losses"), name)(**options)
    if not wrapped or world_size() == 1:
        return loss
    tools = importlib.import_module("pytorch_metric_learning.utils.distributed")
    return tools.DistributedLossWrapper(loss)


def metric_learning_ntxent_plain() -> Any:
    """NTXentLoss as it comes."""
    return _metric_learning("NTXentLoss", wrapped=False)


def metric_learning_ntxent() -> Any:
    """NTXentLoss in DistributedLossWrapper."""
    return _metric_learning("NTXentLoss", wrapped=True)


def metric_learning_supcon() -> Any:
    """SupConLoss in DistributedLossWrapper."""
    return _metric_learning("SupConLoss", wrapped=True)


def metric_learning_multi_similarity() -> Any:
    """MultiSimilarityLoss in DistributedLossWrapper."""
    return _metric_learning("MultiSimilarityLoss", wrapped=True)


class _Given(nn.Module):
    """A sentence encoder whose embeddings are given."""

    similarity_fn_name = "cosine"

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        return {"sentence_embedding": features["sentence_embedding"]}

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(())


class _Sentences(nn.Module):
    """A loss of sentence-transformers, called with the embeddings of two views."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        kind = getattr(importlib.import_module("sentence_transformers.losses"), name)
        self.loss = kind(_Given(), **options)

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        labels = torch.empty(0)
        loss: Tensor = self.loss([{"sentence_embedding": z} for z in (z1, z2)], labels)
        return loss


def sentence_transformers_ranking_plain() -> Any:
    """MultipleNegativesRankingLoss with its defaults, which compares own rows."""
    return _Sentences("MultipleNegativesRankingLoss")


def sentence_transformers_ranking() -> Any:
    """MultipleNegativesRankingLoss, gathering across devices."""
    return _Sentences("MultipleNegativesRankingLoss", gather_across_devices=True)


def sentence_transformers_symmetric() -> Any:
    """MultipleNegativesSymmetricRankingLoss, gathering across devices."""
    return _Sentences("MultipleNegativesSymmetricRankingLoss", gather_across_devices=True)


BUILDERS: list[tuple[str, Form, tuple[Callable[[], Any], ...]]] = [
    ("open_clip_torch", "clip", (open_clip_plain, open_clip_gradient, open_clip_local)),
    ("open_clip_torch", "siglip", (open_clip_siglip,)),
    (
        "lightly",
        "pair",
        (lightly_ntxent_plain, lightly_ntxent, lightly_barlow_twins, lightly_vicreg),
    ),
    (
        "pytorch-metric-learning",
        "rows",
        (
            metric_learning_ntxent_plain,
            metric_learning_ntxent,
            metric_learning_supcon,
            metric_learning_multi_similarity,
        ),
    ),
    (
        "sentence-transformers",
        "pair",
        (
            sentence_transformers_ranking_plain,
            sentence_transformers_ranking,
            sentence_transformers_symmetric,
        ),
    ),
]
COLUMNS = tuple(
    f"{world} processes, {kind} rows" for world in (2, 3) for kind in ("even", "uneven")
)
EXACT = "value exact, gradient exact"
OURS = ("NtXent", "Clip", "Siglip", "Supcon", "WeightedUnsupervised", "WeightedSupervised")


def main(names: list[str]) -> None:
    """Prints the table of the losses that can be built here, or of those named."""
    specs: list[tuple[str, LossSpec]] = []
    for package, form, builders in BUILDERS:
        try:
            label = f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
        for builder in builders:
            spec = LossSpec(f"benchmarks.field_losses.{builder.__name__}", {}, form)
            specs.append((f"{label}: {(builder.__doc__ or '').rstrip('.')}", spec))
    specs += [(f"Heron: {name}", LossSpec(f"heron.losses.{name}", {}, "heron")) for name in OURS]
    marks = {True: "passes", False: "FAILS", None: "refuses"}
    rows: list[str] = []
    for label, spec in specs:
        if names and spec.path.rpartition(".")[2] not in names:
            continue
        print(f"## {label} (heron check {spec.path} --inputs {spec.inputs})", flush=True)
        findings = check_loss(spec)
        for finding in findings:
            print(f"| {finding.case} | {marks[finding.passed]} | {finding.text} |", flush=True)
        rows.append(" | ".join(["", label, *map(partial(cell, findings), COLUMNS), ""]).strip())
    print("\n| loss | " + " | ".join(COLUMNS) + " |")
    print("|---" * (1 + len(COLUMNS)) + "|", *rows, sep="\n")


def cell(findings: Sequence[Finding], case: str) -> str:
    """Returns what a table says of the case that begins so."""
    finding = next(found for found in findings if found.case.startswith(case))
    return "exact" if finding.passed and finding.text.endswith(EXACT) else finding.text[:90]


if __name__ == "__main__":
    main(sys.argv[1:])
