"""Filters by label: against Python's own `and`, `or` and `not`, a sample at a time."""

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.base.errors import RetrievalError
from heron.retrieval.filters import MAX_PARENTHESES, parse_filter, quoted
from tests.retrieval import made

NAMES = ["Smiling", "Male", "5_o_Clock", "t-shirt/top", "tench, Tinca", "and", "it's", 'a "b"']


def table(rows: int = 200) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 2, (rows, len(NAMES))), generator.random(rows) < 0.8


def written(draw: random.Random, depth: int) -> tuple[str, Any]:
    """A random filter, and what it says of one sample's labels, as a function."""
    kind = draw.choice(["name", "not", "and", "or"]) if depth else "name"
    if kind == "name":
        name = draw.choice(NAMES)
        return quoted(name), lambda labels: name in labels
    text, said = written(draw, depth - 1)
    if kind == "not":
        return (
            f"{draw.choice(['not ', 'NOT ', '! ', '!'])}({text})",
            lambda labels: not said(labels),
        )
    other, also = written(draw, depth - 1)
    if kind == "and":
        sign = draw.choice([" and ", "&", " AND ", " && "])
        return f"({text}){sign}({other})", lambda labels: said(labels) and also(labels)
    sign = draw.choice([" or ", "|", " Or ", "||"])
    return f"({text}){sign}({other})", lambda labels: said(labels) or also(labels)


def test_random_filters_pass_what_python_says() -> None:
    targets, known = table()
    samples = made.samples(targets, NAMES, known=known)
    draw = random.Random(1)
    for _ in range(60):
        text, said = written(draw, 3)
        expected = [
            bool(known[i]) and said({NAMES[a] for a in range(len(NAMES)) if targets[i, a]})
            for i in range(len(targets))
        ]
        assert parse_filter(text, NAMES).mask(samples).tolist() == expected, text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a or b and c", lambda a, b, c: a or (b and c)),
        ("a and b or c", lambda a, b, c: (a and b) or c),
        ("not a and b", lambda a, b, c: (not a) and b),
        ("not a or b", lambda a, b, c: (not a) or b),
        ("not not a", lambda a, b, c: a),
        ("!" * 1999 + "a", lambda a, b, c: not a),
        ("not (a or b) and c", lambda a, b, c: not (a or b) and c),
        ("a|b&!c", lambda a, b, c: a or (b and not c)),
        (" ( a ) ", lambda a, b, c: a),
        ("a\tand\n'b'", lambda a, b, c: a and b),
    ],
)
def test_not_binds_closest_and_or_least(text: str, expected: Any) -> None:
    rows = np.array([[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)])
    samples = made.samples(rows, ["a", "b", "c"])
    assert parse_filter(text, samples.names).mask(samples).tolist() == [
        bool(expected(*r)) for r in rows
    ]


def test_quoted_names_are_any_text() -> None:
    targets = np.eye(len(NAMES), dtype=int)
    samples = made.samples(targets, NAMES, kind="multi_class")
    texts = ["Smiling", "'Male'", "5_o_Clock", "t-shirt/top", "'tench, Tinca'", '"and"', "'it''s'"]
    for number, text in enumerate([*texts, "'a \"b\"'"]):
        assert np.flatnonzero(parse_filter(text, NAMES).mask(samples)).tolist() == [number]
    assert [quoted(name) for name in ("Male", "Not", "a b", "it's", "", "x!")] == [
        *("Male", "'Not'", "'a b'", "'it''s'", "''", "'x!'")
    ]


def test_samples_without_labels_pass_no_filter() -> None:
    samples = made.samples(np.array([[1], [0], [0]]), ["a"], known=np.array([True, True, False]))
    assert parse_filter("a", ["a"]).mask(samples).tolist() == [True, False, False]
    assert parse_filter("not a", ["a"]).mask(samples).tolist() == [False, True, False]
    assert parse_filter("a or not a", ["a"]).mask(samples).tolist() == [True, True, False]


def test_counts_are_of_the_labels_that_are_named() -> None:
    samples = made.samples(np.array([[1, 1, 0], [0, 1, 0], [1, 1, 0]]), ["a", "b", "c"])
    assert parse_filter("c and not a and c", samples.names).counts(samples) == "c 0, a 2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at character 1: labels must be joined by 'and' or 'or', 'not' must be before a"),
        ("   ", "at character 1: labels"),
        ("a and", "at character 6: labels"),
        ("a and and b", "at character 7: labels"),
        ("a b", "at character 3: labels"),
        ("a not b", "at character 7: labels"),
        ("(a or b", "at character 1: labels"),
        ("a or (b and (a)", "at character 6: labels"),
        ("(a b)", "at character 2: labels"),
        ("a)", "at character 2: labels"),
        ("()", "at character 1: labels"),
        ("a (b)", "at character 1: labels"),
        ("a()", "at character 1: labels"),
        ("a and 'b", "at character 7: this quote is not closed; add another '"),
        ("a & & b", "at character 5: labels"),
        ("not", "at character 4: labels"),
        ("(" * 60 + "a" + ")" * 60, f"the filter has more than {MAX_PARENTHESES} parentheses"),
        ("a or " * 500 + "a", "the filter has 2,501 characters, and the limit is 2,000"),
        ("A", "no label named 'A' (character 1 of the filter). Did you mean a? The labels are a"),
        ("a or smilin", "'smilin' (character 6 of the filter). Did you mean 'Smiling man'?"),
        ("'Not '", "no label named 'Not ' (character 1 of the filter). Did you mean 'not'?"),
    ],
)
def test_a_fault_is_pointed_at(text: str, message: str) -> None:
    with pytest.raises(RetrievalError) as fault:
        parse_filter(text, ["a", "b", "Smiling man", "not"])
    assert message in str(fault.value)


def test_the_fault_is_marked_in_the_text() -> None:
    with pytest.raises(RetrievalError) as fault:
        parse_filter("a and\tor b", ["a", "b"])
    said = str(fault.value)
    assert said.startswith("cannot read the filter at character 7: labels must")
    assert said.endswith("; in: a and ⟨here⟩or b")


def test_many_names_are_not_all_listed_and_none_is_no_filter() -> None:
    names = [f"class {number}" for number in range(1000)]
    with pytest.raises(RetrievalError, match=r"Did you mean 'class 7'\?.* class 11 and 988 more$"):
        parse_filter("class7", names)
    with pytest.raises(
        RetrievalError, match="'x': these samples have no labels; remove the filter"
    ):
        parse_filter("x", [])
