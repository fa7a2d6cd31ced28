"""Terms by sums of whole anchors, as fused kernels give them, are those by strips."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.losses import fused
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
    anchor_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
) -> Tensor:
    """The formula of `Pairs` with all logits at once, in the stead of the kernels."""
    parts = summands(anchors, keys, moments, floor, anchor_tag, key_tag)
    if anchor_weight is not None and key_weight is not None:
        parts = parts * (anchor_weight @ key_weight.T)
    return parts.sum(2).T


@dataclass
class DenseOperands:
    """`fused.Operands` with all logits at once."""

    anchors: Tensor
    keys: Tensor
    power: Tensor
    sizes: tuple[int, int, int]
    pairing: dict[str, Any]

    def sums(self) -> Tensor:
        return dense(self.anchors, self.keys, **self.pairing)

    def gradient(self, slopes: tuple[Tensor, Tensor], sums: tuple[Tensor, Tensor]) -> Tensor:
        """The sums bound the coefficients, of an anchor and of a key, at every moment."""
        parts = summands(self.anchors, self.keys, **self.pairing)
        own, of_keys = (x.T.abs() * y.T for x, y in zip(slopes, sums, strict=True))
        for r, part in enumerate(parts):
            most = (slopes[0][:, r, None].abs() * part).amax() + (
                slopes[1][:, r] * part
            ).abs().amax()
            assert most <= (own.amax() + of_keys.amax()) * 1.001
        return dense_gradient(self.anchors, self.keys, *slopes, **self.pairing)


def dense_gradient(
    anchors: Tensor,
    keys: Tensor,
    own: Tensor,
    of_keys: Tensor,
    *,
    moments: tuple[float, ...],
    floor: float,
    anchor_tag: Tensor | None,
    key_tag: Tensor | None,
) -> Tensor:
    """The formula of `fused.Operands.gradient` with all logits at once."""
    parts = summands(anchors, keys, moments, floor, anchor_tag, key_tag)
    return (parts * (own.T[:, :, None] + of_keys.T[:, None])).sum(0) @ keys


def summands(
    anchors: Tensor,
    keys: Tensor,
    moments: tuple[float, ...],
    floor: float,
    anchor_tag: Tensor | None,
    key_tag: Tensor | None,
) -> Tensor:
    """Of each moment, pair by pair, [moments, anchors, keys]."""
    logits = anchors @ keys.T
    counted = logits >= floor
    if anchor_tag is not None and key_tag is not None:
        counted = counted & (anchor_tag[:, None] != key_tag)
    return torch.stack([(m * logits).exp() * counted for m in moments])


@pytest.mark.parametrize("name", BY_SUMS)
def test_sums_of_whole_anchors_make_the_same_term(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients; in float32, which alone the kernels take."""
    z = [draw(7, 4, seed=20 + v, dtype=torch.float32) for v in range(2)]
    term, asked = OPTIONS[name][0], list[str]()
    expected = term(z)
    owed = gradients(expected, z)

    def sums(*args: Any, **options: Any) -> Tensor:
        asked.append(name)
        return dense(*args, **options)

    def operands(a: Tensor, k: Tensor, **options: Any) -> DenseOperands:
        asked.append(name)
        return DenseOperands(a, k, a.new_ones(()), (len(a), len(k), a.shape[1]), options)

    monkeypatch.setattr(fused, "exponential_sums", sums)
    monkeypatch.setattr(fused, "mutual_operands", operands)
    monkeypatch.setattr(fused, "Operands", DenseOperands)
    monkeypatch.setattr(fused, "enabled", lambda device: True)
    monkeypatch.setattr(fused, "trusted", lambda kernel, device: kernel != "unit")
    found = term(z)
    assert asked
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, z), owed, strict=True):
        torch.testing.assert_close(one, other)
