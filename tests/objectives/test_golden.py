"""Reference values: every case in the folder that HERON_GOLDEN names, or in the project's copy.

A case is a group of arrays `CASE/params` (JSON), `CASE/in_*`, `CASE/grad_*` and `CASE/loss`; its
term is the name up to the first dash.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heron.losses.classification import ub_exp, ub_log
from heron.losses.hard import debiased, hard
from heron.losses.hierarchical import hierarchical
from heron.losses.mulco import mulco
from heron.losses.supcon import supcon
from heron.losses.supervised import weighted_supervised
from heron.losses.unsupervised import (
    cmc,
    input_weighted_unsupervised,
    nt_xent,
    weighted_unsupervised,
)

GOLDEN = Path(os.environ.get("HERON_GOLDEN", Path(__file__).parent.parent / "golden"))
Arrays = dict[str, np.ndarray[Any, Any]]
Inputs = dict[str, Tensor]


def by_view(inputs: Inputs, name: str) -> list[Tensor]:
    """Take `name1`, `name2`, ... out of the inputs."""
    return [inputs.pop(key) for key in sorted(inputs) if key[:-1] == name]


def classifier(loss: Callable[..., Tensor]) -> Callable[[Inputs, dict[str, Any]], Tensor]:
    """A loss of logits and sets of complementary labels, of which the inputs are all."""
    return lambda i, p: loss(logits := i.pop("logits"), i.pop("ybar"), total=len(logits), **p)


def by_name(inputs: Inputs, *names: str) -> list[Tensor]:
    """Take some inputs by their names."""
    return [inputs.pop(name) for name in names]


# By the name of the case up to its first dash: a term, or a form of it.
RUNNERS: Mapping[str, Callable[[Inputs, dict[str, Any]], Tensor]] = {
    "nt_xent": lambda i, p: nt_xent(by_view(i, "z"), **p),
    "nt_xent_3views": lambda i, p: nt_xent(by_view(i, "z"), **p),
    "cmc": lambda i, p: cmc(by_view(i, "z"), **p),
    "cmc_3views": lambda i, p: cmc(by_view(i, "z"), **p),
    "weighted_unsupervised": lambda i, p: weighted_unsupervised(
        by_view(i, "z"), by_view(i, "h"), **p
    ),
    "input_weighted_unsupervised": lambda i, p: input_weighted_unsupervised(
        by_view(i, "z"), by_view(i, "x"), **p
    ),
    "weighted_supervised": lambda i, p: weighted_supervised(i.pop("s"), i.pop("y"), **p),
    "supcon": lambda i, p: supcon(by_view(i, "z"), i.pop("label"), **p),
    "hard_ucl": lambda i, p: hard(by_view(i, "z"), **p),
    "hard_scl": lambda i, p: hard(by_view(i, "z"), i.pop("label"), **p),
    "debiased": lambda i, p: debiased(by_view(i, "z"), **p),
    "mulco": lambda i, p: mulco(
        *by_name(i, "q", "key", "queue", "prob_q", "prob_queue", "ybar"), **p
    ),
    "hierarchical": lambda i, p: hierarchical(by_view(i, "z"), i.pop("levels"), **p),
    "ub_log": classifier(ub_log),
    "ub_exp": classifier(ub_exp),
}


def cases() -> list[tuple[Path, str]]:
    """Every case of every file of the folder."""
    found = []
    for path in sorted(GOLDEN.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            found += [(path, name) for name in sorted({k.split("/")[0] for k in arrays.files})]
    return found


def load(path: Path, case: str) -> Arrays:
    with np.load(path, allow_pickle=False) as arrays:
        return {k.split("/")[1]: arrays[k] for k in arrays.files if k.split("/")[0] == case}


def test_there_are_cases() -> None:
    assert cases(), f"no golden case in {GOLDEN}"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)], ids=["f64", "f32"]
)
@pytest.mark.parametrize(
    ("path", "case"), cases(), ids=[f"{path.stem}/{case}" for path, case in cases()]
)
def test_value_and_gradients(path: Path, case: str, dtype: torch.dtype, tolerance: float) -> None:
    term = case.split("-")[0]
    assert term in RUNNERS, f"this test cannot run {case}: add its term to RUNNERS"
    arrays = load(path, case)
    params = json.loads(str(arrays["params"]))
    inputs = {k[3:]: torch.tensor(v) for k, v in arrays.items() if k[:3] == "in_"}
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    expected = {k[5:]: torch.tensor(v) for k, v in arrays.items() if k[:5] == "grad_"}
    for name in expected:
        inputs[name].requires_grad_()
    left = dict(inputs)
    loss = RUNNERS[term](left, params)
    assert not left, f"{case} has inputs that {term} does not take: {sorted(left)}"
    loss.backward()  # type: ignore[no-untyped-call]
    assert abs(loss.item() - float(arrays["loss"])) <= tolerance * max(
        1.0, abs(float(arrays["loss"]))
    )
    for name, gradient in expected.items():
        found = inputs[name].grad
        assert found is not None
        torch.testing.assert_close(found.double(), gradient, rtol=tolerance, atol=tolerance)
