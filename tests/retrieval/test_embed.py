"""Every row once, as the model sees it; the same on any number of processes; a crash resumes."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import normalize

from heron.api.job import pretrain
from heron.base.artefact import sha256
from heron.base.errors import CheckpointError, ConfigError, RetrievalError
from heron.data.reader import Reader
from heron.experiment.config import load_config
from heron.experiment.open_data import open_data
from heron.retrieval.embed import Choice, Embedder, embed
from heron.retrieval.embedding_model import EmbeddingModel, read_samples
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.samples import Samples
from heron.shards.build import build
from heron.shards.manifest import Labels
from heron.sources import make_source
from heron.training.pretrained import from_pretrained, locate
from tests import ranks
from tests.data.test_partial_rows import config as partial_rows_config
from tests.experiments import frames
from tests.retrieval import made
from tests.sealed import seal

SMALL = Choice(part_rows=64)
ROWS = 370  # of train and test


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    pretrain(frames(folder, train={"steps": 2}))
    return folder / "run"


@pytest.fixture(scope="module")
def whole(run: Path) -> Embeddings:
    return embed(run, run.parent / "whole", SMALL, progress=False)


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256(p) for p in folder.rglob("*") if p.is_file()}


@torch.no_grad()
def test_vectors_are_the_models_a_row_at_a_time(run: Path, whole: Embeddings) -> None:
    config = load_config(locate(run) / "config.yaml")
    reader, model = Reader(config.data.path), from_pretrained(run)
    hidden, z = dict(whole.blocks("hidden", 50)), dict(whole.blocks("projection"))
    assert np.concatenate(list(hidden.values())).shape == (ROWS, 24)
    assert list(hidden)[:3] == [0, 50, 64]
    for row in (0, 63, 64, 200, 369):
        inputs = []
        for name in ("view1", "view2"):
            view = reader.view(name)
            x = (reader.read(name, np.array([row])) - np.array(view.mean)) / np.array(view.std)
            inputs.append(torch.tensor(x, dtype=torch.float32))
        found = model(inputs, torch.zeros(1, dtype=torch.int64), [1])
        one = whole.take("hidden", np.array([row]))[0]
        np.testing.assert_allclose(one, found["hidden"][0][0], rtol=1e-4, atol=1e-5)
        unit = torch.cat([normalize(v, dim=1) for v in found["projections"]], 1)[0]
        np.testing.assert_allclose(
            np.concatenate(list(z.values()))[row], unit, rtol=1e-4, atol=1e-5
        )
        h = torch.cat([normalize(v, dim=1) for v in found["weights"]], 1)[0]
        np.testing.assert_allclose(
            whole.take("weight", np.array([row]))[0], h, rtol=1e-4, atol=1e-5
        )


def test_samples_are_the_rows_in_the_manifests_order(run: Path, whole: Embeddings) -> None:
    reader = Reader(load_config(locate(run) / "config.yaml").data.path)
    samples = whole.samples
    assert samples.rows.tolist() == list(range(ROWS))
    assert [samples.key(i) for i in range(ROWS)] == [reader.sample_key(i) for i in range(ROWS)]
    assert (samples.targets == reader.targets(np.arange(ROWS))).all()
    assert samples.known.all()
    assert samples.find(samples.key(123)) == 123
    assert whole.manifest.layers["projection"].views == 2
    Embeddings.open(whole.folder)


def embed_here(run: str, out: str) -> int:
    return len(embed(run, out, SMALL, ["data.workers=1"], progress=False))


def test_two_processes_with_readers_write_the_same_bytes(whole: Embeddings, run: Path) -> None:
    out = run.parent / "two"
    assert ranks.run(2, embed_here, str(run), str(out)) == [ROWS, ROWS]
    assert files(out) == files(whole.folder)


def test_a_crash_costs_the_parts_that_were_not_written(
    whole: Embeddings, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, written = tmp_path / "out", list[int]()
    write = Embedder._write

    def until(self: Any, number: int, *rest: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(number)
        write(self, number, *rest)

    def noted(self: Any, number: int, *rest: Any) -> None:
        written.append(number)
        write(self, number, *rest)

    monkeypatch.setattr(Embedder, "_write", until)
    with pytest.raises(KeyboardInterrupt):
        embed(run, out, SMALL, progress=False)
    with pytest.raises(
        RetrievalError, match="an unfinished `heron embed`; run the same command again"
    ):
        Embeddings.open(out)
    seen = json.loads((out / "plan.json").read_text())["seen"]  # or one of before is not gone on
    assert sorted(seen) == ["canvas", "draft", "standardise", "views"]
    (out / "hidden" / "00001.npy").write_bytes(b"cut short")
    altered = bytearray((out / "hidden" / "00002.npy").read_bytes())
    altered[-1] ^= 1  # of its size and shape
    (out / "hidden" / "00002.npy").write_bytes(altered)
    listed = out / "parts" / "00000.json"
    seal(listed, part=json.loads(listed.read_text())["part"] | {"count": 63})
    written[:] = []
    monkeypatch.setattr(Embedder, "_write", noted)
    embed(run, out, SMALL, progress=False)
    assert written == [0, 1, 2, 3, 4, 5]
    assert files(out) == files(whole.folder)


def test_some_rows_some_layers_in_half(run: Path, whole: Embeddings, tmp_path: Path) -> None:
    choice = Choice(role="test", layers=["hidden"], dtype="float16")
    found = embed(run, tmp_path / "test", choice, progress=False)
    assert list(found.manifest.layers) == ["hidden"]
    assert found.samples.rows.tolist() == list(range(300, 370))
    expected = whole.take("hidden", np.arange(300, 370))
    vectors = found.take("hidden", np.arange(70))
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(RetrievalError, match="no layer 'weight', only hidden; use one"):
        found.layer("weight")
    split = embed(run, tmp_path / "split", Choice(split="test", layers=["weight"]), progress=False)
    assert split.samples.rows.tolist() == list(range(300, 370))


def test_what_lies_in_the_folder_is_kept(run: Path, whole: Embeddings, tmp_path: Path) -> None:
    with pytest.raises(
        RetrievalError, match="dtype is float32, not float16.*choose another --out.*--overwrite"
    ):
        embed(run, whole.folder, Choice(part_rows=64, dtype="float16"), progress=False)
    drawn = Choice(part_rows=64, role="labelled")
    embed(run, tmp_path / "drawn", drawn, progress=False)
    with pytest.raises(RetrievalError, match="rows_sha256 .*choose another --out"):
        embed(run, tmp_path / "drawn", drawn, ["data.protocol.seed=1"], progress=False)
    (tmp_path / "drawn" / "plan.json").write_text("{")
    with pytest.raises(
        RetrievalError, match="plan.json is not the plan of .*another --out, or add --over"
    ):
        embed(run, tmp_path / "drawn", drawn, progress=False)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(
        RetrievalError, match="already exists; choose another --out, or add --overwrite"
    ):
        embed(run, tmp_path, SMALL, progress=False)


def test_a_run_of_others_builds_and_fetches_no_data(run: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    message = (
        f"{gone}, the data set of the run, does not exist; set data.path to another one, or, if "
        f"you trust the run, build it with: heron shards build frames --out {gone} "
        "--classes=4 --seed=1 --test=70 --train=300"
    )
    shutil.copytree(locate(run), tmp_path / "foreign")
    config = tmp_path / "foreign" / "config.yaml"
    tree = yaml.safe_load(config.read_text())
    for name in ("state.json", "COMPLETE"):  # weights of others, without a manifest
        (tmp_path / "foreign" / name).unlink()
    for path, said in (
        (str(gone), message),
        ("http://127.0.0.1:9/x", "only fetched if you name it"),
    ):
        tree["data"]["path"] = path
        config.write_text(yaml.safe_dump(tree))
        with pytest.raises(RetrievalError, match=re.escape(said)):
            embed(tmp_path / "foreign", tmp_path / "out", SMALL, progress=False)
    tree["data"]["storage_options"] = {"client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}
    config.write_text(yaml.safe_dump(tree))
    given = ["data.path=s3://mine/x"]
    with pytest.raises(
        RetrievalError, match="reads s3://mine/x with data.storage_options client_k"
    ):
        embed(tmp_path / "foreign", tmp_path / "out", SMALL, given, progress=False)
    assert not gone.exists()


def test_what_cannot_be_embedded(run: Path, tmp_path: Path) -> None:
    def refused(message: str, *overrides: str, choice: Choice = SMALL) -> None:
        with pytest.raises((RetrievalError, ConfigError), match=message):
            embed(run, tmp_path / "out", choice, overrides, progress=False)

    refused("the model has no layer 'logits'", choice=Choice(layers=["logits"]))  # type: ignore[list-item]
    refused("role must be one of labelled, .*, got 'train'", choice=Choice(role="train"))  # type: ignore[arg-type]
    refused(" has no split 'valid', only ", choice=Choice(split="valid"))
    refused("dtype must be float32 or float16, got 'int8'", choice=Choice(dtype="int8"))  # type: ignore[arg-type]
    refused("part_rows must be at least 1, got 0", choice=Choice(part_rows=0))
    swapped = "data.views=[{stored: view2}, {stored: view1}]"
    refused(
        r"the views of .* have the shapes \[\[112\], \[273\]\], but .* on \[\[273\], \[112\]\]",
        swapped,
    )
    refused("data.paths: unknown key; did you mean 'path'", "data.paths=x")
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        embed(tmp_path, tmp_path / "out", SMALL, progress=False)


def test_embeddings_that_are_not_finite_are_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = EmbeddingModel.forward

    def poisoned(self: Any, batch: Any, layers: Any) -> Any:
        found = forward(self, batch, layers)
        at = (batch.indices == 70)[:, None]
        return found | {"hidden": torch.where(at, torch.inf, found["hidden"])}

    monkeypatch.setattr(EmbeddingModel, "forward", poisoned)
    key = Reader(load_config(locate(run) / "config.yaml").data.path).sample_key(70)
    message = f"'hidden' of 1 samples has NaN or infinite values in float32, first in {key}; check"
    with pytest.raises(RetrievalError, match=message):
        embed(run, tmp_path / "out", SMALL, progress=False)


def test_rows_that_cannot_be_read_are_left_out_and_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Reader.fill

    def faulty(self: Reader, out: Any, rows: Any) -> None:
        fill(self, out, rows)
        if 70 in rows:
            self._mark_lost(np.array([70]), "sample 70 is altered")

    monkeypatch.setattr(Reader, "fill", faulty)
    found = embed(run, tmp_path / "out", SMALL, ["data.on_error=skip"], progress=False)
    assert found.manifest.lost == {70: "sample 70 is altered"}
    assert found.samples.rows.tolist() == [row for row in range(ROWS) if row != 70]
    assert [part.count for part in found.manifest.parts] == [64, 63, 64, 64, 64, 50]
    Embeddings.open(found.folder)


def test_damage_is_found(run: Path, tmp_path: Path) -> None:
    found = embed(run, tmp_path / "out", SMALL, progress=False)
    part = found.folder / "projection" / "00002.npy"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(
        RetrievalError, match="projection/00002.npy was altered: its sha256.*restore"
    ):
        Embeddings.open(found.folder)
    part.write_bytes(data[:-4])
    with pytest.raises(
        RetrievalError,
        match=r"00002.npy: an array of float32 \(64, 16\) at byte 0 is too short or .*; embed",
    ):
        list(found.blocks("projection"))
    np.save(part, np.zeros((64, 2), np.float32))
    with pytest.raises(RetrievalError, match=r"is float32 \(64, 2\) instead of float32 \(64, 16\)"):
        list(found.blocks("projection"))
    manifest = json.loads((found.folder / "manifest.json").read_text())
    (found.folder / "manifest.json").write_text(json.dumps(manifest | {"format": 9}))
    with pytest.raises(
        RetrievalError, match="format is 9, but this version of heron reads 2; embed again"
    ):
        Embeddings.open(found.folder)
    (found.folder / "manifest.json").write_bytes(b"\xff")
    with pytest.raises(RetrievalError, match="the manifest of embeddings .*json: not JSON "):
        Embeddings.open(found.folder)
    with pytest.raises(
        RetrievalError, match="has no manifest.json; .*pass a folder that `heron emb"
    ):
        Embeddings.open(tmp_path)
    (found.folder / "known.npy").unlink()
    with pytest.raises(RetrievalError, match="known.npy.*make it again"):
        Samples.load(found.folder)


def test_keys_are_found_and_no_two_are_the_same() -> None:
    y = np.zeros((4, 1), np.uint8)
    samples = made.samples(y, ["a"], keys=["b", "ä", "c", "d"])
    assert [samples.find(key) for key in ("b", "ä", "c", "d")] == [0, 1, 2, 3]
    for unknown in ("dd", "d" * 500):
        message = f"no sample has the key '{unknown}' .of 4.*. Did you mean d"
        with pytest.raises(RetrievalError, match=message):
            samples.find(unknown)
    twice = made.samples(y, ["a"], keys=["b", "a", "b", "c"])
    with pytest.raises(RetrievalError, match="1 keys occur twice, first 'b' in samples 0"):
        twice.refuse_duplicates()


class Labelled:
    """Four rows of complementary labels of three classes, the last of which leaves two."""

    manifest = SimpleNamespace(labels=Labels(kind="complementary", names=list("abc")))
    may_lack_labels = False

    def is_labelled(self, rows: Any) -> Any:
        return np.array([True, False, True, True])[rows]

    def targets(self, rows: Any) -> Any:
        sets = np.array([[0, 1, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0]], np.float32)
        return sets[rows]

    def ground_truth(self, rows: Any) -> Any:
        assert (self.targets(rows).sum(1) == 2).all()
        return 1 - self.targets(rows)

    def sample_keys(self, rows: Any) -> list[str]:
        return [str(row) for row in rows]


def test_a_class_is_known_where_all_others_are_ruled_out() -> None:
    reader: Any = Labelled()
    found = read_samples(reader, np.arange(4))
    assert found.known.tolist() == [True, False, True, False]
    assert found.targets.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_label_distance_is_the_share_of_labels_that_differ() -> None:
    y = np.array([[1, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]], np.uint8)
    known = np.array([True, True, False])
    samples = made.samples(y, list("abcd"), known=known)
    these, those = np.array([[0], [1]]), np.array([[0, 1, 2]])
    np.testing.assert_equal(
        samples.label_distance(these, those),
        np.array([[0, 0.5, np.nan], [0.5, 0, np.nan]], np.float32),
    )
    classes = made.samples(np.eye(3, 4, dtype=np.uint8), list("abcd"), "multi_class")
    assert classes.label_distance(np.array([0, 0]), np.array([0, 1])).tolist() == [0, 1]


def test_partial_rows_are_dropped_as_in_training(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(0, 2, (80, 4))
    views: dict[str, Any] = {name: np.ones((80, 6), np.float32) for name in ("v1", "v2")}
    np.savez(tmp_path / "mine.npz", labels=labels, **views)
    build(make_source("arrays", {"npz": tmp_path / "mine.npz"}), tmp_path / "mine", progress=False)
    protocol = {"labelled": 60, "partial_rows": "drop", "hide_labels": 0.2}
    data = {"protocol": protocol, "batch": {"labelled": 2, "unlabelled": 2}}
    config = partial_rows_config(tmp_path, data=data, train={"epochs": None, "steps": 1})
    roles = open_data(config).roles
    pretrain(config)
    for role in ("labelled", "unlabelled", "test"):
        out = tmp_path / role
        samples = embed(tmp_path / "run", out, Choice(role=role), progress=False).samples
        np.testing.assert_array_equal(samples.rows, roles.rows_of(role))
        np.testing.assert_array_equal(samples.targets, labels[samples.rows])
        assert samples.known.all()  # hidden labels are hidden from training alone
