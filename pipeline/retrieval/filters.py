"""Filters by label: "Smiling and not Male", read as an expression, as a mask over samples.

    filter = both ("or" both)*            also |, ||
    both   = one ("and" one)*             also &, &&
    one    = ("not" | "!") one | "(" filter ")" | NAME | 'NAME' | "NAME"

A name stands for the samples that have the label, or are of the class. Samples without labels pass
no filter: it is not known whether X holds for them, and so neither whether `not X` does.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.samples import Samples

LONGEST = 2_000  # characters of a filter: a page may pass on what anyone types
DEEPEST = 50  # parentheses that may be open at once
SHOWN = 12  # names that a message lists
TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*")"""
    r"""|(?P<sign>&&?|\|\|?|[!()])|(?P<word>[^\s'"&|!()]+)|(?P<quote>\S))"""
)
WORDS = {"and": "and", "or": "or", "not": "not"}
SIGNS = {"&": "and", "&&": "and", "|": "or", "||": "or", "!": "not", "(": "(", ")": ")"}
BINDS = {"(": 0, ")": 1, "end": 1, "or": 1, "and": 2, "not": 3}


@dataclass(frozen=True)
class Filter:
    """A filter that was read: columns of the targets and operators, each after its operands."""

    postfix: Sequence[int | str]

    def mask(self, samples: Samples) -> NDArray[np.bool_]:
        """Returns which samples pass, bool [N]; those without labels do not."""
        operands: list[NDArray[np.bool_]] = []
        for step in self.postfix:
            if isinstance(step, int):
                operands.append(samples.targets[:, step] == 1)
            elif step == "not":
                operands.append(~operands.pop())
            else:
                last, first = operands.pop(), operands.pop()
                operands.append(first & last if step == "and" else first | last)
        return np.asarray(operands.pop() & samples.known)

    def counts(self, samples: Samples) -> str:
        """Says how many samples each label of the filter has, for messages."""
        columns = dict.fromkeys(step for step in self.postfix if isinstance(step, int))
        have = {samples.names[i]: int((samples.targets[:, i] == 1).sum()) for i in columns}
        return ", ".join(f"{name} {count:,}" for name, count in have.items())


class _Token(NamedTuple):
    kind: str  # "name", "end", or a key of BINDS
    text: str  # of a name, without its quotes
    at: int  # of its first character


def parse(text: str, names: Sequence[str]) -> Filter:
    """Reads a filter such as "Smiling and not (Male or 'a name with spaces')".

    A quote within quotes is written twice; a label that is called `and`, `or` or `not` is quoted.

    Raises:
        RetrievalError: it is no filter, with the position of the fault, or names no label.
    """
    if len(text) > LONGEST:
        raise RetrievalError(
            f"a filter of {len(text):,} characters; expected at most {LONGEST:,}; shorten it"
        )
    postfix: list[int | str] = []
    waiting: list[_Token] = []  # open parentheses, and operators that still lack their last operand
    depth, label_next = 0, True
    for token in _tokens(text):
        shown = "the end" if token.kind == "end" else f"'{token.text}'"
        if label_next:
            if token.kind == "name":
                postfix.append(_column(token, names))
                label_next = False
            elif token.kind in ("not", "("):
                waiting.append(token)
                depth += token.kind == "("
                if depth > DEEPEST:
                    found = f"more than {DEEPEST} parentheses are open"
                    raise _fault(text, token.at, found, "fewer of them")
            elif token.kind == "end" and not postfix and not waiting:
                raise _fault(text, token.at, "it is empty", "a label, or no filter at all")
            else:
                expected = "a label, 'not' or '('; a label of such a name is quoted"
                raise _fault(text, token.at, f"found {shown}", expected)
            continue
        if token.kind in ("name", "not", "("):
            end = "')'" if depth else "the end"
            raise _fault(text, token.at, f"found {shown}", f"'and', 'or' or {end}")
        while waiting and BINDS[waiting[-1].kind] >= BINDS[token.kind]:
            postfix.append(waiting.pop().kind)
        if token.kind == ")":
            if not waiting:
                raise _fault(text, token.at, f"found {shown}", "a '(' before it")
            waiting.pop()
            depth -= 1
        elif token.kind == "end" and waiting:
            raise _fault(text, waiting[-1].at, "this '(' is not closed", "a ')' after it")
        elif token.kind != "end":
            waiting.append(token)
            label_next = True
    return Filter(postfix)


def passing(where: str, samples: Samples) -> NDArray[np.bool_]:
    """Returns which samples pass a filter, bool [N].

    Raises:
        RetrievalError: it is no filter (see `parse`), or no sample passes it.
    """
    asked = parse(where, samples.names)
    mask = asked.mask(samples)
    if not mask.any():
        raise RetrievalError(
            f"no sample passes the filter {where!r}; found {asked.counts(samples)} of "
            f"{int(samples.known.sum()):,} labelled samples; ask for less"
        )
    return mask


def _tokens(text: str) -> list[_Token]:
    tokens = []
    for found in TOKEN.finditer(text):
        word = found[found.lastgroup or 0]
        at = found.end() - len(word)
        if found.lastgroup == "quote":
            raise _fault(text, at, "this quote is not closed", f"another {word} after it")
        if found.lastgroup == "quoted":
            kind, word = "name", word[1:-1].replace(word[0] * 2, word[0])
        else:
            kind = SIGNS.get(word) or WORDS.get(word.lower(), "name")
        tokens.append(_Token(kind, word, at))
    return [*tokens, _Token("end", "", len(text.rstrip()))]


def _column(token: _Token, names: Sequence[str]) -> int:
    if token.text in names:
        return names.index(token.text)
    if not names:
        raise RetrievalError(
            f"no label is called '{token.text}': these samples have no labels; leave it out"
        )
    lower = {name.lower(): name for name in reversed(names)}
    near = difflib.get_close_matches(token.text.lower(), lower, 1, 0.0)
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    raise RetrievalError(
        f"no label is called '{token.text}' (character {token.at + 1} of the filter); did you "
        f"mean {quoted(lower[near[0]])}? expected one of {', '.join(names[:SHOWN])}{more}"
    )


def _fault(text: str, at: int, found: str, expected: str) -> RetrievalError:
    """Points at a character of the filter."""
    line = re.sub(r"\s", " ", text)
    return RetrievalError(
        f"the filter cannot be read at character {at + 1}: {found}; expected {expected}; "
        f"in: {line[:at]}⟨here⟩{line[at:]}"
    )


def quoted(name: str) -> str:
    """Returns a name as a filter takes it: in quotes where it would be read as something else."""
    found = TOKEN.fullmatch(name)
    plain = found is not None and found["word"] == name and name.lower() not in WORDS
    return name if plain else "'" + name.replace("'", "''") + "'"
