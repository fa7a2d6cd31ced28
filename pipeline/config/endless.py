"""The section of tars that are streamed without an index, by webdataset."""

import re
from itertools import chain
from string import ascii_lowercase, ascii_uppercase
from typing import Annotated, Any, Literal

import braceexpand
from pydantic import AfterValidator, BeforeValidator

from heron.pipeline.config.sections import Natural, PathText, Section
from heron.shards.artefact import Count

MOST_TARS = 1 << 20
# What counts in braces: what is escaped, ranges of numbers and of letters, and marks.
BRACES = re.compile(
    r"\\.|\{(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?\}"
    r"|\{([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d+))?\}|[{},]"
)
LETTERS = ascii_uppercase + ascii_lowercase


def expand(tars: list[str]) -> list[str]:
    """Returns addresses with their braces expanded: `a-{00..02}.tar` is three.

    Raises:
        ValueError: braces are not balanced, or there are too many addresses.
    """
    if sum(map(_count, tars)) > MOST_TARS:  # counted first: the library makes whole ranges at once
        raise ValueError(f"more than {MOST_TARS:,} tars; expected {MOST_TARS:,} at most")
    try:
        return list(chain.from_iterable(map(braceexpand.braceexpand, tars)))
    except RecursionError:
        raise ValueError("braces are nested too deeply; expected some levels of them") from None


def _count(text: str) -> int:
    """Returns how many addresses the braces of a text stand for, or that they are too many."""
    outside = list[tuple[int, int]]()  # of each brace that is open, the two numbers before it
    before, here = 0, 1  # addresses up to the last comma of a brace, and since
    for found in BRACES.finditer(text):
        if range_ := next((n for n in (found.groups()[:3], found.groups()[3:]) if n[0]), None):
            first, last = (LETTERS.index(x) if x.isalpha() else int(x) for x in range_[:2])
            here *= abs(last - first) // abs(int(range_[2] or 1) or 1) + 1
        elif found[0] == "{":
            outside.append((before, here))
            before, here = 0, 1
        elif found[0] == "," and outside:
            before, here = before + here, 1
        elif found[0] == "}" and outside:
            inside = before + here
            before, here = outside.pop()
            here *= inside
        here = min(here, MOST_TARS + 1)  # or a long text would make a number of as many digits
    return here


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _expandable(tars: list[str]) -> list[str]:
    expand(tars)
    return tars


Tars = Annotated[list[PathText], BeforeValidator(_listed), AfterValidator(_expandable)]


class WebDataset(Section):
    """Tars that are read as they come, again and again, by webdataset: `docs/data.md` has a guide.

    What lies in a sample is what `data.path` says, a data set with the same members, on which the
    run is scored; or, without `data.path`, what the keys from `image` on say, as of `heron shards
    index`. An epoch is of the stream that `data.epoch` names.

    Attributes:
        labelled: tars of samples with labels: a path, an address or `pipe:COMMAND`, with braces, or
            a list of them.
        unlabelled: tars of samples whose labels, if any, are not looked at.
        samples_per_epoch: samples of an epoch.
        shuffle: samples in the buffer that the next one is drawn from.
        resampled: whether each reading process draws from all tars, with replacement; otherwise it
            goes through tars of its own, in an order that changes from pass to pass.
        tar_bytes: the most that a tar may have.
        image: suffixes of the members that are pictures, a view each.
        vector: suffixes of the members that are vectors, a view each, and their widths.
        text: suffixes of the members that are texts, or `json:FIELD`, a view each.
        label: suffix of the member that is the label, or `json:FIELD`.
        label_kind: whether a sample has one class or several labels.
        classes: names of the classes or labels, or how many there are.
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
        """How many views are declared."""
        return len(self.image) + len(self.vector) + len(self.text)

    @property
    def declares(self) -> bool:
        """Whether the members are declared here."""
        return bool(self.views or self.label or self.classes)

    @property
    def names(self) -> list[str]:
        """The names of the classes."""
        given = self.classes
        return given if isinstance(given, list) else [str(number) for number in range(given)]
