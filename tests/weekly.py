"""Tests that take minutes, or repeat another's promise: `make check-all` runs them each week.

HERON_WEEKLY=1 has them run: `HERON_WEEKLY=1 pytest tests/studies/test_on_ray.py`.
"""

import os

import pytest

WEEKLY = bool(os.environ.get("HERON_WEEKLY"))


def weekly(reason: str) -> pytest.MarkDecorator:
    """Marks a test that every week runs, and no commit; the reason says what stands for it."""
    return pytest.mark.skipif(not WEEKLY, reason=f"weekly, by `make check-all`: {reason}")
