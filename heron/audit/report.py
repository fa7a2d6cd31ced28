"""Writes what an audit found: a page, its numbers as JSON, and tables of all that was judged."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from heron.audit.copies import other_labels, read_groups
from heron.audit.findings import (
    Findings,
    LabelFindings,
    copy_table,
    groups_of_copies,
    label_table,
    likely_class,
    look,
    outlier_table,
    pair_table,
    same_samples,
    split_of,
    worst_pairs,
)
from heron.audit.planting import Estimate
from heron.base.artefact import MAX_MANIFEST_BYTES, parse_json
from heron.base.atomic import atomic_write, new_folder
from heron.base.decisions import AUDIT, LISTED
from heron.base.errors import RetrievalError, ShardError, csv_of
from heron.base.workers import ALONE, Executor
from heron.report import pages
from heron.report.pages import ADDRESS, PageLinks, plain_json, png
from heron.retrieval.embeddings import Embeddings, Layer, choose_data
from heron.retrieval.pictures import SamplePictures
from heron.retrieval.samples import Samples

PAGE = Path(__file__).parent / "page"
MOST = 10_000  # labels in labels.csv, at most
FEWEST = 200  # labels in labels.csv, if there are as many
SHOWN = 24  # findings of a kind on the page
MEMBERS = 6  # of a group of copies that are shown
SIDE = 160  # of a picture, in pixels, at most


def audit(
    embeddings: Embeddings,
    out: Path,
    layer: Layer = "hidden",
    data: str | None = None,
    groups: Path | None = None,
    seed: int = 0,
    address: str = ADDRESS,
    overwrite: bool = False,
    executor: Executor = ALONE,
) -> dict[str, Any]:
    """Looks at embeddings, and writes a folder with a report; returns what audit.json holds.

    Labels, splits and pictures are those of the shards that the embeddings name, or of `data`.
    `groups` is a CSV file, key,group, of samples that belong together. Raises a RetrievalError if
    there are fewer than 50 samples, a file of groups leaves one out, or shards are others; and what
    reading the shards raises, if they were given as `data`. What `out` holds is refused or, with
    `overwrite`, moved aside.
    """
    with new_folder(out, overwrite, RetrievalError) as folder:
        links = PageLinks(address)
        shards, no_shards = open_pictures(embeddings, data)
        reader = shards.reader if shards else None
        numbered = None if groups is None else read_groups(groups, embeddings)
        found = look(embeddings, layer, reader, numbered, seed, executor)
        return write_report(found, folder, shards, no_shards, links)


def open_pictures(embeddings: Embeddings, data: str | None) -> tuple[SamplePictures | None, str]:
    """Opens the shards of the samples; None, and why, if they were not given and are not there."""
    manifest = embeddings.manifest
    try:
        shards = choose_data(data, manifest.data, embeddings.where)
        pictures = SamplePictures.open(shards, manifest.run, trusted=False)
        if not same_samples(embeddings, pictures.reader):
            raise RetrievalError(
                f"{pictures.reader.store} has other samples than {embeddings.where}; pass the "
                "shards that were embedded with --data"
            )
        return pictures, ""
    except (RetrievalError, ShardError, OSError) as fault:
        if data is not None:
            raise
        return None, f"pictures, splits, and labels that are not in the embeddings: {fault}"


def pictures_of(
    folder: Path, embeddings: str | None = None, data: str | None = None
) -> tuple[tuple[SamplePictures, Samples] | None, str]:
    """Opens the pictures of the samples of an audit; None, and why, if they are not there.

    `embeddings` and `data` are given by the user, by default those that audit.json names, which
    must not be behind a URL: it may be a stranger's.
    """
    try:
        with (folder / AUDIT).open("rb") as stream:
            numbers = parse_json(stream.read(MAX_MANIFEST_BYTES))
        named = embeddings or str(numbers["embeddings"])
        if embeddings is None and "://" in named:
            raise RetrievalError(f"{named} is behind a URL; to read it, pass it with --embeddings")
        source = Embeddings.open(named)
        pictures, why = open_pictures(source, data)
        return (None if pictures is None else (pictures, source.samples)), why
    except (RetrievalError, ShardError, OSError, ValueError, KeyError, TypeError) as fault:
        if embeddings or data:
            raise
        return None, f"there are no pictures: {fault}"


def write_report(
    found: Findings,
    folder: Path,
    pictures: SamplePictures | None,
    no_shards: str,
    links: PageLinks,
) -> dict[str, Any]:
    """Writes report.html, audit.json and the tables; returns what audit.json holds.

    labels.csv has the most suspicious labels, with an empty column `decision` to fill in:
    labels.parquet all that are known, pairs-A-B.parquet all samples with views A and B.
    """
    groups, shown = groups_of_copies(found), None
    numbers = _numbers(found, groups, list(filter(None, [*found.notes, no_shards])))
    if found.labels is not None:
        table = label_table(found, found.labels)
        with atomic_write(folder / "labels.parquet") as stream:
            table.drop(columns="decision").to_parquet(stream, index=False)
        count = min(MOST, max(FEWEST, found.labels.estimate.errors))
        _write_csv(folder / LISTED, table.head(count))
        shown = table.head(found.labels.estimate.errors) if found.labels.told else None
    for one in found.pairs:
        with atomic_write(folder / _pair_file(one.views)) as stream:
            pair_table(found, one).to_parquet(stream, index=False)
    _write_csv(folder / "copies.csv", copy_table(found, groups))
    _write_csv(folder / "outliers.csv", outlier_table(found))
    text = pages.render(
        "audit.html",
        PAGE,
        name=f"Audit of {Path(found.embeddings.where).resolve().name}",
        sentences=sentences(numbers),
        links=links,
        cards=_cards(found, shown, groups, pictures),
        **numbers,
    )
    with atomic_write(folder / AUDIT) as stream:
        stream.write(plain_json(numbers))
    with atomic_write(folder / "report.html") as stream:
        stream.write(text.encode())
    return numbers


def percent(share: float) -> str:
    """Formats a share in per cent, to two digits below 10."""
    return f"{100 * share:.{1 if share < 0.095 else 0}f} %"


def sentences(numbers: dict[str, Any]) -> list[str]:
    """Returns what was found, in a sentence each: labels, pairs, copies."""
    said = []
    if (labels := numbers["labels"]) is not None and not labels["told"]:
        said.append(
            "The features say no more of the labels than how frequent these are, so that no label "
            "can be judged; use another --encoder."
        )
    elif labels is not None:
        said.append(_estimated(labels["estimate"], labels["known"], "label", "labels.parquet"))
    for pairs in numbers["pairs"]:
        noun = f"pair of '{pairs['views'][0]}' and '{pairs['views'][1]}'"
        text = _estimated(pairs["estimate"], pairs["in_step"], noun, _pair_file(pairs["views"]))
        for shift in pairs["shifts"]:
            text += (
                f" From {shift['first']} to {shift['last']} ({shift['rows']:,} samples) "
                f"'{pairs['views'][1]}' is that of the sample {abs(shift['by']):,} "
                f"{'further on' if shift['by'] > 0 else 'before'}."
            )
        said.append(text)
    copies, splits = numbers["copies"], numbers["copies"]["leaks"] is not None
    text = "No sample is there twice."
    if copies["samples"]:
        text = (
            f"{copies['samples']:,} samples are copies, or nearly, of others, in "
            f"{copies['groups']:,} groups: "
            + (f"{copies['leaks']:,} of these are in several splits, and " if splits else "")
            + f"in {copies['differ']:,} labels differ."
        )
    return [*said, text]


def _estimated(estimate: Estimate, count: int, noun: str, file: str) -> str:
    plural = f"{noun}s" if noun == "label" else f"pairs{noun.removeprefix('pair')}"
    if not estimate.errors:
        return (
            f"None of {count:,} {plural} looks more suspicious than those of right ones do "
            f"({estimate.planted:,} faults were planted)."
        )
    return (
        f"At least {estimate.errors:,} of {count:,} {plural} look wrong "
        f"({percent(estimate.errors / count)}); the first {estimate.errors:,} of {file} would hold "
        f"{percent(estimate.recall)} of {estimate.planted:,} planted faults (95 % interval for "
        f"others: {percent(estimate.low)} to {percent(estimate.high)})."
    )


def _numbers(found: Findings, groups: list[Any], left_out: list[str]) -> dict[str, Any]:
    manifest, labels = found.embeddings.manifest, found.labels
    sizes = [len(rows) for rows in groups]
    return {
        "embeddings": found.embeddings.where,
        "checkpoint": manifest.checkpoint,
        "run": manifest.run,
        "data": manifest.data,
        "layer": found.layer,
        "samples": len(found.embeddings),
        "labels": None
        if labels is None
        else {
            "known": int(np.isfinite(labels.suspicion).sum()),
            "told": labels.told,
            "estimate": labels.estimate,
            "by_label": _by_label(found, labels),
        },
        "pairs": [
            {
                "views": one.views,
                "rows": len(one.rows),
                "in_step": len(one.rows) - sum(s.stop - s.start for s in one.pairs.shifts),
                "estimate": one.pairs.estimate,
                "shifts": [
                    {
                        "first": found.embeddings.samples.key(int(one.rows[shift.start])),
                        "last": found.embeddings.samples.key(int(one.rows[shift.stop - 1])),
                        "rows": shift.stop - shift.start,
                        "by": shift.by,
                    }
                    for shift in one.pairs.shifts
                ],
            }
            for one in found.pairs
        ],
        "copies": {
            "samples": sum(sizes),
            "groups": len(groups),
            "equal": int(found.copies.equal.sum()),
            "leaks": sum(len(set(found.split[rows].tolist())) > 1 for rows in groups)
            if found.splits
            else None,
            "differ": sum(other_labels(rows, found.y) for rows in groups),
        },
        "outliers": {view: len(rows) for view, (rows, _) in found.outliers.items()},
        "left_out": left_out,
    }


def _by_label(found: Findings, labels: LabelFindings) -> list[dict[str, Any]]:
    """Returns of each label how many of the suspicious are given, and how many lack it."""
    top, names = labels.ranking()[: labels.estimate.errors], found.embeddings.samples.names
    if labels.exclusive:
        given, lacking = labels.y[top].argmax(1), likely_class(labels, top)
    else:
        value, label = labels.y.reshape(-1)[top], top % len(names)
        given, lacking = label[value == 1], label[value == 0]
    counts = (np.bincount(numbers, minlength=len(names)).tolist() for numbers in (given, lacking))
    rows = zip(names, *counts, strict=True)
    return [{"label": name, "given": has, "lacking": lacks} for name, has, lacks in rows]


def _write_csv(path: Path, table: pd.DataFrame) -> None:
    with atomic_write(path) as stream:
        stream.write(csv_of(table.to_csv(index=False)).encode())


def _pair_file(views: Sequence[str]) -> str:
    return f"pairs-{views[0]}-{views[1]}.parquet"


def _cards(
    found: Findings,
    labels: pd.DataFrame | None,
    groups: Sequence[Any],
    pictures: SamplePictures | None,
) -> dict[str, list[dict[str, Any]]]:
    """Returns what the page shows of each kind: pictures, keys, and a line that says why.

    `labels` are the lines of the table to show, `groups` all groups of copies.
    """
    samples = found.embeddings.samples

    def card(rows: Sequence[int], text: str, views: Sequence[str] = ("",)) -> dict[str, Any]:
        images = list(_images(found, pictures, rows, views)) if pictures else []
        return {"keys": [samples.key(row) for row in rows], "pictures": images, "text": text}

    cards: dict[str, list[dict[str, Any]]] = {"labels": [], "pairs": [], "copies": []}
    if labels is not None:
        for line in labels.head(SHOWN).to_dict("records"):
            words = f"given {line['given']}, likely {line['likely']}"
            if line["label"]:
                words = f"{'has' if line['given'] else 'lacks'} {line['label']}"
            words += f" (suspicion {line['suspicion']:.3f})"
            cards["labels"].append(card([samples.find(line["key"])], words))
    for one in found.pairs:
        worst = worst_pairs(one)[: min(SHOWN, one.pairs.estimate.errors)]
        for place in worst.tolist():
            home = samples.key(int(one.rows[one.pairs.home[place]]))
            words = f"'{one.views[1]}' seems to be that of {home}"
            cards["pairs"].append(card([int(one.rows[place])], words, one.views))
    for members in groups[:SHOWN]:
        splits = dict.fromkeys(split_of(found, row) for row in members)
        words = f"{len(members)} samples" + (f" in {', '.join(splits)}" if found.splits else "")
        if other_labels(members, found.y):
            words += "; labels differ"
        cards["copies"].append(card(members[:MEMBERS].tolist(), words))
    cards["outliers"] = [
        card([int(row)], f"{view}: {score[row]:.1f} deviations", ("" if one else view,))
        for one in (len(found.outliers) == 1,)
        for view, (odd, score) in found.outliers.items()
        for row in odd[:SHOWN]
    ]
    return cards


def _images(
    found: Findings, pictures: SamplePictures, rows: Sequence[int], views: Sequence[str]
) -> Iterator[tuple[str, str]]:
    samples = found.embeddings.samples
    for row in rows:
        for view in views:
            if view and view not in pictures.views:
                continue
            try:
                picture = pictures.of(samples, row, view)
            except (RetrievalError, ShardError):  # the finding is told without it
                continue
            if picture is not None:
                picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
                yield samples.key(row), png(picture)
