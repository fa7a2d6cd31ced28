"""What the losses refuse, with which words; rows may be whole numbers of any type."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from heron import losses as h
from heron.base.errors import ConfigError, HeronError
from tests.losses.nets import CLASSES, DIM, wrong_labels
from tests.losses.test_modules import CLASS, HOT, LABELS, LOGITS, PATHS, X, Z

REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: h.NtXent(tau=0.0),
        "NtXent: tau must be greater than or equal to 0.003, got 0.0",
    ),
    (
        lambda: h.NtXent()(Z[0]),
        "NtXent: nt_xent needs at least 2 views, got 1; a single-view data set needs two "
        "augmentations of its view",
    ),
    (
        lambda: h.NtXent()(torch.ones(2, 3, 4, 5)),
        "NtXent: projections must be floats [batch, dim], [batch, views, dim], or a list with a "
        "tensor [batch, dim] per view, got float32 2 × 3 × 4 × 5",
    ),
    (
        lambda: h.NtXent()([Z[0], Z[1][:3]]),
        "NtXent: projections of view 1 and projections of view 2 must have the same number of "
        "rows, got 7 and 3",
    ),
    (
        lambda: h.NtXent()([Z[0], Z[1][:, :3]]),
        "NtXent: views of the projections must have one width, got [3, 4]",
    ),
    (
        lambda: h.NtXent()([]),
        "NtXent: projections are an empty list; pass a tensor [batch, dim] per view",
    ),
    (
        lambda: h.Supcon()(Z, CLASS[:3]),
        "Supcon: features and labels must have the same number of rows, got 7 and 3",
    ),
    (
        lambda: h.WeightedSupervised()(Z, CLASS[:3, None]),
        "WeightedSupervised: features and labels must have the same number of rows, got 7 and 3",
    ),
    (
        lambda: h.Supcon()(Z, CLASS.float()),
        "Supcon: labels must be class numbers [batch], or columns [batch, labels], got float32 "
        "7; take argmax(1) of one-hot labels",
    ),
    (
        lambda: h.WeightedSupervised()(Z, CLASS),
        "WeightedSupervised: labels must be 0 or 1 for each label, [batch, labels], got int64 7; "
        "set num_classes to use class numbers [batch]",
    ),
    (
        lambda: h.WeightedSupervised()(Z, LABELS * 2),
        "WeightedSupervised: weighted_supervised: labels of row 0 must be 0 or 1 for each label, "
        "classes one-hot, got [2.0, 2.0, 0.0, 2.0]",
    ),
    (
        lambda: h.CrossEntropy()(LOGITS, CLASS - 1),
        "CrossEntropy: the label of row 0 must be 0 to 2, got -1; remove rows without a label",
    ),
    (
        lambda: h.CrossEntropy()(LOGITS, CLASS + 1),
        "CrossEntropy: the label of row 2 must be 0 to 2, got 3",
    ),
    (
        lambda: h.Bce()(LOGITS, LABELS),
        "Bce: labels must be 0 or 1 for each label, [batch, 3], or class numbers [batch], got "
        "float64 7 × 4",
    ),
    (
        lambda: h.Bce()(LOGITS, HOT * 2),
        "Bce: labels of row 0 must be 0 to 1, got [2.0, 0.0, 0.0]",
    ),
    (
        lambda: h.UbLog()(LOGITS, HOT * 0),
        "UbLog: row 0 has 0 complementary labels of 3 classes; it must have 1 to 2: none says "
        "nothing, all leave no class",
    ),
    (
        lambda: h.Hierarchical()(Z, CLASS),
        "Hierarchical: labels must be paths, whole numbers [batch, levels] with the coarsest "
        "level first, got int64 7",
    ),
    (
        lambda: h.InputWeightedUnsupervised()(Z, X[0]),
        "InputWeightedUnsupervised: inputs must be a list with a tensor [batch, ...] for each of "
        "2 views, as projections, got 1",
    ),
    (
        lambda: h.Hard()(Z),
        "Hard: labels are missing, but supervised is True; pass labels exactly when it is True",
    ),
    (
        lambda: h.Hard(hardening="threshold")(Z, CLASS),
        "Hard: epoch is missing, but the threshold depends on it; pass epoch=..., 0.0 at the start",
    ),
    (
        lambda: h.WeightedUnsupervised(DIM)(Z),
        "WeightedUnsupervised: features are float64, but its own parameters are float32; use "
        "loss.double(), loss.float(), or features of its type",
    ),
    (
        lambda: h.WeightedUnsupervised(DIM + 1).double()(Z),
        "WeightedUnsupervised: projections must have 5 numbers, got 4",
    ),
    (
        lambda: h.Mib(DIM, 3).double()(Z, epoch=0.0),
        "Mib: projections must have 3 views, got 2",
    ),
    (
        lambda: h.C2ae(DIM, CLASSES).double()(Z, HOT),
        "C2ae: features must have 4 numbers, got 8",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES, queue=6)(Z[0], Z[1], LOGITS, HOT),
        "Mulco: queue must be at least 7, or the 7 rows of all processes would push each other "
        "out, got 6",
    ),
    (
        lambda: h.Mulco(DIM + 1, CLASSES)(Z[0], Z[1], LOGITS, HOT),
        "Mulco: keys must have 5 numbers, got 4",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES + 1)(Z[0], Z[1], LOGITS, HOT),
        "Mulco: logits must have 4 classes (classes=), got 3",
    ),
    (
        lambda: h.Pico(DIM, wrong_labels())(Z[0], Z[1], LOGITS, CLASS + 21, epoch=0.0),
        "Pico: indices must be rows of the labels that the loss was made with, 0 to 22, got 21 "
        "to 23",
    ),
    (
        lambda: h.Plnl(wrong_labels())([LOGITS[:, :2]], [LOGITS[:, :2]], CLASS, epoch=0.0),
        "Plnl: logits must have 3 classes, as the labels that the loss was made with, got 2",
    ),
    (
        lambda: h.Plnl(wrong_labels())([LOGITS], [LOGITS] * 2, CLASS, epoch=0.0),
        "Plnl: logits must have the same number of views, got 1 and 2",
    ),
    (
        lambda: h.Plnl(wrong_labels())([LOGITS], [LOGITS], CLASS.float(), epoch=0.0),
        "Plnl: indices must be whole numbers [batch], the samples' rows in the labels that the "
        "loss was made with, got float32 7",
    ),
    (
        lambda: h.MomentumEncoder(torch.nn.Linear(2, 2), 1.5),
        "MomentumEncoder: momentum must be 0 to 1, e.g. 0.999, got 1.5",
    ),
]


NAN = float("nan")
BOTH = torch.stack(Z, 1)
REFUSED += [
    (
        lambda: h.Supcon()(Z, torch.where(CLASS == 0, -1, CLASS)),
        "Supcon: labels of row 0 must be 0 or more, got [-1]; remove rows without a label",
    ),
    (
        lambda: h.Hard()(Z, HOT * NAN),
        "Hard: labels of row 0 must be 0 or more, got [nan, nan, nan]; remove rows without a label",
    ),
    (
        lambda: h.Hierarchical()(Z, PATHS - 1),
        "Hierarchical: labels of row 0 must be 0 or more, got [-1, -1]; remove rows without a "
        "label",
    ),
    (
        lambda: h.Supcon()(Z, HOT[:, :0]),
        "Supcon: labels must be class numbers [batch], or columns [batch, labels], got float64 7 "
        "× 0; take argmax(1) of one-hot labels",
    ),
    (
        lambda: h.WeightedSupervised()(Z, HOT * 1j),
        "WeightedSupervised: labels must be 0 or 1 for each label, [batch, labels], got "
        "complex128 7 × 3; set num_classes to use class numbers [batch]",
    ),
    (
        lambda: h.Bce()(LOGITS[None], CLASS),
        "Bce: logits must be floats [batch, dim] of one view, got float64 1 × 7 × 3",
    ),
    (
        lambda: h.Bce()(LOGITS, HOT * NAN),
        "Bce: labels of row 0 must be 0 to 1, got [nan, nan, nan]",
    ),
    (
        lambda: h.InputWeightedUnsupervised()(Z, [x[:, 0] for x in X]),
        "InputWeightedUnsupervised: inputs must be a tensor [batch, ...] per view, got float64 7",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES)(BOTH, Z[1], LOGITS, CLASS),
        "Mulco: queries must be floats [batch, dim] of one view, got float64 7 × 2 × 4",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES)(Z[0], Z[1], LOGITS, HOT * 0),
        "Mulco: row 0 has 0 complementary labels of 3 classes; it must have 1 to 2: none says "
        "nothing, all leave no class",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES)(Z[0], Z[1] * NAN, LOGITS, CLASS),
        "Mulco: keys of row 0 of all processes must be finite, because the queue stores them; "
        "remove such rows",
    ),
    (
        lambda: h.Comco(DIM, CLASSES)(Z[0], Z[1], LOGITS, CLASS),
        "Comco: epoch is missing, but the loss depends on it; pass epoch=0.0 at first",
    ),
    (
        lambda: h.Comco(DIM, CLASSES)(Z[0], Z[1], LOGITS, CLASS, epoch=NAN),
        "Comco: epoch must be a finite number, 0.0 at the start, got nan",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES, queue=-1),
        "Mulco: queue must be greater than or equal to 1, got -1",
    ),
    (
        lambda: h.Pico(DIM, 2 * HOT),
        "complementary labels of row 0 must be 0 or 1, got [2.0, 0.0, 0.0]",
    ),
    (lambda: h.Mib(0), "dim: projection_width must be greater than or equal to 1, got 0"),
    (
        lambda: h.Mib(DIM)(Z, epoch=0.0, rng_keys=CLASS[:3]),
        "Mib: rng_keys must be int64 7, one per sample, got int64 3",
    ),
    (
        lambda: h.Deepmtmv(DIM, CLASSES).double()(Z[0], 2 * HOT),
        "Deepmtmv: labels of row 0 must be 0 to 1, got [2.0, 0.0, 0.0]",
    ),
]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16])
def test_rows_are_whole_numbers_of_any_type(kind: torch.dtype) -> None:
    def losses(indices: Tensor) -> list[Tensor]:
        pico, plnl = h.Pico(DIM, wrong_labels()), h.Plnl(wrong_labels())
        return [
            pico.double()(Z[0], Z[1], LOGITS, indices, epoch=0.0),
            plnl.double()([LOGITS], [LOGITS], indices, epoch=0.0),
        ]

    rows = torch.arange(7)
    assert losses(rows.to(kind)) == losses(rows)


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises((h.LossError, ConfigError)) as error:
        call()
    assert str(error.value).startswith(message)
    assert isinstance(error.value, HeronError)


OTHER_TYPES = """
import torch
from heron import losses as h
z = torch.randn(7, 4)
for call in (
    lambda: h.Supcon()([z, z], [0] * 7), lambda: h.UbLog()(z, None), lambda: h.NtXent()(None),
):
    try:
        call()
    except h.LossError as error:
        print(error)
"""


def test_what_is_no_tensor_is_refused() -> None:
    """In an interpreter of its own: here the hints of arguments are checked before the loss is."""
    done = subprocess.run([sys.executable, "-c", OTHER_TYPES], capture_output=True, text=True)
    assert [line[:50] for line in done.stdout.splitlines()] == [
        "Supcon: labels must be class numbers [batch], or c",
        "UbLog: labels must be 0 or 1 for each label, [batc",
        "NtXent: projections must be floats [batch, dim], [",
    ], done.stderr
