"""Filters by label: parses "Smiling and not Male" and evaluates it as a mask over samples.

    filter = term ("or" term)*            also |, ||
    term   = factor ("and" factor)*       also &, &&
    factor = ("not" | "!") factor | "(" filter ")" | NAME | 'NAME' | "NAME"

A name stands for the samples that have the label or are of the class. Samples without labels pass
no filter, as neither X nor `not X` is known of them.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heron.config.errors import RetrievalError
from heron.retrieval.samples import Samples

MAX_LENGTH = 2_000  # characters of a filter, which may be anyone's input to a page
MAX_DEPTH = 50  # parentheses that may be open at once
MAX_LISTED = 12  # names that a message lists
TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*")"""
    r"""|(?P<sign>&&?|\|\|?|[!()])|(?P<word>[^\s'"&|!()]+)|(?P<quote>\S))"""
)
WORDS = {"and": "and", "or": "or", "not": "not"}
SIGNS = {"&": "and", "&&": "and", "|": "or", "||": "or", "!": "not", "(": "(", ")": ")"}
BINDS = {"(": 0, ")": 1, "end": 1, "or": 1, "and": 2, "not": 3}


@dataclass(frozen=True)
class Filter:
    """A parsed filter: columns of the targets and operators, each after its operands."""

    postfix: Sequence[int | str]

    def mask(self, samples: Samples) -> NDArray[np.bool_]:
        """Returns which samples pass, bool [N]; samples without labels do not."""
        operands: list[NDArray[np.bool_]] = []
        for step in self.postfix:
            if isinstance(step, int):
                operands.append(samples.targets[:, step] == 1)
            elif step == "not":
                operands.append(~operands.pop())
            else:
                right, left = operands.pop(), operands.pop()
                operands.append(left & right if step == "and" else left | right)
        return np.asarray(operands.pop() & samples.known)

    def counts(self, samples: Samples) -> str:
        """Says how many samples each label of the filter has, for messages."""
        columns = dict.fromkeys(step for step in self.postfix if isinstance(step, int))
        counts = {samples.names[i]: int((samples.targets[:, i] == 1).sum()) for i in columns}
        return ", ".join(f"{name} {count:,}" for name, count in counts.items())


class _Token(NamedTuple):
    kind: str  # "name", "end", or a key of BINDS
    text: str  # of a name, without its quotes
    position: int  # of its first character


def parse_filter(text: str, names: Sequence[str]) -> Filter:
    """Parses a filter such as "Smiling and not (Male or 'a name with spaces')".

    A quote within quotes is doubled; a label called `and`, `or` or `not` has to be quoted. Raises a
    RetrievalError with the position of the fault, or if a name is no label.
    """
    if len(text) > MAX_LENGTH:
        raise RetrievalError(
            f"the filter has {len(text):,} characters, and the limit is {MAX_LENGTH:,}; shorten it"
        )
    postfix: list[int | str] = []
    stack: list[_Token] = []  # open parentheses, and operators without their last operand
    depth, expects_operand = 0, True
    for token in _tokens(text):
        token_text = "the end" if token.kind == "end" else f"'{token.text}'"
        if expects_operand:
            if token.kind == "name":
                postfix.append(_column(token, names))
                expects_operand = False
            elif token.kind in ("not", "("):
                stack.append(token)
                depth += token.kind == "("
                if depth > MAX_DEPTH:
                    fault = f"more than {MAX_DEPTH} parentheses are open; use fewer"
                    raise _fault(text, token.position, fault)
            elif token.kind == "end" and not postfix and not stack:
                raise _fault(
                    text, token.position, "it is empty; write a label, or remove the filter"
                )
            else:
                quote = "" if token.kind == "end" else "; put a label of that name in quotes"
                fault = f"{token_text} instead of a label, 'not' or '('{quote}"
                raise _fault(text, token.position, fault)
            continue
        if token.kind in ("name", "not", "("):
            end = "')'" if depth else "the end"
            raise _fault(text, token.position, f"{token_text} instead of 'and', 'or' or {end}")
        while stack and BINDS[stack[-1].kind] >= BINDS[token.kind]:
            postfix.append(stack.pop().kind)
        if token.kind == ")":
            if not stack:
                raise _fault(text, token.position, "')' has no '(' before it")
            stack.pop()
            depth -= 1
        elif token.kind == "end" and stack:
            raise _fault(text, stack[-1].position, "this '(' is not closed; add a ')'")
        elif token.kind != "end":
            stack.append(token)
            expects_operand = True
    return Filter(postfix)


def filter_mask(where: str, samples: Samples) -> NDArray[np.bool_]:
    """Returns which samples pass a filter, bool [N]; RetrievalError if it is faulty or none do."""
    label_filter = parse_filter(where, samples.names)
    mask = label_filter.mask(samples)
    if not mask.any():
        raise RetrievalError(
            f"no sample passes the filter {where!r}: of {int(samples.known.sum()):,} labelled "
            f"samples, {label_filter.counts(samples)}; relax the filter"
        )
    return mask


def _tokens(text: str) -> list[_Token]:
    tokens = []
    for match in TOKEN.finditer(text):
        word = match[match.lastgroup or 0]
        position = match.end() - len(word)
        if match.lastgroup == "quote":
            raise _fault(text, position, f"this quote is not closed; add another {word}")
        if match.lastgroup == "quoted":
            kind, word = "name", word[1:-1].replace(word[0] * 2, word[0])
        else:
            kind = SIGNS.get(word) or WORDS.get(word.lower(), "name")
        tokens.append(_Token(kind, word, position))
    return [*tokens, _Token("end", "", len(text.rstrip()))]


def _column(token: _Token, names: Sequence[str]) -> int:
    if token.text in names:
        return names.index(token.text)
    if not names:
        raise RetrievalError(
            f"no label named '{token.text}': these samples have no labels; remove the filter"
        )
    by_lowercase = {name.lower(): name for name in reversed(names)}
    closest = difflib.get_close_matches(token.text.lower(), by_lowercase, 1, 0.0)
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    raise RetrievalError(
        f"no label named '{token.text}' (character {token.position + 1} of the filter). Did you "
        f"mean {quoted(by_lowercase[closest[0]])}? The labels are "
        f"{', '.join(names[:MAX_LISTED])}{more}"
    )


def _fault(text: str, position: int, fault: str) -> RetrievalError:
    line = re.sub(r"\s", " ", text)
    return RetrievalError(
        f"cannot read the filter at character {position + 1}: {fault}; in: "
        f"{line[:position]}⟨here⟩{line[position:]}"
    )


def quoted(name: str) -> str:
    """Returns a label's name as a filter takes it: in quotes if it is no plain word."""
    match = TOKEN.fullmatch(name)
    plain = match is not None and match["word"] == name and name.lower() not in WORDS
    return name if plain else "'" + name.replace("'", "''") + "'"
