"""Samples by their keys."""

import numpy as np
import pytest

from heron.base.errors import RetrievalError
from heron.retrieval.samples import Samples


def named(keys: list[str]) -> Samples:
    none = np.zeros((len(keys), 0), np.uint8)
    encoded = np.array([key.encode() for key in keys])
    return Samples(encoded, np.arange(len(keys)), none, np.zeros(len(keys), bool), [], "none")


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [("0123", "s000123, s001230, "), ("123", "s000123, "), ("99999", "s099999"), ("nothing", "")],
)
def test_keys_that_hold_what_was_typed_are_the_nearest(asked: str, nearest: str) -> None:
    """Those nearest to 0123 by their letters did not hold it."""
    samples = named([f"s{n:06}" for n in range(100_000)])
    with pytest.raises(RetrievalError, match=rf"has the key '{asked}' .*\. Did you mean {nearest}"):
        samples.find(asked)


def test_zeros_before_a_number_may_be_left_out() -> None:
    keys = [f"{n:06d}" for n in (123, 1230, 7, 12300)] + ["000x12"]
    found = named(keys)
    assert found.find("0123") == 0 and found.find("000123") == 0 and found.find("7") == 2
    assert found.keys_with("0123", 3) == ["000123", "012300", "001230"]
    assert found.keys_with("123", 1) == ["000123"]
    for unknown in ("x12", "-7", "0124"):
        with pytest.raises(RetrievalError, match=f"no sample has the key '{unknown}'"):
            found.find(unknown)
    assert named(["07", "7"]).find("7") == 1  # a key is itself
