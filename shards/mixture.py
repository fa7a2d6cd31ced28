"""Several data sets as one: the files of all, one manifest, and statistics by their weights."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import numpy as np

from heron.shards.artefact import MANIFEST
from heron.shards.cache import LocalFile
from heron.shards.errors import ShardError
from heron.shards.manifest import (
    FOREIGN,
    SCHEMA_VERSION,
    BuiltFrom,
    Manifest,
    Shard,
    View,
    load_manifest,
)
from heron.shards.remote import Missing
from heron.shards.store import Store

MIXTURE = "mixture"  # the source of such a manifest


class MixedStore(Store):
    """The files of several data sets: `3.train-000000.tar` is one of the data set of number 3.

    Their views and labels must be the same.
    """

    def __init__(self, stores: Sequence[Store], weights: Sequence[float]) -> None:
        """Takes the data sets, and how much each weighs in the statistics of the views."""
        self.stores, self.weights = list(stores), list(weights)

    def where(self, name: str = "") -> str:
        """Returns the path or address of a file, or those of all data sets."""
        if not name or name == MANIFEST:
            return " and ".join(store.where(name) for store in self.stores)
        store, own = self.part(name)
        return store.where(own)

    def part(self, name: str) -> tuple[Store, str]:
        """Returns the store that has a file, and the file's name there."""
        number, _, own = name.partition(".")
        return self.stores[int(number)], own

    def read_bytes(self, name: str) -> bytes:
        """Returns the manifest of all."""
        if name != MANIFEST:
            raise Missing(f"{self.where()}: no file {name!r} of a mixture")
        return json.dumps(self.manifest.model_dump(mode="json")).encode()

    def names(self) -> set[str] | None:
        """Returns the names of all files, or None where some cannot be listed."""
        found = set[str]()
        for number, store in enumerate(self.stores):
            if (names := store.names()) is None:
                return None
            found |= {f"{number}.{name}" for name in names}
        return found

    def local(self, name: str, size: int | None, sha256: str) -> LocalFile:
        """Returns a local file with the bytes of a tar or an index: see `Store`."""
        store, own = self.part(name)
        return store.local(own, size, sha256)

    def copies(self, sizes: Mapping[str, int | None]) -> AbstractContextManager[Path]:
        """Refuses: the data sets are verified one by one."""
        raise ShardError(f"{self.where()}: a mixture; expected one data set; give each alone")

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of all; ShardError names the data sets whose views or labels differ."""
        manifests = [load_manifest(store) for store in self.stores]
        first = manifests[0]
        for store, other in zip(self.stores, manifests, strict=True):
            expected = _described(first)
            for what, found in _described(other).items():
                if found != expected[what]:
                    raise ShardError(
                        f"{store}: its {what} are {found}; expected {expected[what]}, as in "
                        f"{self.stores[0]}; mix data sets of the same views and labels"
                    )
        splits = {split: list[Shard]() for one in manifests for split in one.splits}
        for number, one in enumerate(manifests):
            for split, shards in one.splits.items():
                splits[split] += [
                    shard.model_copy(update={"file": f"{number}.{shard.file}"}) for shard in shards
                ]
        options = {"weights": self.weights, "fingerprints": [m.fingerprint for m in manifests]}
        source = FOREIGN if first.foreign else MIXTURE
        return Manifest(
            dataset="-".join(dict.fromkeys(one.dataset for one in manifests)),
            schema_version=SCHEMA_VERSION,
            views=[self._view(views) for views in zip(*(m.views for m in manifests), strict=True)],
            labels=first.labels,
            block_rows=first.block_rows,
            splits=splits,
            built_from=BuiltFrom(source=source, options=options, files=[], shard_rows=0),
        ).sealed()

    def _view(self, views: Sequence[View]) -> View:
        """Returns a view with the moments of a row that is drawn by the weights."""
        if any(view.mean is None or view.std is None for view in views):
            return views[0].model_copy(update={"mean": None, "std": None})
        shares = np.array(self.weights) / sum(self.weights)
        means, stds = np.array([v.mean for v in views]), np.array([v.std for v in views])
        mean = shares @ means
        std = np.sqrt(np.maximum(shares @ (stds**2 + (means - mean) ** 2), 0))
        return views[0].model_copy(update={"mean": mean.tolist(), "std": std.tolist()})


def _described(one: Manifest) -> dict[str, object]:
    """Returns what of a manifest must be the same in all that are mixed."""
    views = [
        f"{view.name} ({view.kind} {view.extent}, {member}{f':{view.field}' if view.field else ''}"
        f"{', of which rows may lack it' if view.missing else ''})"
        for view, member in zip(one.views, one.members, strict=False)
    ]
    unknown = ", single ones unknown" if one.labels.unknown else ""
    return {
        "views": ", ".join(views),
        "labels": f"{one.labels.kind} of {', '.join(one.labels.names)}{unknown}",
        "levels of labels": one.labels.levels,
        "rows": f"{one.block_rows or 1} a tar sample, members {', '.join(one.members)}",
    }
