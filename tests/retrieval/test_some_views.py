"""Queries that give some of the views: what is found, what is compared, and what is refused."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import heron
from heron.base.errors import ConfigError, InputError, RetrievalError
from heron.cli.arguments import UsageError
from heron.cli.main import main
from heron.negatives.neighbours import Question, find_neighbours
from heron.retrieval import some_views
from heron.retrieval.build import build_index
from heron.retrieval.embed import embed
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index
from heron.retrieval.query import Retriever
from heron.retrieval.some_views import EmbeddingsOfViews
from heron.shards.build import build
from heron.sources import make_source
from tests.retrieval import made
from tests.retrieval.test_query import ask

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"
FACES, WIDTHS = 200, (7, 7, 7, 7, 6, 6)  # pictures; numbers of each of the six views
NET = {"kind": "cnn", "channels": [4, 8], "widths": None, "dropout": None}
Rows = dict[str, NDArray[Any]]


def made_of(folder: Path, rows: Rows, labels: NDArray[Any], model: dict[str, Any]) -> Path:
    """Embeddings of rows by a model that was not trained, with an encoder for each view."""
    arrays: dict[str, Any] = rows | {"labels": labels}
    np.savez(folder / "rows.npz", **arrays)
    source = make_source("arrays", {"npz": folder / "rows.npz"})
    build(source, folder / "data", progress=False)
    views = {"views": [{"stored": name} for name in rows], "standardise": rows["a"].ndim == 2}
    run = made.run(folder / "run", folder / "data", {"data": views, "model": model})
    embed(run, folder / "embeddings", progress=False)
    return folder


def main_of(*words: object) -> None:
    """`heron` with these arguments, which must succeed."""
    assert main([str(word) for word in words]) == 0


def index(folder: Path, name: str, **options: Any) -> Retriever:
    found = Embeddings.open(folder / "embeddings")
    chosen: dict[str, Any] = {"kind": "flat", "k": 5} | options
    build_index(found, folder / name, progress=False, **chosen)
    return Retriever.open(folder / name)


@pytest.fixture(scope="module")
def cameras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Faces by two cameras, which see two thirds each, of CelebA."""
    if not (REAL / "celeba").is_dir():
        pytest.skip(f"needs CelebA's pictures in {REAL}")
    views: dict[str, list[NDArray[np.uint8]]] = {"a": [], "b": []}
    with ZipFile(REAL / "celeba" / "img_align_celeba.zip") as pack:
        names = sorted(name for name in pack.namelist() if name.endswith(".jpg"))[:FACES]
        for name in names:
            face = Image.open(BytesIO(pack.read(name))).convert("RGB")
            for view, left in (("a", 0), ("b", 58)):
                seen = face.crop((left, 30, left + 120, 190)).resize((24, 32))
                views[view].append(np.array(seen))
    rows = {view: np.stack(pictures) for view, pictures in views.items()}
    folder = tmp_path_factory.mktemp("cameras")
    return made_of(folder, rows, np.arange(FACES) % 4, {"encoder": NET})


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """UCI's textures in six views."""
    if not (REAL / "uci" / "texture.dat").is_file():
        pytest.skip(f"needs UCI's textures in {REAL}")
    table = np.loadtxt(REAL / "uci" / "texture.dat", delimiter=",", max_rows=600)
    parts = np.split(table[:, :40].astype(np.float32), np.cumsum(WIDTHS)[:-1], axis=1)
    rows = dict(zip("abcdef", parts, strict=True))
    _, labels = np.unique(table[:, 40], return_inverse=True)
    return made_of(tmp_path_factory.mktemp("six"), rows, labels, {})


def stored(folder: Path, number: int) -> Rows:
    with np.load(folder / "rows.npz") as rows:
        return {name: rows[name][number] for name in rows.files if name != "labels"}


def file(row: NDArray[Any]) -> bytes:
    out = BytesIO()
    Image.fromarray(row).save(out, "PNG") if row.ndim == 3 else np.save(out, row)
    return out.getvalue()


def whole(found: Retriever) -> NDArray[np.float64]:
    """All embeddings, view by view, [rows, views, width]."""
    assert found.embeddings is not None
    layer = found.index.manifest.layer
    every = np.concatenate([block for _, block in found.embeddings.blocks(layer)])
    return every.astype(np.float64).reshape(len(every), found.embeddings.layer(layer).views, -1)


def number_of(found: Retriever, row: int) -> int:
    return int(np.flatnonzero(found.samples.rows == row)[0])


@pytest.mark.parametrize("layer", ["hidden", "projection"])
def test_one_face_of_two_cameras_finds_its_sample_first(cameras: Path, layer: Any) -> None:
    found = index(cameras, layer, layer=layer)
    vectors = whole(found)
    for view, name in enumerate("ab"):
        part = vectors[:, view] / np.linalg.norm(vectors[:, view], axis=1, keepdims=True)
        for row in range(0, FACES, 9):
            number = number_of(found, row)
            answer = found.by_file({name: file(stored(cameras, row)[name])}, 7)
            expected = part @ part[number]
            assert answer.hits[0].number == number
            assert answer.hits[0].score == pytest.approx(1, abs=1e-5)
            scores = [hit.score for hit in answer.hits]
            assert scores == pytest.approx(np.sort(expected)[::-1][:7], abs=1e-5)
    assert answer.query.compares == "b with the same view of each sample; a is not given"


def test_one_missing_view_of_six(six: Path) -> None:
    found = index(six, "whole")
    vectors = whole(found)
    for row in range(0, 600, 29):
        files = {name: file(x) for name, x in stored(six, row).items()}
        missing = "abcdef"[row % 6]
        del files[missing]
        answer = found.by_file(files, 5)
        parts = np.delete(vectors, row % 6, axis=1).reshape(600, -1)
        parts /= np.linalg.norm(parts, axis=1, keepdims=True)
        number = number_of(found, row)
        expected = np.sort(parts @ parts[number])[::-1][:5]
        assert answer.hits[0].number == number
        assert [hit.score for hit in answer.hits] == pytest.approx(expected, abs=1e-5)
        assert f"{missing} is not given" in answer.query.compares
        assert answer.query.voters == 10 and len(answer.query.predicted) == 1


def test_a_missing_view_is_treated_as_in_training(six: Path) -> None:
    """Of P of 6 views: 6 / P of their features, zeros for the others, to the last bit or so."""
    model = heron.from_pretrained(six / "run")
    with np.load(six / "rows.npz") as rows:
        full = {name: rows[name] for name in "abcdef"}
    every = model.encode(full).reshape(600, 6, -1)
    for given in ("a", "cf", "abdef"):
        flags = np.array([name in given for name in "abcdef"])
        expected = every * flags[:, None] * (6 / len(given))
        some = model.encode({name: full[name] for name in given}).reshape(600, 6, -1)
        np.testing.assert_allclose(some, expected, rtol=1e-5, atol=1e-6)
        # W s_i = 6 / P sum_v W_v s_iv, and the bias once.
        assert model.network.classifier is not None
        weights = {k: v.double().numpy() for k, v in model.network.classifier.state_dict().items()}
        logits = expected.reshape(600, -1) @ weights["weight"].T + weights["bias"]
        odds = np.exp(logits)
        predicted = model.predict({name: full[name] for name in given})
        np.testing.assert_allclose(predicted, odds / odds.sum(1, keepdims=True), atol=1e-5)
        for layer in ("projection", "weight"):
            units = model.encode(full, layer).reshape(600, 6, -1) * flags[:, None]
            part = model.encode({name: full[name] for name in given}, layer)
            np.testing.assert_allclose(part.reshape(600, 6, -1), units, atol=1e-5)
    np.testing.assert_array_equal(model.encode(full), every.reshape(600, -1))
    found = index(six, "rule")
    files = {name: file(x) for name, x in stored(six, 7).items() if name in "cf"}
    some = model.encode({name: full[name][7:8] for name in "cf"})[0]
    np.testing.assert_allclose(found.encode(files), some, atol=1e-6)


@pytest.mark.parametrize("metric", ["inner_product", "euclidean"])
def test_other_metrics_compare_the_given_views_alone(six: Path, metric: Any) -> None:
    found = index(six, metric, metric=metric)
    parts = whole(found)[:, [1, 4]].reshape(600, -1)
    own = parts[number_of(found, 11)]
    files = {name: file(x) for name, x in stored(six, 11).items() if name in "be"}
    scores = [hit.score for hit in found.by_file(files, 6).hits]
    if metric == "euclidean":
        expected = np.sort(np.linalg.norm(parts - own, axis=1))[:6]
    else:
        expected = np.sort(parts @ own)[::-1][:6]
    assert scores == pytest.approx(expected, rel=1e-5, abs=1e-3)


def test_a_prefix_codes_and_an_index_alone(six: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: file(x) for name, x in stored(six, 40).items() if name in "ad"}
    short = index(six, "short", width=5)
    parts = whole(short)[:, [0, 3], :5].reshape(600, -1)
    parts /= np.linalg.norm(parts, axis=1, keepdims=True)
    number = number_of(short, 40)
    answer = short.by_file(files, 4)
    assert [hit.score for hit in answer.hits] == pytest.approx(
        np.sort(parts @ parts[number])[::-1][:4], abs=1e-5
    )
    coded = index(six, "coded", kind="sq8", recall=0.9)
    exact = coded.by_file(files, 4)
    assert exact.hits[0].number == number
    decoded = Retriever(coded.index, None, "they are gone", coded.run).by_file(files, 4)
    assert decoded.hits[0].number == number and decoded.hits[0].score < exact.hits[0].score
    monkeypatch.setattr(some_views, "BLOCK", 7)
    assert short.by_file(files, 4) == answer
    alone = Retriever(short.index, None, "they are gone", short.run)
    assert [hit.number for hit in alone.by_file(files, 4).hits] == [h.number for h in answer.hits]


def test_filters_hold_and_samples_without_the_view_are_left_out(tmp_path: Path, six: Path) -> None:
    found = index(six, "filtered")
    label = found.samples.names[0]
    files = {"b": file(stored(six, 3)["b"])}
    answer = found.by_file(files, 20, where=label)
    assert {label} == {name for hit in answer.hits for name in hit.labels}
    assert found.embeddings is not None
    blank = whole(found)
    blank[::2, 1] = 0  # every second sample lacks b
    lacking = made.embeddings(
        tmp_path / "e",
        {"hidden": blank.reshape(600, -1).astype(np.float32)},
        found.samples.targets,
        found.samples.names,
        found.samples.kind,
        [found.samples.key(i) for i in range(600)],
        checkpoint=found.index.manifest.checkpoint,
        data=found.data,
        data_fingerprint=found.index.manifest.data_fingerprint,
        run=found.run,
    )
    build_index(lacking, tmp_path / "i", kind="flat", k=5, progress=False)
    some = Retriever.open(tmp_path / "i")
    hits = some.by_file(files, 400).hits
    assert len(hits) == 300 and all(hit.number % 2 for hit in hits)
    flags = np.arange(600) % 2 == 0
    with pytest.raises(RetrievalError, match="none of the samples that pass has the views of the"):
        some.by_file(files, 3, among=flags)


def test_the_command_says_what_it_compares(
    cameras: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = index(cameras, "said", layer="projection")
    key = found.samples.key(number_of(found, 5))
    (face := tmp_path / "face.png").write_bytes(file(stored(cameras, 5)["b"]))
    ask(found.index.folder, "--file", f"b={face}", "--k", 3)
    shown = capsys.readouterr().out
    assert "views   b with the same view of each sample; a is not given" in shown
    assert shown.splitlines()[7].split()[2] == key
    with pytest.raises(UsageError, match="files with the other views; pass"):
        ask(found.index.folder, "--key", key, "--across")
    ask(found.index.folder, "--file", f"b={face}", "--k", 3, "--across", "--format", "json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["query"]["compares"] == "b with a of each sample"
    z = whole(found)
    expected = np.sort(z[:, 0] @ z[number_of(found, 5), 1] / np.sqrt(2))[::-1][:3]
    assert [hit["score"] for hit in answer["hits"]] == pytest.approx(expected, abs=1e-5)


def test_a_file_without_a_name_is_of_the_view_that_reads_it(six: Path, cameras: Path) -> None:
    found, faces = index(six, "unnamed"), index(cameras, "unnamed")
    face = file(stored(cameras, 1)["a"])
    with pytest.raises(
        RetrievalError,
        match="^the file fits several views .a, b.; say which: VIEW=PATH",
    ):
        faces.by_file(face)
    with pytest.raises(
        RetrievalError, match="^the file fits none of the views: 'a': the file must be an npy"
    ):
        found.by_file(face)
    with pytest.raises(RetrievalError, match="fits several views .a, b, c, d.; say which"):
        found.by_file(file(stored(six, 1)["a"]))


def test_a_file_of_one_width_needs_no_name(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = {"a": draw.normal(size=(40, 3)), "b": draw.normal(size=(40, 5))}
    rows = {name: x.astype(np.float32) for name, x in rows.items()}
    found = index(made_of(tmp_path, rows, np.arange(40) % 2, {}), "index")
    answer = found.by_file(file(rows["b"][6]), 2)
    assert found.samples.rows[answer.hits[0].number] == 6
    assert answer.query.compares.startswith("b with the same view")
    np.save(tmp_path / "x.npy", rows["b"])
    assert found.files([str(tmp_path / "x.npy")]) == {"b": tmp_path / "x.npy"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["a=x.npy", "a=y.npy"], "--file a=y.npy: view 'a' already has a file; pass one"),
        (["g=x.npy"], "--file g=x.npy: no view named 'g'; use one of a=PATH, b=PATH, c=PATH, d"),
        (["none.npy"], "none.npy does not exist; pass a picture or an npy file"),
    ],
)
def test_arguments_that_name_no_view(six: Path, asked: list[str], message: str) -> None:
    with pytest.raises(RetrievalError, match=f"^{message}"):
        index(six, f"arguments-{len(asked[0])}-{len(asked)}").files(asked)


@pytest.mark.parametrize("given", ["a", "cf"])
def test_negatives_by_some_views_are_those_of_their_numbers(
    six: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    asked = [word for name in given for word in ("--view", name)]
    main_of(
        "negatives", six / "embeddings", *asked, "--k", 5, "--anchors", 0, "--out", tmp_path / "r"
    )
    shown, found = capsys.readouterr().out, index(six, f"plain-{given}")
    others = [name for name in "abcdef" if name not in given]
    same = "the same view" if len(given) == 1 else "the same views"
    said = f"{', '.join(given)} with {same} of each sample; {', '.join(others)} are not given"
    assert f"views: {said}\n" in shown and said in (tmp_path / "r" / "report.html").read_text()
    parts = whole(found)[:, ["abcdef".index(name) for name in given]].reshape(600, -1)
    parts /= np.linalg.norm(parts, axis=1, keepdims=True)
    cosines = parts @ parts.T - 2 * np.eye(600)
    nearest = np.argsort(-cosines, axis=1)[:, :5]
    targets = found.samples.targets.argmax(1)
    rate = (targets[nearest] == targets[:, None]).mean()
    numbers = json.loads((tmp_path / "r" / "negatives.json").read_text())
    at = numbers["false_negatives"]["k"].index(5)
    assert numbers["false_negatives"]["same"]["near"]["value"][at] == pytest.approx(rate, abs=1e-3)
    assert numbers["views"] == said and numbers["labelled"] == 600


def test_negatives_of_a_view_that_is_not_there(six: Path, tmp_path: Path) -> None:
    found = Embeddings.open(six / "embeddings")
    with pytest.raises(RetrievalError, match="nothing of view 'g': the model does not see it; use"):
        EmbeddingsOfViews(found, ["g"])
    old = made.unlabelled(tmp_path / "old", made.clustered(40))
    with pytest.raises(RetrievalError, match="does not say which views it has; embed again, into"):
        EmbeddingsOfViews(old, ["a"])
    opened = Index.open(index(six, "checked").index.folder)
    with pytest.raises(RetrievalError, match="the index compares whole vectors, not those of a"):
        find_neighbours(EmbeddingsOfViews(found, ["a"]), Question(), opened)
    assert find_neighbours(EmbeddingsOfViews(found, ["a"]), Question()).numbers.size


@pytest.fixture(scope="module")
def four(six: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same textures without the views e and f, embedded by the model of six views."""
    folder = tmp_path_factory.mktemp("four")
    with np.load(six / "rows.npz") as rows:
        arrays: dict[str, Any] = {name: rows[name] for name in rows.files if name not in "ef"}
    np.savez(folder / "rows.npz", **arrays)
    build(make_source("arrays", {"npz": folder / "rows.npz"}), folder / "data", progress=False)
    return folder


def test_a_data_set_without_two_views_of_six(
    six: Path, four: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = f"data.path={four / 'data'}", tmp_path / "embeddings"
    main_of("embed", six / "run", data, "--out", out, "--quiet")
    assert f"used a, b, c, d; {four / 'data'} lacks e, f\n" in capsys.readouterr().out
    found = Embeddings.open(out)
    assert found.manifest.missing == ["e", "f"] and found.views == ["a", "b", "c", "d"]
    model = heron.from_pretrained(six / "run")
    full = {name: np.stack([stored(six, i)[name] for i in range(600)]) for name in "abcd"}
    rows = found.samples.rows
    expected = model.encode({name: x[rows] for name, x in full.items()})
    np.testing.assert_allclose(
        np.concatenate([b for _, b in found.blocks("hidden")]), expected, 1e-4, 1e-5
    )
    main_of("predict", six / "run", "--data", four / "data", "--out", tmp_path / "p.csv")
    assert f"used a, b, c, d; {four / 'data'} lacks e, f\n" in capsys.readouterr().out
    table = np.genfromtxt(tmp_path / "p.csv", delimiter=",", skip_header=1)[:, 2:]
    np.testing.assert_allclose(table, model.predict(full)[: len(table)], atol=1e-4)

    for metric in ("cosine", "euclidean"):
        build_index(found, tmp_path / metric, kind="flat", k=5, metric=metric, progress=False)
        some = Retriever.open(tmp_path / metric)
        parts = expected.reshape(600, 6, -1)[:, :4]
        number = int(np.flatnonzero(rows == 40)[0])
        files = {name: file(x) for name, x in stored(six, 40).items()}
        for names, views in (("abcdef", [0, 1, 2, 3]), ("bce", [1, 2])):
            answer = some.by_file({name: files[name] for name in names}, 4)
            mine = parts[:, views].reshape(600, -1)
            scores = np.linalg.norm(mine - mine[number], axis=1)
            if metric == "cosine":
                unit = mine / np.linalg.norm(mine, axis=1, keepdims=True)
                scores = -(unit @ unit[number])
            wanted = np.abs(np.sort(scores)[:4])
            assert answer.hits[0].number == number
            assert [hit.score for hit in answer.hits] == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        said = "b, c with the same views of each sample; a, d are not given; e, f are not in the"
        assert answer.query.compares == f"{said} data set"
        by_key = some.by_key(some.samples.key(3), 2).query.compares
        assert (
            by_key == "a, b, c, d with the same views of each sample; e, f are not in the data set"
        )
        with pytest.raises(RetrievalError, match="no e, and no other view is given; pass a f"):
            some.by_file({"e": files["e"]})
    main_of("negatives", out, "--out", tmp_path / "report", "--k", 3)
    assert "e, f are not in the data set\n" in capsys.readouterr().out
    with pytest.raises(RetrievalError, match="nothing of view 'e': the data set lacks it; use one"):
        EmbeddingsOfViews(found, ["e"])


def test_a_data_set_without_any_view_of_the_model(six: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", z=np.zeros((20, 3), np.float32), labels=np.arange(20) % 2)
    build(make_source("arrays", {"npz": tmp_path / "rows.npz"}), tmp_path / "data", progress=False)
    with pytest.raises(ConfigError, match=".* has no stored view 'a'; it has z"):
        embed(six / "run", tmp_path / "e", overrides=[f"data.path={tmp_path / 'data'}"])


def test_unknown_views_and_none_are_refused_in_a_line(six: Path) -> None:
    model, found = heron.from_pretrained(six / "run"), index(six, "refused")
    row = stored(six, 0)["a"]
    for given, message in (
        ({}, "no view is given; pass one or more of a, b, c, d, e, f"),
        ({"g": row}, "no view named 'g'; pass one or more of a, b, c, d, e, f"),
    ):
        with pytest.raises(InputError, match=f"^{message}$"):
            model.encode({name: x[None] for name, x in given.items()})
        with pytest.raises(InputError, match=f"^{message}$"):
            model.predict({name: x[None] for name, x in given.items()})
        with pytest.raises(RetrievalError, match=f"^{message}$"):
            found.by_file({name: file(x) for name, x in given.items()})
    with pytest.raises(RetrievalError, match="with the samples' other views, because the index"):
        found.by_file({"a": file(row)}, across=True)
