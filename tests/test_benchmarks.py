"""The yardsticks of `benchmarks.objectives` are right, and its plan for a GPU is sound."""

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.isolation import OUT_OF_MEMORY, Outcome, alone
from benchmarks.objectives import (
    Bench,
    double,
    forward_backward,
    measure,
    parse,
    plan,
    report,
    tensors_of,
)
from benchmarks.rates import Rates, rates
from benchmarks.table import Case
from benchmarks.workloads import TERMS, Draw

CASE = Case("cmc", "ours", 16, 8, "float32", "cpu", 1)


@pytest.mark.parametrize("name", TERMS)
def test_dense_is_ours(name: str) -> None:
    inputs = {
        key: [double(x) for x in part] if isinstance(part, list) else double(part)
        for key, part in TERMS[name].draw(Draw(16, 8, "cpu", classes=4)).items()
    }
    ours, dense = (
        forward_backward(replace(CASE, term=name, method=method), inputs)()
        for method in ("ours", "dense")
    )
    assert len(ours) == 1 + sum(x.requires_grad for x in tensors_of(inputs)) >= 2
    for found, expected in zip(ours, dense, strict=True):
        assert float(expected.abs().max()) > 1e-4
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


def test_a_gpu_measures_all_terms_in_both_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERON_PRECISION", raising=False)
    lines = plan(parse(["--device", "cuda"]))
    assert {case.term for case, _ in lines} == set(TERMS)
    of_cmc = [(c.size, c.dim, c.precision, c.rows, *more) for c, more in lines if c.term == "cmc"]
    assert of_cmc == [
        (4096, 128, "tf32", None, "dense", "inf-cl"),
        (4096, 128, "bf16", None, "dense"),
        (16_384, 128, "tf32", None, "dense", "compiled", "inf-cl"),
        (16_384, 128, "bf16", None, "dense"),
        (65_536, 128, "tf32", None, "dense", "inf-cl"),
        (65_536, 128, "bf16", None, "dense"),
        (1_048_576, 128, "tf32", 16_384, "dense", "inf-cl"),
        (1_048_576, 128, "bf16", 16_384, "dense"),
        (65_536, 256, "tf32", None, "dense", "inf-cl"),
        (65_536, 256, "bf16", None, "dense"),
    ]
    raced = {(c.term, c.precision, c.rows) for c, more in lines if "siglip-kernel" in more}
    assert raced == {("nt_xent", "bf16", None)}
    shapes = {c.term: c.shape for c, _ in lines if c.size == 1_048_576}
    assert shapes["nt_xent"] == (32_768, 2_097_152)
    assert shapes["mulco"] == (256, 1_048_576)
    assert "hierarchical" not in shapes


def test_the_table_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Its whole course with results made up: dense takes 40 bytes a pair of 100 GB."""
    ran: Counter[str] = Counter()

    def run(case: Case) -> Outcome:
        ran[case.method] += 1
        pairs = math.prod(case.shape)
        if case.method == "inf-cl":
            return Outcome(missing="ModuleNotFoundError: No module named 'inf_cl'")
        if case.method == "ours":
            return Outcome(pairs / 1e12, 1e6 * case.size, 1e11, 1e-4, 2e-3)
        if 40 * pairs > 1e11:
            return Outcome(missing=OUT_OF_MEMORY)
        return Outcome(pairs / 1e11, 40 * pairs, 1e11)

    def rate(shapes: Any, dim: int, *_: Any) -> Rates:
        return Rates({(a, k): 2.0 * dim * a * k / 1e14 for a, k in shapes}, 4e14, 4e12)

    words = ["--device", "cuda", "--terms", "cmc", "hierarchical"]
    numbers = report(parse(words), run, rate)
    output = capsys.readouterr().out
    assert "nan" not in output
    rows = {line.split(" | ")[1]: line for line in output.splitlines() if line.startswith("| cmc")}
    assert "| 8,192 x 4,096 | 0.034 | 0.336 | – | – [1] |" in output
    assert "1,374 GB" in rows["1,048,576"] and "32,768 x 1,048,576" in rows["1,048,576"]
    assert "[1] ModuleNotFoundError: No module named 'inf_cl'" in output
    assert ran["dense"] == 8  # a batch that cannot fit is not tried
    assert json.loads(json.dumps(numbers))["lines"][0]["ours"]["loss_error"] == 1e-4


def test_ours_must_run() -> None:
    with pytest.raises(SystemExit, match="method='ours'.*: RuntimeError: broken"):
        Bench(lambda case: Outcome(missing="RuntimeError: broken"))(CASE)


def test_a_measurement_is_a_process() -> None:
    outcome = alone(measure, CASE, limit_s=60)
    assert outcome.seconds > 0 and outcome.bytes >= 0 and not outcome.missing
    bad = alone(measure, replace(CASE, term="no such"), limit_s=60)
    assert bad.missing == "KeyError: 'no such'"
    assert alone(measure, CASE, limit_s=0).missing == "took more than 0 s"
    assert alone(rates, [(32, 16)], 8, "float32", "cpu", 1, limit_s=60).products[32, 16] > 0
