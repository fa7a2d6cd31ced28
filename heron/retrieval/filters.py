"""Filters by label: parses "Smiling and not Male" and evaluates it as a mask over samples.

    filter = term ("or" term)*            also |, ||
    term   = factor ("and" factor)*       also &, &&
    factor = ("not" | "!") factor | "(" filter ")" | NAME | 'NAME' | "NAME"

A name stands for the samples that have the label or are of the class. Samples without labels pass
no filter, as neither X nor `not X` is known of them. Python's own parser reads the filter, with the
number of a label in the place of its name.
"""

import ast
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import RetrievalError
from heron.retrieval.samples import Samples

MAX_LENGTH = 2_000  # characters of a filter, which may be anyone's input to a page
MAX_PARENTHESES = 50
MAX_LISTED = 12  # names that a message lists
TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*")"""
    r"""|(?P<sign>&&?|\|\|?|[!()])|(?P<word>[^\s'"&|!()]+)|(?P<quote>\S))"""
)
WORDS = {"and": "and", "or": "or", "not": "not"}
SIGNS = {"&": "and", "&&": "and", "|": "or", "||": "or", "!": "not", "(": "(", ")": ")"}


@dataclass(frozen=True)
class Filter:
    """A parsed filter: `and`, `or` and `not` of the numbers of labels."""

    tree: ast.expr

    def mask(self, samples: Samples) -> NDArray[np.bool_]:
        """Returns which samples pass, bool [N]; samples without labels do not."""
        return _passes(self.tree, samples.targets) & samples.known

    def counts(self, samples: Samples) -> str:
        """Says how many samples each label of the filter has, for messages."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Constant)]
        columns = dict.fromkeys(int(str(node.value)) for node in nodes)
        counts = {samples.names[i]: int((samples.targets[:, i] == 1).sum()) for i in columns}
        return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _passes(node: ast.expr, targets: NDArray[np.uint8]) -> NDArray[np.bool_]:
    if isinstance(node, ast.BoolOp):
        combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return np.asarray(combine.reduce([_passes(part, targets) for part in node.values]))
    if isinstance(node, ast.UnaryOp):
        return ~_passes(node.operand, targets)
    assert isinstance(node, ast.Constant)
    return np.asarray(targets[:, int(str(node.value))] == 1)


def parse_filter(text: str, names: Sequence[str]) -> Filter:
    """Parses a filter such as "Smiling and not (Male or 'a name with spaces')".

    A quote within quotes is doubled; a label called `and`, `or` or `not` has to be quoted. Raises a
    RetrievalError with the position of the fault, or if a name is no label.
    """
    if len(text) > MAX_LENGTH:
        raise RetrievalError(
            f"the filter has {len(text):,} characters, and the limit is {MAX_LENGTH:,}; shorten it"
        )
    words, places = list[str](), list[int]()  # of Python, and their places in the text
    for match in TOKEN.finditer(text):
        token = match[match.lastgroup or 0]
        place = match.end() - len(token)
        if match.lastgroup == "quote":
            raise _fault(text, place, f"this quote is not closed; add another {token}")
        if match.lastgroup == "quoted":
            word = _column(token[1:-1].replace(token[0] * 2, token[0]), place, names)
        else:
            word = SIGNS.get(token) or WORDS.get(token.lower()) or _column(token, place, names)
        if words[-1:] == [word] == ["not"]:  # twice is not at all, however often it is written
            del words[-1], places[-1]
        else:
            words.append(word)
            places.append(place)
    if words.count("(") > MAX_PARENTHESES:
        raise RetrievalError(f"the filter has more than {MAX_PARENTHESES} parentheses; use fewer")
    python = " ".join(words)
    try:
        tree = ast.parse(python, mode="eval").body
        others = (n for n in ast.walk(tree) if isinstance(n, ast.Call | ast.Tuple))  # 1 (2), ()
        offset = next((node.col_offset for node in others), None)
    except SyntaxError as error:
        offset = (error.offset or len(python) + 2) - 1  # 0: at the end
    if offset is None:
        return Filter(tree)
    starts = accumulate((len(word) + 1 for word in words), initial=0)
    places.append(len(text.rstrip()))
    raise _fault(
        text,
        places[sum(start <= offset for start in starts) - 1],
        "labels must be joined by 'and' or 'or', 'not' must be before a label, and every "
        "parenthesis closed; put a label with spaces or of these words in quotes",
    )


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


def _column(name: str, place: int, names: Sequence[str]) -> str:
    """Returns the number of a label, as it is written."""
    if name in names:
        return str(names.index(name))
    if not names:
        raise RetrievalError(
            f"no label named '{name}': these samples have no labels; remove the filter"
        )
    by_lowercase = {known.lower(): known for known in reversed(names)}
    closest = difflib.get_close_matches(name.lower(), by_lowercase, 1, 0.0)
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    raise RetrievalError(
        f"no label named '{name}' (character {place + 1} of the filter). Did you "
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
