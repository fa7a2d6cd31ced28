"""What the losses refuse, with which words; rows may be whole numbers of any type."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from heron import losses as h
from heron.config.errors import ConfigError
from heron.shards.errors import HeronError
from tests.losses.nets import CLASSES, DIM, wrong_labels
from tests.losses.test_modules import CLASS, HOT, LABELS, LOGITS, PATHS, X, Z

REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: h.NtXent(tau=0.0),
        "NtXent: tau must be greater than or equal to 0.003, got 0.0",
    ),
    (
        lambda: h.NtXent()(Z[0]),
        "NtXent: nt_xent has 1 view; expected at least 2: a single-view data set needs two "
        "augmentations of it",
    ),
    (
        lambda: h.NtXent()(torch.ones(2, 3, 4, 5)),
        "NtXent: projections are float32 2 × 3 × 4 × 5; expected floats [batch, dim], "
        "[batch, views, dim], or a list with a tensor [batch, dim] a view",
    ),
    (
        lambda: h.NtXent()([Z[0], Z[1][:3]]),
        "NtXent: rows: projections of view 1 have 7 and projections of view 2 3; expected the same",
    ),
    (
        lambda: h.NtXent()([Z[0], Z[1][:, :3]]),
        "NtXent: views of the projections have [3, 4] numbers; expected one width",
    ),
    (
        lambda: h.NtXent()([]),
        "NtXent: projections are an empty list; expected a tensor [batch, dim] a view",
    ),
    (
        lambda: h.Supcon()(Z, CLASS[:3]),
        "Supcon: rows: features have 7 and labels 3; expected the same",
    ),
    (
        lambda: h.WeightedSupervised()(Z, CLASS[:3, None]),
        "WeightedSupervised: rows: features have 7 and labels 3; expected the same",
    ),
    (
        lambda: h.Supcon()(Z, CLASS.float()),
        "Supcon: labels are float32 7; expected class numbers [batch], or columns "
        "[batch, labels]; take argmax(1) of one-hot labels",
    ),
    (
        lambda: h.WeightedSupervised()(Z, CLASS),
        "WeightedSupervised: labels are int64 7; expected 0 or 1 for each label, "
        "[batch, labels]; give num_classes for class numbers [batch]",
    ),
    (
        lambda: h.WeightedSupervised()(Z, LABELS * 2),
        "WeightedSupervised: weighted_supervised: labels of row 0 are",
    ),
    (
        lambda: h.CrossEntropy()(LOGITS, CLASS - 1),
        "CrossEntropy: the label of row 0 is -1; expected 0 to 2; leave rows without a label out",
    ),
    (
        lambda: h.CrossEntropy()(LOGITS, CLASS + 1),
        "CrossEntropy: the label of row 2 is 3; expected 0 to 2",
    ),
    (
        lambda: h.Bce()(LOGITS, LABELS),
        "Bce: labels are float64 7 × 4; expected 0 or 1 for each label, [batch, 3], or class "
        "numbers [batch]",
    ),
    (
        lambda: h.Bce()(LOGITS, HOT * 2),
        "Bce: labels of row 0 are [2.0, 0.0, 0.0]; expected 0 to 1",
    ),
    (
        lambda: h.UbLog()(LOGITS, HOT * 0),
        "UbLog: row 0 has 0 complementary labels of 3 classes; expected 1 to 2",
    ),
    (
        lambda: h.Hierarchical()(Z, CLASS),
        "Hierarchical: labels are int64 7; expected paths: whole numbers "
        "[batch, levels], coarsest level first",
    ),
    (
        lambda: h.InputWeightedUnsupervised()(Z, X[0]),
        "InputWeightedUnsupervised: inputs are of 1 and projections of 2 views; expected as "
        "many: a list with a tensor [batch, ...] a view",
    ),
    (
        lambda: h.Hard()(Z),
        "Hard: labels are missing, and supervised is True; expected labels exactly where it is "
        "True",
    ),
    (
        lambda: h.Hard(hardening="threshold")(Z, CLASS),
        "Hard: epoch is missing, and its threshold moves with it; expected epoch=..., 0.0 at the "
        "start",
    ),
    (
        lambda: h.WeightedUnsupervised(DIM)(Z),
        "WeightedUnsupervised: features are float64 and its own parameters float32; expected the "
        "same: loss.double(), loss.float(), or features of its type",
    ),
    (
        lambda: h.WeightedUnsupervised(DIM + 1).double()(Z),
        "WeightedUnsupervised: projections have 4 numbers; expected 5",
    ),
    (
        lambda: h.Mib(DIM, 3).double()(Z, epoch=0.0),
        "Mib: projections are of 2 views; expected 3",
    ),
    (
        lambda: h.C2ae(DIM, CLASSES).double()(Z, HOT),
        "C2ae: features have 8 numbers; expected 4",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES, queue=6)(Z[0], Z[1], LOGITS, HOT),
        "Mulco: queue is 6, smaller than the 7 rows of all processes, which would push each "
        "other out; expected at least 7",
    ),
    (
        lambda: h.Mulco(DIM + 1, CLASSES)(Z[0], Z[1], LOGITS, HOT),
        "Mulco: keys have 4 numbers; expected 5",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES + 1)(Z[0], Z[1], LOGITS, HOT),
        "Mulco: logits are of 3 classes; expected classes=4",
    ),
    (
        lambda: h.Pico(DIM, wrong_labels())(Z[0], Z[1], LOGITS, CLASS + 21, epoch=0.0),
        "Pico: indices are 21 to 23; expected rows of the labels that the loss was made with, "
        "0 to 22",
    ),
    (
        lambda: h.Plnl(wrong_labels())([LOGITS[:, :2]], [LOGITS[:, :2]], CLASS, epoch=0.0),
        "Plnl: logits are of 2 classes; expected 3, as the labels that the loss was made with",
    ),
    (
        lambda: h.Plnl(wrong_labels())([LOGITS], [LOGITS] * 2, CLASS, epoch=0.0),
        "Plnl: logits are of 1 and 2 views; expected as many",
    ),
    (
        lambda: h.Plnl(wrong_labels())([LOGITS], [LOGITS], CLASS.float(), epoch=0.0),
        "Plnl: indices are float32 7; expected the samples' rows of the labels that the "
        "loss was made with, whole numbers [batch]",
    ),
    (
        lambda: h.MomentumEncoder(torch.nn.Linear(2, 2), 1.5),
        "MomentumEncoder: momentum is 1.5; expected 0 to 1, e.g. 0.999",
    ),
]


NAN = float("nan")
BOTH = torch.stack(Z, 1)
ONE_VIEW = "expected floats [batch, dim] of one view"
REFUSED += [
    (
        lambda: h.Supcon()(Z, torch.where(CLASS == 0, -1, CLASS)),
        "Supcon: labels of row 0 are [-1]; expected 0 or more; leave rows without a label out",
    ),
    (lambda: h.Hard()(Z, HOT * NAN), "Hard: labels of row 0 are [nan, nan, nan]; expected 0 or"),
    (lambda: h.Hierarchical()(Z, PATHS - 1), "Hierarchical: labels of row 0 are [-1, -1]; expec"),
    (lambda: h.Supcon()(Z, HOT[:, :0]), "Supcon: labels are float64 7 × 0; expected class numbe"),
    (lambda: h.WeightedSupervised()(Z, HOT * 1j), "WeightedSupervised: labels are complex128 7"),
    (lambda: h.Bce()(LOGITS[None], CLASS), f"Bce: logits are float64 1 × 7 × 3; {ONE_VIEW}"),
    (lambda: h.Bce()(LOGITS, HOT * NAN), "Bce: labels of row 0 are [nan, nan, nan]; expected 0"),
    (
        lambda: h.InputWeightedUnsupervised()(Z, [x[:, 0] for x in X]),
        "InputWeightedUnsupervised: inputs are float64 7; expected a tensor [batch, ...] a view",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES)(BOTH, Z[1], LOGITS, CLASS),
        f"Mulco: queries are float64 7 × 2 × 4; {ONE_VIEW}",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES)(Z[0], Z[1], LOGITS, HOT * 0),
        "Mulco: row 0 has 0 complementary labels of 3 classes; expected 1 to 2",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES)(Z[0], Z[1] * NAN, LOGITS, CLASS),
        "Mulco: keys of row 0 of all processes are not finite; expected finite numbers, since the "
        "queue keeps them; leave such rows out",
    ),
    (
        lambda: h.Comco(DIM, CLASSES)(Z[0], Z[1], LOGITS, CLASS, epoch=NAN),
        "Comco: epoch is nan; expected a finite number, 0.0 at the start",
    ),
    (
        lambda: h.Mulco(DIM, CLASSES, queue=-1),
        "Mulco: queue must be greater than or equal to 1, got -1",
    ),
    (lambda: h.Pico(DIM, 2 * HOT), "complementary labels of row 0 are [2.0, 0.0, 0.0]; expected"),
    (lambda: h.Mib(0), "dim: projection_width must be greater than or equal to 1, got 0"),
    (lambda: h.Mib(DIM)(Z, epoch=0.0, rng_keys=CLASS[:3]), "Mib: rng_keys are int64 3; expected"),
    (
        lambda: h.Deepmtmv(DIM, CLASSES).double()(Z[0], 2 * HOT),
        "Deepmtmv: labels of row 0 are [2.0, 0.0, 0.0]; expected 0 to 1",
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
        "Supcon: labels are list; expected class numbers [b",
        "UbLog: labels are NoneType; expected 0 or 1 for ea",
        "NtXent: projections are NoneType; expected floats ",
    ], done.stderr
