"""Terms by sums of whole anchors, as fused kernels give them, are those by strips."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.pipeline.objectives import fused
from tests.objectives.test_family import OPTIONS
from tests.objectives.test_terms import draw, gradients

BY_SUMS = [name for name in OPTIONS if "label" not in name and "hier" not in name]


def dense(
    anchors: Tensor,
    keys: Tensor,
    *,
    moments: tuple[float, ...],
    floor: float,
    anchor_tag: Tensor | None,
    key_tag: Tensor | None,
    anchor_weight: Tensor | None,
    key_weight: Tensor | None,
) -> Tensor:
    """The formula of `Pairs` with all logits at once, in the stead of the kernels."""
    logits = anchors @ keys.T
    counted = logits >= floor if floor > -math.inf else torch.ones_like(logits, dtype=torch.bool)
    if anchor_tag is not None and key_tag is not None:
        counted = counted & (anchor_tag[:, None] != key_tag)
    weight = counted.to(logits)
    if anchor_weight is not None and key_weight is not None:
        weight = weight * (anchor_weight @ key_weight.T)
    return torch.stack([((m * logits).exp() * weight).sum(1) for m in moments], 1)


@pytest.mark.parametrize("name", BY_SUMS)
def test_sums_of_whole_anchors_make_the_same_term(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients; in float32, which alone the kernels take."""
    z = [draw(7, 4, seed=20 + v, dtype=torch.float32) for v in range(2)]
    term, asked = OPTIONS[name][0], list[str]()
    expected = term(z)

    def sums(*args: Any, **options: Any) -> Tensor:
        asked.append(name)
        return dense(*args, **options)

    monkeypatch.setattr(fused, "exponential_sums", sums)
    monkeypatch.setattr(fused, "enabled", lambda device: True)
    found = term(z)
    assert asked
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, z), gradients(expected, z), strict=True):
        torch.testing.assert_close(one, other)
