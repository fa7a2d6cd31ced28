"""What was altered, or comes from others, is refused by name: embeddings, indexes, FAISS files."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from heron.base.artefact import MANIFEST, FileSum
from heron.base.errors import RetrievalError
from heron.cli.reports import negatives
from heron.cli.retrieval import index as index_verb
from heron.cli.retrieval import query
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index
from heron.retrieval.index_files import INDEX
from heron.retrieval.index_plan import KINDS, Kind
from tests.retrieval.made import clustered, embeddings, unlabelled
from tests.sealed import seal

FACES = Path(__file__).parents[2] / "configs" / "faces.yaml"
N, DIM = 700, 8
SAMPLES = "keys.npy", "rows.npy", "targets.npy", "known.npy", "labels.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings `e`, and an index of every kind beside them."""
    folder = tmp_path_factory.mktemp("custody")
    stored = unlabelled(folder / "e", clustered(N, DIM))
    for kind in KINDS:
        build_index(stored, folder / kind, kind=kind, queries=50, k=5, progress=False)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of them."""
    return lambda name: Path(shutil.copytree(made / name, tmp_path / name))


def flip(path: Path, byte: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def relist(folder: Path, name: str, key: str = "files") -> None:
    """Has a manifest list a file as it now is, as one who altered both would."""
    files = json.loads((folder / MANIFEST).read_text())[key]
    seal(folder / MANIFEST, **{key: files | {name: FileSum.of(folder / name).model_dump()}})


@pytest.mark.parametrize("name", ["hidden/00001.npy", *SAMPLES])
def test_altered_embeddings_are_refused_before_they_are_used(
    name: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, indexed = copied("e"), copied("flat")
    seal(indexed / MANIFEST, embeddings=str(folder))
    flip(folder / name)
    message = rf"e/{name} was altered: its sha256 is \w+… instead of \w+…; restore it, or embed"
    uses: list[Callable[..., Any]] = [
        lambda **more: index_verb(str(folder), out=str(tmp_path / "i"), quiet=True, **more),
        lambda **more: negatives(str(folder), out=tmp_path / "report", **more),
        lambda **more: query(str(indexed), key="s007", **more),
    ]
    for use in uses:
        with pytest.raises(RetrievalError, match=message):
            use()
    if name.startswith("hidden"):
        index_verb(str(folder), out=str(tmp_path / "i"), quiet=True, no_verify=True)
        query(str(indexed), key="s007", no_verify=True)


def test_a_file_that_is_gone_or_cut_is_refused_unverified(copied: Callable[[str], Path]) -> None:
    folder = copied("e")
    data = (folder / "known.npy").read_bytes()
    (folder / "known.npy").write_bytes(data[:-1])
    with pytest.raises(RetrievalError, match=r"known.npy has 827 bytes instead of 828; restore it"):
        Embeddings.open(folder, verify=False)
    (folder / "known.npy").unlink()
    with pytest.raises(RetrievalError, match="No such file or directory; restore it"):
        Embeddings.open(folder, verify=False)


def test_what_was_whole_is_not_read_again(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("e")
    Embeddings.open(folder)
    monkeypatch.setattr("heron.base.artefact.sha256", lambda path: pytest.fail(f"reads {path}"))
    Embeddings.open(folder)


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    (
        "e",
        {"format": 1},
        "format is 1, but this version of heron reads 2; embed again, into an empty",
    ),
    ("e", {"rows": -1}, "rows must be greater than or equal to 0, got -1"),
    ("e", {"rows": N + 1}, f"the parts have {N} vectors instead of {N + 1}"),
    ("e", {"rows": float(N)}, "rows must be a valid integer"),
    ("e", {"layers": {}}, "layers must have at least 1 item"),
    ("e", {"layers": {"../up": {"dim": 8, "dtype": "float32", "views": 1}}}, "layers.../up"),
    ("e", {"samples": {}}, r"samples must be keys.npy, rows.npy, .*, got \[\]"),
    (
        "e",
        {"samples": {"../keys.npy": {"bytes": 1, "sha256": "0" * 64}}},
        "samples must be .*, got .*/keys",
    ),
    ("e", {"checkpoint": "c"}, "checkpoint must match pattern"),
    ("e", {"data_fingerprint": "0" * 64}, "data_fingerprint must match pattern"),
    (
        "flat",
        {"format": 1},
        "format is 1, but this version of heron reads 2; build the index again",
    ),
    ("flat", {"count": -1}, "count must be greater than or equal to 0, got -1"),
    ("flat", {"count": N + 1}, f"vectors: {N} instead of {N + 1}; samples: {N}"),
    ("flat", {"dim": 0}, "dim must be greater than or equal to 1, got 0"),
    ("flat", {"seed": -1}, "seed must be greater"),
    ("flat", {"kind": "hnsw"}, "kind: hnsw instead of flat"),
    ("flat", {"normalised": False}, "normalised: False instead of True"),
    ("flat", {"compared_by": "euclidean"}, "compared_by: euclidean instead of inner_product"),
    ("flat", {"search": {"nprobe": 1}}, r"search: \['nprobe'\] instead of \[\]"),
    ("ivf", {"search": {"nprobe": 0}}, "search.nprobe must be greater"),
    ("ivf", {"search": {}}, r"search: \[\] instead of \['nprobe'\]"),
    ("flat", {"files": {}}, r"files: \[\] instead of \['index.faiss', 'keys.npy'"),
    ("flat", {"seconds": {"read": "long"}}, "seconds.read must be a valid number"),
]


@pytest.mark.parametrize(("name", "changes", "message"), HOSTILE)
def test_a_manifest_is_typed_and_bounded(
    name: str, changes: dict[str, Any], message: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    seal(folder / MANIFEST, **changes)
    with pytest.raises(RetrievalError, match=message) as refused:
        Embeddings.open(folder) if name == "e" else Index.open(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("flat", {"lists": 4}),
        ("flat", {"links": 4}),
        ("ivf", {"lists": 0}),
        ("ivf", {"lists": 2**31}),
        ("ivf", {"subvectors": 4}),
        ("sq8", {"bits": 4}),
        ("rabitq", {"bits": 0}),
        ("rabitq", {"subvectors": 4}),
        ("rabitq", {"table": True}),
        ("ivfpq", {"bits": 9}),
        ("ivfpq", {"bits": 0}),
        ("hnsw", {"links": 0}),
        ("hnsw", {"mapped": True}),
        ("ivf", {"table": True}),
        ("ivfpq", {"table": True, "subvectors": 2**24}),
        ("ivf", {"index_bytes": -1}),
        ("ivf", {"training": -1}),
    ],
)
def test_a_plan_fits_its_kind(
    kind: str, changes: dict[str, Any], copied: Callable[[str], Path]
) -> None:
    folder = copied(kind)
    plan = json.loads((folder / MANIFEST).read_text())["plan"]
    seal(folder / MANIFEST, plan=plan | changes)
    with pytest.raises(RetrievalError, match=f"({kind} has a table|{next(iter(changes))})"):
        Index.open(folder)


def test_recall_is_a_share(copied: Callable[[str], Path]) -> None:
    folder = copied("ivf")
    recall = json.loads((folder / MANIFEST).read_text())["recall"]
    seal(folder / MANIFEST, recall=recall | {"value": 1.5})
    with pytest.raises(RetrievalError, match="recall.value must be less than or equal"):
        Index.open(folder)


def array(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / name, change(np.load(folder / name)))


def one(value: int) -> Callable[[Any], Any]:
    def apply(found: Any) -> Any:
        found.view(np.uint8 if found.dtype == bool else found.dtype).flat[3] = value
        return found

    return apply


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        ("targets.npy", array("targets.npy", one(2)), "targets must be 0 or 1, got 2"),
        ("targets.npy", array("targets.npy", lambda x: x.astype(int)), r"must be \|u1 .*got <i8"),
        ("targets.npy", array("targets.npy", lambda x: x[:, :0]), r"must be .*got \|u1 \(700, 0\)"),
        ("known.npy", array("known.npy", one(2)), "flags must be 0 or 1, got 2"),
        ("known.npy", array("known.npy", lambda x: x[1:]), r"known must be .*, got .*\(699,\)"),
        ("rows.npy", array("rows.npy", one(-1)), "rows must be at least 0, got -1"),
        ("rows.npy", array("rows.npy", lambda x: x.astype(float)), "rows must be <i8 .*, got <f8"),
        ("keys.npy", array("keys.npy", lambda x: x.astype(str)), "keys must be .*, got <U4 "),
        ("keys.npy", array("keys.npy", lambda x: np.array([b"\xff"] * N)), "a key is not UTF-8"),
        ("keys.npy", lambda f: (f / "keys.npy").write_bytes(b"PK"), "keys.npy"),
        ("labels.json", lambda f: (f / "labels.json").write_text('{"kind":"x","names":["a"]}'),
         "cannot read .*labels.json: kind must be 'multi_label'"),
        ("labels.json", lambda f: (f / "labels.json").write_text('{"kind":"multi_label"}'),
         "cannot read .*labels.json: names is missing"),
        ("labels.json", lambda f: (f / "labels.json").write_text('{"kind":"none","names":[1]}'),
         "cannot read .*labels.json: .*names.0 must be a valid string"),
    ],
)  # fmt: skip
def test_samples_are_what_they_should_be(
    name: str, harm: Callable[[Path], Any], message: str, copied: Callable[[str], Path]
) -> None:
    for opened, key, of in ((Embeddings, "samples", "e"), (Index, "files", "flat")):
        folder = copied(of)
        harm(folder)
        relist(folder, name, key)
        with pytest.raises(RetrievalError, match=message):
            opened.open(folder)


def test_a_class_is_one(tmp_path: Path) -> None:
    y = np.eye(3)[np.arange(60) % 3]
    y[7, :2] = 1
    with pytest.raises(
        RetrievalError, match="labels are multi_class, but a sample does not have exactly"
    ):
        embeddings(tmp_path, {"hidden": clustered(60)}, y, list("abc"), "multi_class")


def write(folder: Path, index: Any) -> None:
    faiss.write_index(index, str(folder / INDEX))
    relist(folder, INDEX)


@cache
def others() -> dict[str, Any]:
    """Indexes that FAISS reads, of as many vectors, and are not of the plan."""
    unit = clustered(N, DIM)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    found = {}
    for name in ("HNSW8,Flat", "SQ8", "IDMap,Flat", "IVF4,Flat", "IVF16,PQ2x4", "Flat,RFlat"):
        found[name] = faiss.index_factory(DIM, name, faiss.METRIC_INNER_PRODUCT)
        found[name].train(unit)
        _ = found[name].add_with_ids(unit, np.arange(N)) if "ID" in name else found[name].add(unit)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_another_index_than_the_plans(kind: Kind, copied: Callable[[str], Path]) -> None:
    folder = copied(kind)
    for name, index in others().items():
        write(folder, index)
        with pytest.raises(
            RetrievalError, match=f"{INDEX}: .*(needs|instead of) .*; build the index again"
        ):
            Index.open(folder)
            pytest.fail(name)


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        (
            "sq8",
            "SQ6",
            "bytes of a code of the plan: 6 instead of 8; the type of the codes: 6 instead",
        ),
        (
            "rabitq",
            "RaBitQ5",
            "bytes of a code of the plan: 25 instead of 26; bits: 5 instead of 6",
        ),
        ("rabitq", "RaBitQ6", "bits of a query: 8 instead of 4"),
    ],
)
def test_codes_of_another_kind_than_the_plans(
    kind: str, other: str, message: str, copied: Callable[[str], Path]
) -> None:
    """Of the plan's class, lists and vectors: only the codes differ."""
    folder = copied(kind)
    lists = faiss.read_index(str(folder / INDEX)).nlist
    index = faiss.index_factory(DIM, f"IVF{lists},{other}")
    index.train(clustered(N, DIM))
    index.add(clustered(N, DIM))
    if other == "RaBitQ6":
        index.qb = 8
    write(folder, index)
    with pytest.raises(RetrievalError, match=message):
        Index.open(folder)


def test_numbers_beyond_n_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("ivf")
    index = faiss.read_index(str(folder / INDEX))
    for number in range(index.nlist):
        size = index.invlists.list_size(number)
        ids = faiss.rev_swig_ptr(index.invlists.get_ids(number), size)
        ids += N
    write(folder, index)
    opened = Index.open(folder)
    with pytest.raises(
        RetrievalError, match=rf"has a vector of number \d+, but numbers go from 0 to {N - 1}"
    ):
        opened.search(clustered(2, DIM), 3)
    with pytest.raises(RetrievalError, match=f"{INDEX}: .*; build the index again"):
        opened.vectors(np.arange(3))


def test_an_array_larger_than_the_file_is_not_made(copied: Callable[[str], Path]) -> None:
    before = faiss.get_deserialization_loop_limit(), faiss.get_deserialization_vector_byte_limit()
    folder = copied("flat")
    path = folder / INDEX
    data = bytearray(path.read_bytes())
    at = data.index((N * DIM).to_bytes(8, "little"))  # how many floats follow
    data[at : at + 8] = (2**36).to_bytes(8, "little")
    path.write_bytes(data)
    relist(folder, INDEX)
    with pytest.raises(RetrievalError, match="cannot read it: .*limit"):
        Index.open(folder)
    assert before == (
        faiss.get_deserialization_loop_limit(),
        faiss.get_deserialization_vector_byte_limit(),
    )


def in_a_child(work: Callable[[], object], seconds: int) -> str:
    """Returns how some work ended: "whole", "refused", or what else it was."""
    child = os.fork()
    if not child:
        signal.alarm(seconds)
        try:
            work()
            os._exit(0)
        except RetrievalError:
            os._exit(1)
        except BaseException:
            os._exit(2)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return ("whole", "refused", "a traceback")[os.WEXITSTATUS(status)]


FLIPS = int(os.environ.get("HERON_FAISS_FLIPS", "12"))  # a kind; some hundreds outside CI


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_faiss_file_of_the_right_checksum_crashes_nothing(
    kind: Kind, copied: Callable[[str], Path]
) -> None:
    folder, draw = copied(kind), np.random.default_rng(0)
    path, queries = folder / INDEX, clustered(20, DIM)
    data, allowed = path.read_bytes(), np.arange(N) % 3 == 0

    def use() -> None:
        opened = Index.open(folder)
        opened.search(queries, 10)
        opened.search(queries, 10, allowed=allowed)
        opened.vectors(np.arange(N))

    ends: list[Sequence[Any]] = []
    for turn in range(FLIPS):
        harmed = bytearray(data)
        at = int(draw.integers(min(len(data), 300) if turn % 2 else len(data)))
        harmed[at] ^= 1 << int(draw.integers(8))
        path.write_bytes(harmed)
        relist(folder, INDEX)
        ends.append((at, in_a_child(use, 20)))
    assert {end for _, end in ends} <= {"whole", "refused"}, ends
