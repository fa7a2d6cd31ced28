"""Several data sets as one: all their files, one manifest, and weighted statistics."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import numpy as np

from heron.base.artefact import MANIFEST
from heron.base.errors import ShardError
from heron.shards.cache import LocalFile
from heron.shards.manifest import (
    FOREIGN_SOURCE,
    SCHEMA_VERSION,
    BuiltFrom,
    Manifest,
    Shard,
    View,
    load_manifest,
)
from heron.shards.remote import Missing
from heron.shards.store import Store

MIXTURE = "mixture"  # `built_from.source` of its manifest


class MixedStore(Store):
    """Files of data sets with the same views and labels: `3.train-000000.tar` is from number 3."""

    def __init__(self, stores: Sequence[Store], weights: Sequence[float]) -> None:
        """Takes the data sets, and their weights in the statistics of the views."""
        self.stores, self.weights = list(stores), list(weights)

    def where(self, name: str = "") -> str:
        """Returns the path or address of a file, or of all data sets."""
        if not name or name == MANIFEST:
            return " and ".join(store.where(name) for store in self.stores)
        store, own_name = self.locate(name)
        return store.where(own_name)

    def locate(self, name: str) -> tuple[Store, str]:
        """Returns the store that holds a file, and the file's name in it."""
        number, _, own_name = name.partition(".")
        return self.stores[int(number)], own_name

    def read_bytes(self, name: str) -> bytes:
        """Returns the manifest of the mixture as JSON."""
        if name != MANIFEST:
            raise Missing(f"{self.where()}: the mixture has no file {name!r}")
        return json.dumps(self.manifest.model_dump(mode="json")).encode()

    def names(self) -> set[str] | None:
        """Returns the names of all files, or None where a data set cannot be listed."""
        all_names = set[str]()
        for number, store in enumerate(self.stores):
            if (names := store.names()) is None:
                return None
            all_names |= {f"{number}.{name}" for name in names}
        return all_names

    def local(self, name: str, size: int, sha256: str) -> LocalFile:
        """Returns a local file with the bytes of a tar or an index: see `Store`."""
        store, own_name = self.locate(name)
        return store.local(own_name, size, sha256)

    def local_copies(self, sizes: Mapping[str, int]) -> AbstractContextManager[Path]:
        """Raises ShardError, as the data sets must be verified one by one."""
        raise ShardError(f"{self.where()} is a mixture, not one data set; pass each alone")

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the mixture; ShardError where views or labels differ."""
        manifests = [load_manifest(store) for store in self.stores]
        first = manifests[0]
        for store, manifest in zip(self.stores, manifests, strict=True):
            expected = _comparable_parts(first)
            for part, actual in _comparable_parts(manifest).items():
                if actual != expected[part]:
                    raise ShardError(
                        f"{store}: its {part} are {actual}, but those of {self.stores[0]} are "
                        f"{expected[part]}; mix data sets of the same views and labels"
                    )
        splits = {split: list[Shard]() for manifest in manifests for split in manifest.splits}
        for number, manifest in enumerate(manifests):
            for split, shards in manifest.splits.items():
                splits[split] += [
                    shard.model_copy(update={"file": f"{number}.{shard.file}"}) for shard in shards
                ]
        options = {"weights": self.weights, "fingerprints": [m.fingerprint for m in manifests]}
        source = FOREIGN_SOURCE if first.foreign else MIXTURE
        return Manifest(
            dataset="-".join(dict.fromkeys(manifest.dataset for manifest in manifests)),
            schema_version=SCHEMA_VERSION,
            views=[self._mix(views) for views in zip(*(m.views for m in manifests), strict=True)],
            labels=first.labels,
            block_rows=first.block_rows,
            splits=splits,
            built_from=BuiltFrom(source=source, options=options, files=[], shard_rows=0),
        ).sealed()

    def _mix(self, views: Sequence[View]) -> View:
        """Returns the view with the mean and std of rows that are drawn by the weights."""
        if any(view.mean is None or view.std is None for view in views):
            return views[0].model_copy(update={"mean": None, "std": None})
        shares = np.array(self.weights) / sum(self.weights)
        means = np.array([view.mean for view in views])
        stds = np.array([view.std for view in views])
        mean = shares @ means
        std = np.sqrt(np.maximum(shares @ (stds**2 + (means - mean) ** 2), 0))
        return views[0].model_copy(update={"mean": mean.tolist(), "std": std.tolist()})


def _comparable_parts(manifest: Manifest) -> dict[str, object]:
    views = [
        f"{view.name} ({view.kind} {view.extent}, {member}{f':{view.field}' if view.field else ''}"
        f"{', of which rows may lack it' if view.missing else ''})"
        for view, member in zip(manifest.views, manifest.members, strict=False)
    ]
    unknown = ", single ones unknown" if manifest.labels.unknown else ""
    return {
        "views": ", ".join(views),
        "labels": f"{manifest.labels.kind} of {', '.join(manifest.labels.names)}{unknown}",
        "levels of labels": manifest.labels.levels,
        "rows": f"{manifest.block_rows or 1} a tar sample, members {', '.join(manifest.members)}",
    }
