"""Shows the content of a folder of shards: a table, and for images a contact sheet."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps

from heron.base.atomic import make_parents, set_aside
from heron.base.errors import RESTORE, ShardError
from heron.shards.index import ShardIndex, array_at
from heron.shards.manifest import Manifest, Shard, load_manifest
from heron.shards.picture import decode
from heron.shards.store import Store, open_store

PICTURES = (".png", ".jpg", ".jpeg", ".webp")  # file types of a contact sheet
DRAWABLE_CHANNELS = (1, 3)  # numbers of channels that can be drawn: grey and RGB
MIN_CELL_PIXELS = 96  # minimum width of a picture on the contact sheet, in pixels


def show(folder: Path | str | Store) -> str:
    """Returns tables of the views, splits and label frequencies, and the provenance."""
    store = open_store(folder)
    return "\n".join(_lines(store, load_manifest(store)))


def _lines(store: Store, manifest: Manifest) -> Iterator[str]:
    size = sum(shard.bytes for shards in manifest.splits.values() for shard in shards)
    yield f"{manifest.dataset}: {size / 1e6:,.1f} MB in {store}"
    yield ""
    yield f"{'view':<14}{'kind':<10}{'shape':<18}{'dtype':<10}statistics"
    for view in manifest.views:
        details = ""
        if view.mean is not None and view.std is not None:
            details = f"mean {np.mean(view.mean):.3f}, std {np.mean(view.std):.3f} over columns"
        if view.kind == "graph":
            details = "{} nodes and {} edges at most, {} labels of nodes".format(*view.shape)
        yield f"{view.name:<14}{view.kind:<10}{view.extent:<18}{view.dtype:<10}{details}".rstrip()
    yield ""
    yield f"{'split':<14}{'rows':>10}{'shards':>8}{'MB':>10}"
    for split, shards in manifest.splits.items():
        megabytes = sum(shard.bytes for shard in shards) / 1e6
        yield f"{split:<14}{manifest.rows(split):>10,}{len(shards):>8}{megabytes:>10,.1f}"
    if manifest.partial:
        yield ""
        yield f"{'rows with':<40}{'rows':>10}"
        for names, count in rows_by_views(store, manifest).items():
            yield f"{names:<40}{count:>10,}"
    yield ""
    rates = label_rates(store, manifest)
    yield f"{manifest.labels.kind} labels ({len(rates)}) and the share of rows that have them"
    width = max((len(name) for name in rates), default=0) + 2
    columns = max(1, 100 // (width + 9))
    cells = [f"{name:<{width}}{100 * rate:5.1f} %  " for name, rate in rates.items()]
    for first in range(0, len(cells), columns):
        yield "".join(cells[first : first + columns]).rstrip()
    yield ""
    origin = manifest.built_from
    yield manifest.fingerprint
    yield f"built from {origin.source}, seed {manifest.seed}"
    for name, value in origin.options.items():
        yield f"  {name}: {value}"
    for file in origin.files:
        yield f"  {file.name}: {file.bytes:,} bytes, sha256 {file.sha256[:12]}…"


def label_rates(store: Store, manifest: Manifest) -> dict[str, float]:
    """Returns the share of each label, or finest class, among the rows where it is known."""
    names = manifest.labels.names
    counts, rows = np.zeros(len(names)), np.zeros(len(names))
    for shards in manifest.splits.values():
        for shard in shards:
            labels = read_index(store, shard).labels
            labels = labels[manifest.labels.is_labelled(labels)]
            is_known = labels != manifest.labels.unlabelled_value
            rows += is_known.sum(0) if manifest.labels.unknown else len(labels)
            if labels.dtype == np.uint8:
                counts += (labels * is_known).sum(0)
            else:
                finest = labels if labels.ndim == 1 else labels[:, -1]
                counts += np.bincount(finest, minlength=len(names))
    return dict(zip(names, (counts / rows.clip(1)).tolist(), strict=True))


def rows_by_views(store: Store, manifest: Manifest) -> dict[str, int]:
    """Returns the number of rows by the views they have (`image + text`), largest first."""
    presence = [
        present
        for shards in manifest.splits.values()
        for shard in shards
        if (present := read_index(store, shard).present) is not None
    ]
    return count_views(np.concatenate(presence) > 0, [view.name for view in manifest.views])


def count_views(present: NDArray[np.bool_], names: Sequence[str]) -> dict[str, int]:
    """Returns the number of rows of `present` [rows, views] by views, largest first."""
    patterns, counts = np.unique(present, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable").tolist()
    titles = [" + ".join(n for n, on in zip(names, row, strict=True) if on) for row in patterns]
    return {titles[i] or "none": int(counts[i]) for i in order}


def read_index(store: Store, shard: Shard) -> ShardIndex:
    """Returns the index of a shard; ShardError where it is missing or damaged."""
    with store.local(shard.index_file, shard.index_bytes, shard.index_sha256) as file:
        return ShardIndex.read(file.path)


def contact_sheet(
    folder: Path | str | Store,
    path: Path | str,
    split: str | None = None,
    count: int = 48,
    captions: bool = False,
) -> None:
    """Draws the first pictures of a split (by default the first) on one sheet."""
    store = open_store(folder)
    path = Path(path)
    if path.suffix.lower() not in PICTURES:
        raise ShardError(
            f"{path}: a contact sheet must be one of {', '.join(PICTURES)}, not "
            f"{path.suffix or 'a file with no suffix'}; choose another name for --sheet"
        )
    manifest = load_manifest(store)
    view = next(
        (v for v in manifest.views if v.kind == "image" and v.shape[2] in DRAWABLE_CHANNELS), None
    )
    if view is None:
        raise ShardError(
            f"{store}: no view of images in 1 or 3 channels; a contact sheet needs pictures: "
            "run without --sheet"
        )
    split = split or next(iter(manifest.splits))
    manifest.rows(split)  # raises an error that lists the splits if there is no such split
    pictures = list(_pictures(store, manifest, split, count, manifest.views.index(view)))
    if not pictures:
        raise ShardError(
            f"{store}: a contact sheet of {count} pictures of split {split!r} would be empty; use "
            "--count 1 or more"
        )
    cell = max(MIN_CELL_PIXELS, max(image.width for _, image in pictures))
    caption_height = 14 if captions else 0
    columns = min(12, max(1, round((len(pictures) * 4 / 3) ** 0.5)))
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * cell, rows * (cell + caption_height)), "white")
    pen = ImageDraw.Draw(sheet)
    for n, (key, image) in enumerate(pictures):
        x, y = n % columns * cell, n // columns * (cell + caption_height)
        fitted = ImageOps.contain(image, (cell, cell))
        sheet.paste(fitted, (x + (cell - fitted.width) // 2, y))
        if captions:
            pen.text((x + 3, y + cell + 1), key, fill="black")
    save_sheet(sheet, path)


def save_sheet(sheet: Image.Image, path: Path) -> None:
    """Writes a picture; one of the same name is moved aside, as it may be anybody's."""
    make_parents(path, ShardError, "--sheet")
    if path.is_file():  # a line of its own stream: the answer on the other one may be JSON
        print(f"the former {path} is now {set_aside(path)}", file=sys.stderr)
    sheet.save(path)


def _pictures(
    store: Store, manifest: Manifest, split: str, count: int, column: int
) -> Iterator[tuple[str, Image.Image]]:
    for shard in manifest.splits[split]:
        index = read_index(store, shard)
        with store.local(shard.file, shard.bytes, shard.sha256) as file:
            data = np.memmap(file.path, np.uint8, "r")
            starts, lengths = index.offsets[:, column].tolist(), index.lengths[:, column].tolist()
            for key, start, length in zip(index.keys.tolist(), starts, lengths, strict=True):
                if count <= 0:
                    return
                if not length:
                    continue  # the row lacks its picture
                payload = data[start : start + length].tobytes()
                if manifest.block_rows is None:
                    try:
                        pictures = [(key, Image.fromarray(decode(payload)))]
                    except ValueError as fault:
                        raise ShardError(f"{shard.file} sample {key} {fault}; {RESTORE}") from None
                else:
                    pictures = _decode_block(key, payload, shard.file)[:count]
                count -= len(pictures)
                yield from pictures


def _decode_block(key: str, payload: bytes, file: str) -> list[tuple[str, Image.Image]]:
    """Returns the pictures of a block [rows, height, width, channels], by their keys."""
    where = f"{file} sample {key}"
    block = array_at(np.frombuffer(payload, np.uint8), 0, len(payload), where)
    if block.shape[-1] == 1:
        block = block[..., 0]  # Pillow has no channel axis for grey
    return [(f"{key}/{row}", Image.fromarray(x).convert("RGB")) for row, x in enumerate(block)]
