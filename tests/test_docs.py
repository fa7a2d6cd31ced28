"""The worked example of the guide is code that works, and the tests that guides name are there."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heron.losses import engine
from tests.objectives.test_terms import assert_same, draw

TESTS = Path(__file__).parent
TABLES = [(TESTS.parent / "docs" / f"{name}.md").read_text() for name in ("data", "security")]
GUIDE = (Path(__file__).parent.parent / "docs" / "objectives.md").read_text()


def looped(z: list[Tensor], tau: float) -> Tensor:
    unit, losses = [engine.unit(v) for v in z], []
    for u in range(len(z)):
        for v in range(len(z)):
            for i in range(len(z[0])):
                if u != v:
                    others = [(k, j) for k in range(len(z[0])) for j in range(len(z)) if k != i]
                    far = torch.stack([unit[u][i] @ unit[j][k] for k, j in others]) / tau
                    losses.append(torch.logsumexp(far, 0) - unit[u][i] @ unit[v][i] / tau)
    return torch.stack(losses).mean()


def test_the_worked_example_is_the_loss_it_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/objectives.md", "exec"), names)
    z = [draw(7, 4, seed=v) for v in (0, 1, 2)]
    tau = 0.3
    assert_same(names["decoupled"](z, tau=tau), looped(z, tau), z)
    shares = [names["decoupled"](z, tau=tau, rows=r) for r in (slice(0, 3), slice(3, 7))]
    assert_same(torch.stack(shares).sum(), looped(z, tau), z)
    single = [v[:1].detach().requires_grad_() for v in z]
    names["decoupled"](single, tau=tau).backward()  # no negatives, as `heron check` tries
    assert all(v.grad is not None and v.grad.isfinite().all() for v in single)


def test_the_tests_that_guides_name_are_there() -> None:
    named = [found for text in TABLES for found in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text)]
    here = [(path, name) for path, name in named if name or path.startswith(("retrieval", "serve"))]
    assert len(here) > 30
    assert [n for n in here if f"def {n[1]}" not in (TESTS / n[0]).read_text()] == []
