"""The section of tars that are streamed without an index, by webdataset."""

import math
import re
from itertools import chain, islice
from typing import Annotated, Any, Literal

import braceexpand
from pydantic import AfterValidator, BeforeValidator

from heron.pipeline.config.sections import Natural, PathText, Section
from heron.shards.artefact import Count

MOST_TARS = 1 << 20
RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")


def expand(tars: list[str]) -> list[str]:
    """Returns addresses with their braces expanded: `a-{00..02}.tar` is three.

    Raises:
        ValueError: braces are not balanced, or there are too many addresses.
    """
    fault = f"more than {MOST_TARS:,} tars; expected {MOST_TARS:,} at most"
    for text in tars:  # the library makes a whole range, or all that nested braces stand for, first
        sizes = [abs(int(last) - int(first)) + 1 for first, last in RANGE.findall(text)]
        at_once = math.prod(sizes) if re.search(r"\{[^{}]*\{", text) else max(sizes, default=1)
        if at_once > MOST_TARS:
            raise ValueError(fault)
    every = chain.from_iterable(map(braceexpand.braceexpand, tars))
    if len(found := list(islice(every, MOST_TARS + 1))) > MOST_TARS:
        raise ValueError(fault)
    return found


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
