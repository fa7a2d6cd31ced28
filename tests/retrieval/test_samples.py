"""Samples by their keys."""

import numpy as np
import pytest

from heron.config.errors import RetrievalError
from heron.retrieval.samples import Samples


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [("0123", "000123, 012300, "), ("123", "000123, "), ("99999", "099999"), ("nothing", "")],
)
def test_keys_that_hold_what_was_typed_are_the_nearest(asked: str, nearest: str) -> None:
    """Those nearest to 0123 by their letters did not hold it."""
    keys = np.array([f"{n:06}".encode() for n in range(100_000)])
    none = np.zeros((len(keys), 0), np.uint8)
    samples = Samples(keys, np.arange(len(keys)), none, np.zeros(len(keys), bool), [], "none")
    with pytest.raises(RetrievalError, match=f"has the key '{asked}'; .* the nearest {nearest}"):
        samples.find(asked)
