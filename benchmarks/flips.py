"""Flips single bits in artefacts: each flip must be refused, or must change nothing.

    python -m benchmarks.flips --flips 1000

A small run makes a data set, a checkpoint, embeddings and an index of every kind. One bit of one
file is flipped at a time, and the artefact is opened as its consumers open it, comparing checksums.
A flip that is not refused is harmless if the manifest's JSON is the same as before, and otherwise
silent. No flip may be silent or end in anything but a user's error.
"""

import argparse
import contextlib
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from heron.api.job import pretrain
from heron.base.artefact import MANIFEST, parse_json
from heron.base.errors import HeronError
from heron.data.reader import Reader
from heron.experiment.config import parse_config
from heron.retrieval.build import build_index
from heron.retrieval.embed import Choice, embed
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index
from heron.retrieval.index_files import INDEX
from heron.retrieval.index_plan import KINDS
from heron.training.pretrained import locate

STATE = "state.json"  # the manifest of a checkpoint
ROWS = 900  # enough for the codes of `ivfpq`
OUTCOMES = "refused", "the same JSON", "silent", "no user's error"


@dataclass(frozen=True)
class Subject:
    """Files of one kind, and how their consumers open them."""

    name: str
    files: list[Path]
    consume: Callable[[], object]


def subjects(folder: Path) -> Iterator[Subject]:
    """Makes the artefacts in a folder, and yields them by kind of file."""
    run, vectors = folder / "run", folder / "embeddings"
    pretrain(
        parse_config(
            {
                "run": {"dir": str(run)},
                "data": {
                    "path": str(folder / "data"),
                    "build": {"source": "frames", "train": ROWS, "test": 50, "classes": 4},
                    "protocol": {"labelled": 60, "test": "test"},
                    "batch": {"labelled": 10, "unlabelled": 21},
                    "views": [{"stored": "view1"}, {"stored": "view2"}],
                    "standardise": True,
                    "window_rows": 64,
                },
                "model": {"encoder": {"kind": "mlp", "widths": [16, 12]}},
                "objective": {"cross_entropy": {"weight": 1.0}},
                "train": {"steps": 2, "cpu_threads": 1},
                "evaluate": {"map": "never", "baselines": False},
            }
        )
    )

    def open_data() -> None:
        Reader(folder / "data").verify_payloads()

    data = folder / "data"
    yield Subject("data set: manifest", [data / MANIFEST], open_data)
    yield Subject("data set: indexes", sorted(data.glob("*.npz")), open_data)
    yield Subject("data set: shards", sorted(data.glob("*.tar")), open_data)
    checkpoint = locate(run)
    tensors = sorted(checkpoint.glob("*.safetensors"))
    yield Subject("checkpoint: manifest", [checkpoint / STATE], lambda: locate(run))
    yield Subject("checkpoint: tensors", tensors, lambda: locate(run))
    texts = [checkpoint / "config.yaml", checkpoint / "model.json"]
    yield Subject("checkpoint: texts", texts, lambda: locate(run))
    embeddings = embed(run, vectors, Choice(part_rows=256), progress=False)
    samples = [vectors / name for name in embeddings.manifest.samples]
    vector_files = sorted(vectors.glob("*/*.npy"))
    yield Subject("embeddings: manifest", [vectors / MANIFEST], lambda: Embeddings.open(vectors))
    yield Subject("embeddings: vectors", vector_files, lambda: Embeddings.open(vectors))
    yield Subject("embeddings: samples", samples, lambda: Embeddings.open(vectors))
    for kind in KINDS:
        index_folder = folder / kind
        files = build_index(embeddings, index_folder, kind=kind, queries=50, progress=False).files

        def consume(index_folder: Path = index_folder) -> Index:
            return Index.open(index_folder)

        yield Subject(f"index {kind}: manifest", [index_folder / MANIFEST], consume)
        yield Subject(f"index {kind}: FAISS", [index_folder / INDEX], consume)
        sample_files = [index_folder / name for name in files if name != INDEX]
        yield Subject(f"index {kind}: samples", sample_files, consume)


def outcome(subject: Subject, path: Path, byte: int, bit: int) -> str:
    """Flips a bit, opens the artefact, restores the file, and returns the outcome."""
    original, status = path.read_bytes(), path.stat()
    flipped = bytearray(original)
    flipped[byte] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        subject.consume()
        same = path.name in (MANIFEST, STATE) and parse_json(bytes(flipped)) == parse_json(original)
        return "the same JSON" if same else "silent"
    except HeronError:
        return "refused"
    except Exception:  # noqa: BLE001 - any other error is a fault that this benchmark looks for
        return "no user's error"
    finally:
        path.write_bytes(original)
        os.utime(
            path, ns=(status.st_atime_ns, status.st_mtime_ns)
        )  # by which the cache knows it as verified


def flip(subject: Subject, count: int, draw: random.Random) -> tuple[Counter[str], list[str]]:
    """Flips random bits; returns the number of each outcome, and where the forbidden ones were."""
    subject.consume()
    outcomes, bad = Counter[str](), list[str]()
    for _ in range(count):
        path = draw.choice(subject.files)
        byte, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        outcomes[result := outcome(subject, path, byte, bit)] += 1
        if result in OUTCOMES[2:]:
            bad.append(f"{result}: {path}, byte {byte}, bit {bit}")
    subject.consume()
    return outcomes, bad


def main() -> None:
    """Prints the table; the status is 1 if a flip was silent or ended in a traceback."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, faults, total = random.Random(arguments.seed), list[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["HERON_CACHE"] = f"{scratch}/cache"
        with contextlib.redirect_stdout(None):
            all_subjects = list(subjects(Path(scratch)))
        print(f"| file | flips | {' | '.join(OUTCOMES)} |\n|---|---|{'---|' * len(OUTCOMES)}")
        for number, subject in enumerate(all_subjects):
            first, last = (arguments.flips * (number + i) // len(all_subjects) for i in range(2))
            outcomes, bad = flip(subject, last - first, draw)
            total, faults = total + outcomes, faults + bad
            print(row(subject.name, outcomes), flush=True)
    print(row("all", total), *faults, sep="\n")
    raise SystemExit(bool(faults))


def row(name: str, outcomes: Counter[str]) -> str:
    """Returns a line of the table."""
    numbers = [outcomes.total(), *(outcomes[outcome] for outcome in OUTCOMES)]
    return f"| {name} | {' | '.join(map(str, numbers))} |"


if __name__ == "__main__":
    main()
