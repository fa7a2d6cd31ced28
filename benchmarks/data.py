"""Rows per second of our loader, beside bare loops and the loaders of other packages.

    python -m benchmarks.data
    python -m benchmarks.data --celeba img_align_celeba.zip --pictures 20000
    python -m benchmarks.data --memory

Everything is measured in this run: every loader has a process of its own, on one thread, and they
take turns. What counts are the ratios, medians over rounds. Ratios by processor time, which
includes that of workers, hardly suffer from other load. All files are in the page cache.

Pictures are CelebA's, or without CelebA drawn faces of as many pixels:

- `bare`: reads the same JPEGs at known offsets and decodes them with the same decoder into one
  array; it runs in as many processes as the others have workers.
- `ours`: the batches of a run: pictures, labels, row numbers, keys.
- `half`: decoded at half their size, which is what a view of 64 x 64 asks for.
- `folder`: a file a picture, as with torchvision's ImageFolder; `webdataset` on our tars;
  `streaming` (MDS) and `litdata` on the same JPEGs. All of these decode with Pillow.

A stream reads the same tars without their indexes:

- `bare`: webdataset's own loop with our decoder.
- `ours`: the batches of a run with `data.webdataset`.

Vectors are two views of 273 and 112 values:

- `bare`: indexes a mapped .npy file a view by the same rows; always in one process.
- `webdataset`: on tars with a member for every view of every row. This, `streaming` and `litdata`
  (`pip install mosaicml-streaming litdata`) have the first rows alone.

With --memory, instead, the private memory of a loader's processes after each of ten epochs.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import loaders, memory, peers, sets
from benchmarks.isolation import Outcome, alone
from benchmarks.race import Contestant, Rate, race, ratio
from benchmarks.table import Table, number

CELEBA = Path(__file__).parents[2] / "shared" / "data" / "celeba" / "img_align_celeba.zip"
SIDE = 197  # of drawn pictures: as many pixels as CelebA's 178 x 218
HALF = 64  # height and width of a view that needs only half the resolution
EPOCHS = 10  # of --memory
LIMIT_S = 1800.0  # for a peer to write its data, or for the epochs of --memory
SMALL = {"pictures": 96, "rows": 2000, "peer_rows": 200, "batches": [8, 50], "workers": [0]}
SMALL |= {
    "rounds": 1,
    "seconds": 0.02,
    "side": 128,
    "celeba": None,
    "memory_rows": 600,
    "writers": 1,
}

Line = tuple[str, str]  # what is read, and by whom
PEERS = {"streaming": peers.write_streaming, "litdata": peers.write_litdata}
LOADERS = ["folder", "webdataset", *PEERS]
VIEWS = ["view1", "view2"]


def plan(folder: Path, batches: Sequence[int]) -> dict[Line, Callable[[int], Contestant]]:
    """Returns the lines of the table, each with a function from workers to a contestant."""
    pictures, vectors = folder / "pictures", folder / "vectors"
    picture_batch, vector_batch = batches

    def bare(size: int | None) -> Callable[[int], Contestant]:
        args = (pictures / "shards", picture_batch, size)
        return lambda workers: Contestant(loaders.bare_pictures, args, team=max(1, workers))

    def by(open_: Callable[..., Any], *args: Any) -> Callable[[int], Contestant]:
        return lambda workers: Contestant(open_, args, workers)

    arrays = (vectors / "shards", vectors / "arrays", vector_batch)
    return {
        ("pictures", "bare"): bare(None),
        ("pictures", "ours"): by(loaders.ours, pictures / "shards", ["image"], picture_batch, None),
        ("half", "bare"): bare(HALF),
        ("half", "ours"): by(loaders.ours, pictures / "shards", ["image"], picture_batch, HALF),
        ("stream", "bare"): by(loaders.bare_web, pictures / "shards", picture_batch),
        ("stream", "ours"): by(loaders.endless, pictures / "shards", picture_batch),
        ("pictures", "folder"): by(loaders.files, pictures / "files", picture_batch),
        ("pictures", "webdataset"): by(loaders.web_pictures, pictures / "shards", picture_batch),
        ("pictures", "streaming"): by(peers.streaming, pictures / "streaming", picture_batch),
        ("pictures", "litdata"): by(peers.litdata, pictures / "litdata", picture_batch),
        ("vectors", "bare"): lambda _: Contestant(loaders.bare_vectors, arrays, team=1),
        ("vectors", "ours"): by(loaders.ours, vectors / "shards", VIEWS, vector_batch, None),
        ("vectors", "webdataset"): by(loaders.web_vectors, vectors / "members", vector_batch),
        ("vectors", "streaming"): by(peers.streaming, vectors / "streaming", vector_batch),
        ("vectors", "litdata"): by(peers.litdata, vectors / "litdata", vector_batch),
    }


def write(folder: Path, arguments: argparse.Namespace) -> dict[Line, str]:
    """Writes the data in the requested forms; returns why peers could not write some of them."""
    pictures, vectors = folder / "pictures", folder / "vectors"
    shards, writers, requested = pictures / "shards", arguments.writers, arguments.loaders
    sets.build_pictures(shards, arguments.pictures, arguments.celeba, arguments.side, writers)
    sets.build_vectors(vectors / "shards", arguments.rows, writers)
    sets.write_arrays(vectors / "shards", vectors / "arrays")
    if "folder" in requested:
        sets.write_files(shards, pictures / "files")
    if "webdataset" in requested:
        sets.write_members(vectors / "shards", vectors / "members", arguments.peer_rows)
    missing = {}
    for folder_of_kind, count in ((pictures, arguments.pictures), (vectors, arguments.peer_rows)):
        for name in PEERS.keys() & requested:
            samples = peers.Samples(folder_of_kind / "shards", count)
            outcome = alone(PEERS[name], samples, folder_of_kind / name, limit_s=LIMIT_S)
            if isinstance(outcome, Outcome):
                missing[folder_of_kind.name, name] = outcome.missing
    return missing


def report(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all contestants and prints the table."""
    unwritten = write(folder, arguments)
    lines = {
        line: make
        for line, make in plan(folder, arguments.batches).items()
        if line[1] in ("bare", "ours", *arguments.loaders)
    }
    keys = [(line, workers) for workers in arguments.workers for line in lines]
    contestants = {key: lines[key[0]](key[1]) for key in keys if key[0] not in unwritten}
    rates, missing = race(contestants, arguments.rounds, arguments.seconds)
    for (line, workers), fault in missing.items():
        if line[1] in ("bare", "ours"):
            raise SystemExit(f"{', '.join(line)}, {workers} workers: {fault}")
    missing |= {key: unwritten[key[0]] for key in keys if key[0] in unwritten}
    print_table(list(lines), arguments.workers, rates, missing)
    return {
        f"{', '.join(line)}, {workers} workers": [asdict(rate) for rate in turns]
        for (line, workers), turns in rates.items()
    }


def print_table(
    lines: Sequence[Line],
    workers: Sequence[int],
    rates: Mapping[tuple[Line, int], Sequence[Rate]],
    missing: Mapping[tuple[Line, int], str],
) -> None:
    heads = ["", "loader"]
    for count in workers:
        heads += [f"rows/s, {count} workers", "of bare", "by processor time", "ours is"]
    print(f"{Table.row(heads)}\n{'|---' * len(heads)}|")
    notes: list[str] = []
    for line in lines:
        cells = list(line)
        for count in workers:
            turns = rates.get((line, count))
            if turns is None:
                fault = missing[line, count]
                absent = "ModuleNotFoundError" in fault
                notes += [] if absent or fault in notes else [fault]
                cells += ["not installed" if absent else f"– [{notes.index(fault) + 1}]", *"–––"]
                continue
            bare, our_turns = (rates[(line[0], name), count] for name in ("bare", "ours"))
            cells.append(number(statistics.median(rate.rows for rate in turns), ",.0f"))
            cells += [number(x, ".2f" if x > 0.1 else ".4f") for x in ratio(turns, bare)]
            is_peer = line[1] not in ("bare", "ours")
            cells.append(f"{ratio(our_turns, turns)[0]:.1f} x" if is_peer else "")
        print(Table.row(cells))
    for note_number, note in enumerate(notes, start=1):
        print(f"\n[{note_number}] {note}")


def report_memory(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures both kinds of data and prints a column for each."""
    rows, workers = arguments.memory_rows, arguments.workers[-1]
    sets.build_vectors(folder / "vectors", rows, arguments.writers)
    sets.build_tiles(folder / "pictures", rows, arguments.writers)
    picture_batch, vector_batch = arguments.batches
    megabytes_by_kind = {}
    for name, views, batch in (
        ("vectors", VIEWS, vector_batch),
        ("pictures", ["image"], picture_batch),
    ):
        args = (folder / name, views, batch, workers, EPOCHS)
        megabytes_by_kind[name] = alone(memory.measure, *args, limit_s=LIMIT_S)
        if isinstance(megabytes_by_kind[name], Outcome):
            raise SystemExit(f"{name}: {megabytes_by_kind[name].missing}")
    print(f"{rows:,} rows, {workers} workers; private memory of all processes in MB")
    heads = ["after epoch", *megabytes_by_kind]
    print(f"{Table.row(heads)}\n{'|---' * len(heads)}|")
    for epoch, row in enumerate(zip(*megabytes_by_kind.values(), strict=True), start=1):
        print(Table.row([str(epoch), *(f"{megabytes:,.1f}" for megabytes in row)]))
    later = [column[1:] for column in megabytes_by_kind.values()]
    spans = [f"{max(x) - min(x):.1f} ({(max(x) - min(x)) / x[0]:.1%})" for x in later]
    print(Table.row([f"largest difference, 2 to {EPOCHS}", *spans]))
    return megabytes_by_kind


def cores() -> int:
    return len(os.sched_getaffinity(0))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--celeba", type=Path, help="img_align_celeba.zip, the text files beside it"
    )
    parser.add_argument("--loaders", nargs="*", default=LOADERS, choices=LOADERS, help="of others")
    parser.add_argument("--pictures", type=int, default=5000, help="how many pictures")
    parser.add_argument("--rows", type=int, default=200_000, help="how many vectors")
    parser.add_argument(
        "--peer-rows", type=int, default=20_000, help="of them, where each is alone"
    )
    parser.add_argument("--batches", type=int, nargs=2, default=[256, 1000], help="rows of a batch")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="a column each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a turn")
    parser.add_argument("--writers", type=int, default=cores(), help="processes that write shards")
    parser.add_argument("--side", type=int, default=SIDE, help="of drawn pictures")
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    parser.add_argument("--memory-rows", type=int, default=100_000)
    parser.add_argument(
        "--small", action="store_true", help="all of it, too small to mean anything"
    )
    parser.add_argument("--json", help="a file for the numbers")
    parser.set_defaults(celeba=CELEBA if CELEBA.exists() else None)
    if parser.parse_args(words).small:
        parser.set_defaults(**SMALL)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    with tempfile.TemporaryDirectory(prefix="heron-") as scratch:
        print(f"{cores()} cores, 1 thread, torch {torch.__version__}")
        numbers = (report_memory if arguments.memory else report)(Path(scratch), arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
