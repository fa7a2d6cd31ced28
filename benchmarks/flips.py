"""Single bits flipped in artefacts: each flip is refused, or it is shown to change nothing.

    python -m benchmarks.flips --flips 1000

A small run makes a data set, a checkpoint, embeddings and an index of every kind. One bit of one
file is flipped at a time, and the artefact is opened as its consumers open it, checksums compared.
A flip that is not refused is harmless where the manifest's JSON is the same as before; else it is
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

from heron.pipeline.config.experiment import parse_config
from heron.pipeline.data.reader import Reader
from heron.pipeline.pretrain import pretrain
from heron.pipeline.retrieval.build import build_index
from heron.pipeline.retrieval.embed import embed
from heron.pipeline.retrieval.embedder import Choice
from heron.pipeline.retrieval.embeddings import Embeddings
from heron.pipeline.retrieval.index import Index
from heron.pipeline.retrieval.index_files import INDEX
from heron.pipeline.retrieval.kinds import KINDS
from heron.pipeline.training.pretrained import locate
from heron.shards.artefact import MANIFEST, parse_json
from heron.shards.errors import HeronError

STATE = "state.json"  # the manifest of a checkpoint
ROWS = 900  # enough for the codes of `ivfpq`
OUTCOMES = "refused", "the same JSON", "silent", "no user's error"


@dataclass(frozen=True)
class Subject:
    """Files of one kind, and how those who consume them open them."""

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
    made = embed(run, vectors, Choice(part_rows=256), progress=False)
    samples = [vectors / name for name in made.manifest.samples]
    parts = sorted(vectors.glob("*/*.npy"))
    yield Subject("embeddings: manifest", [vectors / MANIFEST], lambda: Embeddings.open(vectors))
    yield Subject("embeddings: vectors", parts, lambda: Embeddings.open(vectors))
    yield Subject("embeddings: samples", samples, lambda: Embeddings.open(vectors))
    for kind in KINDS:
        at = folder / kind
        files = build_index(made, at, kind=kind, queries=50, progress=False).manifest.files

        def consume(at: Path = at) -> Index:
            return Index.open(at)

        yield Subject(f"index {kind}: manifest", [at / MANIFEST], consume)
        yield Subject(f"index {kind}: FAISS", [at / INDEX], consume)
        others = [at / name for name in files if name != INDEX]
        yield Subject(f"index {kind}: samples", others, consume)


def outcome(subject: Subject, path: Path, byte: int, bit: int) -> str:
    """Flips a bit, says what became of it, and puts the file back as it was."""
    whole, known = path.read_bytes(), path.stat()
    flipped = bytearray(whole)
    flipped[byte] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        subject.consume()
        same = path.name in (MANIFEST, STATE) and parse_json(bytes(flipped)) == parse_json(whole)
        return "the same JSON" if same else "silent"
    except HeronError:
        return "refused"
    except Exception:  # noqa: BLE001 - any other is what this looks for
        return "no user's error"
    finally:
        path.write_bytes(whole)
        os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))  # it is remembered to be whole


def flip(subject: Subject, count: int, draw: random.Random) -> tuple[Counter[str], list[str]]:
    """Flips drawn bits; returns how many came to which outcome, and where those that must not."""
    subject.consume()
    found, bad = Counter[str](), list[str]()
    for _ in range(count):
        path = draw.choice(subject.files)
        byte, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        found[said := outcome(subject, path, byte, bit)] += 1
        if said in OUTCOMES[2:]:
            bad.append(f"{said}: {path}, byte {byte}, bit {bit}")
    subject.consume()
    return found, bad


def main() -> None:
    """Prints the table; the status is 1 where a flip was silent or ended in a traceback."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, faults, total = random.Random(given.seed), list[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as made:
        os.environ["HERON_CACHE"] = f"{made}/cache"
        with contextlib.redirect_stdout(None):
            every = list(subjects(Path(made)))
        print(f"| file | flips | {' | '.join(OUTCOMES)} |\n|---|---|{'---|' * len(OUTCOMES)}")
        for number, subject in enumerate(every):
            first, last = (given.flips * (number + i) // len(every) for i in range(2))
            found, bad = flip(subject, last - first, draw)
            total, faults = total + found, faults + bad
            print(row(subject.name, found), flush=True)
    print(row("all", total), *faults, sep="\n")
    raise SystemExit(bool(faults))


def row(name: str, found: Counter[str]) -> str:
    """Returns a line of the table."""
    numbers = [found.total(), *(found[said] for said in OUTCOMES)]
    return f"| {name} | {' | '.join(map(str, numbers))} |"


if __name__ == "__main__":
    main()
