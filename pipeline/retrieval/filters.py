"""Filters by label: "Smiling and not Male", read as an expression, as a mask over samples.

    either = both ("or" both)*            also |, ||
    both   = one ("and" one)*             also &, &&
    one    = ("not" | "!") one | "(" either ")" | NAME | 'NAME' | "NAME"

A name stands for the samples that have the label, or are of the class. Samples without labels pass
no filter: it is not known whether X holds for them, and so neither whether `not X` does.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.samples import Samples

LONGEST = 2_000  # characters of a filter: a page may pass on what anyone types
DEEPEST = 50  # parentheses within parentheses: each is a call of a function
SHOWN = 12  # names that a message lists
TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*")"""
    r"""|(?P<sign>&&?|\|\|?|[!()])|(?P<word>[^\s'"&|!()]+)|(?P<fault>\S))"""
)

Kind = Literal["and", "or", "not", "(", ")", "name", "end"]
WORDS: dict[str, Kind] = {"and": "and", "or": "or", "not": "not"}
SIGNS: dict[str, Kind] = {
    **{"&": "and", "&&": "and", "|": "or", "||": "or", "!": "not"},
    **{"(": "(", ")": ")"},
}


@dataclass(frozen=True)
class Has:
    """The samples that have one label: a column of the targets."""

    column: int

    def holds(self, targets: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Where it holds, [N]."""
        return np.asarray(targets[:, self.column] == 1)


@dataclass(frozen=True)
class Not:
    """Those that an expression does not hold for."""

    part: "Expression"

    def holds(self, targets: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Where it holds, [N]."""
        return ~self.part.holds(targets)


@dataclass(frozen=True)
class Joined:
    """Those that all of some expressions hold for, or any."""

    word: Literal["and", "or"]
    parts: tuple["Expression", ...]

    def holds(self, targets: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Where it holds, [N]."""
        join = np.logical_and if self.word == "and" else np.logical_or
        found = self.parts[0].holds(targets)
        for part in self.parts[1:]:
            found = join(found, part.holds(targets))
        return found


Expression = Has | Not | Joined


@dataclass(frozen=True)
class Filter:
    """A filter that was read.

    Attributes:
        text: as it was given.
        expression: what it says.
        names: of the labels in it, each once, in order.
    """

    text: str
    expression: Expression
    names: list[str]

    def mask(self, samples: Samples) -> NDArray[np.bool_]:
        """Which samples pass, bool [N]; those without labels do not.

        Args:
            samples: with the names that the filter was read with.
        """
        return np.asarray(self.expression.holds(samples.targets) & samples.known)

    def counts(self, samples: Samples) -> str:
        """How many samples each label of the filter has, for messages."""
        columns = [samples.names.index(name) for name in self.names]
        have = [int((samples.targets[:, column] == 1).sum()) for column in columns]
        return ", ".join(f"{name} {n:,}" for name, n in zip(self.names, have, strict=True))


def parse(text: str, names: Sequence[str]) -> Filter:
    """Read a filter.

    Args:
        text: such as "Smiling and not (Male or 'a name with spaces')"; a quote within quotes is
            written twice. `and`, `or` and `not` may be capitals; a label of such a name is quoted.
        names: of the labels that there are.

    Raises:
        RetrievalError: it is no filter, with the position of the fault, or names no label.
    """
    return _Parser(text, names).filter()


@dataclass(frozen=True)
class _Token:
    kind: Kind
    text: str  # of a name, without its quotes
    at: int  # of its first character


class _Parser:
    """Reads a filter from left to right, a function a rule of the grammar."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self.text, self.columns = text, {name: i for i, name in enumerate(names)}
        if len(text) > LONGEST:
            raise RetrievalError(
                f"a filter of {len(text):,} characters; expected at most {LONGEST:,}; shorten it"
            )
        self.used: list[str] = []
        self.depth, self.next = 0, 0
        self.tokens = self._tokens()

    def filter(self) -> Filter:
        """The whole."""
        if self.tokens[0].kind == "end":
            raise self._fault(self.tokens[0], "it is empty", "a label, or no filter at all")
        expression = self._either()
        if (token := self._token).kind != "end":
            expected = "a '(' before it" if token.kind == ")" else "'and', 'or' or the end"
            raise self._fault(token, f"found {_shown(token)}", expected)
        return Filter(self.text, expression, list(dict.fromkeys(self.used)))

    def _tokens(self) -> list[_Token]:
        tokens: list[_Token] = []
        end = len(self.text.rstrip())
        at = 0
        while at < end and (found := TOKEN.match(self.text, at)) is not None:
            at = found.end()
            word = found[found.lastgroup or 0]
            start = at - len(word)
            match found.lastgroup:
                case "quoted":
                    name = word[1:-1].replace(word[0] * 2, word[0])
                    tokens.append(_Token("name", name, start))
                case "sign":
                    tokens.append(_Token(SIGNS[word], word, start))
                case "word":
                    tokens.append(_Token(WORDS.get(word.lower(), "name"), word, start))
                case _:
                    token = _Token("name", word, start)
                    raise self._fault(token, "this quote is not closed", f"another {word} after it")
        return [*tokens, _Token("end", "", end)]

    @property
    def _token(self) -> _Token:
        return self.tokens[self.next]

    def _either(self) -> Expression:
        return self._joined("or")

    def _joined(self, word: Literal["and", "or"]) -> Expression:
        """Parts with a word between them; `and` binds closer than `or`."""
        rule = self._one if word == "and" else lambda: self._joined("and")
        parts = [rule()]
        while self._token.kind == word:
            self.next += 1
            parts.append(rule())
        return parts[0] if len(parts) == 1 else Joined(word, tuple(parts))

    def _one(self) -> Expression:
        negated = False
        while self._token.kind == "not":
            negated, self.next = not negated, self.next + 1
        token = self._token
        self.next += 1
        if token.kind == "name":
            inner: Expression = Has(self._column(token))
        elif token.kind == "(":
            inner = self._inside(token)
        else:
            raise self._fault(
                token,
                f"found {_shown(token)}",
                "a label, 'not' or '('; a label of such a name is quoted",
            )
        return Not(inner) if negated else inner

    def _inside(self, opened: _Token) -> Expression:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self._fault(opened, f"more than {DEEPEST} parentheses are open", "fewer of them")
        inner = self._either()
        if (token := self._token).kind == "end":
            raise self._fault(opened, "this '(' is not closed", "a ')' after it")
        if token.kind != ")":
            raise self._fault(token, f"found {_shown(token)}", "'and', 'or' or ')'")
        self.depth, self.next = self.depth - 1, self.next + 1
        return inner

    def _column(self, token: _Token) -> int:
        """The column of a name."""
        if token.text not in self.columns:
            raise RetrievalError(self._unknown(token))
        self.used.append(token.text)
        return self.columns[token.text]

    def _unknown(self, token: _Token) -> str:
        names = list(self.columns)
        if not names:
            return f"no label is called '{token.text}': these samples have no labels; leave it out"
        lower: dict[str, str] = {name.lower(): name for name in reversed(names)}
        near = difflib.get_close_matches(token.text.lower(), lower, 1, 0.0)
        listed = ", ".join(names[:SHOWN])
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        return (
            f"no label is called '{token.text}' (character {token.at + 1} of the filter); did you "
            f"mean {quoted(lower[near[0]])}? expected one of {listed}{more}"
        )

    def _fault(self, token: _Token, found: str, expected: str) -> RetrievalError:
        """An error that points at a token."""
        line = re.sub(r"\s", " ", self.text)
        return RetrievalError(
            f"the filter cannot be read at character {token.at + 1}: {found}; expected "
            f"{expected}\n  {line}\n  {' ' * token.at}^"
        )


def quoted(name: str) -> str:
    """A name as a filter takes it: in quotes where it would be read as something else."""
    found = TOKEN.fullmatch(name)
    plain = found is not None and found.lastgroup == "word" and found["word"] == name
    return name if plain and name.lower() not in WORDS else "'" + name.replace("'", "''") + "'"


def _shown(token: _Token) -> str:
    return "the end" if token.kind == "end" else f"'{token.text}'"
