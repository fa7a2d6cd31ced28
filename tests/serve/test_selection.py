"""What the page's server says of selections: counts, outlines, colours, exports; many indexes."""

import csv
import json
from io import StringIO
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from heron.cli.main import main
from heron.retrieval.build import build_index
from heron.retrieval.index import Index
from heron.retrieval.map import SampleMap
from heron.retrieval.query import Retriever
from heron.serve.routes import about
from tests.serve.served import LIMITS, Site, running

SOME = quote("Smiling and not Male")


def drawn(site: Site) -> SampleMap:
    found = site.found.index.sample_map()
    assert found is not None
    return found


def half(site: Site) -> tuple[str, "np.ndarray[tuple[int], np.dtype[np.bool_]]"]:
    """An outline of about half of the samples, and which."""
    grid = drawn(site).grid
    middle = int(np.median(grid[:, 0]))
    return f"0,0,{middle},0,{middle},65535,0,65535", grid[:, 0] < middle


def test_the_map_and_its_colours(faces: Site, frames: Site) -> None:
    about, samples = faces.json("/api/about"), faces.found.samples
    assert about["map"]["how"].startswith("PCA of 192 dimensions") and about["indexes"] == [""]
    response, data = faces.ask("/api/map?of=some")
    assert response.headers["Content-Type"] == "application/octet-stream" and len(data) == 4 * 48
    np.testing.assert_array_equal(np.frombuffer(data, "<u2").reshape(48, 2), drawn(faces).grid)
    place = samples.names.index("Smiling")
    _, data = faces.ask(f"/api/colours?label={place}")
    assert list(data) == samples.targets[:, place].tolist()
    assert "number of a label, 0 to 39, got None" in faces.error("/api/colours")  # no classes
    for label, status in (("99", 400), ("-1", 400), ("x", 400)):
        faces.error(f"/api/colours?label={label}", status)
    about, samples = frames.json("/api/about"), frames.found.samples
    _, data = frames.ask("/api/colours")
    order = np.argsort(-samples.targets.sum(0), kind="stable")
    assert about["exclusive"] and about["classes"] == order.tolist()
    assert [about["classes"][code] for code in data] == samples.targets.argmax(1).tolist()


def test_addresses_name_the_index_so_that_a_cache_holds_the_map_of_it(
    faces: Site, tmp_path: Path
) -> None:
    of = {faces.json("/api/about")["of"]}
    assert faces.found.embeddings is not None
    build_index(faces.found.embeddings, tmp_path / "other", kind="flat", progress=False)
    saved = Index.build(np.eye(9), kind="flat")
    saved.save(tmp_path / "saved")
    for folder in ("other", "saved"):
        of.add(about(Retriever.open(tmp_path / folder), LIMITS, None)["of"])
    assert len(of) == 3 and "" not in of


def test_labels_are_counted_where_filter_and_outline_allow(faces: Site) -> None:
    y, names = faces.found.samples.targets, faces.found.samples.names
    outline, inside = half(faces)
    passed = (y[:, names.index("Smiling")] == 1) & (y[:, names.index("Male")] == 0)
    for query, mask in (
        ("", np.ones(48, bool)),
        (f"?where={SOME}", passed),
        (f"?lasso={outline}", inside),
        (f"?where={SOME}&lasso={outline}", passed & inside),
    ):
        found = faces.json(f"/api/facets{query}")
        assert found == {"allowed": int(mask.sum()), "counts": y[mask].sum(0).tolist()}


def test_an_outline_selects(faces: Site) -> None:
    outline, inside = half(faces)
    found = faces.json(f"/api/neighbours?key=000007&k=47&lasso={outline}")
    wanted = np.flatnonzero(inside)
    assert sorted(hit["number"] for hit in found["hits"]) == wanted[wanted != 6].tolist()
    scores = [hit["score"] for hit in found["hits"]]
    assert scores == sorted(scores, reverse=True)
    for bad in ("1,2,3", "x", "1,2,3,4,5,99999999", ","):
        assert "must have 3 to 100 corners" in faces.error(f"/api/facets?lasso={bad}")
    assert "lasso must have at most" in faces.error(f"/api/facets?lasso={'1,' * 700}")
    empty = "1,1,2,1,2,2"
    assert "are inside the outline" in faces.error(f"/api/neighbours?key=000007&lasso={empty}")
    assert "is inside the outline" in faces.error(f"/api/export?format=csv&lasso={empty}")


def test_a_selection_is_exported(faces: Site) -> None:
    outline, inside = half(faces)
    keys = [faces.found.samples.key(int(n)) for n in np.flatnonzero(inside)]
    response, data = faces.ask(f"/api/export?format=csv&lasso={outline}")
    assert response.headers["Content-Disposition"] == 'attachment; filename="keys.csv"'
    assert [row[0] for row in csv.reader(StringIO(data.decode()))] == ["key", *keys]
    assert faces.json(f"/api/export?format=json&lasso={outline}") == keys
    assert len(faces.json("/api/export?format=json")) == 48
    assert "format must be 'csv' or 'json', got 'xml'" in faces.error("/api/export?format=xml")
    assert "format is" in faces.error("/api/export")


def test_several_keys_are_one_query(faces: Site) -> None:
    found = faces.json("/api/neighbours?key=000007&key=000009&k=5")
    wanted = faces.found.by_keys(["000007", "000009"], 5)
    assert [hit["number"] for hit in found["hits"]] == [hit.number for hit in wanted.hits]
    assert found["query"]["keys"] == ["000007", "000009"] and found["query"]["labelled"] is True
    many = "&".join(f"key={n:06d}" for n in range(1, 22))
    assert "at most 20 items" in faces.error(f"/api/neighbours?{many}")  # 20 at most
    told = faces.error("/api/neighbours?key=000007&key=000009&relation=hard")
    assert "relation 'hard' needs one key, got 2" in told


def test_where_none_is_a_false_negative_the_nearest_in_label_space_are_shown(faces: Site) -> None:
    samples, alone = faces.found.samples, 0
    for number in range(48):
        found = faces.json(f"/api/neighbours?key={samples.key(number)}&k=5&relation=false")
        apart = [hit["label_distance"] for hit in found["hits"]]
        assert len(apart) == 5 or not found["instead"]
        assert found["close"] == samples.close_distance
        assert found["instead"] or max(apart) <= found["close"]
        if found["instead"]:
            every = samples.label_distance(np.array([number]), np.arange(48))
            assert apart == pytest.approx(sorted(every)[1:6])
            alone += 1
    assert alone > 10


def test_a_random_sample_of_those_with_labels(faces: Site) -> None:
    samples = faces.found.samples
    for _ in range(10):
        key = faces.json(f"/api/random?where={SOME}")["key"]
        names = samples.label_names(samples.find(key))
        assert "Smiling" in names and "Male" not in names
    assert faces.json("/api/sample/6") == {"key": "000007", "labels": samples.label_names(6)}
    assert "no sample has the number 48" in faces.error("/api/sample/48", 404)


def test_an_upload_has_predicted_labels(faces: Site) -> None:
    from tests.serve.served import picture

    found = faces.upload(picture(faces, 11), query="?where=Male")["query"]
    vector, _ = faces.found.vector(11)
    predicted, voters = faces.found.predict(vector)  # whatever the filter
    assert found["predicted"] == pytest.approx(predicted) and found["voters"] == voters == 10


def test_several_indexes(faces: Site, frames: Site) -> None:
    both: dict[str, Retriever] = {"faces": faces.found, "frames": frames.found}
    with running(both) as url:
        site = Site(url, faces.found)
        first, second = site.json("/api/about"), site.json("/api/1/about")
        assert first["indexes"] == second["indexes"] == ["faces", "frames"]
        assert (first["dim"], first["pictures"]) == (192, True) and second["pictures"] is False
        key = quote(frames.found.samples.key(3))
        assert site.json(f"/api/1/neighbours?key={key}&k=2")["query"]["number"] == 3
        site.error("/api/2/about", 404)


def test_the_verb_takes_several(
    faces: Site, frames: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn

    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: sockets[0].close())
    folders = [str(site.found.index.folder) for site in (faces, frames)]
    assert main(["serve", *folders, "--port", "0"]) == 0
    assert f"{', '.join(folders)}: 96 samples at http://127.0.0.1:" in capsys.readouterr().out
    assert main(["serve", *folders, "--port", "0", "--run", "x"]) == 2
    assert "--export work with one index only; pass one" in capsys.readouterr().err


def test_json_is_whole_over_many_pieces() -> None:
    from heron.serve.routes import EXPORT_CHUNK, lines_of

    keys = [f'k"{n},' for n in range(2 * EXPORT_CHUNK + 3)]
    pieces = [*lines_of(iter(keys), "json")]
    assert json.loads("".join(pieces)) == keys and len(pieces) == 3
    rows = csv.reader(StringIO("".join(lines_of(iter(keys), "csv"))))
    assert [row[0] for row in rows][1:] == keys
    assert json.loads("".join(lines_of(iter([]), "json"))) == []
