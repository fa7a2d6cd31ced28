"""The section for tars that webdataset streams without an index."""

import re
from itertools import chain
from string import ascii_lowercase, ascii_uppercase
from typing import Annotated, Literal

import braceexpand
from pydantic import AfterValidator, BeforeValidator

from heron.base.artefact import Count
from heron.base.sections import Natural, PathText, Section

MAX_TARS = 1 << 20
# Tokens of brace expansion: escapes, ranges of numbers or letters, and punctuation.
BRACES = re.compile(
    r"\\.|\{(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?\}"
    r"|\{([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d+))?\}|[{},]"
)
LETTERS = ascii_uppercase + ascii_lowercase


def expand(tars: list[str]) -> list[str]:
    """Returns addresses with their braces expanded: `a-{00..02}.tar` is three.

    Raises ValueError if braces are not balanced, or there are too many addresses.
    """
    if sum(map(_count, tars)) > MAX_TARS:  # counted first: the library expands whole ranges at once
        raise ValueError(f"more than {MAX_TARS:,} tars; the limit is {MAX_TARS:,}")
    try:
        return list(chain.from_iterable(map(braceexpand.braceexpand, tars)))
    except RecursionError:
        raise ValueError("the braces are nested too deeply; use fewer levels") from None


def _count(text: str) -> int:
    """Counts the addresses that the braces of a text stand for, up to MAX_TARS + 1."""
    enclosing = list[tuple[int, int]]()  # both counts outside of each open brace
    earlier, alternatives = 0, 1  # addresses before the last comma of a brace, and since
    for match in BRACES.finditer(text):
        if bounds := next(
            (groups for groups in (match.groups()[:3], match.groups()[3:]) if groups[0]), None
        ):
            first, last = (
                LETTERS.index(bound) if bound.isalpha() else int(bound) for bound in bounds[:2]
            )
            alternatives *= abs(last - first) // abs(int(bounds[2] or 1) or 1) + 1
        elif match[0] == "{":
            enclosing.append((earlier, alternatives))
            earlier, alternatives = 0, 1
        elif match[0] == "," and enclosing:
            earlier, alternatives = earlier + alternatives, 1
        elif match[0] == "}" and enclosing:
            inside = earlier + alternatives
            earlier, alternatives = enclosing.pop()
            alternatives *= inside
        alternatives = min(alternatives, MAX_TARS + 1)  # so that long texts give no huge numbers
    return alternatives


def _expandable(tars: list[str]) -> list[str]:
    expand(tars)
    return tars


Listed = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Tars = Annotated[list[PathText], Listed, AfterValidator(_expandable)]


class WebDataset(Section):
    """Tars that webdataset streams in an endless loop, without an index: see `docs/data.md`.

    The members of a sample are those of `data.path`, a data set on which the run is scored; or,
    without `data.path`, those declared by the keys from `image` on, as for `heron shards index`. An
    epoch is one of the stream that `data.epoch` names.

    Attributes:
        labelled: tars of samples with labels: a path, an address or `pipe:COMMAND`, with braces, or
            a list of these.
        unlabelled: tars of samples whose labels, if any, are ignored.
        samples_per_epoch: number of samples in an epoch.
        shuffle: size of the buffer, in samples, that the next sample is picked from.
        resampled: whether each loader process draws from all tars, with replacement; otherwise it
            goes through its own tars, in an order that changes from pass to pass.
        tar_bytes: maximal size of a tar in bytes.
        image: suffixes of the members that are pictures, a view each.
        vector: suffixes of the members that are vectors, a view each, and their widths.
        text: suffixes of the members that are texts, or `json:FIELD`, a view each.
        label: suffix of the member that is the label, or `json:FIELD`.
        label_kind: whether a sample has one class or several labels.
        classes: names of the classes or labels, or their number.
    """

    labelled: Tars = []
    unlabelled: Tars = []
    samples_per_epoch: Natural
    shuffle: Count = 1000
    resampled: bool = False
    tar_bytes: Natural = 1 << 32
    image: list[str] = []
    vector: dict[str, Natural] = {}
    text: list[str] = []
    label: str | None = None
    label_kind: Literal["multi_class", "multi_label"] = "multi_class"
    classes: list[str] | Natural = []

    @property
    def views(self) -> int:
        """The number of declared views."""
        return len(self.image) + len(self.vector) + len(self.text)

    @property
    def declares(self) -> bool:
        """Whether the members are declared here."""
        return bool(self.views or self.label or self.classes)

    @property
    def names(self) -> list[str]:
        """The names of the classes."""
        classes = self.classes
        return classes if isinstance(classes, list) else [str(number) for number in range(classes)]
