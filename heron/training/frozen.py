"""Embeds rows by frozen encoders once, and keeps the features in the cache for this and later runs.

Blocks of rows do not depend on the number of processes. Each part of the rows is embedded by the
process that locks it first, of this run or of another one at the same time.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heron.base.atomic import POLL_S, atomic_write, cache_folder, locked, save_json
from heron.base.errors import AGAIN, DiskFull, InUse, Stopped
from heron.base.terminal import Bar, print_lines
from heron.data.batches import Batch
from heron.data.random_keys import rng_keys
from heron.data.rows import Rows
from heron.data.streams import Streams
from heron.data.views import Embedded, Views
from heron.distributed.collectives import on_all, rank, world_size
from heron.distributed.watchdog import Watchdog
from heron.experiment.config import Config
from heron.models.heterogeneous import AUTOCAST, Heterogeneous

FORMAT = 2  # of what is kept; a change of it leaves older features aside
BLOCK = 64  # rows that are embedded at a time
LOST = "lost.json"  # ends the name of a file of rows that could not be read, and the reasons


@dataclass
class FrozenEncoders:
    """The frozen encoders of a run before its first step.

    `model` has its pretrained weights, whole; `stop` says whether a signal came; `shown` whether
    this process says how far it is.
    """

    config: Config
    streams: Streams
    model: Heterogeneous
    device: torch.device
    watchdog: Watchdog
    stop: Callable[[], bool]
    shown: bool
    _kept: dict[str, Embedded] = field(default_factory=dict)  # by the name of the folder

    def embed(self) -> tuple[Streams, dict[int, Embedded]]:
        """Embeds what is not kept yet; every process calls it.

        Returns the streams, which then read features, and the features of scored rows by view.

        Raises:
            DiskFull: the features do not fit on the disk of the cache.
            Stopped: a signal came; what is embedded stays.
        """
        config, classifies = self.config, self.model.classifier is not None
        streams = self.streams.labelled, self.streams.unlabelled
        drawn = self.streams.roles.union([s.name for s in streams if s is not None]).all_rows
        probe, scored = config.evaluate.probe, ["test"] if config.evaluate.test else []
        scored += ["validation"] if config.data.protocol.validation else []
        if probe == "always" or (probe == "auto" and not classifies) or config.evaluate.knn:
            scored += ["labelled"]
        tested = self.streams.roles.union(scored).all_rows

        def work() -> tuple[list[Embedded], dict[int, Embedded]]:
            kept = [self._keep(view, drawn, True) for view in config.frozen_views]
            tested_views = [v for v in config.frozen_views if v < self.model.classified]
            return kept, {view: self._keep(view, tested, False) for view in tested_views}

        with self.watchdog.busy():
            kept, plain = on_all(work)
        folders = [embedded.folder for embedded in kept]
        placed = [replace(x, place=folders[:n].count(x.folder)) for n, x in enumerate(kept)]
        embedded = dict(zip(config.frozen_views, placed, strict=True))
        return replace(self.streams, embedded=embedded), plain

    def _keep(self, view: int, rows: Rows, drawn: bool) -> Embedded:
        """Embeds the parts that are missing, and says what is kept, where, and how large."""
        options = self.config.data.views[view]
        if not drawn:
            options = options.model_copy(update={"augment": []})
        encoder, augments = self.model.encoders[view % len(self.model.encoders)], options.augment
        name = self._fingerprint(view, options.model_dump(mode="json"), encoder, rows)
        if name in self._kept:
            return self._kept[name]
        kept = self._kept[name] = Embedded(
            cache_folder() / f"frozen-{name[:16]}",
            rows,
            self.config.train.frozen_views if augments else 1,
            self.model.widths[view],
            "float64" if self.config.train.precision == "fp64" else "float32",
        )
        kept.folder.mkdir(parents=True, exist_ok=True)
        data = self.config.data.model_copy(update={"views": [options]})
        views, seed = Views(self.streams.reader, data, self.device), int(name[:15], 16)

        def features(block: Rows, variants: Sequence[int]) -> list[Tensor]:
            if self.stop():
                raise Stopped(f"a signal came; what is embedded so far is kept in {kept.folder}")
            read = self.streams.reader.read(options.stored, block)
            stored, numbers = {options.stored: torch.from_numpy(read)}, torch.from_numpy(block)
            made = []
            for variant in variants:
                keys = torch.from_numpy(rng_keys(seed, np.array([variant]), block))
                batch = Batch(stored, torch.empty(0, 0), numbers, keys, [len(block)])
                batch = batch.to(self.device)
                x = views(batch, train=bool(augments))[0]
                made.append(self._encode(encoder, x, batch.rng_keys))
            return made

        def keep_part(part: int) -> None:
            with locked(kept.file(part, 0), kept.folder / f".{part:06d}.lock"):
                missing, own = kept.missing(part), kept.parts[part]
                blocks = [own[start : start + BLOCK] for start in range(0, len(own), BLOCK)]
                found = [features(block, missing) for block in blocks if missing]
                faults = self.streams.reader.lost
                if lost := {row: faults[row] for row in own.tolist() if row in faults}:
                    save_json(kept.folder / f"{part:06d}-{LOST}", lost)
                for variant, chunks in zip(missing, zip(*found, strict=True), strict=True):
                    with atomic_write(kept.file(part, variant)) as stream:
                        np.save(stream, torch.cat(chunks).numpy())

        by = getattr(encoder.options, "name", type(encoder.network).__name__)
        what = f"{kept.variants} augmented views of " if augments else ""
        self._keep_all(kept, f"{what}{len(rows):,} rows of '{options.stored}'", by, keep_part)
        return kept

    def _keep_all(
        self, kept: Embedded, what: str, by: str, keep_part: Callable[[int], None]
    ) -> None:
        """Calls `keep_part` for each part that is missing, until other processes' are there."""
        from rich.filesize import decimal

        start, todo = time.monotonic(), [p for p in range(len(kept.parts)) if kept.missing(p)]
        total, where = sum(len(kept.parts[p]) for p in todo), f"{decimal(kept.bytes)} in"
        if todo and self.shown:
            needed, free = kept.bytes * total // len(kept.rows), shutil.disk_usage(kept.folder).free
            if needed > free:
                raise DiskFull(
                    f"{kept.folder}: the features of {what} need {decimal(needed)}, and "
                    f"{decimal(free)} are free; free some space, set HERON_CACHE to a folder on "
                    f"another disk, or lower train.frozen_views, and {AGAIN}"
                )
            print_lines(f"embedding {what} once, by the frozen {by}: {where} {kept.folder}")
        first = len(todo) * rank() // world_size()  # each process begins elsewhere
        todo = [*todo[first:], *todo[:first]]
        with Bar(total, "row", name="embedding", hidden=not self.shown) as bar:
            while todo:
                left = []
                for part in todo:
                    try:
                        if kept.missing(part):
                            keep_part(part)
                        bar.update(len(kept.parts[part]))
                    except InUse:  # another process embeds it
                        left.append(part)
                todo = left
                time.sleep(POLL_S if todo else 0)
        for path in kept.folder.glob(f"*-{LOST}"):
            lost = json.loads(path.read_text())
            self.streams.reader.lost |= {int(row): reason for row, reason in lost.items()}
        if self.shown:
            seconds = f"by {by} in {time.monotonic() - start:,.0f} s; later runs read them"
            how = f"embedded once {seconds}" if total else "are kept from an earlier run"
            print_lines(f"{what} {how}: {where} {kept.folder}")

    def _fingerprint(self, view: int, options: Any, encoder: nn.Module, rows: Rows) -> str:
        """Returns the sha256 of all that features depend on, but the number of variants."""
        config, reader, stored = self.config, self.streams.reader, options["stored"]
        section = config.model.encoder_of(config.data.view_names[view])[1]
        facts = {
            "format": FORMAT,
            "encoder": section.model_dump(mode="json", exclude={"weights"}),
            "precision": config.train.precision,
            "view": {**options, "name": None, "tokenizer": reader.tokenizers.get(stored)},
            "decoded": reader.decoders[stored].shape,
            "data": reader.manifest.fingerprint,
            "seed": config.seed if options["augment"] else None,
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        digest.update(rows.tobytes())
        if reader.may_lack_views:
            digest.update(reader.present(rows, [stored]).tobytes())
        for name, x in sorted(encoder.state_dict().items()):
            digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    @torch.no_grad()
    def _encode(self, encoder: nn.Module, x: Tensor, keys: Tensor) -> Tensor:
        """Returns features in host memory; not compiled, as in evaluation."""
        precision = self.config.train.precision
        half, double = AUTOCAST.get(precision), precision == "fp64"
        x = x.double() if double and x.is_floating_point() else x
        with torch.autocast(x.device.type, half, half is not None, cache_enabled=False):
            y: Tensor = encoder.forward(x, keys)
        return (y if double else y.float()).cpu()
