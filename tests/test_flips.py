"""Flipped bits are refused; a flip that is not is seen. `benchmarks.flips` is the long run."""

import random
from pathlib import Path

import pytest

from benchmarks.flips import Subject, flip, outcome, subjects
from heron.base.errors import HeronError


def test_every_flip_is_refused_or_harmless(tmp_path: Path) -> None:
    draw = random.Random(0)
    every = list(subjects(tmp_path))
    assert len(every) == 27
    for subject in every:
        found, bad = flip(subject, 3, draw)
        assert found.total() == 3 and not bad, subject.name


def test_what_became_of_a_flip(tmp_path: Path) -> None:
    (path := tmp_path / "manifest.json").write_text('{"a": 1e5}')

    def refuse() -> None:
        if path.read_text() != '{"a": 1e5}':
            raise HeronError("altered")

    def stumble() -> None:
        raise ValueError

    at = path.read_text().index("e5")
    assert outcome(Subject("", [path], refuse), path, at, 5) == "refused"
    assert outcome(Subject("", [path], lambda: None), path, at, 5) == "the same JSON"
    assert outcome(Subject("", [path], lambda: None), path, at + 1, 0) == "silent"
    assert outcome(Subject("", [path], stumble), path, 0, 0) == "no user's error"
    other = path.rename(tmp_path / "weights")
    assert outcome(Subject("", [other], lambda: None), other, at, 5) == "silent"
    assert other.read_text() == '{"a": 1e5}'
    with pytest.raises(ValueError):
        flip(Subject("", [other], stumble), 1, random.Random(0))
