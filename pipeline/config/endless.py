"""The section of tars that are streamed without an index, by webdataset."""

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Literal

import braceexpand
from pydantic import AfterValidator, BeforeValidator

from heron.pipeline.config.sections import Natural, PathText, Section
from heron.shards.artefact import Count

MOST_TARS = 1 << 20


def expand(tars: list[str]) -> list[str]:
    """Returns addresses with their braces expanded: `a-{00..02}.tar` is three.

    Raises:
        ValueError: braces are not balanced, or there are too many addresses.
    """

    def every() -> Iterator[str]:
        for text in tars:
            yield from braceexpand.braceexpand(text)

    if len(found := list(islice(every(), MOST_TARS + 1))) > MOST_TARS:
        raise ValueError(f"more than {MOST_TARS:,} tars; expected {MOST_TARS:,} at most")
    return found


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _expandable(tars: list[str]) -> list[str]:
    expand(tars)
    return tars


Tars = Annotated[list[PathText], BeforeValidator(_listed), AfterValidator(_expandable)]


class WebDataset(Section):
    """Tars that are read as they come, again and again, by webdataset: `docs/data.md` has a guide.

    `labelled` and `unlabelled` are tars of samples with and without labels that are looked at: a
    path, an address or `pipe:COMMAND`, with braces, or a list of them. An epoch is
    `samples_per_epoch` samples of the stream that `data.epoch` names; `shuffle` is how many samples
    lie in the buffer that the next one is drawn from. Each reading process goes through tars of its
    own in an order that changes from pass to pass; with `resampled` it draws from all of them, with
    replacement. `tar_bytes` is the most that a tar may have.

    What lies in a sample is what `data.path` says, a data set with the same members, on which the
    run is scored; or, without `data.path`, `image`, `vector` (its width by its suffix) and `label`,
    as of `heron shards index`, and `classes`: their names, or how many there are.
    """

    labelled: Tars = []
    unlabelled: Tars = []
    samples_per_epoch: Natural
    shuffle: Count = 1000
    resampled: bool = False
    tar_bytes: Natural = 1 << 32
    image: list[str] = []
    vector: dict[str, Natural] = {}
    label: str | None = None
    label_kind: Literal["multi_class", "multi_label"] = "multi_class"
    classes: list[str] | Natural = []

    @property
    def views(self) -> int:
        """How many views are declared."""
        return len(self.image) + len(self.vector)

    @property
    def declares(self) -> bool:
        """Whether the members are declared here."""
        return bool(self.views or self.label or self.classes)

    @property
    def names(self) -> list[str]:
        """The names of the classes."""
        given = self.classes
        return given if isinstance(given, list) else [str(number) for number in range(given)]
