"""Queries: what is found against a loop over all samples; filters, relations, and bad input."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.base.errors import RetrievalError, ShardError
from heron.cli.arguments import UsageError, Verb, parse
from heron.cli.retrieval import query
from heron.retrieval.answer import Answer
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.query import Retriever
from tests.retrieval import made

N, DIM = 720, 12
NAMES = ["a", "b", "c", "d", "e"]
BARE = 40  # samples without labels: the last ones


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Embeddings:
    generator = np.random.default_rng(0)
    vectors = (generator.normal(size=(N, DIM)) + 0.5).astype(np.float32)
    targets = generator.integers(0, 2, (N, len(NAMES)))
    known = np.arange(N) < N - BARE
    folder = tmp_path_factory.mktemp("query") / "embeddings"
    return made.embeddings(folder, {"hidden": vectors}, targets, NAMES, known=known)


@pytest.fixture(scope="module")
def retriever(stored: Embeddings) -> Retriever:
    folder = stored.folder.parent / "index"
    build_index(stored, folder, kind="flat", progress=False)
    return Retriever.open(folder)


def all_vectors(stored: Embeddings) -> NDArray[np.float64]:
    return stored.take("hidden", np.arange(len(stored))).astype(np.float64)


def by_a_loop(
    stored: Embeddings, query: NDArray[Any], metric: str, allowed: Any, k: int
) -> list[tuple[int, float]]:
    """The k nearest of those that are allowed, with their scores, in float64."""
    found = []
    for number, vector in enumerate(all_vectors(stored)):
        if not allowed(number):
            continue
        score = sum(float(a) * float(b) for a, b in zip(query, vector, strict=True))
        if metric == "cosine":
            score /= float(np.linalg.norm(query) * np.linalg.norm(vector))
        if metric == "euclidean":
            score = float(np.linalg.norm(query - vector))
        found.append((number, score))
    return sorted(found, key=lambda hit: hit[1] if metric == "euclidean" else -hit[1])[:k]


def same(answer: Answer, expected: list[tuple[int, float]]) -> None:
    assert [hit.number for hit in answer.hits] == [number for number, _ in expected]
    np.testing.assert_allclose([h.score for h in answer.hits], [s for _, s in expected], rtol=1e-5)


@pytest.mark.parametrize("metric", ["cosine", "inner_product", "euclidean"])
def test_a_key_finds_what_a_loop_finds(stored: Embeddings, tmp_path: Path, metric: Any) -> None:
    build_index(stored, tmp_path / "index", kind="flat", metric=metric, progress=False)
    found = Retriever.open(tmp_path / "index")
    x, samples = all_vectors(stored), stored.samples
    for number in (0, 359, 360, 719):
        query = x[number]
        answer = found.by_key(f"s{number:03d}", 7)
        same(answer, by_a_loop(stored, query, metric, lambda i, q=number: i != q, 7))
        assert (answer.allowed, answer.k, answer.metric) == (N - 1, 7, metric)
        assert answer.query.labels == samples.label_names(number)
        for hit in answer.hits:
            assert hit.key == f"s{hit.number:03d}"
            y = samples.targets[hit.number]
            assert hit.labels == [NAMES[a] for a in range(len(NAMES)) if y[a]]
            both = samples.known[number] and samples.known[hit.number]
            differ = int((samples.targets[number] != samples.targets[hit.number]).sum())
            assert hit.label_distance == (pytest.approx(differ / len(NAMES)) if both else None)
    same(found.by_vector(x[3] * 2, 9), by_a_loop(stored, x[3] * 2, metric, lambda i: True, 9))


def test_a_filter_is_a_mask_without_the_query(stored: Embeddings, retriever: Retriever) -> None:
    y, known, x = stored.samples.targets, stored.samples.known, all_vectors(stored)

    def passes(number: int) -> bool:
        return bool(known[number] and y[number, 0] and not (y[number, 1] or y[number, 2]))

    there = [i for i in range(N) if passes(i)]
    for number in (there[0], next(i for i in range(N) if not passes(i)), N - 1):
        answer = retriever.by_key(f"s{number:03d}", 5, "a and not (b or c)")
        same(
            answer,
            by_a_loop(stored, x[number], "cosine", lambda i, q=number: passes(i) and i != q, 5),
        )
        assert answer.allowed == len(there) - (number in there)
        assert answer.where == "a and not (b or c)"
    answer = retriever.by_vector(x[0], N, "a and not (b or c)")
    assert (len(answer.hits), answer.k, answer.allowed) == (len(there), N, len(there))


def test_hard_ones_are_beyond_the_median_and_false_ones_the_same(
    stored: Embeddings, retriever: Retriever
) -> None:
    y, known, x = stored.samples.targets, stored.samples.known, all_vectors(stored)
    for number in (0, 100):
        apart = {i: (y[i] != y[number]).mean() for i in range(N) if known[i] and i != number}
        answer = retriever.by_key(f"s{number:03d}", 6, relation="hard")
        assert answer.far is not None
        assert answer.far == pytest.approx(float(np.median(list(apart.values()))))
        hard = [i for i in apart if apart[i] >= answer.far - 1e-6]
        assert answer.allowed == len(hard)
        same(answer, by_a_loop(stored, x[number], "cosine", lambda i, of=hard: i in of, 6))
        far = retriever.by_key(f"s{number:03d}", 6, relation="hard", far=0.8)
        beyond = [i for i in apart if apart[i] > 0.7]
        same(far, by_a_loop(stored, x[number], "cosine", lambda i, of=beyond: i in of, 6))
        answer = retriever.by_key(f"s{number:03d}", 4, relation="false")
        same_labels = [i for i in apart if apart[i] == 0]
        assert (answer.allowed, answer.far) == (len(same_labels), None)
        same(answer, by_a_loop(stored, x[number], "cosine", lambda i, of=same_labels: i in of, 4))
        joined = retriever.by_key(f"s{number:03d}", 6, "d", "hard")
        with_d = [i for i in hard if y[i, 3]]
        assert joined.allowed == len(with_d)
        same(joined, by_a_loop(stored, x[number], "cosine", lambda i, of=with_d: i in of, 6))


def test_several_samples_are_one_query(stored: Embeddings, retriever: Retriever) -> None:
    x, y = all_vectors(stored), stored.samples.targets
    own = [3, 8, 5]
    mean = (x[own] / np.linalg.norm(x[own], axis=1, keepdims=True)).mean(0)
    answer = retriever.by_keys(["s003", "s008", "s003", "s005"], 9)
    same(answer, by_a_loop(stored, mean, "cosine", lambda i: i not in own, 9))
    assert answer.query.examples == own and answer.allowed == N - 3
    assert answer.query.labels == [n for i, n in enumerate(NAMES) if y[own, i].all()]
    with pytest.raises(RetrievalError, match="there are no keys; pass the key of at least"):
        retriever.by_keys([])
    some = retriever.by_keys(["s003", "s008"], 9, "a")
    same(
        some,
        by_a_loop(
            stored,
            x[[3, 8]].T @ (1 / np.linalg.norm(x[[3, 8]], axis=1)),
            "cosine",
            lambda i: y[i, 0] and i < N - BARE and i not in (3, 8),
            9,
        ),
    )
    with pytest.raises(RetrievalError, match="no sample has the key 's7000'"):
        retriever.by_keys(["s003", "s7000"])


def test_labels_are_predicted_from_the_nearest(stored: Embeddings, retriever: Retriever) -> None:
    x, y, known = all_vectors(stored), stored.samples.targets, stored.samples.known
    near = [i for i, _ in by_a_loop(stored, x[700], "cosine", lambda i: known[i], 10)]
    share = y[near].mean(0)
    predicted, voters = retriever.predict(x[700].astype(np.float32))
    assert voters == 10
    assert predicted == {n: pytest.approx(share[i]) for i, n in enumerate(NAMES) if share[i] >= 0.5}
    assert [*predicted.values()] == sorted(predicted.values(), reverse=True)


def test_keys_that_hold_a_part_and_counts_of_labels(stored: Embeddings) -> None:
    samples = stored.samples
    assert samples.keys_with("s07", 20) == [f"s07{n}" for n in range(10)]
    assert samples.keys_with("70", 5) == ["s070", "s170", "s270", "s370", "s470"]
    assert samples.keys_with("s00", 3) == ["s000", "s001", "s002"]
    for none in ("0s", "x", "\0", "é", "s0000"):  # "0s" is there only across two keys
        assert samples.keys_with(none, 5) == []
    beside = made.samples(np.ones((2, 1)), ["a"], keys=["xxxx00", "100100"])
    assert beside.keys_with("00100", 5) == ["100100"]  # "00" and "100" of two keys are none
    allowed = np.random.default_rng(0).random(N) < 0.3
    assert samples.label_counts(allowed) == samples.targets[allowed].sum(0).tolist()
    assert samples.label_counts() == samples.targets.sum(0).tolist()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"key": "s7000"}, "no sample has the key 's7000' .of 720.. Did you mean s700, "),
        (
            {"k": 0},
            "k must be 1 to 719, because the index has 720 samples, including the query, got 0",
        ),
        ({"k": 720}, "k must be 1 to 719, .*, got 720"),
        ({"where": "a and z"}, "no label named 'z' .character 7 of the filter.. Did you mean"),
        ({"where": "a and ("}, "cannot read the filter at character 7: labels must be joined"),
        (
            {"where": "a and not a"},
            r"no sample passes the filter 'a and not a': of 680 labelled samples, a \d+; relax",
        ),
        ({"relation": "far"}, "relation must be one of neighbours, hard, false, got 'far'"),
        (
            {"far": 0.5},
            "above 0 and at most 1, with relation 'hard', got 0.5 with relation 'neighbours'",
        ),
        ({"far": 1.5, "relation": "hard"}, "above 0 and at most 1, with relation 'hard', got 1.5"),
        ({"far": 0.0, "relation": "hard"}, "above 0 and at most 1, with relation 'hard', got 0.0"),
        (
            {"key": "s719", "relation": "hard"},
            "'s719' is a sample that has no labels, which relation 'hard' needs",
        ),
    ],
)
def test_what_cannot_be_asked(retriever: Retriever, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        retriever.by_key(**({"key": "s000"} | asked))


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (np.zeros((1, DIM), np.float32), r"a vector must be .* \(12,\), .* got float32 \(1, 12\)"),
        (np.array(["a"] * DIM), r"a vector must be numbers of shape \(12,\), .*<U1"),
        (np.ones(DIM + 1), rf"must be \[queries, {DIM}\], .*, got \[1, {DIM + 1}\]"),
        (np.full(DIM, np.nan), "not finite"),
        (np.full(DIM, 1e300), "not finite"),
        (np.zeros(DIM), "zero"),
    ],
)
def test_vectors_that_are_none(retriever: Retriever, vector: Any, message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        retriever.by_vector(vector, 3)


def test_a_vector_has_no_labels_to_be_related_by(retriever: Retriever) -> None:
    with pytest.raises(
        RetrievalError, match="'a vector' is not a sample and has no labels, which rel"
    ):
        retriever.by_vector(np.ones(DIM), 3, relation="false")
    answer = retriever.by_vector(np.ones(DIM), N)
    assert {hit.label_distance for hit in answer.hits} == {None}
    with pytest.raises(
        RetrievalError, match="k must be 1 to 720, because .* 720 samples, got 721$"
    ):
        retriever.by_vector(np.ones(DIM), N + 1)


def test_without_the_embeddings_the_index_gives_the_vector(
    stored: Embeddings, tmp_path: Path
) -> None:
    moved = tmp_path / "embeddings"
    shutil.copytree(stored.folder, moved)
    build_index(Embeddings.open(moved), tmp_path / "index", kind="flat", progress=False)
    build_index(Embeddings.open(moved), tmp_path / "codes", kind="ivfpq", progress=False)
    there = Retriever.open(tmp_path / "index").by_key("s007", 9)
    assert there.query.vector == f"the embeddings of {moved}"
    moved.rename(tmp_path / "elsewhere")
    gone = Retriever.open(tmp_path / "index").by_key("s007", 9)
    assert "the index, because " in gone.query.vector
    assert [hit.number for hit in gone.hits] == [hit.number for hit in there.hits]
    codes = Retriever.open(tmp_path / "codes").by_key("s007", 9)
    assert "the index, decoded from codes (ivfpq is lossy), because " in codes.query.vector
    assert "does not exist" in codes.query.vector
    assert 7 not in [hit.number for hit in codes.hits]
    given = Retriever.open(tmp_path / "codes", tmp_path / "elsewhere").by_key("s007", 9)
    assert given.query.vector == f"the embeddings of {tmp_path / 'elsewhere'}"
    x = np.ones((N, DIM))
    others = made.embeddings(moved, {"hidden": x}, np.ones((N, 1)), ["a"], checkpoint="b" * 64)
    foreign = Retriever.open(tmp_path / "index")
    assert "is not what" in foreign.by_key("s007", 9).query.vector
    with pytest.raises(RetrievalError, match=f"checkpoint {'b' * 19}, not {'c' * 19};"):
        Retriever.open(tmp_path / "index", others.folder)


def test_what_needs_more_than_the_index_says_what_is_missing(retriever: Retriever) -> None:
    with pytest.raises(ShardError, match="data/made/manifest.json"):
        retriever.picture(0)


def ask(*words: object) -> None:
    """`heron query` with these arguments."""
    parse("heron query", Verb(query), [str(word) for word in words])()


def test_the_verb_prints_a_table(retriever: Retriever, capsys: pytest.CaptureFixture[str]) -> None:
    ask(retriever.index.folder, "--key", "s000", "--k", 6, "--where", "a", "--relation", "hard")
    head, table = capsys.readouterr().out.split("\n\n")
    answer = retriever.by_key("s000", 6, "a", "hard")
    labels = ", ".join(answer.query.labels)
    assert head.splitlines() == [
        f"query   s000: {labels}",
        f"vector  the embeddings of {retriever.index.manifest.embeddings}",
        "index   flat of 720 x 12 'hidden', cosine",
        f"found   6 of 6 requested, among {answer.allowed} hard negatives, at a label distance of "
        f"{answer.far:.4g} or more, where a",
    ]
    title, *lines = table.splitlines()
    assert re.split(r"\s{2,}", title.strip()) == [
        *("cosine", "key", "label distance", "labels (+ not the query's, - only the query's)")
    ]
    assert len(lines) == 6
    for place, (line, hit) in enumerate(zip(lines, answer.hits, strict=True)):
        number, score, key, apart, *changes = line.split()
        assert (int(number), float(score), key) == (place + 1, round(hit.score, 6), hit.key)
        assert float(apart) == pytest.approx(hit.label_distance, abs=1e-4)
        more = {f"+{n}" for n in set(hit.labels) - set(answer.query.labels)}
        less = {f"-{n}" for n in set(answer.query.labels) - set(hit.labels)}
        assert set(changes) == more | less
        assert line.index(key) == title.index("key")


def test_the_verb_prints_json_in_full(
    retriever: Retriever, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(retriever.index.folder, "--key", "s001", "--k", 4, "--format", "json")
    found = json.loads(capsys.readouterr().out)
    index = found.pop("index")
    assert found == retriever.by_key("s001", 4).plain()
    assert index["checkpoint"] == "c" * 64
    rows = np.random.default_rng(4).normal(size=(3, DIM))
    np.save(tmp_path / "rows.npy", rows)
    vector = ("--vector", tmp_path / "rows.npy")
    ask(retriever.index.folder, *vector, "--row", 2, "--format", "json", "--where", "not a")
    found = json.loads(capsys.readouterr().out)
    expected = retriever.by_vector(rows[2], 10, "not a").plain()
    assert found["hits"] == expected["hits"]
    assert found["query"] == {
        "number": None,
        "key": f"{tmp_path / 'rows.npy'} row 2",
        "labels": [],
        "vector": "as given",
        "examples": [],
        "predicted": {},
        "voters": 0,
        "compares": "",
    }
    ask(retriever.index.folder, *vector)
    title, *lines = capsys.readouterr().out.splitlines()[5:]
    assert title.split() == ["cosine", "key", "labels"]
    for line, hit in zip(lines, retriever.by_vector(rows[0]).hits, strict=True):
        assert line.split(maxsplit=3)[2:] == [hit.key, ", ".join(hit.labels) or "none"]


def test_the_verb_says_what_is_wrong(retriever: Retriever, tmp_path: Path) -> None:
    folder = retriever.index.folder
    (text := tmp_path / "notes.npy").write_text("hello")
    np.save(pickled := tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(rows := tmp_path / "rows.npy", np.ones((2, DIM)))
    np.save(words := tmp_path / "words.npy", np.array(["a"]))
    np.save(broken := tmp_path / "nan.npy", np.array([0, np.inf, np.nan]))
    (cut := tmp_path / "cut.npy").write_bytes(rows.read_bytes()[:-8])
    (empty := tmp_path / "empty.npy").write_bytes(b"")
    for words_, message in [
        (
            (folder, "--vector", text),
            "notes.npy is not an npy array at byte 0 .*",
        ),
        ((folder, "--vector", pickled), "objects.npy: an array of Python objects is a pickle"),
        ((folder, "--vector", rows, "--row", 2), r"rows.npy has 2 rows, .* --row cannot be 2"),
        ((folder, "--vector", rows, "--row", -1), r"has 2 rows, .* --row cannot be -1"),
        ((folder, "--vector", words), r"words.npy must have numbers, .*, got <U1 \(1,\)"),
        ((folder, "--vector", broken), "2 numbers of row 0 are not finite in float32, the first"),
        (
            (folder, "--vector", cut),
            r"cut.npy: an array of float64 \(2, 12\) at byte 0 is too short",
        ),
        ((folder, "--vector", empty), "cannot read .*empty.npy as an npy file: "),
        (
            (folder, "--vector", tmp_path / "none.npy"),
            "cannot read .*none.npy as an npy file: .*No such file",
        ),
        ((folder, "--key", "s000", "--sheet", "sheet.doc"), "sheet.doc: a sheet cannot be .doc"),
        ((tmp_path, "--key", "s000"), "has no manifest\\.json"),
    ]:
        with pytest.raises(RetrievalError, match=message):
            ask(*words_)
    for given in ((), ("--key", "s000", "--file", "x.png")):
        with pytest.raises(
            UsageError, match="pass exactly one of --key, --file, --text and --vector"
        ):
            ask(folder, *given)
